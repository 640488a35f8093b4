"""What a request obeys: pinned when it is admitted, written down, and kept by every later run of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fairway.formats.limits import POLICY_NAME
from fairway.formats.probe import PROBE
from fairway.v1 import inference_pb2
from services.core.errors import FailedPrecondition, Unavailable
from services.core.manifest import sha256_of
from services.core.records import (
    DEPLOYMENTS,
    GATEWAY_EXECUTOR,
    TENANTS,
    WORKERS,
    Degrade,
    Deployment,
    LoadedVersion,
    Meta,
    Tenant,
    VersionState,
    Worker,
)
from services.core.safety import UNAVAILABLE, SafetyPins
from services.gateway.catalog import PinnedVersion
from services.gateway.faces.grpc.messages import accepted_message
from services.gateway.idempotency.record_codec import AcceptedTerms, decode, encode
from services.gateway.requests.terms import Resume
from services.gateway.safety import packs as packs_module
from services.gateway.safety.packs import SafetyPacks
from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics
from tests.support.safety import counted, desk_of
from tests.unit.gateway.conftest import DIGEST
from tests.unit.gateway.policy.test_degrade import SMALL, Gateway, admitted, gateway

__all__ = ["gateway"]

PACK, NEXT = "sha256:" + "e1" * 32, "sha256:" + "e2" * 32


def policy(*phrases: str) -> bytes:
    rules = [{"category": "bad", "phrases": phrases}]
    return json.dumps({"categories": {"bad": {"action": "block"}}, "lists": rules}).encode()


OWN, OF_SMALL, OF_PACK, OF_NEXT = (policy(word) for word in ("own", "small", "pack", "next"))


@pytest.fixture
def packs(fleet: Any, gateway: Gateway, tmp_path: Path) -> Any:
    """Both models have a pack of their own, and ``strict`` is the tenant's."""
    for digest, data in ((DIGEST, OWN), (SMALL, OF_SMALL), (PACK, OF_PACK), (NEXT, OF_NEXT)):
        folder = tmp_path / digest[-4:]
        folder.mkdir()
        for file in fleet.files.folder.iterdir() if digest in (DIGEST, SMALL) else ():
            (folder / file.name).symlink_to(file)
        (folder / "safety_policy.json").unlink(missing_ok=True)
        (folder / "safety_policy.json").write_bytes(data)
        fleet.files.of_version[digest] = folder
    deploy(fleet, PACK)
    assign(fleet)
    admission = gateway.service._admission
    admission._ports = gateway.service._ports = replace(
        gateway.service._ports,
        packs=SafetyPacks(fleet.catalog, fleet.files, SystemClock()),
        safety=desk_of(),
    )
    return fleet.files


def deploy(fleet: Any, digest: str) -> None:
    pack = Deployment(Meta("strict"), "strict", "v1", digest, 0, executor=GATEWAY_EXECUTOR)
    fleet.deployments.put(DEPLOYMENTS + "strict", pack, 44)


def assign(fleet: Any, pack: str = "strict") -> None:
    degrade = Degrade(10, {"chat-small": "chat-tiny"})
    fleet.tenants.put(TENANTS + "acme", Tenant(Meta("acme"), degrade=degrade, safety_pack=pack))


def pins(own: bytes, pack: str = PACK) -> SafetyPins:
    return SafetyPins(sha256_of(own), "strict", "strict", pack)


async def test_a_request_is_pinned_to_its_packs_and_says_so(gateway: Gateway, packs: Any) -> None:
    answer = await gateway.ask()
    assert answer.accepted.safety == pins(OWN)
    message = accepted_message(answer.accepted).safety
    assert (message.default_digest, message.deployment, message.pack_digest) == (
        sha256_of(OWN),
        "strict",
        PACK,
    )
    explained = gateway.placement.asked[0].safety
    assert explained == f"{sha256_of(OWN)} of the version, {PACK} of strict"


