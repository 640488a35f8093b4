"""The operators' client against real control planes and a registry: calls, failover, changes done once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairway.client import (
    AdminClient,
    ClientOptions,
    Closed,
    Conflict,
    ConnectionLost,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    NoGateway,
    NotFound,
    RetryPolicy,
    Unauthenticated,
    Unavailable,
    WaitFailed,
)
from fairway.client.publish.publish import PublishProgress
from fairway.v1 import controlplane_pb2 as cp
from services.core.manifest import sha256_of
from services.core.records import (
    ASSIGNMENTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    LoadedVersion,
    Tag,
    VersionRecord,
    VersionState,
    Worker,
    tag_key,
    version_key,
)
from services.ports.store import Delete
from tests.integration.client.planes import Fleet, fleet
from tests.support.model_folder import write_model
from tests.support.waiting import until

DIGEST, OTHER = sha256_of(b"1"), sha256_of(b"2")


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path / "blobs") as found:
        yield found


def tenant(name: str, **fields: Any) -> cp.Tenant:
    return cp.Tenant(metadata=cp.Metadata(name=name), **fields)


def key(name: str) -> cp.Key:
    return cp.Key(metadata=cp.Metadata(name=name), role=cp.KEY_ROLE_ADMIN)


# --- resources -----------------------------------------------------------------------------------


async def test_a_tenant_lives_from_create_to_delete(planes: Fleet) -> None:
    async with planes.client() as admin:
        made = await admin.tenants.create(tenant("acme", requests_per_minute=60))
        found = await admin.tenants.get("acme")
        assert not found.data_key.generations
        found.ClearField("data_key")
        assert found == made
        made.requests_per_minute = 120
        changed = await admin.tenants.update(made)
        assert (changed.requests_per_minute, changed.metadata.etag != made.metadata.etag) == (120, True)
        with pytest.raises(Conflict) as caught:
            await admin.tenants.update(made)
        assert caught.value.reason == "ETAG_MISMATCH"
        with pytest.raises(Conflict):
            await admin.tenants.create(tenant("acme"))
        with pytest.raises(Conflict):
            await admin.tenants.delete("acme", etag=made.metadata.etag)
        await admin.tenants.delete("acme")
        with pytest.raises(NotFound):
            await admin.tenants.get("acme")
        with pytest.raises(InvalidRequest):
            await admin.tenants.create(tenant("Not A Name"))


async def test_changes_of_two_clients_are_both_kept(planes: Fleet) -> None:
    async with planes.client() as one, planes.client() as other:
        await one.tenants.create(tenant("acme"))
        before = await one.tenants.get("acme")

        def limit(found: cp.Tenant) -> None:
            found.max_concurrency += 1

        await asyncio.gather(*(client.tenants.change("acme", limit) for client in (one, other, one)))
        assert (await one.tenants.get("acme")).max_concurrency == 3
        with pytest.raises(Conflict, match="etag"):
            await one.tenants.change("acme", limit, etag=before.metadata.etag)


async def test_a_key_is_made_rotated_and_listed_without_its_secret(planes: Fleet) -> None:
    async with planes.client() as admin:
        made = await admin.keys.create(key("ops"))
        turned = await admin.keys.rotate("ops", grace_s=1.5)
        assert len({made.secret, turned.secret, ""}) == 3
        assert [found.metadata.name for found in await admin.keys.list()] == ["ops"]
        await admin.keys.delete("ops")


async def test_a_list_is_read_page_by_page_and_bounded(planes: Fleet) -> None:
    async with planes.client() as admin:
        names = [f"t{number}" for number in range(7)]
        for name in names:
            await admin.tenants.create(tenant(name))
        service = admin.tenants._service
        pages = [
            [found.metadata.name for found in (await service.call("ListTenants", page_size=3)).tenants],
            [found.metadata.name for found in await admin.tenants.list()],
            [found.metadata.name for found in await admin.tenants.list(limit=5)],
        ]
        assert pages == [names[:3], names, names[:5]]
        found = await service.pages("ListTenants", "tenants", page_size=3)
        assert [each.metadata.name for each in found] == names
        with pytest.raises(FailedPrecondition) as caught:
            await service.pages("ListTenants", "tenants", page_size=3, most=6)
        assert caught.value.reason == "LIST_TOO_LONG"
        with pytest.raises(ValueError, match="limit"):
            await admin.tenants.list(limit=0)


# --- deployments and nodes -----------------------------------------------------------------------


def holds(state: VersionState, **fields: Any) -> Worker:
    loaded = LoadedVersion("chat", "tiny", DIGEST, state, **fields)
    return Worker("w0", "w0:1", versions=(loaded,))


async def deployed(planes: Fleet, admin: AdminClient, worker: Worker) -> cp.Deployment:
    await planes.put(version_key("tiny", DIGEST), VersionRecord("tiny", DIGEST, 1, 0.0))
    await planes.put(WORKERS + "w0", worker)
    await planes.put(ASSIGNMENTS + "w0", Assignment("w0", (AssignedVersion("chat", "tiny", DIGEST),)))
    wanted = cp.Deployment(metadata=cp.Metadata(name="chat"), model="tiny", version=DIGEST, replicas=1)
    return await admin.deployments.create(wanted)


async def test_a_deployment_is_scaled_and_waited_for(planes: Fleet) -> None:
    async with planes.client() as admin:
        await deployed(planes, admin, holds(VersionState.LOADING))
        seen: list[int] = []
        looked = asyncio.Event()

        def report(found: cp.Deployment) -> None:
            seen.append(found.status.ready_replicas)
            looked.set()

        waiting = asyncio.create_task(admin.deployments.wait_ready("chat", timeout_s=60, report=report))
        await looked.wait()
        await planes.put(WORKERS + "w0", holds(VersionState.READY))
        ready = await waiting
        assert (seen[0], seen[-1], ready.status.ready_replicas) == (0, 1, 1)
        scaled = await admin.deployments.scale("chat", 2)
        assert (scaled.replicas, scaled.version_digest) == (2, DIGEST)
        with pytest.raises(DeadlineExceeded, match="1 of 2 replicas after") as caught:
            await admin.deployments.wait_ready("chat", timeout_s=1.5)
        assert caught.value.reason == "NOT_READY_IN_TIME"
        await admin.deployments.delete("chat")


async def test_a_change_keeps_the_version_whose_tag_moved_unless_it_names_one(planes: Fleet) -> None:
    for digest in (DIGEST, OTHER):
        await planes.put(version_key("tiny", digest), VersionRecord("tiny", digest, 1, 0.0))
    await planes.put(tag_key("tiny", "prod"), Tag("tiny", "prod", DIGEST))
    async with planes.client() as admin:
        wanted = cp.Deployment(metadata=cp.Metadata(name="chat"), model="tiny", version="prod", replicas=1)
        await admin.deployments.create(wanted)
        await planes.put(tag_key("tiny", "prod"), Tag("tiny", "prod", OTHER))
        scaled = await admin.deployments.scale("chat", 3)
        assert (scaled.version_digest, scaled.replicas) == (DIGEST, 3)

        def follow(found: cp.Deployment) -> None:
            found.version = "prod"

        assert (await admin.deployments.change("chat", follow)).version_digest == OTHER


async def test_a_replica_that_fails_for_good_ends_the_wait_with_its_reason(planes: Fleet) -> None:
    async with planes.client() as admin:
        worker = holds(VersionState.FAILED, reason="DOES_NOT_FIT", message="it needs 9 GiB")
        await deployed(planes, admin, worker)
        with pytest.raises(WaitFailed, match="w0 cannot serve chat: it needs 9 GiB") as caught:
            await admin.deployments.wait_ready("chat", timeout_s=60)
        assert (caught.value.reason, caught.value.metadata["worker_id"]) == ("DOES_NOT_FIT", "w0")


async def test_a_node_is_cordoned_drained_and_forgotten(planes: Fleet) -> None:
    async with planes.client() as admin:
        await planes.put(WORKERS + "w0", Worker("w0", "w0:1"))
        assert (await admin.nodes.cordon("w0")).cordoned
        assert not (await admin.nodes.uncordon("w0")).cordoned
        with pytest.raises(WaitFailed) as caught:
            await admin.nodes.wait_drained("w0", timeout_s=60)
        assert caught.value.reason == "DRAIN_ENDED"
        assert (await admin.nodes.drain("w0")).draining
        assert (await admin.nodes.wait_drained("w0", timeout_s=60)).drain.done
        with pytest.raises(FailedPrecondition, match="lives"):
            await admin.nodes.delete("w0")
        await planes.store.commit([Delete(WORKERS + "w0")])
        await admin.nodes.delete("w0")
        assert list(await admin.nodes.list()) == []


async def test_queues_need_a_leader(planes: Fleet) -> None:
    async with planes.client(retry=RetryPolicy(max_attempts=1)) as admin:
        with pytest.raises(Unavailable) as caught:
            await admin.queues.list()
        assert caught.value.reason == "NO_LEADER"


# --- models --------------------------------------------------------------------------------------


async def test_a_model_is_published_tagged_and_deleted(planes: Fleet, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    phases: dict[str, PublishProgress] = {}
    async with planes.client() as admin:
        models = admin.models
        done = await models.publish(
            folder,
            "tiny",
            "v1",
            progress=lambda now: phases.update({now.phase: now}),
            for_another_engine=True,
        )
        again = await models.publish(folder, "tiny", for_another_engine=True)
        assert (done.created, again.created, again.uploaded_bytes) == (True, False, 0)
        assert phases["done"].done_ratio == 1.0
        await models.tag("tiny", "stable", done.digest)
        (found,) = await models.list()
        assert dict(found.tags) == {"v1": done.digest, "stable": done.digest}
        (version,) = await models.versions("tiny")
        assert (version.digest, (await models.get("tiny", "stable")).digest) == (done.digest, done.digest)
        for name in ("v1", "stable"):
            await models.untag("tiny", name)
        with pytest.raises(NotFound):
            await models.untag("tiny", "v1")
        await models.delete("tiny", done.digest)
        assert not await models.versions("tiny")
        assert (await models.collect_garbage(dry_run=True)).young_blobs


# --- servers that come and go --------------------------------------------------------------------


async def test_calls_go_on_while_any_control_plane_lives(planes: Fleet) -> None:
    first, second = planes.planes
    async with planes.client() as admin:
        for number, (off, on) in enumerate([(first, second), (second, first)]):
            await off.stop()
            await admin.tenants.create(tenant(f"t{number}"))
            assert len(await admin.tenants.list()) == number + 1
            await off.start()
            assert on.port


@pytest.mark.parametrize("way", ["waits", "fails_fast"])
async def test_no_control_plane_at_all_is_said(planes: Fleet, way: str) -> None:
    for plane in planes.planes:
        await plane.stop()
    patient = way == "waits"
    options = {"connect_timeout_s": 0.3} if patient else {"wait_for_ready": False, "connect_timeout_s": 600.0}
    async with planes.client(timeout_s=700, **options) as admin:
        with pytest.raises(NoGateway, match="no control plane could be reached"):
            await admin.tenants.list()


async def test_a_control_plane_that_hangs_is_left_for_the_other(planes: Fleet) -> None:
    planes.planes[0].servicer.frozen = True
    async with planes.client(timeout_s=3) as admin, asyncio.timeout(60):
        while not planes.planes[0].servicer.held:
            await admin.tenants.list()
    planes.planes[1].servicer.frozen = True
    async with planes.client(timeout_s=0.5) as admin:
        with pytest.raises((DeadlineExceeded, ConnectionLost)):
            await admin.tenants.list()


async def test_a_change_whose_answer_is_lost_is_done_once(planes: Fleet) -> None:
    for plane in planes.planes:
        plane.servicer.lost = {"CreateKey": 1, "RotateKey": 1, "UpdateTenant": 1}
    async with planes.client() as admin:
        made = await admin.keys.create(key("ops"))
        assert made.secret
        before = (await admin.keys.get("ops")).metadata.etag
        turned = await admin.keys.rotate("ops")
        assert turned.key.metadata.etag == (await admin.keys.get("ops")).metadata.etag != before
        await admin.tenants.create(tenant("acme"))

        def limit(found: cp.Tenant) -> None:
            found.max_concurrency += 1

        await admin.tenants.change("acme", limit)
        assert (await admin.tenants.get("acme")).max_concurrency == 1
        left = [plane.servicer.lost for plane in planes.planes]
        assert all(sum(each[method] for each in left) < 2 for method in left[0]), "an answer was lost of each"


async def test_what_cannot_be_is_refused_before_anything_is_sent(planes: Fleet) -> None:
    with pytest.raises(ValueError, match="admin_key"):
        AdminClient("127.0.0.1:1", admin_key="")
    with pytest.raises(ValueError, match="address"):
        AdminClient(admin_key="k")
    with pytest.raises(ValueError, match="different endpoints"):
        AdminClient("127.0.0.1:1", admin_key="k", registry=["127.0.0.1:2"] * 2)
    with pytest.raises(RuntimeError, match="not open"):
        AdminClient("127.0.0.1:1", admin_key="k").tenants  # noqa: B018
    async with AdminClient(registry=planes.registry, admin_key="admin") as admin:
        assert list(await admin.models.list()) == []
        with pytest.raises(ValueError, match="no control plane"):
            admin.tenants  # noqa: B018
        with pytest.raises(ValueError, match="control plane"):
            admin.models.watch()
    async with AdminClient(planes.planes[0].address, admin_key="admin") as admin:
        with pytest.raises(ValueError, match="registry="):
            await admin.models.list()
        for wrong in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="timeout_s must be above 0"):
                await admin.tenants.list(timeout_s=wrong)
            with pytest.raises(ValueError, match="timeout_s must be above 0"):
                await admin.deployments.wait_ready("chat", timeout_s=wrong)
            with pytest.raises(ValueError, match="connect_timeout_s must be above 0"):
                ClientOptions(connect_timeout_s=wrong)
    async with AdminClient(planes.planes[0].address, admin_key="wrong") as admin:
        with pytest.raises(Unauthenticated):
            await admin.tenants.list()


async def test_closing_ends_calls_and_watches(planes: Fleet) -> None:
    before = asyncio.all_tasks()
    for plane in planes.planes:
        plane.servicer.frozen = True
    async with planes.client(timeout_s=600) as admin:
        watch = admin.tenants.watch()
        await planes.put(WORKERS + "w0", Worker("w0", "w0:1"))
        await planes.put(ASSIGNMENTS + "w0", Assignment("w0", (AssignedVersion("chat", "tiny", DIGEST),)))
        await admin.nodes.drain("w0")
        looked = asyncio.Event()
        drain = admin.nodes.wait_drained("w0", timeout_s=600, report=lambda _: looked.set())
        waiting = [
            asyncio.ensure_future(admin.tenants.list()),
            asyncio.ensure_future(anext(watch)),
            asyncio.ensure_future(drain),
        ]
        await looked.wait()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Closed] * 3
    with pytest.raises(Closed):
        admin.tenants  # noqa: B018
    for plane in planes.planes:
        await plane.stop()
    await until(lambda: not asyncio.all_tasks() - before)


async def test_a_deployment_gets_an_earlier_state_again_with_its_present_replicas(planes: Fleet) -> None:
    for digest in (DIGEST, OTHER):
        await planes.put(version_key("tiny", digest), VersionRecord("tiny", digest, 1, 0.0))
    async with planes.client() as admin:
        wanted = cp.Deployment(metadata=cp.Metadata(name="back"), model="tiny", version=DIGEST, replicas=1)
        await admin.deployments.create(wanted)

        def change(found: cp.Deployment) -> None:
            found.version, found.price.output_micros = OTHER, 7

        await admin.deployments.change("back", change)
        await admin.deployments.scale("back", 3)
        before = await admin.deployments.rollback("back")
        assert (before.version_digest, before.price.output_micros, before.replicas) == (DIGEST, 0, 3)
        states = await admin.deployments.history("back")
        assert [one.deployment.version_digest for one in states] == [DIGEST, OTHER, OTHER, DIGEST]
        forward = await admin.deployments.rollback("back", states[1].name)
        assert (forward.version_digest, forward.price.output_micros) == (OTHER, 7)
        with pytest.raises(NotFound):
            await admin.deployments.rollback("back", "no-such-state")
