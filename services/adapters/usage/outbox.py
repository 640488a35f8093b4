"""Usage events on the local disk until the ledger has stored them.

Each process life is one source, which numbers its events from 1. Events are appended to a file and synced
a moment later, outside the event loop. A file is named by its source and its first event. About once a
second the oldest file is sent; it no longer grows then, and is deleted when the ledger has stored all of
it. Files of earlier lives are sent first, under their own sources. Damaged bytes are passed over; a torn end
is what a crash leaves.

What the ledger refuses for good is halved until the single event is found, which is set apart.
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
from services.adapters.synced_files import append_bytes, own_folder
from services.adapters.threads import in_thread
from services.adapters.usage.refused import EVENT, RefusedEvents
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
_LAST_SEND_S: Final = 3.0
_FILE_EVENTS: Final = 2000  # below what one report may contain
_REPORT_BYTES: Final = 4 * 1024**2  # well below what a message may have
# Sends of a file after which an error of the ledger itself counts as a refusal of an event.
_MOST_TRIES: Final = 5
# What reading a file fails with for good.
_UNREADABLE: Final = (errno.ENOENT, errno.EIO)


class UsageReports(Protocol):
    """The leading control plane's ledger."""

    async def report(self, source: str, first: int, events: Sequence[pb.UsageEvent], lost_until: int) -> int:
        """Return the number up to which the source's events are durable.

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
    tries: int = 0  # sends that failed in the ledger itself


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
        self._apart = RefusedEvents(folder / "refused")
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
        if not self._apart.count:
            return ""
        return f"{self._apart.count} refused usage events or damaged files are set apart in the outbox"

    @property
    def _full(self) -> bool:
        return self.size_bytes >= self._max_bytes * FULL_RATIO

    @property
    def lost(self) -> int:
        """Events that found the outbox, or the folder of refused ones, full."""
        return self._lost

    def add(self, event: UsageEvent) -> None:
        reserved = isinstance(event, RequestUsage) and event.budgeted
        if self.size_bytes >= self._max_bytes or (self._full and not reserved):
            if not self._lost:
                log.error("usage.outbox_full", bytes=self.size_bytes)
            self._lost += 1
            return
        self._added.append(framed(event_to_proto(event).SerializeToString()))
        self._added_bytes += len(self._added[-1])
        self._wake.set()

    async def recover(self) -> None:
        """Find the files of earlier lives.

        Raises BlockingIOError when another process owns the folder, or OSError.
        """
        if self._lock < 0:
            self._lock = await in_thread(own_folder, self._folder)
        await in_thread(self._apart.release, self._folder)
        found = await in_thread(_files_in, self._folder)
        self._stored_bytes = sum(file.size_bytes for file in found)
        self._files.extend(found)
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
        while self._files:
            await self._written()
            file = self._files[0]
            file.grows = False
            try:
                if not file.stored:
                    if not await self._deliver_all(file, await in_thread(self._read, file.path)):
                        return False
                    file.stored = True
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
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            sent = await self.send()
            if not sent:
                self._to_send.set()
            await self._clock.sleep(SEND_S if sent else _RETRY_S)

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
        if not self._files or self._files[-1] is not file:
            self._files.append(file)
        self._to_send.set()

    async def _deliver_all(self, file: _File, events: Sequence[pb.UsageEvent]) -> bool:
        """Return whether every event of the file is durable in the ledger, or set apart."""
        first, batch, batch_bytes = file.first, list[pb.UsageEvent](), 0
        for event in events:
            size_bytes = event.ByteSize()
            if batch and batch_bytes + size_bytes > _REPORT_BYTES:
                if not await self._deliver(file, first, batch):
                    return False
                first, batch, batch_bytes = first + len(batch), [], 0
            batch.append(event)
            batch_bytes += size_bytes
        return not batch or await self._deliver(file, first, batch)

    async def _deliver(self, file: _File, first: int, events: Sequence[pb.UsageEvent]) -> bool:
        """The same for consecutive events of the file."""
        try:
            return await self._report(file, first, events)
        except FairwayError as error:
            file.tries += isinstance(error, InternalError)
            if not (is_final(error) or file.tries >= _MOST_TRIES):
                log.info("usage.not_sent", source=file.source, reason=error.reason)
                return False
            if len(events) == 1:
                return await self._set_apart(file.source, first, events[0], error)
        half = len(events) // 2
        if not await self._deliver(file, first, events[:half]):
            return False
        return await self._deliver(file, first + half, events[half:])

    async def _report(self, file: _File, first: int, events: Sequence[pb.UsageEvent]) -> bool:
        """Return whether the events are durable in the ledger. Raises FairwayError."""
        lost_until = 0
        for _ in range(2):
            last = await self._reports.report(file.source, first, events, lost_until)
            if last >= first + len(events) - 1:
                return True
            # Earlier events of the source are not here any more: the disk lost them, or they are set apart.
            log.error("usage.events_missing", source=file.source, after=last, before=first)
            lost_until = first - 1
        return False

    async def _set_apart(self, source: str, number: int, event: pb.UsageEvent, error: FairwayError) -> bool:
        """Return whether the event is out of the way; after an internal error it waits for room."""
        kept = await in_thread(self._apart.keep, source, number, framed(event.SerializeToString()))
        if not kept and not is_final(error):
            return False
        self._lost += not kept
        log.error(
            "usage.event_refused",
            source=source,
            number=number,
            kept=kept,
            reason=error.reason,
            error=error.message,
        )
        return True

    def _read(self, path: Path) -> list[pb.UsageEvent]:
        """Return the whole events of a file. A copy of a damaged one is set apart. Raises OSError."""
        try:
            data = path.read_bytes()
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            log.error("usage.file_unreadable", file=path.name, error=repr(error))
            self._apart.move_unreadable(path)
            return []
        found = read_frames(data)
        events = [pb.UsageEvent.FromString(content) for content in found.contents]
        if found.torn:
            log.warning("usage.file_torn", file=path.name, events=len(events))
        elif found.damaged:
            kept = self._apart.keep_damaged(path)
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
            "Usage events that were dropped because the outbox, or the folder of what is set apart, was full",
            lambda: [((), float(self._lost))],
        )
        metrics.level(
            "fairway_usage_outbox_refused",
            "Usage events that the ledger refused for good and damaged outbox files, which are set apart",
            lambda: float(self._apart.count),
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
