"""What every ``Quarantine`` does: in one process, on the in-memory store and on a real etcd."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType

import pytest
import pytest_asyncio

from services.adapters.etcd.store import EtcdStore
from services.adapters.memory.store import MemoryStore
from services.adapters.quarantine import (
    MemoryQuarantine,
    QuarantineLimits,
    StoreQuarantine,
    displaced,
)
from services.core.errors import StoreUnavailable
from services.core.records import QUARANTINE, load, quarantine_key
from services.ports.poison.quarantine import Quarantine, Quarantined
from services.ports.store import Delete, Store
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Versioned
from tests.support.quarantines import decode, store_quarantine
from tests.support.waiting import until

LIMITS = QuarantineLimits(ttl_s=60, max_of_version=3)
Make = Callable[[QuarantineLimits], Awaitable[Quarantine]]


@pytest_asyncio.fixture(params=["memory", "memory store", "etcd"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes the quarantines of two gateways of one fleet, or twice that of one process."""
    clock, stack = SystemClock(), AsyncExitStack()
    store: Store = MemoryStore(clock)
    if request.param == "etcd":
        store = EtcdStore([request.getfixturevalue("etcd_endpoint")], clock)
        stack.push_async_callback(store.close)
    alone = MemoryQuarantine(clock, LIMITS)

    async def build(limits: QuarantineLimits) -> Quarantine:
        if request.param == "memory":
            return alone if limits is LIMITS else MemoryQuarantine(clock, limits)
        return await store_quarantine(store, stack, limits)

    async with stack:
        yield build


@pytest.fixture
def digest() -> str:
    """A version of its own: the store is that of all tests."""
    return f"sha256:{uuid.uuid4().hex}"


async def test_what_is_added_is_found_at_once_and_by_others_soon(make: Make, digest: str) -> None:
    here, there = await make(LIMITS), await make(LIMITS)
    assert not here.holds(digest)
    await here.add(digest, "f1", model="chat", deaths=2)
    found = here.find(digest, "f1")
    assert found is not None
    assert (found.version_digest, found.fingerprint, found.model, found.deaths) == (digest, "f1", "chat", 2)
    await until(lambda: there.find(digest, "f1") == found)
    assert there.holds(digest)
    assert there.count(digest) == here.count(digest) == 1


async def test_other_inputs_and_other_versions_may_run(make: Make, digest: str) -> None:
    quarantine = await make(LIMITS)
    await quarantine.add(digest, "f1", model="chat", deaths=2)
    assert quarantine.find(digest, "f2") is None
    assert quarantine.find(digest + "0", "f1") is None
    assert not quarantine.holds(digest + "0")


async def test_an_entry_ends_by_itself(make: Make, digest: str) -> None:
    quarantine = await make(QuarantineLimits(ttl_s=1))
    await quarantine.add(digest, "f1", model="chat", deaths=2)
    assert quarantine.count(digest) == 1
    await until(lambda: quarantine.find(digest, "f1") is None)
    assert quarantine.count(digest) == 0


async def test_the_oldest_of_a_version_makes_room(make: Make, digest: str) -> None:
    here, there = await make(LIMITS), await make(LIMITS)
    for number in range(LIMITS.max_of_version + 1):
        await here.add(digest, f"f{number}", model="chat", deaths=2)
        await until(lambda number=number: there.find(digest, f"f{number}") is not None)  # type: ignore[misc]
    await until(lambda: there.find(digest, "f0") is None)
    assert here.find(digest, "f0") is None
    assert there.count(digest) == here.count(digest) == LIMITS.max_of_version


async def test_the_same_input_twice_is_one_entry(make: Make, digest: str) -> None:
    quarantine = await make(LIMITS)
    for deaths in (2, 3):
        await quarantine.add(digest, "f1", model="chat", deaths=deaths)
    assert quarantine.count(digest) == 1
    found = quarantine.find(digest, "f1")
    assert found is not None
    assert found.deaths == 3


class Behind:
    """The view of a gateway that its watch has not reached yet."""

    view: Mapping[str, Versioned[Quarantined]] = MappingProxyType({})
    revision: int = 0


async def test_entries_that_the_view_lacks_count_and_make_room() -> None:
    store, behind = MemoryStore(SystemClock()), Behind()
    quarantine = StoreQuarantine(store, behind, SystemClock(), LIMITS)
    for number in range(LIMITS.max_of_version + 2):
        await quarantine.add("sha256:1", f"f{number}", model="chat", deaths=2)
    stored = (await store.list(QUARANTINE)).entries
    assert {load(entry.value, Quarantined).fingerprint for entry in stored} == {"f2", "f3", "f4"}
    behind.view = {entry.key: Versioned(decode(entry), 1, 1) for entry in stored[:2]}
    assert quarantine.count("sha256:1") == LIMITS.max_of_version
    await quarantine.add("sha256:1", "f2", model="chat", deaths=3)
    assert quarantine.count("sha256:1") == LIMITS.max_of_version


