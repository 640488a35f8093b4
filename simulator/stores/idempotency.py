"""Redis's idempotency records as a model: the same rules as the Lua scripts, by the injected clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.adapters.idempotency_rules import EXAMINED, READ_CHUNKS, WATCH_S, keys_exceeded
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
from simulator.stores.limiter import MemoryLimiter


@dataclass(slots=True)
class _Record:
    """Times are monotonic seconds."""

    fingerprint: str  # hash of the request
    owner: str  # the gateway's run that holds the lease; empty without one
    epoch: int  # fences earlier owners
    state: RecordState  # RUNNING, FREE, ENDED or, without its log, EXPIRED
    lease_s: float  # end of the owner's lease
    expire_s: float  # the record is deleted
    body_expire_s: float = 0.0  # the chunks are dropped
    watched_s: float = 0.0  # a reader follows until then
    chunks: list[bytes] = field(default_factory=list)  # the log
    expected: int = 0  # number of chunks that the log must have; fewer mean a hole

    @property
    def size(self) -> int:
        return sum(map(len, self.chunks))


class MemoryIdempotency:
    """``IdempotencyStore`` in one event loop; settles with the given limiter."""

    def __init__(self, clock: Clock, limiter: MemoryLimiter, limits: RecordLimits | None = None) -> None:
        self._clock = clock
        self._limiter = limiter
        self._limits = limits if limits is not None else RecordLimits()
        self._tenants: dict[str, dict[str, _Record]] = {}
        self._epoch = 0

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        now_s, limits = self._clock.monotonic_s(), self._limits
        records = self._lapse(key.tenant_id, now_s)
        record = records.get(key.digest)
        if record is None:
            if len(records) >= limits.max_tenant_keys:
                oldest_s = min(held.expire_s for held in records.values())
                raise keys_exceeded(limits, oldest_s - now_s)
            self._epoch += 1
            records[key.digest] = _Record(
                fingerprint,
                owner,
                self._epoch,
                RecordState.RUNNING,
                now_s + limits.lease_s,
                now_s + limits.tombstone_s,
            )
            return Owned(Hold(key, owner, self._epoch), 0)
        if record.fingerprint != fingerprint:
            return OtherBody()
        state = self._state(record, now_s)
        if state is RecordState.RUNNING:
            return Running()
        if state is not RecordState.FREE:
            return Ended() if state is RecordState.ENDED else Expired()
        self._epoch += 1
        record.owner, record.epoch, record.state = owner, self._epoch, RecordState.RUNNING
        record.lease_s, record.expire_s = now_s + limits.lease_s, now_s + limits.tombstone_s
        record.expected = len(record.chunks)
        return Owned(Hold(key, owner, self._epoch), len(record.chunks))

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        return tuple(self._append(addition) for addition in additions)

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._end(hold, chunk, RecordState.ENDED, reservation, usage)

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._end(hold, chunk, RecordState.FREE, reservation, usage)

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        now_s = self._clock.monotonic_s()
        record = self._lapse(key.tenant_id, now_s).get(key.digest)
        if record is None:
            return LogTail(RecordState.GONE)
        if watch:
            record.watched_s = now_s + WATCH_S
        end = start + READ_CHUNKS
        return LogTail(
            self._state(record, now_s), tuple(record.chunks[start:end]), more=len(record.chunks) > end
        )

    async def delete(self, key: RecordKey) -> bool:
        records = self._lapse(key.tenant_id, self._clock.monotonic_s())
        return records.pop(key.digest, None) is not None

    def _append(self, addition: Addition) -> Written:
        now_s = self._clock.monotonic_s()
        records = self._lapse(addition.hold.key.tenant_id, now_s)
        record = records.get(addition.hold.key.digest)
        refused = _refused(record, addition.hold)
        if refused is not None or record is None:
            return refused or Written.GONE
        record.lease_s = now_s + self._limits.lease_s
        if not self._put(records, record, addition.chunk, now_s):
            return Written.TOO_LARGE
        return Written.WATCHED if record.watched_s > now_s else Written.KEPT

    async def _end(
        self,
        hold: Hold,
        chunk: bytes,
        state: RecordState,
        reservation: Reservation | None,
        usage: Usage,
    ) -> Written:
        now_s = self._clock.monotonic_s()
        records = self._lapse(hold.key.tenant_id, now_s)
        record = records.get(hold.key.digest)
        refused = _refused(record, hold)
        if refused is not None or record is None:
            return refused or Written.GONE
        fits = self._put(records, record, chunk, now_s, ends=state is RecordState.ENDED)
        record.expire_s = now_s + self._limits.tombstone_s
        if record.state is not RecordState.EXPIRED:
            record.state = state if fits else RecordState.FREE
        if record.state is RecordState.FREE and not record.chunks:
            del records[hold.key.digest]
        # Marked before the limiter is called: no other task runs between the record's end and its charge.
        record.owner = ""
        if reservation is not None:
            # A released request may be resumed for as long as its record is kept.
            self._limiter.settle_for(self._limits.tombstone_s, reservation, usage)
        return Written.KEPT if fits else Written.TOO_LARGE

    def _put(
        self, records: dict[str, _Record], record: _Record, chunk: bytes, now_s: float, *, ends: bool = False
    ) -> bool:
        """Append the chunk; return whether the record has it. Drops older bodies to make room."""
        if record.state is RecordState.EXPIRED:
            return False
        if not chunk:
            return True
        limits, size = self._limits, len(chunk)
        total = sum(held.size for held in records.values())
        oldest = sorted(
            (held for held in records.values() if held.chunks), key=lambda held: held.body_expire_s
        )
        for held in oldest[:EXAMINED]:
            if total + size <= limits.max_tenant_bytes:
                break
            if held is not record and not self._keeps(held, now_s):
                total -= held.size
                _drop(held)
        has_hole = len(record.chunks) != record.expected
        too_large = record.size + size > limits.max_record_bytes
        if not (ends and limits.open_s):
            too_large = too_large or total + size > limits.max_tenant_bytes
        if too_large and not has_hole and limits.open_s:
            return False
        if has_hole or too_large:
            _drop(record)
            record.state = RecordState.EXPIRED
            return False
        record.chunks.append(chunk)
        record.expected += 1
        record.body_expire_s = now_s + limits.body_s
        return True

    def _keeps(self, record: _Record, now_s: float) -> bool:
        """Whether the record makes no room for others."""
        state, written_s = self._state(record, now_s), record.body_expire_s - self._limits.body_s
        is_open = state is RecordState.FREE and written_s > now_s - self._limits.open_s
        return state is RecordState.RUNNING or is_open

    def _state(self, record: _Record, now_s: float) -> RecordState:
        if record.state is RecordState.RUNNING and record.lease_s <= now_s:
            return RecordState.FREE
        if record.state is RecordState.ENDED and not record.chunks:
            return RecordState.EXPIRED
        return record.state

    def _lapse(self, tenant_id: str, now_s: float) -> dict[str, _Record]:
        records = self._tenants.setdefault(tenant_id, {})
        for digest in [digest for digest, held in records.items() if held.expire_s <= now_s]:
            del records[digest]
        for held in records.values():
            if held.chunks and held.body_expire_s <= now_s:
                _drop(held)
        return records


def _drop(record: _Record) -> None:
    record.chunks.clear()


def _refused(record: _Record | None, hold: Hold) -> Written | None:
    if record is None:
        return Written.GONE
    if (record.owner, record.epoch) != (hold.owner, hold.epoch):
        return Written.FENCED
    return None