async def test_what_it_obeys_is_written_down_and_read_back(gateway: Gateway, packs: Any) -> None:
    found, (written,) = await admitted(gateway)
    assert found.safety is not None
    assert found.safety.terms.pins == found.spec.safety == written.safety == pins(OWN)
    assert [rule.phrases for rule in found.safety.pack.lists] == [("own",), ("pack",)]
    (read,) = decode(encode([written]))
    assert read == written
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(written))[:-1]
    (before,) = decode(msgspec.msgpack.encode([older]))
    assert isinstance(before, AcceptedTerms)
    assert before.safety is None


@pytest.mark.parametrize("begun", [True, False])
async def test_a_later_run_obeys_what_the_first_did(
    gateway: Gateway, packs: Any, fleet: Any, begun: bool
) -> None:
    _, (written,) = await admitted(gateway)
    deploy(fleet, NEXT)
    now, _ = await admitted(gateway)
    assert now.spec.safety == pins(OWN, NEXT)
    resume = Resume(PinnedVersion(DIGEST, 1), (), (), replaceable=not begun, safety=written.safety)
    later, _ = await admitted(gateway, resume)
    assert later.spec.safety == pins(OWN)
    assign(fleet, "")
    unassigned, _ = await admitted(gateway, resume)
    assert unassigned.safety is not None
    assert unassigned.safety.pack == later.safety.pack  # type: ignore[union-attr]
    from_older = replace(resume, safety=None)  # its record is of a gateway that did not write them
    assign(fleet)
    found, _ = await admitted(gateway, from_older)
    assert found.spec.safety == pins(OWN, NEXT)


async def test_another_model_brings_its_own_pack(gateway: Gateway, packs: Any) -> None:
    gateway.pressure[DIGEST] = 1.0
    found, (written,) = await admitted(gateway)
    assert found.spec.model == "chat-tiny"
    assert found.spec.safety == written.safety == pins(OF_SMALL)
    assert found.safety is not None
    assert [rule.phrases for rule in found.safety.pack.lists] == [("small",), ("pack",)]


async def test_a_request_that_moves_to_another_version_obeys_that(
    gateway: Gateway, packs: Any, fleet: Any
) -> None:
    found, _ = await admitted(gateway)
    assert found.reroute is not None
    held = fleet.deployments.view[DEPLOYMENTS + "chat-small"].record
    fleet.deployments.put(DEPLOYMENTS + "chat-small", replace(held, version_digest=SMALL), 50)
    version = LoadedVersion("chat-small", "tiny", SMALL, VersionState.READY, max_model_len=96)
    for key in list(fleet.workers.view):
        fleet.workers.put(key, Worker("w", "w:1", versions=(version,)))
    deploy(fleet, NEXT)
    moved = await found.reroute(found)
    assert moved.spec.version_digest == SMALL
    assert moved.safety is not None
    assert moved.safety.terms.pins == moved.spec.safety == pins(OF_SMALL), "the tenant's stays as it was"


async def test_nothing_runs_that_nothing_can_judge(gateway: Gateway, packs: Any) -> None:
    async def lost(*_: Any, **__: Any) -> Path:
        raise OSError("the disk is full")

    fetch, packs.fetch = packs.fetch, lost
    with pytest.raises(Unavailable, match="nothing is sent unjudged") as refused:
        await gateway.ask()
    assert refused.value.retry_after_s
    assert not gateway.placement.asked
    assert not gateway.workers.started
    assert await gateway.service._ports.limiter.concurrency("acme") == 0  # type: ignore[union-attr]
    packs.fetch = fetch
    assert (await gateway.ask()).accepted.safety == pins(OWN)


async def test_a_registry_that_is_away_for_a_moment_fails_no_request(
    gateway: Gateway, packs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs_module, "_PAUSE_S", 0.01)
    fetch, failures = packs.fetch, 0

    async def away(*asked: Any, **options: Any) -> Path:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise Unavailable("the registry restarts")
        return cast(Path, await fetch(*asked, **options))

    packs.fetch = away
    answers = await asyncio.gather(*(gateway.ask() for _ in range(4)))
    assert [answer.accepted.safety for answer in answers] == [pins(OWN)] * 4


