"""What the etcd adapter does when the server is frozen, gone, back or behind a name, and how watches end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from services.adapters.etcd import watch as etcd_watch
from services.adapters.etcd.channel import EtcdChannel, targets
from services.adapters.etcd.store import EtcdStore
from services.core.errors import InvalidInput, StoreUnavailable
from services.ports.store import Committed, LeaseLost, Put
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.leadership import Election, Registration

TIMEOUT_S = 0.5
MARGIN_S = 5.0  # for a busy machine


@pytest_asyncio.fixture
async def store(own_etcd: Any) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(
        [own_etcd.address], SystemClock(), timeout_s=TIMEOUT_S, progress_s=0.1, silence_s=TIMEOUT_S
    )
    yield store
    await store.close()


@pytest_asyncio.fixture
async def patient(own_etcd: Any) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([own_etcd.address], SystemClock(), timeout_s=MARGIN_S)
    yield store
    await store.close()


async def follow(store: EtcdStore) -> None:
    async with aclosing(store.watch("/k", 1)) as batches:
        async for _ in batches:
            pass


async def test_every_call_to_a_frozen_server_ends_on_time(own_etcd: Any, store: EtcdStore) -> None:
    lease_id = await store.grant_lease(60)
    watching = asyncio.create_task(follow(store))
    await asyncio.sleep(0.3)
    own_etcd.freeze()
    try:
        calls = (
            store.get("/k"),
            store.list("/k"),
            store.commit([Put("/k", b"")]),
            store.grant_lease(5),
            store.keep_alive(lease_id),
            store.revoke_lease(lease_id),
            follow(store),
            watching,
        )
        start_s = time.monotonic()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - start_s < TIMEOUT_S + MARGIN_S
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * len(calls)
    finally:
        own_etcd.thaw()


async def test_a_server_that_is_gone_is_refused_at_once_and_found_again(
    own_etcd: Any, patient: EtcdStore
) -> None:
    committed = await patient.commit([Put("/k", b"1")])
    assert isinstance(committed, Committed)
    lease_id = await patient.grant_lease(60)
    own_etcd.kill()
    with pytest.raises(StoreUnavailable):
        await patient.get("/k")
    await asyncio.to_thread(own_etcd.start)
    async with asyncio.timeout(30):
        while True:
            try:
                await patient.get("/k")
                break
            except StoreUnavailable:
                await asyncio.sleep(0.05)
    entry = await patient.get("/k")
    assert entry is not None
    assert entry.mod_revision == committed.revision
    await patient.keep_alive(lease_id)
    await patient.revoke_lease(lease_id)
    with pytest.raises(LeaseLost):
        await patient.keep_alive(lease_id)


async def received(etcd: Any, method: str) -> tuple[int, int]:
    """Return how many streams of a method etcd has started, and how many messages it received on them."""

    def count(kind: str) -> int:
        with urllib.request.urlopen(f"http://{etcd.address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        named = f'grpc_server_{kind}_total{{grpc_method="{method}"'
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(named))

    return await asyncio.to_thread(count, "started"), await asyncio.to_thread(count, "msg_received")


async def test_keep_alives_share_a_stream_that_outlives_neither_a_lease_nor_the_server(
    own_etcd: Any, patient: EtcdStore
) -> None:
    lease_id, other_id = await patient.grant_lease(60), await patient.grant_lease(60)
    for _ in range(3):
        await asyncio.gather(patient.keep_alive(lease_id), patient.keep_alive(other_id))
    await patient.revoke_lease(other_id)
    with pytest.raises(LeaseLost):
        await patient.keep_alive(other_id)
    await patient.keep_alive(lease_id)
    assert await received(own_etcd, "LeaseKeepAlive") == (1, 8)
    own_etcd.kill()
    await asyncio.to_thread(own_etcd.start)
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StoreUnavailable):
                await patient.get("/k")
                break
    await patient.keep_alive(lease_id)


async def test_a_message_is_requested_only_from_a_silent_watch(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], SystemClock(), progress_s=1.0, silence_s=8.0)
    times: list[float] = []

    async def note() -> None:
        async with aclosing(store.watch("/k", 1)) as batches:
            async for _ in batches:
                times.append(time.monotonic())

    watching = asyncio.create_task(note())
    try:
        for _ in range(10):
            await asyncio.sleep(0.2)
            await store.commit([Put("/k", b"")])
        streams, messages = await received(own_etcd, "Watch")
        # A machine that stalls makes the watch silent for a second.
        late = sum(int(after - before) for before, after in itertools.pairwise(times))
        assert (streams, messages <= 1 + late) == (1, True), "a progress request while events arrive"
        began_s = times[-1]
        await asyncio.sleep(2.5)
        _, messages = await received(own_etcd, "Watch")
        assert 2 <= messages <= 1 + late + int(time.monotonic() - began_s), "one a second at most"
        assert time.monotonic() - times[-1] < 2.0
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await store.close()


async def test_names_are_resolved_and_a_dead_one_is_left(own_etcd: Any) -> None:
    store = EtcdStore([f"localhost:{own_etcd.port}"], SystemClock(), timeout_s=MARGIN_S)
    assert isinstance(await store.commit([Put("/k", b"1")]), Committed)
    await store.close()
    store = EtcdStore(["localhost:1", f"http://localhost:{own_etcd.port}"], SystemClock(), timeout_s=MARGIN_S)
    with pytest.raises(StoreUnavailable):
        await store.get("/k")
    entry = await store.get("/k")
    assert entry is not None
    await store.close()


async def test_a_dead_address_beside_a_live_one_is_not_used(own_etcd: Any) -> None:
    store = EtcdStore(["127.0.0.1:1", own_etcd.address], SystemClock(), timeout_s=MARGIN_S)
    for _ in range(20):
        await store.get("/k")
    await store.close()


async def test_closing_ends_calls_and_watches_with_an_error_not_a_cancellation(
    own_etcd: Any, store: EtcdStore
) -> None:
    watching = asyncio.create_task(follow(store))
    await asyncio.sleep(0.3)
    own_etcd.freeze()
    try:
        reading = asyncio.create_task(store.get("/k"))
        await asyncio.sleep(0.1)
        await store.close()
        outcomes = await asyncio.wait_for(
            asyncio.gather(watching, reading, return_exceptions=True), TIMEOUT_S + MARGIN_S
        )
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
        with pytest.raises(StoreUnavailable):
            await store.get("/k")
    finally:
        own_etcd.thaw()


async def test_leadership_and_registration_on_a_real_server(own_etcd: Any, store: EtcdStore) -> None:
    """A freeze longer than the lease: the leader and the worker know, and come back with new numbers."""
    clock = SystemClock()
    election = Election(store, "/leaders/x/0", b"me", 2, clock)
    registration = Registration(store, "/workers/w", b"1", clock, ttl_s=2)
    tasks = [asyncio.create_task(election.run()), asyncio.create_task(registration.run())]
    try:
        epoch = await asyncio.wait_for(election.wait_leading(), 30)
        incarnation = await registration.wait_registered(5)
        registration.update(b"2")
        assert await registration.wait_registered(5) == incarnation
        own_etcd.freeze()
        frozen_s = time.monotonic()
        await asyncio.wait_for(election.wait_lost(epoch), 30)
        await asyncio.sleep(max(0.0, frozen_s + 3.5 - time.monotonic()))
        assert registration.incarnation is None
        own_etcd.thaw()
        assert await asyncio.wait_for(election.wait_leading(), 30) > epoch
        assert await registration.wait_registered(30) > incarnation
    finally:
        own_etcd.thaw()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await store.get("/leaders/x/0") is None, "resigned"
    assert await store.get("/workers/w") is None


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        (["127.0.0.1:2379"], ("ipv4:127.0.0.1:2379",)),
        (["10.0.0.1:1", "10.0.0.2:2"], ("ipv4:10.0.0.1:1,10.0.0.2:2",)),
        (["[::1]:2379"], ("ipv6:[::1]:2379",)),
        (["http://etcd:2379/"], ("dns:///etcd:2379",)),
        (["etcd-0:1", "10.0.0.2:2"], ("dns:///etcd-0:1", "dns:///10.0.0.2:2")),
    ],
)
def test_endpoints_become_targets(endpoints: list[str], expected: tuple[str, ...]) -> None:
    assert targets(endpoints) == expected


@pytest.mark.parametrize("endpoint", ["", "etcd", "etcd:", ":2379", "etcd:99999", "a/b:1"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidInput):
        targets([endpoint])
    with pytest.raises(InvalidInput):
        targets([])


def test_https_needs_certificates_and_all_or_no_members() -> None:
    with pytest.raises(InvalidInput, match="FAIRWAY_TLS_DIR"):
        EtcdChannel(["https://etcd:2379"])
    with pytest.raises(InvalidInput, match="none of them"):
        EtcdChannel(["https://etcd-0:2379", "etcd-1:2379"])


@pytest.mark.parametrize(
    ("version", "ordered"),
    [
        ("3.4.24", False),
        ("3.4.25", True),
        ("3.5.1", False),
        ("3.5.7", False),
        ("3.5.8", True),
        ("3.6.0", True),
        ("3.6.0-rc.1", True),
        ("4.0.0", True),
        ("3.3.27", False),
        ("unknown", False),
    ],
)
def test_progress_answers_are_trusted_by_version(version: str, ordered: bool) -> None:
    assert etcd_watch.progress_is_ordered(version) is ordered
