"""Data keys of tenants: wrapped in the store, unwrapped in memory for a stated time.

A key is made when a tenant first has something to seal; of several gateways that make one, the store accepts
one. A key that is rotated away opens what it sealed until nothing of that can be stored any more. Keys under
a former key-encryption key are wrapped again by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final
from weakref import WeakValueDictionary

import structlog

from services.core.errors import FairwayError, IntegrityError, KeyDestroyed, KeyUnavailable, StoreUnavailable
from services.core.records import MAX_KEY_GENERATIONS, TENANT_KEYS, TenantKeyring, WrappedKey, dump
from services.ports.clock import Clock
from services.ports.key_wrapper import KeyWrapper, Wrapped
from services.ports.store import Committed, ModRevisionIs, Put, Store
from services.runtime.fleet_state.informer import RecordView, Versioned

log = structlog.get_logger()

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 4
TIMEOUT_S: Final = 2.0
RETRY_S: Final = 1.0  # after a failure, time until the key is asked for again
ROUND_S: Final = 5.0
_TRIES: Final = 5
_MAX_CACHED: Final = 65_536


@dataclass(frozen=True, slots=True)
class DataKey:
    """A generation of a tenant's key, unwrapped."""

    key_id: bytes
    material: bytes = field(repr=False)


@dataclass(slots=True)
class _Cached:
    key: DataKey
    unwrap_s: float
    used: bool = True


@dataclass(frozen=True, slots=True)
class KeyTimes:
    """Times in seconds."""

    cache_s: float = 900.0  # an unwrapped key stays in memory for so long
    keep_s: float = 90 * 86_400.0  # a rotated key is kept for so long: longer than anything that it sealed


