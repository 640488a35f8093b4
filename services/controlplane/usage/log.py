"""The ledger's log in its store: numbered segments, checkpoints, and one object per hour.

The next number is the fence: a segment is created under a name that must be free, so of two writers that
continue from the same number one finds the name taken, and stops. No lock and no clock is needed for that.

A checkpoint contains the state up to a segment; the sums up to it are in the objects of the hours that it
names. They are written first, then the checkpoint, and only ``KEEP_S`` later the segments that it covers
are deleted. A number whose segment was deleted is free again, which would break the fence. Therefore a
writer acknowledges a segment only if it saw no foreign checkpoint within the last ``VERIFY_S``, which is
much shorter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from services.adapters.threads import in_thread
from services.controlplane.usage.codec import (
    book_from_bytes,
    checkpoint_to_bytes,
    hour_from_bytes,
    hour_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from services.controlplane.usage.policy.book import LedgerBook, Segment
from services.controlplane.usage.policy.lines import Lines, summed
from services.core.errors import NotFound, StoreUnavailable
from services.ports.clock import Clock
from services.ports.ledger_store import LedgerStore

log = structlog.get_logger()

VERIFY_S: Final = 60.0
KEEP_S: Final = 600.0
_LOADS: Final = 5
_RELOAD_S: Final = 0.2
_AT_ONCE: Final = 16
_SEGMENTS: Final = "segments/"
_CHECKPOINTS: Final = "checkpoints/"
_HOURS: Final = "hours/"


class Superseded(Exception):
    """Another writer continued the log. The state must be loaded again before anything is appended."""


class UsageLog:
    """Reads and continues the log. One task appends; another may write checkpoints beside it."""

    def __init__(self, store: LedgerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._checkpoint = ""  # name of the newest that was loaded or written
        self._own = ""  # name of the newest that was loaded, or that this process began to write
        self._verified_s = 0.0
        self._covered_s = 0.0  # when the newest checkpoint was loaded or written

    async def load(self) -> LedgerBook:
        """Return the state after the last segment. Raises StoreUnavailable, or IntegrityError."""
        for _ in range(_LOADS):
            book = await self._try_load()
            if book is not None:
                return book
            await self._clock.sleep(_RELOAD_S)
        raise StoreUnavailable("the log of the usage ledger has a gap, or other control planes write it")

    async def append(self, segment: Segment) -> None:
        """Return once the segment is durable.

        Raises Superseded, or StoreUnavailable: it may be stored then, and is to be appended again.
        """
        name, data = _segment_name(segment.number), segment_to_bytes(segment)
        if not await self._store.create(name, data):
            try:
                stored = await self._store.read(name)
            except NotFound:
                raise Superseded from None
            if stored != data:
                raise Superseded
        now_s = self._clock.monotonic_s()
        if now_s - self._verified_s > VERIFY_S:
            if await self._store.names(_CHECKPOINTS, self._own):
                raise Superseded
            self._verified_s = now_s

    async def write_checkpoint(self, sealed: LedgerBook, oldest: int) -> dict[int, int]:
        """Store the sums of the sealed state, then the state; return the hours' objects, from ``oldest`` on.

        Raises StoreUnavailable; it can be called again with the same state.
        """
        number = sealed.number
        hours = {hour: through for hour, through in sealed.hours.items() if hour >= oldest}
        for hour, lines in sorted(sealed.sums.hours.items()):
            if hour < oldest:
                continue
            stored = await self.hour(hour, hours[hour]) if hour in hours else {}
            data = await in_thread(_merged, stored, lines)
            await self._store.create(_hour_name(hour, number), data)
            hours[hour] = number
        name = self._own = _checkpoint_name(number)
        await self._store.create(name, await in_thread(checkpoint_to_bytes, sealed, hours))
        self._checkpoint, self._covered_s = name, self._clock.monotonic_s()
        return hours

    async def delete_covered(self, book: LedgerBook) -> None:
        """Delete what the newest checkpoint replaced, unless it is too young. Raises StoreUnavailable."""
        if not self._checkpoint or self._clock.monotonic_s() - self._covered_s < KEEP_S:
            return
        through = _number_of(self._checkpoint)
        segments = await self._store.names(_SEGMENTS)
        checkpoints = await self._store.names(_CHECKPOINTS)
        used = {_hour_name(hour, number) for hour, number in book.hours.items()}
        hours = [name for name in await self._store.names(_HOURS) if name not in used]
        await self._store.delete([name for name in segments if _number_of(name) <= through])
        await self._store.delete([name for name in hours if _number_of(name) <= through])
        await self._store.delete([name for name in checkpoints if name < self._checkpoint])

    async def hour(self, hour: int, through: int) -> Lines:
        """Return the lines of an hour's object. Raises NotFound, StoreUnavailable or IntegrityError."""
        return await in_thread(hour_from_bytes, await self._store.read(_hour_name(hour, through)))

    async def _try_load(self) -> LedgerBook | None:
        """Return the state, or None when the log changed meanwhile."""
        newest = await self._newest_checkpoint()
        try:
            book = LedgerBook()
            if newest:
                book = await in_thread(book_from_bytes, await self._store.read(newest))
            names = await self._store.names(_SEGMENTS, _segment_name(book.number))
            segments = await self._read_all(names)
        except NotFound:
            return None  # deleted: a newer checkpoint covers it
        for segment in segments:
            if segment.number != book.number + 1:
                log.warning("usage.log_gap", after=book.number, found=segment.number)
                return None
            book.apply(segment)
        now_s = self._clock.monotonic_s()
        if await self._newest_checkpoint() != newest:
            return None
        self._checkpoint = self._own = newest
        self._verified_s = self._covered_s = now_s
        return book

    async def _newest_checkpoint(self) -> str:
        names = await self._store.names(_CHECKPOINTS)
        return names[-1] if names else ""

    async def _read_all(self, names: Sequence[str]) -> list[Segment]:
        segments: list[Segment] = []
        for start in range(0, len(names), _AT_ONCE):
            reads = [self._store.read(name) for name in names[start : start + _AT_ONCE]]
            segments += map(segment_from_bytes, await asyncio.gather(*reads))
        return segments


def _merged(stored: Lines, lines: Lines) -> bytes:
    return hour_to_bytes(summed((stored, lines)))


def _segment_name(number: int) -> str:
    return f"{_SEGMENTS}{number:016d}"


def _checkpoint_name(number: int) -> str:
    return f"{_CHECKPOINTS}{number:016d}"


def _hour_name(hour: int, through: int) -> str:
    return f"{_HOURS}{hour:08d}-{through:016d}"


def _number_of(name: str) -> int:
    """Return the number of the segment with which an object ends."""
    return int(name[-16:])
