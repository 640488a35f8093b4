"""Usage events on the local disk until the ledger has stored them.

Each process life is one source, which numbers its events from 1. Events are appended to a file and synced
a moment later, outside the event loop. A file is named by its source and its first event. About once a
second the oldest file is sent; it no longer grows then, and is deleted when the ledger has stored all of
it. Files of earlier lives are sent first, under their own sources. Damaged bytes are passed over; a torn end
is what a crash leaves. Each event has its number with it, so that those behind damage keep theirs.

Events that the ledger refuses for good are halved until the single event is found, which is set aside. Events
at which the ledger itself fails again and again are found the same way, but stay aside only if it takes
another event after them. Else the ledger is broken, and they are sent again, behind the others.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import structlog

from fairway.task_group import TaskGroup
from fairway.v1 import usage_pb2 as pb
from services.adapters.frames import framed, read_frames
from services.adapters.synced_files import append_bytes, own_folder, replace_file, sync_folder
from services.adapters.threads import in_thread
from services.core.errors import FairwayError, InternalError, is_final
from services.core.usage import RequestUsage, UsageEvent
from services.ports.clock import Clock
from services.rpc.convert.usage import event_to_proto
from services.runtime.telemetry.metrics import Metrics

log = structlog.get_logger()

MAX_BYTES: Final = 96 * 1024**2
# Above this part the outbox is full, and takes only requests of tenants with budgets, which were admitted
# before: a gateway runs at most 4,096, and an event with all of its labels has below 9 KiB.
FULL_RATIO: Final = 0.5
SYNC_S: Final = 0.1
SEND_S: Final = 1.0
_RETRY_S: Final = 2.0
_MOST_RETRY_S: Final = 60.0  # longest pause while the ledger fails at everything
_LAST_SEND_S: Final = 3.0
_FILE_EVENTS: Final = 2000  # below what one report may contain
_REPORT_BYTES: Final = 4 * 1024**2  # well below what a message may have
# Errors of the ledger itself in a row after which a file is halved.
_MOST_TRIES: Final = 5
_MOST_SUSPECTS: Final = 4  # single events of files, after which the ledger counts as broken
# What reading a file fails with for good.
_UNREADABLE: Final = (errno.ENOENT, errno.EIO)
MAX_REFUSED_BYTES: Final = 16 * 1024**2
MAX_REFUSED_FILES: Final = 1000
EVENT: Final = ".events"
DAMAGED: Final = ".damaged"
_AGAIN: Final = "-x"


def name_of(source: str, number: int) -> str:
    """Return the name of a refused event's file: its new source, unless it was sent again already."""
    if origin_of(source) is None:
        source, number = f"{source}{_AGAIN}{number}", 1
    return f"{source}.{number:012d}{EVENT}"


def origin_of(source: str) -> tuple[str, int] | None:
    """Return where an event that is sent again comes from; None for the source of a process."""
    origin, _, number = source.rpartition(_AGAIN)
    return (origin, int(number)) if origin and number.isdecimal() else None


class RefusedEvents:
    """Events that the ledger refused for good, and outbox files with damaged bytes, in a folder of files.

    They are set aside so that what waits behind them is sent. The next life of the process sends the events
    again, each as a source of its own, because the ledger has passed over their numbers. Every method but
    ``count`` does file I/O, for a thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    @property
    def count(self) -> int:
        return len(self._sizes)

    def keep(self, name: str, data: bytes) -> bool:
        """Store a framed event. Returns False when there is no room. Raises OSError."""
        others = [size for other, size in self._sizes.items() if other != name]
        if len(others) >= MAX_REFUSED_FILES or sum(others) + len(data) > MAX_REFUSED_BYTES:
            return False
        self._sizes[name] = replace_file(self._folder / name, data)
        return True

    def keep_damaged(self, file: Path) -> bool:
        """Store a copy of a file with damaged bytes, which is not sent again. The same otherwise."""
        return self.keep(f"{file.stem}{DAMAGED}", file.read_bytes())

    def move_unreadable(self, file: Path) -> None:
        """Take the file itself, if it is there. Raises OSError."""
        if file.exists():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            name = f"{file.stem}{DAMAGED}"
            self._sizes[name] = file.stat().st_size
            file.replace(self._folder / name)

    def release_one(self, name: str, to: Path) -> int:
        """Move an event back to the outbox; return its size. Raises OSError."""
        (self._folder / name).replace(to / name)
        sync_folder(to)
        return self._sizes.pop(name)

    def release(self, to: Path) -> None:
        """Move the events back to the outbox. Raises OSError."""
        found = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in found:
            if path.suffix == EVENT:
                path.replace(to / path.name)
            elif path.suffix == DAMAGED:
                self._sizes[path.name] = path.stat().st_size
        if found:
            sync_folder(to)


class UsageReports(Protocol):
    """The leading control plane's ledger."""

    async def report(
        self, source: str, first: int, events: Sequence[pb.UsageEvent], lost_until: int, apart: int
    ) -> int:
        """Return the number up to which the source's events are durable. ``apart`` counts missing events up
        to ``lost_until`` that the source has set aside or counted.

        Raises FairwayError, within a bounded time.
        """


