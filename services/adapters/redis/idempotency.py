"""Idempotency records in Redis, shared by all gateways: one Lua script per operation, with Redis time.

A tenant's keys share a hash tag with its quotas, so that one script ends a record and settles it:

    fw:{tenant}:idem:DIGEST      hash   head of a record; without its log it is a tombstone
    fw:{tenant}:idem:DIGEST:log  list   chunks
    fw:{tenant}:idem.index       zset   records by the time their heads are deleted
    fw:{tenant}:idem.bodies      zset   records that have a log, by the time it lapses
    fw:{tenant}:idem.sizes       hash   bytes of each log, and their sum

Every key expires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from services.adapters.idempotency_rules import READ_CHUNKS, WATCH_S, keys_exceeded
from services.adapters.quotas.quota import decode_claims
from services.adapters.redis.cluster import open_scripts
from services.adapters.redis.memory import KEY_BYTES, RedisMemory
from services.adapters.redis.reservation_calls import RESERVATION, arguments_of, keys_of, slots_key
from services.adapters.redis.topologies import NO_ACCESS, RedisAccess
from services.core.generation import Usage
from services.ports.clock import Clock
from services.ports.idempotency import (
    Addition,
    Claim,
    Ended,
    Expired,
    Hold,
    LogTail,
    OtherBody,
    Owned,
    RecordKey,
    RecordLimits,
    RecordState,
    Running,
    Written,
)
from services.ports.limiter import Reservation

_FOUND: Final[Mapping[str, Claim]] = {
    "running": Running(),
    "ended": Ended(),
    "expired": Expired(),
    "other": OtherBody(),
}
_APPEND_BATCH: Final = 64
_APPEND_BYTES: Final = 1024**2
_ERASED_AT_ONCE: Final = 256


class RedisIdempotency:
    """``IdempotencyStore`` on Redis 6.2 or later. The caller closes it."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        limits: RecordLimits | None = None,
        *,
        timeout_s: float = 0.25,
        access: RedisAccess = NO_ACCESS,
        memory: RedisMemory | None = None,
        retention_of: Callable[[str], float] = lambda tenant_id: 0.0,
    ) -> None:
        """``memory`` bounds what a tenant keeps by what Redis has left. ``retention_of`` returns the tenant's
        own bound of ``body_s``; 0: none."""
        self._most = limits if limits is not None else RecordLimits()
        self._memory = memory
        self._retention_of = retention_of
        self._scripts = open_scripts(url, clock, timeout_s=timeout_s, access=access)
        self._claim = self._scripts.script("common", "idem_common", "idem_claim")
        self._append = self._scripts.script("common", "idem_common", "idem_append")
        self._end = self._scripts.script(*RESERVATION, "idem_common", "idem_end")
        self._read = self._scripts.script("common", "idem_common", "idem_read")
        self._delete = self._scripts.script("common", "idem_common", "idem_delete")
        self._names = self._scripts.script("idem_names")

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        limits = await self._limits()
        answer = await self._scripts.run(
            key.tenant_id,
            self._claim,
            (*_record(key), *_usage_keys(key.tenant_id)),
            (
                key.digest,
                fingerprint,
                owner,
                _us(limits.lease_s),
                _us(limits.tombstone_s),
                limits.max_tenant_keys,
            ),
        )
        word = answer[0].decode()
        if word == "owned":
            self._wrote(KEY_BYTES)
            return Owned(Hold(key, owner, int(answer[1])), int(answer[2]))
        if word == "full":
            if self._memory is not None and self._memory.reserve.reached:
                raise self._memory.reserve.refusal()
            raise keys_exceeded(limits, int(answer[1]) / 1e6)
        return _FOUND[word]

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        answers: dict[int, Written] = {}
        for tenant_id, numbers in _by_tenant(additions).items():
            for batch in _batches(numbers, additions):
                words = await self._append_to(tenant_id, [additions[number] for number in batch])
                answers.update(zip(batch, words, strict=True))
        return tuple(answers[number] for number in range(len(additions)))

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._settle(hold, chunk, "d", reservation, usage)

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._settle(hold, chunk, "i", reservation, usage)

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        state, chunks, length = await self._scripts.run(
            key.tenant_id, self._read, _record(key), (start, READ_CHUNKS, _us(WATCH_S) if watch else 0)
        )
        return LogTail(RecordState(state.decode()), tuple(chunks), more=length > start + len(chunks))

    async def delete(self, key: RecordKey) -> bool:
        names = (*_record(key), *_usage_keys(key.tenant_id))
        return bool(await self._scripts.run(key.tenant_id, self._delete, names, (key.digest,)))

    async def erase(self, tenant_id: str) -> int:
        """Delete every record of the tenant as ``delete`` does; return their number."""
        index, erased = _usage_keys(tenant_id)[0], 0
        while digests := await self._scripts.run(tenant_id, self._names, (index,), (_ERASED_AT_ONCE,)):
            for digest in digests:
                erased += await self.delete(RecordKey(tenant_id, digest.decode()))
        return erased

    async def connect(self) -> None:
        """Return once Redis responded and has the scripts. Raises StoreUnavailable."""
        await self._scripts.connect()

    async def close(self) -> None:
        await self._scripts.close()

    async def _limits(self) -> RecordLimits:
        return await self._memory.bounds(self._most) if self._memory is not None else self._most

    def _body_us(self, limits: RecordLimits, tenant_id: str) -> int:
        return _us(min(self._retention_of(tenant_id) or limits.body_s, limits.body_s))

    def _wrote(self, size_bytes: int) -> None:
        if self._memory is not None:
            self._memory.reserve.wrote(size_bytes)

    async def _append_to(self, tenant_id: str, additions: Sequence[Addition]) -> list[Written]:
        limits = await self._limits()
        _, bodies, sizes = _usage_keys(tenant_id)
        keys = [name for addition in additions for name in _record(addition.hold.key)]
        arguments: list[str | int | bytes] = [
            _prefix(tenant_id),
            _us(limits.lease_s),
            self._body_us(limits, tenant_id),
            limits.max_record_bytes,
            limits.max_tenant_bytes,
            _us(limits.tombstone_s),
            _us(limits.open_s),
        ]
        for addition in additions:
            hold = addition.hold
            arguments += [hold.key.digest, hold.owner, hold.epoch, addition.chunk]
        self._wrote(sum(len(addition.chunk) for addition in additions))
        words = await self._scripts.run(tenant_id, self._append, (bodies, sizes, *keys), arguments)
        return [Written(word.decode()) for word in words]

    async def _settle(
        self, hold: Hold, chunk: bytes, state: str, reservation: Reservation | None, usage: Usage
    ) -> Written:
        limits, tenant_id = await self._limits(), hold.key.tenant_id
        self._wrote(len(chunk))
        while True:
            keys: list[str] = [*_record(hold.key), *_usage_keys(tenant_id)]
            arguments: list[str | int | bytes] = [
                _prefix(tenant_id),
                hold.key.digest,
                hold.owner,
                hold.epoch,
                chunk,
                state,
                self._body_us(limits, tenant_id),
                limits.max_record_bytes,
                limits.max_tenant_bytes,
                _us(limits.tombstone_s),
                _us(limits.open_s),
            ]
            if reservation is not None:
                keys += [slots_key(tenant_id), *keys_of(reservation, reservation.claims)]
                arguments += arguments_of(reservation, usage, reservation.claims)
            answer = await self._scripts.run(tenant_id, self._end, keys, arguments)
            if isinstance(answer, bytes):
                return Written(answer.decode())
            assert reservation is not None, "only a reservation has claims"
            reservation = decode_claims(reservation, answer[0])  # its record has others: repeat with those


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _prefix(tenant_id: str) -> str:
    return f"fw:{{{tenant_id}}}:idem:"


def _record(key: RecordKey) -> tuple[str, str]:
    head = _prefix(key.tenant_id) + key.digest
    return head, head + ":log"


def _usage_keys(tenant_id: str) -> tuple[str, str, str]:
    base = f"fw:{{{tenant_id}}}:idem."
    return base + "index", base + "bodies", base + "sizes"


def _by_tenant(additions: Sequence[Addition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, addition in enumerate(additions):
        found.setdefault(addition.hold.key.tenant_id, []).append(number)
    return found


def _batches(numbers: Sequence[int], additions: Sequence[Addition]) -> list[list[int]]:
    """Split the numbers into calls of bounded size, because a script blocks all other clients of Redis."""
    batches: list[list[int]] = []
    size = 0
    for number in numbers:
        length = len(additions[number].chunk)
        if not batches or len(batches[-1]) >= _APPEND_BATCH or size + length > _APPEND_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(number)
        size += length
    return batches
