"""Keys of tenants: made once, rotated, wrapped again, used while their place is lost, destroyed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from services.adapters.keys.tenant_keys import RETRY_S, TIMEOUT_S, KeyTimes, TenantKeys
from services.adapters.memory.store import MemoryStore
from services.core.errors import IntegrityError, KeyDestroyed, KeyUnavailable
from services.core.records import TENANT_KEYS, TenantKeyring, dump, load
from services.ports.store import Put
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.supervisor import Supervisor
from tests.support.clocks import HandClock
from tests.support.tenant_keys import FakeKms, ring_view, tenant_keys
from tests.support.waiting import until

TIMES = KeyTimes(cache_s=100.0, keep_s=1000.0)


class Installation:
    """Two gateways on one store and one place of keys."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.store = MemoryStore(SystemClock())
        self.kms = FakeKms()
        self.view: Informer[TenantKeyring] = ring_view(self.store, SystemClock())
        self.left, self.right = self.gateway(), self.gateway()

    def gateway(self) -> TenantKeys:
        return tenant_keys(self.store, self.kms, self.clock, TIMES, self.view)

    async def ring(self, tenant: str = "acme") -> TenantKeyring:
        entry = await self.store.get(TENANT_KEYS + tenant)
        assert entry is not None
        return load(entry.value, TenantKeyring)

    async def put(self, ring: TenantKeyring, tenant: str = "acme") -> None:
        await self.store.commit([Put(TENANT_KEYS + tenant, dump(ring))])
        await self.seen()

    async def seen(self) -> None:
        listing = await self.store.list(TENANT_KEYS)
        stored = {entry.key: entry.mod_revision for entry in listing.entries}
        await until(lambda: {key: held.mod_revision for key, held in self.view.view.items()} == stored)


@asynccontextmanager
async def installation() -> AsyncIterator[Installation]:
    found, supervisor = Installation(), Supervisor(SystemClock())
    supervisor.spawn("rings", found.view.run())
    await found.view.wait_synced(5.0)
    try:
        yield found
    finally:
        await supervisor.close()


async def test_of_many_first_uses_one_makes_the_key() -> None:
    async with installation() as here:
        uses = [keys.sealing("acme") for _ in range(20) for keys in (here.left, here.right)]
        found = await asyncio.gather(*uses)
        assert len({key.material for key in found}) == 1
        assert len((await here.ring()).generations) == 1
        assert (await here.left.sealing("acme/responses")) == found[0], "spaces share the tenant's key"
        assert (await here.left.sealing("other")).material != found[0].material
        assert found[0].material.hex() not in (await here.store.list("")).entries.__repr__()


async def test_a_key_is_unwrapped_once_in_its_time() -> None:
    async with installation() as here:
        await here.left.sealing("acme")
        await here.seen()
        before = here.kms.unwrapped
        await asyncio.gather(*(here.left.sealing("acme") for _ in range(50)))
        assert here.kms.unwrapped == before
        here.clock.now_s += TIMES.cache_s
        await asyncio.gather(*(here.left.sealing("acme") for _ in range(50)))
        assert here.kms.unwrapped == before + 1


async def test_a_used_key_is_renewed_in_the_background_and_an_unused_one_is_forgotten() -> None:
    async with installation() as here:
        for tenant in ("busy", "idle"):
            await here.left.sealing(tenant)
        await here.seen()
        here.clock.now_s += TIMES.cache_s * 0.6
        await here.left.round()
        before = here.kms.unwrapped
        await here.left.sealing("busy")
        await here.left.round()
        assert here.kms.unwrapped == before + 1
        here.clock.now_s += TIMES.cache_s * 0.6
        await here.left.round()
        assert here.left.cached == 1
        await here.left.sealing("busy")
        assert here.kms.unwrapped == before + 1, "its renewal was in time"


@pytest.mark.parametrize("loss", ["unreachable", "slow"])
async def test_a_lost_place_of_keys_refuses_only_who_needs_it(loss: str) -> None:
    async with installation() as here:
        cached = await here.left.sealing("acme")
        await here.right.sealing("cold")
        await here.seen()
        if loss == "slow":
            here.kms.delay_s = 10 * TIMEOUT_S
        else:
            here.kms.problem = "not reachable"
        assert await here.left.sealing("acme") == cached
        async with asyncio.timeout(30):
            with pytest.raises(KeyUnavailable) as refused:
                await here.left.sealing("cold")
        assert refused.value.retry_after_s
        assert here.left.problem()
        failures = here.left.failures
        with pytest.raises(KeyUnavailable):
            await here.left.sealing("cold")
        assert here.left.failures == failures, "a second refusal costs nothing"
        with pytest.raises(KeyUnavailable):
            await here.left.sealing("unknown")
        assert await here.store.get(TENANT_KEYS + "unknown") is None
        here.clock.now_s += TIMES.cache_s
        with pytest.raises(KeyUnavailable):
            await here.left.sealing("acme")
        here.kms.problem, here.kms.delay_s = "", 0.0
        here.clock.now_s += RETRY_S
        assert await here.left.sealing("acme") == cached


async def test_a_rotated_key_seals_and_the_former_ones_open_until_their_time_is_over() -> None:
    async with installation() as here:
        old = await here.left.sealing("acme")
        here.clock.now_s += 1
        await here.put(replace(await here.ring(), rotate_unix_s=here.clock.unix_s()))
        await asyncio.gather(here.left.round(), here.right.round())
        await here.seen()
        fresh = await here.right.sealing("acme")
        assert fresh.key_id != old.key_id
        assert len((await here.ring()).generations) == 2, "one gateway made it"
        assert await here.right.opening("acme", old.key_id) == old
        here.clock.now_s += TIMES.keep_s + 1
        await here.left.round()
        await here.seen()
        assert await here.left.opening("acme", fresh.key_id) == fresh
        with pytest.raises(IntegrityError):
            await here.left.opening("acme", old.key_id)


async def test_keys_under_a_former_key_encryption_key_are_wrapped_again() -> None:
    async with installation() as here:
        key = await here.left.sealing("acme")
        await here.seen()
        here.kms.add("kms:2")
        await asyncio.gather(here.left.round(), here.right.round())
        await here.seen()
        assert [each.wrapper for each in (await here.ring()).generations] == ["kms:2"]
        assert await here.gateway().sealing("acme") == key


async def test_nothing_of_an_erased_tenant_opens_and_nothing_more_is_sealed() -> None:
    async with installation() as here:
        key = await here.left.sealing("acme")
        await here.put(TenantKeyring(erase_unix_s=here.clock.unix_s()))
        for keys in (here.left, here.right, here.gateway()):
            with pytest.raises(KeyDestroyed):
                await keys.sealing("acme")
            with pytest.raises(KeyDestroyed):
                await keys.opening("acme", key.key_id)
            with pytest.raises(KeyDestroyed):
                await keys.require_present("acme")
        await here.left.round()
        assert here.left.cached == 0, "no key of it stays in memory"
        assert not (await here.ring()).generations


async def test_a_wrapped_key_moved_to_another_tenant_does_not_unwrap() -> None:
    async with installation() as here:
        await here.left.sealing("acme")
        await here.put(await here.ring(), "evil")
        with pytest.raises(IntegrityError):
            await here.left.sealing("evil")