@dataclass(slots=True)
class _File:
    """A file of consecutive events."""

    path: Path
    source: str
    first: int
    count: int = 0  # events that this life appended
    grows: bool = False
    size_bytes: int = 0
    stored: bool = False  # the ledger has all of it
    acknowledged: int = 0  # number of the last event that the ledger has
    cut: bool = False  # whether events at its end are missing
    tries: int = 0  # errors of the ledger itself, in a row


class DiskOutbox:
    """Implements ``ports.usage.UsageOutbox``. The owner runs ``run``."""

    def __init__(
        self,
        folder: Path,
        source: str,
        reports: UsageReports,
        clock: Clock,
        *,
        metrics: Metrics | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """``source`` is unique to this life of the process."""
        self._folder = folder
        self._aside = RefusedEvents(folder / "refused")
        self._source = source
        self._reports = reports
        self._clock = clock
        self._max_bytes = max_bytes
        self._files: deque[_File] = deque()  # the oldest first; the last may grow
        self._stored_bytes = 0
        self._added: list[bytes] = []
        self._added_bytes = 0
        self._next = 1  # number of the next event
        self._lost = 0
        self._passed: dict[str, set[int]] = {}  # numbers that are set aside, or lost here, by source
        self._suspects: list[str] = []  # names of events set aside since the ledger last took one
        self._refused = ""
        self._wake = asyncio.Event()  # something was added
        self._to_send = asyncio.Event()
        self._writing: asyncio.Future[int] | None = None  # one write at a time
        self._lock = -1
        if metrics is not None:
            self._export(metrics)

    @property
    def size_bytes(self) -> int:
        """Bytes that wait, on disk and for it."""
        return self._stored_bytes + self._added_bytes

    @property
    def problem(self) -> str:
        """Why events are lost, or may be; empty while none is. Requests can be rejected meanwhile."""
        if self._refused:
            return f"the disk does not take usage events ({self._refused})"
        return "as many usage events wait for the ledger as may" if self._full else ""

    @property
    def notice(self) -> str:
        """What an operator has to look at, while no request is rejected for it."""
        if not self._aside.count:
            return ""
        return f"{self._aside.count} refused usage events or damaged files are set apart in the outbox"

    @property
    def _full(self) -> bool:
        return self.size_bytes >= self._max_bytes * FULL_RATIO

    @property
    def lost(self) -> int:
        """Events that found the outbox, or the folder of refused ones, full, and at least one for each end of
        a file that cannot be read."""
        return self._lost

    def add(self, event: UsageEvent) -> None:
        reserved = isinstance(event, RequestUsage) and event.budgeted
        if self.size_bytes >= self._max_bytes or (self._full and not reserved):
            if not self._lost:
                log.error("usage.outbox_full", bytes=self.size_bytes)
            self._lost += 1
            return
        message = event_to_proto(event)
        message.number = self._next + len(self._added)
        self._added.append(framed(message.SerializeToString()))
        self._added_bytes += len(self._added[-1])
        self._wake.set()

    async def recover(self) -> None:
        """Find the files of earlier lives.

        Raises BlockingIOError when another process owns the folder, or OSError.
        """
        if self._lock < 0:
            self._lock = await in_thread(own_folder, self._folder)
        await in_thread(self._aside.release, self._folder)
        found = await in_thread(_files_in, self._folder)
        self._stored_bytes = sum(file.size_bytes for file in found)
        self._files.extend(found)
        for file in found:
            if origin := origin_of(file.source):
                self._passed.setdefault(origin[0], set()).add(origin[1])
        if found:
            self._to_send.set()

    async def run(self) -> None:
        """Write and send until cancelled; survives outages of the disk and of the ledger."""
        async with TaskGroup() as group:
            group.create_task(self._sync_forever())
            group.create_task(self._send_forever())

    async def close(self) -> None:
        """Write what was added, try once to send it, and release the folder. ``run`` has ended."""
        await self._written()
        await self.sync()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SEND_S):
                await self.send()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def sync(self) -> None:
        """Write what was added and sync it. It stays in memory when the disk refuses it."""
        while self._added and self._writing is None:
            count = min(len(self._added), _FILE_EVENTS)
            file = self._growing_file(count)
            data = b"".join(self._added[:count])
            write = partial(append_bytes, file.path, data)
            self._writing = asyncio.get_running_loop().run_in_executor(None, write)
            # Its end is noted even if this task is cancelled: the same events must not be written again.
            self._writing.add_done_callback(partial(self._note_written, file, count, len(data)))
            await self._written()
            if self._refused:
                return

    async def send(self) -> bool:
        """Send files, the oldest first, until none is left. Returns whether the ledger stored them."""
        sent = await self._send_files()
        if self._suspects:
            await self._take_back()
            return False
        return sent

    async def _take_back(self) -> None:
        """Queue what was set aside without a sign that it is the cause."""
        log.error("usage.ledger_fails", suspects=len(self._suspects))
        for name in self._suspects:
            try:
                size_bytes = await in_thread(self._aside.release_one, name, self._folder)
            except OSError as error:
                log.error("usage.disk_failed", file=name, error=repr(error))
                continue  # the next life sends it
            source, _, first = name.removesuffix(EVENT).rpartition(".")
            again = _File(self._folder / name, source, int(first), size_bytes=size_bytes, tries=_MOST_TRIES)
            if self._files:
                self._files[-1].grows = False
            self._files.append(again)
            self._stored_bytes += size_bytes
        self._suspects.clear()

    async def _send_files(self) -> bool:
        """Send files, the oldest first, until one cannot be sent."""
        while self._files:
            await self._written()
            file = self._files[0]
            file.grows = False
            try:
                if not file.stored:
                    if not await self._deliver_all(file, await in_thread(self._read, file)):
                        return False
                    file.stored = True
                    others = [each.source for each in self._files][1:2]
                    if file.cut and file.source not in (self._source, *others):
                        self._lost += 1  # no later event of the source shows how many
                # A send that was cancelled here may have deleted it.
                await in_thread(partial(file.path.unlink, missing_ok=True))
            except OSError as error:
                log.error("usage.disk_failed", file=file.path.name, error=repr(error))
                return False
            self._files.popleft()
            self._stored_bytes -= file.size_bytes
        return True

    async def _sync_forever(self) -> None:
        while True:
            await self._wake.wait()
            await self._clock.sleep(SYNC_S)
            self._wake.clear()
            await self.sync()
            if self._refused:
                await self._clock.sleep(_RETRY_S)
                self._wake.set()

    async def _send_forever(self) -> None:
        retry_s = _RETRY_S
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            sent = await self.send()
            if not sent:
                self._to_send.set()
            is_broken = any(file.tries >= _MOST_TRIES for file in self._files)
            retry_s = min(_MOST_RETRY_S, 2 * retry_s) if is_broken and not sent else _RETRY_S
            await self._clock.sleep(SEND_S if sent else retry_s)

    async def _written(self) -> None:
        """Return once no write is under way and its result is noted."""
        while self._writing is not None:
            await asyncio.wait({self._writing})

    def _note_written(self, file: _File, count: int, size_bytes: int, writing: asyncio.Future[int]) -> None:
        self._writing = None
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception()
        if error is not None:
            if not self._refused:
                log.error("usage.not_written", error=repr(error))
            self._refused = type(error).__name__
            return
        self._refused = ""
        del self._added[:count]
        self._added_bytes -= size_bytes
        self._stored_bytes += size_bytes
        self._next += count
        file.count += count
        file.size_bytes += size_bytes
        if not any(each is file for each in self._files):
            self._files.append(file)
        self._to_send.set()

    async def _deliver_all(self, file: _File, events: Sequence[pb.UsageEvent]) -> bool:
        """Return whether every event of the file is durable in the ledger, or set aside."""
        batch, batch_bytes = list[pb.UsageEvent](), 0
        for event in events:
            if event.number <= file.acknowledged or event.number in self._passed.get(file.source, ()):
                continue
            size_bytes = event.ByteSize()
            if batch and (batch_bytes + size_bytes > _REPORT_BYTES or event.number != batch[-1].number + 1):
                if not await self._deliver(file, batch):
                    return False
                batch, batch_bytes = [], 0
            batch.append(event)
            batch_bytes += size_bytes
        return not batch or await self._deliver(file, batch)

    async def _deliver(self, file: _File, events: Sequence[pb.UsageEvent]) -> bool:
        """The same for consecutive events of the file."""
        try:
            return await self._report(file, events)
        except FairwayError as error:
            if not is_final(error):
                file.tries = file.tries + 1 if isinstance(error, InternalError) else 0
                if file.tries < _MOST_TRIES:
                    log.info("usage.not_sent", source=file.source, reason=error.reason)
                    return False
            if len(events) == 1:
                return await self._set_aside(file.source, events[0], error)
        half = len(events) // 2
        if not await self._deliver(file, events[:half]):
            return False
        return await self._deliver(file, events[half:])

    async def _report(self, file: _File, events: Sequence[pb.UsageEvent]) -> bool:
        """Return whether the events are durable in the ledger. Raises FairwayError."""
        first, lost_until, apart = events[0].number, 0, 0
        passed = self._passed.get(file.source, set())
        for _ in range(2):
            last = await self._reports.report(file.source, first, events, lost_until, apart)
            if last >= events[-1].number:
                file.acknowledged = last
                passed.difference_update([number for number in passed if number <= last])
                self._suspects.clear()
                return True
            # Earlier events of the source are not here any more: the disk lost them, or they are set aside.
            lost_until, apart = first - 1, sum(last < number < first for number in passed)
            if lost_until - last > apart:
                log.error("usage.events_missing", source=file.source, after=last, before=first, apart=apart)
        return False

    async def _set_aside(self, source: str, event: pb.UsageEvent, error: FairwayError) -> bool:
        """Return whether the next event is to be sent; after an internal error this one waits for room."""
        number, name = event.number, name_of(source, event.number)
        event.ClearField("number")
        kept = await in_thread(self._aside.keep, name, framed(event.SerializeToString()))
        if not is_final(error):
            if not kept:
                return False
            self._suspects.append(name)
        self._lost += not kept
        is_again = origin_of(source) is not None
        if not is_again:
            self._passed.setdefault(source, set()).add(number)
        log.error(
            "usage.event_refused",
            source=source,
            number=number,
            kept=kept,
            reason=error.reason,
            error=error.message,
        )
        return is_again or len(self._suspects) < _MOST_SUSPECTS

    def _read(self, file: _File) -> list[pb.UsageEvent]:
        """Return the whole events of a file. A copy of a damaged one is set aside. Raises OSError."""
        path = file.path
        try:
            data = path.read_bytes()
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            log.error("usage.file_unreadable", file=path.name, error=repr(error))
            self._aside.move_unreadable(path)
            file.cut = True
            return []
        found = read_frames(data)
        events = [pb.UsageEvent.FromString(content) for content in found.contents]
        number = file.first - 1
        for event in events:  # files of earlier versions contain no numbers
            number = event.number = event.number or number + 1
        if found.torn:
            log.warning("usage.file_torn", file=path.name, events=len(events))
        elif found.damaged:
            file.cut = found.damaged[-1][1] == len(data)
            kept = self._aside.keep_damaged(path)
            begin, end = found.damaged[0]
            log.error("usage.file_damaged", file=path.name, begin=begin, end=end, kept=kept)
        return events

    def _growing_file(self, count: int) -> _File:
        """Return the file that the next events go to: the last one, unless it is full or being sent."""
        last = self._files[-1] if self._files else None
        if last is not None and last.grows and last.count + count <= _FILE_EVENTS:
            return last
        path = self._folder / f"{self._source}.{self._next:012d}{EVENT}"
        return _File(path, self._source, self._next, grows=True)

    def _export(self, metrics: Metrics) -> None:
        metrics.level(
            "fairway_usage_outbox_bytes",
            "Usage events that wait for the ledger, on disk and in memory",
            lambda: float(self.size_bytes),
        )
        metrics.counted(
            "fairway_usage_outbox_lost_total",
            "Usage events dropped because the outbox, or the folder of what is set apart, was full; "
            "at least one for each end of a file that cannot be read",
            lambda: [((), float(self._lost))],
        )
        metrics.level(
            "fairway_usage_outbox_refused",
            "Usage events that the ledger refused for good and damaged outbox files, which are set apart",
            lambda: float(self._aside.count),
        )


def _files_in(folder: Path) -> list[_File]:
    """Return the files of earlier lives, by source and first event."""
    paths = [path for path in folder.iterdir() if path.suffix == EVENT]
    found = []
    for path in paths:
        source, _, first = path.stem.rpartition(".")
        if source and first.isdecimal():
            found.append(_File(path, source, int(first), size_bytes=path.stat().st_size))
    return sorted(found, key=lambda one: (one.source, one.first))
