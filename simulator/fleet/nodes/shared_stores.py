"""Redis and the usage ledger's store, as gateways and control planes reach them over the network."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from services.core.errors import NotFound, StoreUnavailable
from services.core.generation import Usage
from services.core.limits import Claim as LimitClaim
from services.core.limits import Limit, Price
from services.ports.idempotency import Addition, Claim, Hold, LogTail, RecordKey, Written
from services.ports.limiter import NO_PRICE, Reservation
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter

LEDGER: Final = "ledger"
_LEDGER_TIMEOUT_S: Final = 5.0
T = TypeVar("T")


class LedgerObjects:
    """What the store holds. It outlives the process, as on a disk."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def create(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    async def names(self, prefix: str, after: str) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.objects if name.startswith(prefix) and name > after))

    async def read(self, name: str) -> bytes:
        if name not in self.objects:
            raise NotFound(f"the ledger has no {name}", name=name)
        return self.objects[name]

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)


def serve_ledger(process: Process, network: Network, ledger: LedgerObjects) -> None:
    """Answer control planes until the process crashes."""
    network.listen(process, LEDGER, lambda connection: None, answers=ledger)


class RemoteLedger:
    """Implements ``ports.ledger_store.LedgerStore`` for one process."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def create(self, name: str, data: bytes) -> bool:
        return await self._ask(lambda ledger: ledger.create(name, data))

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        return await self._ask(lambda ledger: ledger.names(prefix, after))

    async def read(self, name: str) -> bytes:
        return await self._ask(lambda ledger: ledger.read(name))

    async def delete(self, names: Sequence[str]) -> None:
        await self._ask(lambda ledger: ledger.delete(names))

    async def _ask(self, question: Callable[[LedgerObjects], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._network.ask(self._process, LEDGER, question, within_s=_LEDGER_TIMEOUT_S)
        except Unreachable as error:
            raise StoreUnavailable("the ledger did not answer in time", retry_after_s=1.0) from error


REDIS: Final = "redis"
_REDIS_TIMEOUT_S: Final = 0.25  # the timeout of adapters.redis.limiter


@dataclass(frozen=True, slots=True)
class Redis:
    """What Redis holds. It outlives the process, as with ``appendfsync always``."""

    limiter: MemoryLimiter
    records: MemoryIdempotency


def serve_redis(process: Process, network: Network, redis: Redis) -> None:
    """Answer gateways until the process crashes."""
    network.listen(process, REDIS, lambda connection: None, answers=redis)


class RedisLink:
    """One gateway's connection to Redis."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def ask(self, question: Callable[[Redis], Coroutine[Any, Any, T]]) -> T:
        """Return the answer. Raises StoreUnavailable when none came in time: it may have been done then."""
        try:
            return await self._network.ask(self._process, REDIS, question, within_s=_REDIS_TIMEOUT_S)
        except Unreachable as error:
            raise StoreUnavailable("Redis did not answer in time", retry_after_s=1.0) from error


class RemoteLimiter:
    """Implements ``ports.limiter.Limiter`` over a link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[LimitClaim] = (),
        price: Price = NO_PRICE,
    ) -> Reservation:
        return await self._link.ask(
            lambda redis: redis.limiter.admit(tenant_id, request_id, limits, claims, price)
        )

    async def reserve(
        self, reservation: Reservation, claims: Sequence[LimitClaim], price: Price
    ) -> Reservation:
        return await self._link.ask(lambda redis: redis.limiter.reserve(reservation, claims, price))

    async def take(self, tenant_id: str, claims: Sequence[LimitClaim]) -> None:
        await self._link.ask(lambda redis: redis.limiter.take(tenant_id, claims))

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        if running:
            await self._link.ask(lambda redis: redis.limiter.renew(running))

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        await self._link.ask(lambda redis: redis.limiter.settle_now(reservation, usage))


class RemoteRecords:
    """Implements ``ports.idempotency.IdempotencyStore`` over a link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        return await self._link.ask(lambda redis: redis.records.claim(key, fingerprint, owner))

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        return await self._link.ask(lambda redis: redis.records.append(additions))

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._link.ask(lambda redis: redis.records.finish(hold, chunk, reservation, usage))

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._link.ask(lambda redis: redis.records.release(hold, chunk, reservation, usage))

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        return await self._link.ask(lambda redis: redis.records.read(key, start, watch=watch))

    async def delete(self, key: RecordKey) -> bool:
        return await self._link.ask(lambda redis: redis.records.delete(key))
