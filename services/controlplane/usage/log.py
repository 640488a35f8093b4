"""The ledger's log in its store: numbered segments, checkpoints, and one object per hour.

The next number is the fence: a segment is created under a name that must be free, so if two writers
continue from the same number one finds the name taken, and stops. No lock and no clock is needed for that.

A checkpoint contains the state up to a segment; the sums up to it are in the objects of the hours that it
names. They are written first, then the checkpoint, and only ``KEEP_S`` later the segments that it covers
are deleted. A number whose segment was deleted is free again, which would break the fence. Therefore a
writer acknowledges a segment only if it saw no foreign checkpoint within the last ``VERIFY_S``, which is
much shorter.

An object with damage, or with events that no sender can have measured, is copied to ``damaged/`` before what
can be read of it is used. A damaged checkpoint is not used while the one before it is there, because the
segments after that one are there too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import structlog

from services.adapters.threads import in_thread
from services.controlplane.usage.codec import (
    Read,
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
from services.ports.usage import LedgerStore

log = structlog.get_logger()

VERIFY_S: Final = 60.0
KEEP_S: Final = 600.0
_MOST_LOADS: Final = 5
_RELOAD_S: Final = 0.2
_AT_ONCE: Final = 16
MAX_DAMAGED: Final = 1000  # copies of damaged objects
_SEGMENTS: Final = "segments/"
_CHECKPOINTS: Final = "checkpoints/"
_HOURS: Final = "hours/"
_DAMAGED: Final = "damaged/"
_KINDS: Final = {_SEGMENTS: "1", _CHECKPOINTS: "2", _HOURS: "3"}
T = TypeVar("T")


class Superseded(Exception):
    """Another writer continued the log. The state must be loaded again before anything is appended."""


class UsageLog:
    """Reads and continues the log. One task appends; another may write checkpoints at the same time."""

    def __init__(self, store: LedgerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._checkpoint = ""  # name of the newest that was loaded or written
        self._own = ""  # name of the newest that was loaded, or that this process began to write
        self._loads = 0  # number of loads so far
        self._verified_s = 0.0
        self._covered_s = 0.0  # time at which the newest checkpoint was loaded or written
        self.damaged: frozenset[str] = frozenset()  # names of the copies of damaged objects
        self._found: set[str] = set()  # names of those that this process made
        self._counted: set[str] = set()  # names of those whose lost events are counted
        # Events that the last load was the first to miss in damaged segments. ``unread_more``: or more.
        self.unread = 0
        self.unread_more = False

    async def load(self) -> LedgerBook:
        """Return the state after the last segment. Raises StoreUnavailable."""
        problem = ""
        for _ in range(_MOST_LOADS):
            found = await self._try_load()
            if isinstance(found, LedgerBook):
                return found
            problem = found
            await self._clock.sleep(_RELOAD_S)
        raise StoreUnavailable(problem)

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

        Raises Superseded, or StoreUnavailable: it can be called again with the same state.
        """
        number, loads = sealed.number, self._loads
        hours = {hour: through for hour, through in sealed.hours.items() if hour >= oldest}
        for hour, lines in sorted(sealed.sums.hours.items()):
            if hour < oldest:
                continue
            stored: Lines = {}
            if hour in hours:
                try:
                    stored = await self.hour(hour, hours[hour])
                except NotFound:
                    # A later checkpoint replaced it, a foreign one or one of this process whose answer was
                    # lost; where there is none, it was lost in the store.
                    if await self._store.names(_CHECKPOINTS, self._checkpoint):
                        raise Superseded from None
                    log.error("usage.object_missing", name=_hour_name(hour, hours[hour]))
            data = await in_thread(_merged, stored, lines)
            await self._store.create(_hour_name(hour, number), data)
            hours[hour] = number
        name, data = f"{_CHECKPOINTS}{number:016d}", await in_thread(checkpoint_to_bytes, sealed, hours)
        if loads == self._loads:
            self._own = name
            await self._store.create(name, data)
        if loads != self._loads:  # What a later load found is the state now, with the hours that it names.
            raise Superseded
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
        """Return the lines of an hour's object. Raises NotFound or StoreUnavailable."""
        return (await self._read(_hour_name(hour, through), hour_from_bytes)).value

    async def list_damaged(self) -> None:
        """Note which copies of damaged objects are there. Raises StoreUnavailable."""
        self.damaged = frozenset(await self._store.names(_DAMAGED))

    async def _try_load(self) -> LedgerBook | str:
        """Return the state, or what changed meanwhile or is missing."""
        await self.list_damaged()
        checkpoints = await self._store.names(_CHECKPOINTS)
        try:
            newest, book = await self._book(checkpoints)
            names = await self._store.names(_SEGMENTS, _segment_name(book.number))
            segments = await self._read_all(names)
        except NotFound:
            return "an object of the usage ledger is gone: other control planes write it"
        unread, more = 0, False
        for read in segments:
            segment = read.value
            if segment.number != book.number + 1:
                return f"segment {book.number + 1} of the usage ledger is missing: restore it from a backup"
            is_new = _copy_of(_segment_name(segment.number)) in self._found - self._counted
            more = more or (is_new and read.lost is None)
            # Where a damaged segment does not have the number, gaps in and behind it are what is missing.
            unread += _gaps_in(segment, book) if more and not read.lost else (read.lost or 0) * is_new
            book.apply(segment)
        now_s = self._clock.monotonic_s()
        if await self._newest_checkpoint() != newest:
            return "other control planes write checkpoints of the usage ledger"
        self._checkpoint = self._own = newest
        self._loads += 1
        self._verified_s = self._covered_s = now_s
        self.unread, self.unread_more = unread, more
        self._counted |= self._found
        return book

    async def _book(self, checkpoints: Sequence[str]) -> tuple[str, LedgerBook]:
        """Return the name and the state of the newest checkpoint without damage that segments follow, else
        what can be read of the newest."""
        newest, found = checkpoints[-1] if checkpoints else "", LedgerBook()
        for name in reversed(checkpoints):
            read = await self._read(name, partial(book_from_bytes, number=_number_of(name)))
            if name == newest:
                found = read.value
            after = await self._store.names(_SEGMENTS, _segment_name(read.value.number))
            follows = name == newest or (after and _number_of(after[0]) == read.value.number + 1)
            if follows and not read.damage:
                # The numbers of the damaged ones are written again.
                await self._store.delete([each for each in checkpoints if each > name])
                return name, read.value
        return newest, found

    async def _read(self, name: str, decode: Callable[[bytes], Read[T]]) -> Read[T]:
        """Return what can be read of an object; copy a damaged one. Raises NotFound or StoreUnavailable."""
        data = await self._store.read(name)
        read = await in_thread(decode, data)
        copy = _copy_of(name)
        if read.damage and copy not in self.damaged:
            kept = len(self.damaged) < MAX_DAMAGED
            self._found.add(copy)
            if kept:
                await self._store.create(copy, data)
            self.damaged |= {copy}
            log.error("usage.object_damaged", name=name, copy=copy, kept=kept, damage=read.damage[:2000])
        return read

    async def _newest_checkpoint(self) -> str:
        names = await self._store.names(_CHECKPOINTS)
        return names[-1] if names else ""

    async def _read_all(self, names: Sequence[str]) -> list[Read[Segment]]:
        segments: list[Read[Segment]] = []
        for start in range(0, len(names), _AT_ONCE):
            reads = [
                self._read(name, partial(segment_from_bytes, number=_number_of(name)))
                for name in names[start : start + _AT_ONCE]
            ]
            segments += await asyncio.gather(*reads)
        return segments


def _gaps_in(segment: Segment, book: LedgerBook) -> int:
    """Return how many numbers are missing before and in the batches that the book is about to apply."""
    last_of: dict[str, int] = {}
    missing = 0
    for batch in segment.batches:
        last = last_of.get(batch.source, book.last_of(batch.source))
        missing += max(0, batch.last - last - len(batch.events))
        last_of[batch.source] = batch.last
    return missing


def _merged(stored: Lines, lines: Lines) -> bytes:
    return hour_to_bytes(summed((stored, lines)))


def _copy_of(name: str) -> str:
    kind, _, number = name.partition("/")
    return f"{_DAMAGED}{_KINDS[kind + '/']}-{number}"


def _segment_name(number: int) -> str:
    return f"{_SEGMENTS}{number:016d}"


def _hour_name(hour: int, through: int) -> str:
    return f"{_HOURS}{hour:08d}-{through:016d}"


def _number_of(name: str) -> int:
    """Return the number of the segment with which an object ends."""
    return int(name[-16:])