async def test_an_earlier_entry_in_the_view_hides_no_later_one() -> None:
    store, behind = MemoryStore(SystemClock()), Behind()
    quarantine = StoreQuarantine(store, behind, SystemClock(), LIMITS)
    await quarantine.add("sha256:1", "f1", model="chat", deaths=2)
    (early,) = (await store.list(QUARANTINE)).entries
    await quarantine.add("sha256:1", "f1", model="chat", deaths=3)
    behind.view = {early.key: Versioned(decode(early), early.mod_revision, early.mod_revision)}
    behind.revision = early.mod_revision
    found = quarantine.find("sha256:1", "f1")
    assert found is not None
    assert found.deaths == 3


async def test_the_store_removes_an_entry_with_its_lease() -> None:
    """Else the keys of versions that are gone would stay for ever."""
    async with AsyncExitStack() as stack:
        store = MemoryStore(SystemClock())
        quarantine = await store_quarantine(store, stack, QuarantineLimits(ttl_s=1))
        await quarantine.add("sha256:1", "f1", model="chat", deaths=2)
        assert len((await store.list(QUARANTINE)).entries) == 1
        async with asyncio.timeout(30):
            while (await store.list(QUARANTINE)).entries:
                await asyncio.sleep(0.05)


async def test_what_an_operator_removes_from_the_store_may_run_again() -> None:
    async with AsyncExitStack() as stack:
        store = MemoryStore(SystemClock())
        quarantine = await store_quarantine(store, stack, LIMITS)
        await quarantine.add("sha256:1", "f1", model="chat", deaths=2)
        await until(lambda: quarantine.find("sha256:1", "f1") is not None)
        await asyncio.sleep(0.05)
        assert quarantine.holds("sha256:1")
        await store.commit([Delete(quarantine_key("sha256:1", "f1"))])
        await until(lambda: not quarantine.holds("sha256:1"))


class Hooked(MemoryStore):
    """A store in which a test acts before each write."""

    before: Callable[[], None] = staticmethod(lambda: None)

    async def grant_lease(self, ttl_s: int) -> int:
        self.before()
        return await super().grant_lease(ttl_s)


async def test_an_input_that_was_lifted_is_refused_while_it_is_added_again() -> None:
    store, behind = Hooked(SystemClock()), Behind()
    quarantine = StoreQuarantine(store, behind, SystemClock(), LIMITS)
    await quarantine.add("sha256:1", "f1", model="chat", deaths=2)
    found: list[Quarantined | None] = []

    def lifted() -> None:
        """The view passes the first addition and its removal."""
        behind.view, behind.revision = MappingProxyType({}), 1_000_000
        found.append(quarantine.find("sha256:1", "f1"))

    store.before = lifted
    await quarantine.add("sha256:1", "f1", model="chat", deaths=3)
    assert [one.deaths for one in found if one is not None] == [3]
    assert quarantine.find("sha256:1", "f1") is None, "the view has passed both"


class Away(MemoryStore):
    """A store that takes no writes."""

    async def grant_lease(self, ttl_s: int) -> int:
        raise StoreUnavailable("away")


async def test_without_the_store_the_input_is_refused_here() -> None:
    async with AsyncExitStack() as stack:
        quarantine = await store_quarantine(Away(SystemClock()), stack, LIMITS)
        with pytest.raises(StoreUnavailable):
            await quarantine.add("sha256:1", "f1", model="chat", deaths=2)
        assert quarantine.find("sha256:1", "f1") is not None
        assert quarantine.holds("sha256:1")


def entry(version: str, fingerprint: str, until_unix_s: float) -> Quarantined:
    return Quarantined(version, fingerprint, "chat", 2, until_unix_s)


def test_the_fleet_holds_a_bounded_number_and_a_version_displaces_its_own_first() -> None:
    limits = QuarantineLimits(max_of_version=2, max_entries=4)
    held = [entry("a", "1", 1.0), entry("b", "1", 2.0), entry("b", "2", 3.0), entry("c", "1", 4.0)]
    assert displaced(held, entry("b", "3", 9.0), limits) == (held[1],)
    assert displaced(held, entry("d", "1", 9.0), limits) == (held[0],)
    assert displaced(held, entry("b", "2", 9.0), limits) == ()
    assert displaced(held[:3], entry("c", "1", 9.0), limits) == ()
