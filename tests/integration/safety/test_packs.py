"""Safety packs from their publication to what a request obeys: deployed, assigned, rolled out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from fairway.client.publish.publish import PublishRefused, publish
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import registry_pb2
from services.adapters.etcd.store import EtcdStore
from services.controlplane.resources.accounts import Tenants
from services.controlplane.resources.deployments import Deployments
from services.core.arms import ArmKey, SliKey
from services.core.errors import FailedPrecondition, FairwayError, InvalidInput, NotFound, Unavailable
from services.core.manifest import sha256_of
from services.core.records import ASSIGNMENTS, DEPLOYMENTS, EVENTS, EventRecord, Meta, Priority, Tenant, load
from services.gateway.slis import ScreenEnd, SliRecorder, subject_of
from services.rpc.status import from_rpc_error
from tests.integration.safety.conftest import CLOCK, Installation, policy
from tests.support.model_folder import safetensors
from tests.support.registry import ADMIN
from tests.support.waiting import until


async def model(at: Installation, content: Any = None) -> str:
    """Publish a version of the model ``tiny``, with this policy of its own, and return its digest."""
    folder = at.folder / "tiny"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(512))
    if content is not None:
        (folder / "safety_policy.json").write_text(json.dumps(content))
    channel = at.registry.channel
    done = await publish(channel, folder, "tiny", metadata=ADMIN, for_another_engine=True)
    return done.digest


# --- versions --------------------------------------------------------------------------------------


async def test_a_pack_is_a_version_of_its_own_kind(installation: Installation) -> None:
    digest = await installation.publish(policy("kaboom"))
    assert await installation.publish(policy("kaboom")) == digest, "the same content is the same version"
    listed = await installation.registry.stub.ListVersions(
        registry_pb2.ListVersionsRequest(model="strict"), metadata=ADMIN
    )
    (version,) = listed.versions
    assert (version.digest, list(version.servable_by), list(version.tags)) == (
        digest,
        ["gateway"],
        ["latest"],
    )
    _, manifest = await installation.registry.client.get_version("strict", digest)
    assert (manifest.kind, [file.path for file in manifest.files]) == ("safety-pack", ["safety_policy.json"])
    assert manifest.safety_policy_digest == manifest.files[0].digest


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"lists": [{"category": "bad", "phrases": ["x"]}]}, "'bad' is no category"),
        (policy("x") | {"window_tokens": 100_000}, "window_tokens"),
        (policy("x") | {"lists": [{"category": "bad", "patterns": ["(a+)+"]}]}, "patterns"),
    ],
)
async def test_a_pack_that_is_none_is_refused_by_the_client_and_by_the_registry(
    installation: Installation, content: Any, problem: str
) -> None:
    with pytest.raises(PublishRefused, match=problem):
        await installation.publish(content)
    data = json.dumps(content).encode()
    digest, stub = sha256_of(data), installation.registry.stub
    header = registry_pb2.ChunkHeader(digest=digest, size_bytes=len(data))
    parts = [
        registry_pb2.UploadChunkRequest(header=header),
        registry_pb2.UploadChunkRequest(data=data),
    ]
    await stub.UploadChunk(iter(parts), metadata=ADMIN)
    file = registry_pb2.ManifestFile(
        path="safety_policy.json", size_bytes=len(data), digest=digest, chunks=[digest]
    )
    manifest = registry_pb2.Manifest(schema=2, files=[file], kind="safety-pack", safety_policy_digest=digest)
    with pytest.raises(FairwayError, match=problem):
        await created(installation, manifest)
    manifest.files.insert(
        0, registry_pb2.ManifestFile(path="a.json", size_bytes=len(data), digest=digest, chunks=[digest])
    )
    with pytest.raises(InvalidInput, match="one file"):
        await created(installation, manifest)


async def created(at: Installation, manifest: registry_pb2.Manifest) -> None:
    request = registry_pb2.CreateVersionRequest(model="strict", manifest=manifest)
    try:
        await at.registry.stub.CreateVersion(request, metadata=ADMIN)
    except Exception as error:
        raise from_rpc_error(error) from error  # type: ignore[arg-type]


# --- deployments and assignments -------------------------------------------------------------------


async def test_its_deployment_has_no_workers_and_is_there_at_once(installation: Installation) -> None:
    digest = await installation.publish(policy("kaboom"))
    deployment = await installation.deploy()
    assert (deployment.executor, deployment.version_digest) == ("gateway", digest)
    assert deployment.status.message == "gateways apply it"
    assert (deployment.status.wanted_replicas, list(deployment.status.replicas)) == (0, [])
    await asyncio.sleep(0.3)  # a round of the reconciler
    assert not (await installation.store.list(ASSIGNMENTS)).entries
    assert list(installation.catalog.names()) == [], "no request names a pack as its model"
    with pytest.raises(NotFound):
        installation.catalog.resolve("strict")


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 1},
        {"scaling": pb.Scaling(max_replicas=2)},
        {"node_selector": {"gpu": "h100"}},
        {"tensor_parallel": 2},
        {"executor": "torch"},
    ],
)
async def test_a_deployment_of_a_pack_asks_for_nothing_of_workers(
    installation: Installation, fields: dict[str, Any]
) -> None:
    await installation.publish(policy("kaboom"))
    with pytest.raises(FairwayError, match=r"safety pack|one device"):
        await installation.deploy(**fields)


async def test_a_model_is_no_pack(installation: Installation) -> None:
    digest = await model(installation)
    with pytest.raises(FairwayError, match="safety packs alone"):
        await installation.deploy("tiny", digest, executor="gateway")
    await installation.deploy("tiny", digest, replicas=1)
    with pytest.raises(InvalidInput, match="of a model"):
        await installation.tenant(pack="tiny")
    await installation.publish(policy("kaboom"))
    await installation.deploy()
    changed = pb.Deployment(metadata=pb.Metadata(name="tiny"), model="strict", version="latest")
    with pytest.raises(InvalidInput, match="between a model and a safety pack"):
        await installation.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=changed))


async def test_a_pack_that_a_tenant_obeys_stays(installation: Installation) -> None:
    digest = await installation.publish(policy("kaboom"))
    with pytest.raises(NotFound, match="no safety pack strict"):
        await installation.tenant()
    await installation.deploy()
    await installation.tenant()
    delete = pb.DeleteDeploymentRequest(name="strict")
    with pytest.raises(FailedPrecondition, match="tenant acme obey"):
        await installation.call("DeleteDeployment", delete)
    with pytest.raises(FailedPrecondition):
        await installation.registry.service.delete_version("strict", digest)
    await installation.tenant(pack="", new=False)
    await installation.call("DeleteDeployment", delete)


@pytest.mark.parametrize("first", ["assignment", "deletion"])
async def test_of_an_assignment_and_a_deletion_at_once_one_fails(
    installation: Installation, first: str
) -> None:
    """Both read the state before; the second to commit acts on what is no longer so."""
    await installation.publish(policy("kaboom"))
    await installation.deploy()
    await installation.tenant(pack="")
    store = Overtaken([installation.store_address], CLOCK)

    async def assign() -> None:
        await installation.tenant(new=False)

    async def delete() -> None:
        await installation.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="strict"))

    store.between = assign if first == "assignment" else delete
    tenants = Tenants(store, CLOCK)
    with pytest.raises(FairwayError):
        if first == "assignment":
            await Deployments(store, CLOCK).delete("strict")
        else:
            await tenants.update(Tenant(Meta("acme"), safety_pack="strict"))
    assert store.between is None
    deployed = await installation.store.get(DEPLOYMENTS + "strict")
    assert (deployed is not None) is (first == "assignment")
    await store.close()


class Overtaken(EtcdStore):
    """Lets another call commit first."""

    between: Callable[[], Awaitable[None]] | None = None

    async def commit(self, *arguments: Any, **named: Any) -> Any:
        if self.between is not None:
            act, self.between = self.between, None
            await act()
        return await super().commit(*arguments, **named)


async def test_an_assignment_is_an_event(installation: Installation) -> None:
    await installation.publish(policy("kaboom"))
    await installation.deploy()
    await installation.tenant()
    await installation.tenant(pack="", new=False)

    async def messages() -> list[str]:
        entries = (await installation.store.list(EVENTS)).entries
        found = [load(entry.value, EventRecord) for entry in entries]
        return [one.message for one in found if one.reason == "SAFETY_PACK_ASSIGNED"]

    async with asyncio.timeout(20.0):
        while len(await messages()) < 2:
            await asyncio.sleep(0.05)
    assert await messages() == [
        "obeys the safety pack 'strict', before ''",
        "obeys the safety pack '', before 'strict'",
    ]


# --- what a request obeys --------------------------------------------------------------------------


async def test_a_request_obeys_its_version_and_its_tenant_as_the_stricter_of_both(
    installation: Installation,
) -> None:
    own = policy("kaboom", action="flag") | {"fail": "open"}
    digest, pack = await model(installation, own), await installation.publish(policy("zap"))
    await installation.deploy()
    acme, free = await installation.tenant(), await installation.tenant("free", "")
    packs = installation.packs
    both = await packs.terms("tiny", digest, acme, "s")
    alone = await packs.terms("tiny", digest, free, "s")
    assert both is not None
    assert alone is not None
    assert both.pack.categories["bad"].action == "block"
    assert [rule.phrases for rule in both.pack.lists] == [("kaboom",), ("zap",)]
    assert (both.pack.fail, alone.pack.fail) == ("closed", "open")
    policy_digest = sha256_of(json.dumps(own).encode())
    assert (both.pins.default_digest, both.pins.pack_digest) == (policy_digest, pack)
    assert (alone.pins.default_digest, alone.pins.pack_digest) == (policy_digest, "")
    assert (both.pins.deployment, both.pins.model, both.shadow) == ("strict", "strict", None)
    assert await packs.terms("tiny", digest, acme, "s") is not None
    assert (await packs.terms("tiny", digest, acme, "s")).compiled is both.compiled, "it is compiled once"  # type: ignore[union-attr]


async def test_without_a_pack_a_request_obeys_nothing(installation: Installation) -> None:
    digest, free = await model(installation), await installation.tenant("free", "")
    assert await installation.packs.terms("tiny", digest, free, "s") is None


async def test_a_pack_that_cannot_be_read_refuses_the_request_until_it_can(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await model(installation)
    await installation.publish(policy("kaboom"))
    await installation.deploy()
    acme = await installation.tenant()

    async def lost(*_: Any, **__: Any) -> Any:
        raise Unavailable("the registry does not answer", retry_after_s=1.0)

    with monkeypatch.context() as patched:
        patched.setattr(installation.packs._files, "fetch", lost)
        with pytest.raises(Unavailable, match="nothing is sent unjudged") as refused:
            await installation.packs.terms("tiny", digest, acme, "s")
        assert refused.value.retry_after_s
    assert await installation.packs.terms("tiny", digest, acme, "s") is not None


async def test_a_tenant_whose_pack_this_gateway_does_not_have_yet_waits(installation: Installation) -> None:
    digest, free = await model(installation), await installation.tenant("free", "")
    with pytest.raises(Unavailable, match="does not have the safety pack later yet"):
        await installation.packs.terms("tiny", digest, replace(free, safety_pack="later"), "s")


async def test_a_run_that_goes_on_obeys_what_it_obeyed(installation: Installation) -> None:
    digest, old = await model(installation), await installation.publish(policy("kaboom"), tag="v1")
    await installation.deploy(version="v1")
    acme = await installation.tenant()
    before = await installation.packs.terms("tiny", digest, acme, "s")
    assert before is not None
    new = await installation.publish(policy("zap"), tag="v2")
    updated = pb.Deployment(metadata=pb.Metadata(name="strict"), model="strict", version="v2")
    await installation.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=updated))

    async def obeyed() -> str:
        terms = await installation.packs.terms("tiny", digest, acme, "s")
        return "" if terms is None else terms.pins.pack_digest

    async with asyncio.timeout(20.0):
        while await obeyed() != new:
            await asyncio.sleep(0.02)
    again = await installation.packs.pinned("tiny", digest, before.pins)
    assert again is not None
    assert (again.pins, again.pack) == (before.pins, before.pack)
    assert again.pins.pack_digest == old


# --- rollouts --------------------------------------------------------------------------------------


async def two_versions(at: Installation) -> tuple[str, str]:
    old = await at.publish(policy("kaboom"), tag="v1")
    new = await at.publish(policy("kaboom", "zap"), tag="v2")
    await at.deploy(version="v1")
    return old, new


async def routed(at: Installation, sessions: int = 200) -> dict[str, int]:
    """Return how many sessions obey each version."""
    found: dict[str, int] = {}
    for number in range(sessions):
        terms = await at.packs.named("strict", "acme", f"s{number}")
        found[terms.pins.pack_digest] = found.get(terms.pins.pack_digest, 0) + 1
    return found


def canary(weight: float) -> dict[str, Any]:
    step = pb.RolloutStep(weight_ratio=weight, min_requests=1)
    step.hold.FromSeconds(600)
    return {"steps": [step]}


async def test_a_canary_splits_sessions_and_is_promoted(installation: Installation) -> None:
    old, new = await two_versions(installation)
    await installation.rollout("v2", **canary(0.5))
    running = await installation.phase(pb.ROLLOUT_PHASE_RUNNING)
    assert list(running.gate.metrics) == ["error_ratio", "intervention_rate", "ttft_p95", "cost"]
    await until(lambda: installation.catalog._splits.of("strict") is not None)

    async def split() -> bool:
        return len(await routed(installation)) == 2

    async with asyncio.timeout(20.0):
        while not await split():
            await asyncio.sleep(0.05)
    first = {f"s{n}": (await installation.packs.named("strict", "acme", f"s{n}")).pins for n in range(50)}
    again = {f"s{n}": (await installation.packs.named("strict", "acme", f"s{n}")).pins for n in range(50)}
    assert first == again, "sessions are sticky"
    assert all(pins.step for pins in first.values())
    assert 60 < (await routed(installation))[new] < 140
    await installation.call("PromoteRollout", pb.PromoteRolloutRequest(name="r", to_end=True))
    soaking = await installation.phase(pb.ROLLOUT_PHASE_SOAKING)
    assert not soaking.fits
    async with asyncio.timeout(20.0):
        while await routed(installation) != {new: 200}:
            await asyncio.sleep(0.05)
    await installation.call("RevertRollout", pb.RevertRolloutRequest(name="r"))
    await installation.phase(pb.ROLLOUT_PHASE_ABORTED)
    async with asyncio.timeout(20.0):
        while await routed(installation) != {old: 200}:
            await asyncio.sleep(0.05)


async def test_an_instant_rollout_waits_for_no_worker(installation: Installation) -> None:
    _, new = await two_versions(installation)
    gate = pb.RolloutGate()
    gate.patience.FromSeconds(1)
    wanted = {"strategy": pb.ROLLOUT_STRATEGY_INSTANT, "gate": gate}
    rollout = await installation.rollout("v2", **wanted)
    assert rollout.phase == pb.ROLLOUT_PHASE_LOADING
    await installation.phase(pb.ROLLOUT_PHASE_SOAKING)
    await installation.call("PromoteRollout", pb.PromoteRolloutRequest(name="r", to_end=True))
    await installation.phase(pb.ROLLOUT_PHASE_COMPLETED)
    found = await installation.call("GetDeployment", pb.GetDeploymentRequest(name="strict"))
    assert found.deployment.version_digest == new
    assert not (await installation.store.list(ASSIGNMENTS)).entries


async def test_a_shadow_only_flags(installation: Installation) -> None:
    old, new = await two_versions(installation)
    await installation.rollout(
        "v2",
        strategy=pb.ROLLOUT_STRATEGY_SHADOW,
        shadow=pb.RolloutShadow(arm="canary", fraction_ratio=1.0),
    )
    await installation.phase(pb.ROLLOUT_PHASE_RUNNING)

    async def shadowed() -> bool:
        return bool((await installation.packs.named("strict", "acme", "s")).pins.shadow_digest)

    async with asyncio.timeout(20.0):
        while not await shadowed():
            await asyncio.sleep(0.05)
    terms = await installation.packs.named("strict", "acme", "s")
    assert (terms.pins.pack_digest, terms.pins.shadow_digest) == (old, new)
    assert terms.pack.lists[0].phrases == ("kaboom",), "the shadow does not replace what is enforced"
    assert terms.shadow is not None
    assert terms.shadow.pack.lists[0].phrases == ("kaboom", "zap")


async def test_a_pack_that_intervenes_too_often_is_rolled_back(installation: Installation) -> None:
    """What gateways report of the arms of a pack reaches the gate, which fails by the intervention rate."""
    old, new = await two_versions(installation)
    await installation.rollout("v2", **canary(0.5))
    await installation.phase(pb.ROLLOUT_PHASE_RUNNING)
    async with asyncio.timeout(20.0):
        while len(await routed(installation, 50)) < 2:
            await asyncio.sleep(0.05)
    recorder = SliRecorder()
    for number in range(3000):
        pins = (await installation.packs.named("strict", "acme", f"s{number}")).pins
        key = SliKey(ArmKey("strict", pins.pack_digest), "acme", Priority.STANDARD)
        subject = subject_of(key, f"s{number}", pins.step, 10, ())
        # The new version intervenes in every fifth request, the old one in every hundredth.
        every = 5 if pins.pack_digest == new else 100
        recorder.screened(subject, ScreenEnd(number % every == 0, flagged=False, hold_s=0.01, tokens=100))
    report = recorder.cut(CLOCK.unix_s())
    assert report is not None
    installation.slis.report("gateway", 1, 1, [report])
    ended = await installation.phase(pb.ROLLOUT_PHASE_ROLLING_BACK, pb.ROLLOUT_PHASE_ABORTED)
    (failed,) = [one for one in ended.history if one.what == "GATE_FAILED"]
    assert failed.message == "canary fails intervention_rate"
    async with asyncio.timeout(20.0):
        while await routed(installation) != {old: 200}:
            await asyncio.sleep(0.05)
