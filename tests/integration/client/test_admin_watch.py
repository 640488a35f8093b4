"""Watches of the operators' client: over connections that break, servers that change, and a compaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fairway.client import (
    AdminClient,
    Changed,
    ClientOptions,
    Deleted,
    FairwayError,
    InvalidRequest,
    Missed,
    NoGateway,
    Snapshot,
)
from fairway.client.admin.watch import watch_resources
from fairway.v1 import controlplane_pb2 as cp
from services.core.manifest import sha256_of
from services.core.records import Tag, VersionRecord, tag_key, version_key
from services.rpc.server import ServerTls
from services.runtime.certificates import FolderCertificates
from services.runtime.clock import SystemClock
from tests.integration.client.planes import Fleet, fleet
from tests.support.certificates import authority_in, issued
from tests.support.waiting import until

T = TypeVar("T")
DIGEST = sha256_of(b"1")
HANG_S = 60.0


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path / "blobs") as found:
        yield found


def tenant(name: str, **fields: Any) -> cp.Tenant:
    return cp.Tenant(metadata=cp.Metadata(name=name), **fields)


async def take(news: AsyncGenerator[T, None]) -> T:
    async with asyncio.timeout(HANG_S):
        return await anext(news)


async def test_a_watch_goes_on_when_its_certificate_was_replaced_and_expires(
    planes: Fleet, tmp_path: Path
) -> None:
    """Its authority is replaced too: what the client read at its start opens nothing any more."""
    authority, plane, lost = authority_in(tmp_path / "certs"), planes.planes[0], list[FairwayError]()
    server = FolderCertificates(issued(authority, "controlplane").folder, SystemClock())
    folder = issued(authority, "operator", days=5 / 86400).folder
    await plane.stop()
    plane.tls = ServerTls(server, SystemClock())
    await plane.start()
    async with (
        AdminClient(plane.address, admin_key="admin", credentials=folder) as admin,
        aclosing(admin.tenants.watch(on_lost=lambda error, _: lost.append(error))) as news,
    ):
        assert await take(news) == Snapshot({})
        issued(authority, "operator")
        await asyncio.to_thread(authority.rotate, lambda done: None)
        coming = asyncio.create_task(take(news))
        await until(lambda: bool(lost))
        made = await admin.tenants.create(tenant("acme"))
        assert await coming == Changed("acme", made)
    assert [error.reason for error in lost] == ["UNAUTHENTICATED"]


async def test_what_is_there_then_every_change(planes: Fleet) -> None:
    async with planes.client() as admin:
        made = await admin.tenants.create(tenant("acme"))
        async with aclosing(admin.tenants.watch()) as news:
            assert await take(news) == Snapshot({"acme": made})
            changed = await admin.tenants.update(tenant("acme", max_concurrency=3))
            assert await take(news) == Changed("acme", changed)
            await admin.tenants.delete("acme")
            assert await take(news) == Deleted("acme", tenant("acme"))
        core = admin.tenants._service.core
        assert [one.in_flight for one in core.pool._endpoints.values()] == [0, 0]


async def test_models_are_watched_as_versions_and_tags(planes: Fleet) -> None:
    async with planes.client() as admin, aclosing(admin.models.watch()) as news:
        assert await take(news) == Snapshot({})
        await planes.put(version_key("tiny", DIGEST), VersionRecord("tiny", DIGEST, 1, 0.0))
        await planes.put(tag_key("tiny", "v1"), Tag("tiny", "v1", DIGEST))
        told = [await take(news), await take(news)]
        assert [one.name for one in told if isinstance(one, Changed)] == [f"tiny/{DIGEST}", "tiny:v1"]


async def test_a_watch_goes_on_at_the_other_control_plane_after_its_last_revision(planes: Fleet) -> None:
    lost: list[FairwayError] = []
    async with planes.client() as admin:
        await admin.tenants.create(tenant("acme"))
        async with aclosing(admin.tenants.watch(on_lost=lambda error, _: lost.append(error))) as news:
            await take(news)
            for number in range(2):
                off = next(plane for plane in planes.planes if plane.servicer.resumed)
                off.servicer.resumed.clear()
                await off.stop()
                name = f"t{number}"
                await admin.tenants.create(tenant(name))
                told = await take(news)
                assert isinstance(told, Changed)
                assert told.name == name
                on = next(plane for plane in planes.planes if plane.servicer.resumed)
                assert on is not off
                assert on.servicer.resumed[-1] > 0, "it began anew instead of going on"
                await off.start()
    assert len(lost) == 2


async def test_after_a_compaction_there_is_a_snapshot_again(planes: Fleet) -> None:
    async with planes.client() as admin:
        made = await admin.tenants.create(tenant("acme"))
        async with aclosing(admin.tenants.watch()) as news:
            assert await take(news) == Snapshot({"acme": made})
            for plane in planes.planes:
                await plane.stop()
            for number in range(3):
                await planes.put(f"/elsewhere/{number}", Tag("m", "t", DIGEST))
            planes.store.compact((await planes.store.list("/")).revision)
            for plane in planes.planes:
                await plane.start()
            found = await take(news)
            assert isinstance(found, Snapshot)
            assert (set(found.items), found.started_over) == ({"acme"}, True)
            await admin.tenants.create(tenant("bolt"))
            told = await take(news)
            assert isinstance(told, Changed)
            assert told.name == "bolt"


async def test_a_long_list_of_what_is_there_is_one_snapshot(planes: Fleet) -> None:
    names = [f"t{number:04}" for number in range(1200)]
    for name in names:
        await planes.put(tag_key("tiny", name), Tag("tiny", name, DIGEST))
    async with planes.client() as admin, aclosing(admin.models.watch()) as news:
        found = await take(news)
        assert isinstance(found, Snapshot)
        assert sorted(found.items) == [f"tiny:{name}" for name in names]


async def test_events_go_on_where_they_were(planes: Fleet) -> None:
    async with planes.client() as admin:
        async with aclosing(admin.events.watch(kinds=[cp.RESOURCE_KIND_TENANT], newest=5)) as news:
            waiting = asyncio.ensure_future(anext(news))
            made = 0
            while not waiting.done():  # until the recorder follows the store
                await admin.tenants.create(tenant(f"early{made}"))
                made += 1
                await asyncio.wait([waiting], timeout=0.2)
            first = await waiting
            assert isinstance(first, cp.Event)
            for plane in planes.planes:
                await plane.stop()
                await plane.start()
            await admin.tenants.create(tenant("later"))
            seen = [first]
            while seen[-1].resource != "later":
                event = await take(news)
                assert isinstance(event, cp.Event)
                seen.append(event)
        names = [event.name for event in seen]
        assert names == sorted(set(names)), "an event was told twice, or out of order"
        listed = await admin.events.list(limit=None)
        assert [event.name for event in listed][::-1] == names
        assert [event.resource for event in await admin.events.list(limit=1)] == ["later"]


async def test_events_that_may_be_missing_are_marked(planes: Fleet) -> None:
    async with planes.client() as admin, aclosing(admin.events.watch(newest=1)) as news:
        while not await admin.events.list():
            await admin.tenants.create(tenant(f"t{len(await admin.tenants.list())}"))
            await asyncio.sleep(0.02)
        assert isinstance(await take(news), cp.Event)
        for plane in planes.planes:
            await plane.stop()
        for number in range(3):
            await planes.put(f"/elsewhere/{number}", Tag("m", "t", DIGEST))
        planes.store.compact((await planes.store.list("/")).revision)
        for plane in planes.planes:
            await plane.start()
        while not isinstance(await take(news), Missed):
            pass


async def test_a_watch_that_cannot_begin_or_is_refused_is_raised(planes: Fleet) -> None:
    async with planes.client() as admin:
        service = admin.tenants._service
        refused: AsyncGenerator[Any, None] = watch_resources(
            service, cp.RESOURCE_KIND_LEADER, lambda _: None, None
        )
        with pytest.raises(InvalidRequest):
            await take(refused)
    options = ClientOptions(wait_for_ready=False)
    async with AdminClient("127.0.0.1:9", admin_key="admin", options=options) as admin:
        with pytest.raises(NoGateway):
            await take(admin.tenants.watch())
        with pytest.raises(NoGateway):
            await take(admin.events.watch())


async def test_a_control_plane_that_hangs_is_left_by_a_watch(planes: Fleet) -> None:
    first = planes.planes[0].servicer
    first.frozen = True
    async with planes.client(timeout_s=3) as admin, asyncio.timeout(HANG_S):
        while not first.held:
            async with aclosing(admin.nodes.watch()) as news:
                assert await take(news) == Snapshot({})