def probing(fleet: Any, packs: Any, fail: str) -> None:
    """Let the tenant's pack judge by a probe. The version's own pack fails alike: the stricter counts."""
    rule = {"category": "bad", "threshold": 0.5}
    own = {"categories": {"bad": {"action": "block"}}, "fail": fail}
    (packs.of_version[DIGEST] / POLICY_NAME).write_text(json.dumps(own))
    (packs.of_version[NEXT] / POLICY_NAME).write_text(json.dumps(own | {"probe": rule}))
    deploy(fleet, NEXT)


@pytest.mark.parametrize("fail", ["closed", "hold"])
async def test_a_pack_with_a_probe_refuses_a_version_without(
    gateway: Gateway, packs: Any, fleet: Any, fail: str
) -> None:
    probing(fleet, packs, fail)
    fleet.ready("w1", capabilities=("probe",))
    message = "the safety pack strict judges by a probe, and a replica of tiny has none: publish tiny with"
    with pytest.raises(FailedPrecondition, match=message) as refused:  # the replica on w0 has none
        await gateway.ask()
    assert (refused.value.metadata["model"], refused.value.metadata["pack"]) == ("tiny", "strict")
    assert not gateway.placement.asked
    fleet.ready("w0", capabilities=("probe",))
    await gateway.ask()
    assert gateway.workers.started[0].probe


async def test_a_pack_with_a_probe_that_fails_open_passes_with_a_flag(
    gateway: Gateway, packs: Any, fleet: Any
) -> None:
    probing(fleet, packs, "open")
    metrics = Metrics()
    ports = replace(gateway.service._ports, safety=desk_of(metrics=metrics))
    gateway.service._admission._ports = gateway.service._ports = ports
    answer = await gateway.ask()
    assert len(answer.ids[0]) == 2
    assert not gateway.workers.started[0].probe, "an engine without a probe refuses who asks for scores"
    name = "fairway_gateway_safety_interventions_total"
    assert counted(metrics, name, category=UNAVAILABLE, action="flag", scope="output") == 1


async def test_without_a_replica_the_files_of_a_version_tell_whether_it_has_a_probe(
    gateway: Gateway, packs: Any, fleet: Any
) -> None:
    probing(fleet, packs, "closed")
    fleet.workers.put(WORKERS + "w0", Worker("w0", "w0:1"))
    with pytest.raises(FailedPrecondition, match="a replica of tiny has none"):
        await admitted(gateway)
    tenant = fleet.tenants.view[TENANTS + "acme"].record

    async def probed() -> bool:
        found = await gateway.service._ports.packs.terms("tiny", SMALL, tenant, "s")  # type: ignore[union-attr]
        return found is not None and found.probed

    (packs.of_version[SMALL] / PROBE).write_bytes(b"of the small one")
    assert not await probed(), "its ready replica has none"
    fleet.workers.put(WORKERS + "w9", Worker("w9", "w9:1"))
    assert await probed()


async def test_without_packs_a_request_obeys_none(gateway: Gateway, fleet: Any) -> None:
    answer = await gateway.ask()
    assert answer.accepted.safety is None
    assert not accepted_message(answer.accepted).HasField("safety")
    assert gateway.placement.asked[0].safety == ""
    assert inference_pb2.Accepted().HasField("safety") is False


@pytest.mark.parametrize("judged", [False, True])
async def test_tokens_come_one_by_one_where_a_model_judges_them(
    gateway: Gateway, packs: Any, fleet: Any, *, judged: bool
) -> None:
    rule = {"model": "small", "labels": {"threat": "bad"}, "scopes": ["output"]}
    pack = {"categories": {"bad": {"action": "flag"}}, "classifiers": [rule] * judged, "fail": "open"}
    (packs.of_version[NEXT] / POLICY_NAME).write_text(json.dumps(pack))
    deploy(fleet, NEXT)
    await gateway.ask()
    assert gateway.workers.started[0].unmerged is judged