class TenantKeys:
    """The keys of all tenants, for the roles that keep what is theirs. ``run`` is a task of the process.

    While the wrapper fails, a cached key is used until its time is over; then its tenant alone gets
    KeyUnavailable.
    """

    def __init__(
        self,
        store: Store,
        rings: RecordView[TenantKeyring],
        wrapper: KeyWrapper,
        clock: Clock,
        *,
        random_bytes: Callable[[int], bytes],
        times: KeyTimes,
    ) -> None:
        """``rings``: the records under ``TENANT_KEYS``. ``random_bytes`` returns unpredictable bytes."""
        self._store = store
        self._rings = rings
        self._wrapper = wrapper
        self._clock = clock
        self._random_bytes = random_bytes
        self._times = times
        self._cached: dict[tuple[str, str], _Cached] = {}
        self._failed: dict[tuple[str, str], tuple[float, KeyUnavailable]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.failures = 0  # unwrappings that failed

    @property
    def cached(self) -> int:
        """Unwrapped keys in memory."""
        return len(self._cached)

    def problem(self) -> str:
        """Return why keys cannot be unwrapped; empty while they can."""
        return next((error.message for _, error in self._failed.values()), "")

    async def sealing(self, owner: str) -> DataKey:
        """Return the key that seals, made if there is none. ``owner``: a tenant, or ``TENANT/SPACE``.

        Raises KeyUnavailable, KeyDestroyed, StoreUnavailable.
        """
        tenant = owner.partition("/")[0]
        held = await self._ring(tenant)
        if held is None or not held.record.generations:
            held = await self._made(tenant)
        return await self._unwrapped(tenant, held.record.generations[0])

    async def opening(self, owner: str, key_id: bytes) -> DataKey:
        """Return the key with which something was sealed.

        Raises KeyUnavailable, KeyDestroyed, StoreUnavailable, IntegrityError for a key that never was.
        """
        tenant, name = owner.partition("/")[0], key_id.hex()
        held = await self._ring(tenant)
        found = None if held is None else _find(held.record, name)
        if found is None and (held := await self._read(tenant)) is not None:
            found = _find(held.record, name)
        if found is None:
            raise IntegrityError(f"the tenant has no key with the id {name}")
        return await self._unwrapped(tenant, found)

    async def require_present(self, owner: str) -> None:
        """Return unless the tenant was erased. Raises KeyDestroyed, StoreUnavailable."""
        await self._ring(owner.partition("/")[0])

    async def run(self) -> None:
        """Renew cached keys, make and wrap those that are due, drop what is over, until cancelled."""
        while True:
            await self._clock.sleep(ROUND_S)
            try:
                await self.round()
            except (FairwayError, TimeoutError) as error:
                log.warning("tenant_keys.round_failed", error=str(error))

    async def round(self) -> None:
        """Do once what ``run`` does at each interval. Raises KeyUnavailable, StoreUnavailable."""
        await self._refresh()
        async with asyncio.timeout(TIMEOUT_S):
            current = await self._wrapper.current()
        for name, held in list(self._rings.view.items()):
            tenant, ring = name.removeprefix(TENANT_KEYS), held.record
            if not ring.generations:
                continue
            try:
                if (changed := await self._due(tenant, ring, current)) != ring:
                    done = await self._write(tenant, changed, held.mod_revision)
                    log.info("tenant_keys.changed", tenant=tenant, written=done)
            except (KeyUnavailable, IntegrityError) as error:
                log.warning("tenant_keys.not_changed", tenant=tenant, error=error.message)

    async def _due(self, tenant: str, ring: TenantKeyring, current: str) -> TenantKeyring:
        """Return the ring as it is to be: with a requested key, wrapped by the current one, without keys
        whose last sealed data is gone."""
        generations = list(ring.generations)
        if generations[0].create_unix_s < ring.rotate_unix_s and len(generations) < MAX_KEY_GENERATIONS:
            generations.insert(0, await self._generated(tenant, ring.rotate_unix_s))
        now_s = self._clock.unix_s()
        generations = [generations[0]] + [
            each for newer, each in pairwise(generations) if newer.create_unix_s + self._times.keep_s > now_s
        ]
        for number, each in enumerate(generations):
            if each.wrapper != current:
                generations[number] = await self._rewrapped(tenant, each)
        return replace(ring, generations=tuple(generations))

    async def _rewrapped(self, tenant: str, key: WrappedKey) -> WrappedKey:
        material = await self._unwrap(tenant, key)
        wrapped = await self._wrap(tenant, key.key_id, material)
        return replace(key, wrapper=wrapped.wrapper, data=wrapped.data.hex())

    async def _refresh(self) -> None:
        """Unwrap again what is used and past half of its time, and forget what is over or destroyed."""
        now_s = self._clock.monotonic_s()
        for (tenant, name), cached in list(self._cached.items()):
            age_s = now_s - cached.unwrap_s
            held = self._rings.view.get(TENANT_KEYS + tenant)
            wrapped = None if held is None else _find(held.record, name)
            if age_s >= self._times.cache_s or (held is not None and wrapped is None):
                del self._cached[tenant, name]
            elif cached.used and wrapped is not None and age_s >= self._times.cache_s / 2:
                try:
                    await self._unwrap_into_cache(tenant, wrapped)
                except KeyUnavailable as error:
                    log.warning("tenant_keys.not_renewed", tenant=tenant, error=error.message)
        self._failed = {key: held for key, held in self._failed.items() if held[0] > now_s - ROUND_S}

    async def _ring(self, tenant: str) -> Versioned[TenantKeyring] | None:
        """Return the ring as it was last seen; None: no ring. Raises KeyDestroyed."""
        held = self._rings.view.get(TENANT_KEYS + tenant)
        return await self._read(tenant) if held is None else _present(tenant, held)

    async def _read(self, tenant: str) -> Versioned[TenantKeyring] | None:
        entry = await self._store.get(TENANT_KEYS + tenant)
        if entry is None:
            return None
        record = entry.load(TenantKeyring)
        return _present(tenant, Versioned(record, entry.create_revision, entry.mod_revision))

    async def _made(self, tenant: str) -> Versioned[TenantKeyring]:
        """Return the ring with a key, made here or by another gateway."""
        async with self._lock(tenant):
            for _ in range(_TRIES):
                held = await self._read(tenant)
                if held is not None and held.record.generations:
                    return held
                ring = TenantKeyring() if held is None else held.record
                ring = replace(ring, generations=(await self._generated(tenant, ring.rotate_unix_s),))
                if await self._write(tenant, ring, 0 if held is None else held.mod_revision):
                    log.info("tenant_keys.made", tenant=tenant)
        raise StoreUnavailable("the tenant's key is being changed by others", retry_after_s=1.0)

    async def _generated(self, tenant: str, least_unix_s: float) -> WrappedKey:
        key_id, material = self._random_bytes(KEY_ID_BYTES).hex(), self._random_bytes(KEY_BYTES)
        wrapped = await self._wrap(tenant, key_id, material)
        created_s = max(self._clock.unix_s(), least_unix_s)
        return WrappedKey(key_id, wrapped.wrapper, wrapped.data.hex(), created_s)

    async def _write(self, tenant: str, ring: TenantKeyring, mod_revision: int) -> bool:
        key = TENANT_KEYS + tenant
        done = await self._store.commit([Put(key, dump(ring))], [ModRevisionIs(key, mod_revision)])
        return isinstance(done, Committed)

    async def _unwrapped(self, tenant: str, wrapped: WrappedKey) -> DataKey:
        name = (tenant, wrapped.key_id)
        if (found := self._fresh(name)) is not None:
            return found
        async with self._lock(tenant):
            if (found := self._fresh(name)) is not None:
                return found
            failed_s, error = self._failed.get(name, (-RETRY_S, None))
            if error is not None and self._clock.monotonic_s() - failed_s < RETRY_S:
                raise KeyUnavailable(error.message, retry_after_s=error.retry_after_s)
            return await self._unwrap_into_cache(tenant, wrapped)

    def _fresh(self, name: tuple[str, str]) -> DataKey | None:
        cached = self._cached.get(name)
        if cached is None or self._clock.monotonic_s() - cached.unwrap_s >= self._times.cache_s:
            return None
        cached.used = True
        return cached.key

    async def _unwrap_into_cache(self, tenant: str, wrapped: WrappedKey) -> DataKey:
        name = (tenant, wrapped.key_id)
        try:
            material = await self._unwrap(tenant, wrapped)
        except KeyUnavailable as error:
            self.failures += 1
            self._failed[name] = (self._clock.monotonic_s(), error)
            raise
        self._failed.pop(name, None)
        key = DataKey(bytes.fromhex(wrapped.key_id), material)
        while len(self._cached) >= _MAX_CACHED:
            del self._cached[next(iter(self._cached))]
        self._cached[name] = _Cached(key, self._clock.monotonic_s(), used=False)
        return key

    async def _wrap(self, tenant: str, key_id: str, material: bytes) -> Wrapped:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._wrapper.wrap(material, _context(tenant, key_id))
        except TimeoutError:
            raise _slow() from None

    async def _unwrap(self, tenant: str, key: WrappedKey) -> bytes:
        wrapped = Wrapped(key.wrapper, bytes.fromhex(key.data))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._wrapper.unwrap(wrapped, _context(tenant, key.key_id))
        except TimeoutError:
            raise _slow() from None

    def _lock(self, tenant: str) -> asyncio.Lock:
        found = self._locks.get(tenant)
        if found is None:
            found = self._locks[tenant] = asyncio.Lock()
        return found


def _context(tenant: str, key_id: str) -> str:
    """Return what a key is bound to: one that is moved to another tenant does not unwrap."""
    return f"{tenant}/{key_id}"


def _present(tenant: str, held: Versioned[TenantKeyring]) -> Versioned[TenantKeyring]:
    if held.record.erase_unix_s:
        raise KeyDestroyed(f"the data of tenant {tenant} was erased and its key destroyed", tenant=tenant)
    return held


def _find(ring: TenantKeyring, key_id: str) -> WrappedKey | None:
    return next((each for each in ring.generations if each.key_id == key_id), None)


def _slow() -> KeyUnavailable:
    return KeyUnavailable(
        f"the keys of this installation did not answer within {TIMEOUT_S:g} s", retry_after_s=RETRY_S
    )
