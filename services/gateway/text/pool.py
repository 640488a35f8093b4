"""The text processes of a gateway: their number, and the order in which texts are encoded.

Each version has its own processes: its tokenizer or template cannot harm other versions. The first process
runs while the version is loaded and reads short texts only. Further ones start when a long text arrives or
short ones wait, run at a lower priority, and end when idle. Per tenant, one short text of a version and one
long text of all versions are read at a time; tenants alternate.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

import structlog

from services.core.backoff import Backoff
from services.core.errors import (
    FailedPrecondition,
    FairwayError,
    InternalError,
    ShareExceeded,
    Unavailable,
    VersionFailing,
)
from services.core.generation import Constraint
from services.core.limits import share_of
from services.gateway.text.child import Cause, ProcessEnded, Strikes, TextLimits, TextProcess, own
from services.gateway.text.messages import (
    Answer,
    CheckConstraint,
    ConstraintPassed,
    Decoded,
    DecodePicture,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodePrompt,
    EncodeRows,
    Loaded,
    LoadText,
    Order,
    PictureDecoded,
    RowsEncoded,
    TextRefused,
    error_of,
    ids_of,
)
from services.gateway.text.text_model import (
    Conversation,
    DecodedText,
    EncodedRows,
    EncodedText,
    OpenFolder,
    PictureFile,
    Pixels,
    RowTexts,
    TextModel,
    TokenRun,
)
from services.ports.clock import Clock
from services.runtime.process.tenant_turns import TenantRoundRobin, nobody
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics

# A short text takes at most about 20 ms of a processor: the longest delay of another tenant's.
SHORT_BYTES: Final = 16 * 1024

# What is read, and what becomes of it.
AnyText = str | Conversation | RowTexts | PictureFile | TokenRun | Constraint
AnyRead = EncodedText | EncodedRows | Pixels | DecodedText | Constraint


@dataclass(eq=False, slots=True)
class TextJob:
    """It waits or is being read; ``future`` receives what becomes of it."""

    tenant_id: str
    text: AnyText
    size_bytes: int
    future: asyncio.Future[AnyRead]
    retried: bool = False

    @property
    def is_long(self) -> bool:
        """Constraints and pictures are: their cost does not follow from their size, and may end a process."""
        return self.size_bytes > SHORT_BYTES or isinstance(self.text, Constraint | PictureFile)

    def fail(self, error: FairwayError) -> None:
        """Return the error to the caller, unless it has a result or is gone."""
        if not self.future.done():
            self.future.set_exception(error)


def order_of(job: TextJob, limits: TextLimits) -> Order:
    """Return the order that reads the text."""
    cpu_s = limits.cpu_s(job.size_bytes)
    match job.text:
        case Constraint() as constraint:
            return CheckConstraint(constraint, limits.constraint_cpu_s, limits.load_cpu_s)
        case str(text):
            return EncodePrompt(text, cpu_s)
        case RowTexts() as rows:
            return EncodeRows(rows, cpu_s)
        case PictureFile() as picture:
            return DecodePicture(picture, cpu_s)
        case TokenRun() as run:
            return DecodeTokens(run, cpu_s)
        case chat:
            return EncodeChat(chat, cpu_s)


def ended_error(job: TextJob, cause: Cause, limits: TextLimits) -> FairwayError:
    """Return the error of a text on which its process ended."""
    if isinstance(job.text, Constraint):
        return limits.constraint_error(cause)
    if isinstance(job.text, PictureFile):
        return limits.picture_error(cause, job.size_bytes)
    return limits.read_error(cause, job.size_bytes)


log = structlog.get_logger()

MAX_LONG: Final = 2  # long texts that are read at a time, of all versions
MAX_VERSION_PROCESSES: Final = 4
MAX_FURTHER: Final = 6  # processes beyond the first ones, of all versions
MAX_LOADS: Final = 2
MAX_PENDING: Final = 4096
MAX_PENDING_BYTES: Final = 64 * 1024 * 1024
TICK_S: Final = 0.05
RETRY: Final = Backoff(1.0, 60.0)  # delay of the next start after failed ones
MAX_FAILED: Final = 256
_ID_BYTES: Final = 4  # what a token id counts as
_UNLOADED: Final = "the version's tokenizer was unloaded; send the request again"


@dataclass(eq=False, slots=True)
class _Version:
    """The processes and waiting texts of one version."""

    digest: str
    # Opens the version's files.
    folder: OpenFolder
    # Running and starting processes; at most one, the first, has normal priority.
    processes: list[TextProcess] = field(default_factory=list)
    # Waiting short texts, by tenant.
    short: TenantRoundRobin[TextJob] = field(default_factory=TenantRoundRobin)
    # Waiting long texts, by tenant.
    long: TenantRoundRobin[TextJob] = field(default_factory=TenantRoundRobin)
    # The tenants whose short text is being read.
    reading: set[str] = field(default_factory=set)
    # Ended processes, by tenant.
    strikes: Strikes = field(default_factory=Strikes)
    # Whether short texts waited at the last check.
    pressed: bool = False
    # Failed starts in a row.
    failures: int = 0
    # Earliest time of the next start.
    retry_at_s: float = 0.0

    def queue(self, job: TextJob) -> TenantRoundRobin[TextJob]:
        return self.long if job.is_long else self.short

    def next_check_s(self, idle_s: float) -> float:
        """When its processes need a check, monotonic: 0.0 for now, inf for never."""
        if self.pressed or self.short or self.long or not all(process.idle for process in self.processes):
            return 0.0
        ends_s = [process.idle_since_s + idle_s for process in self.processes if process.nice]
        if len(ends_s) == len(self.processes):  # the first process is missing
            ends_s.append(self.retry_at_s)
        return min(ends_s, default=inf)


@dataclass(slots=True)
class _Failure:
    error: FailedPrecondition
    count: int
    until_s: float


class TextProcesses:
    """Implements ``Texts``. Event loop only; ``run`` is a task of the process."""

    def __init__(
        self, clock: Clock, supervisor: Supervisor, metrics: Metrics, limits: TextLimits | None = None
    ) -> None:
        self._clock = clock
        self._supervisor = supervisor
        self._limits = limits if limits is not None else TextLimits()
        self._versions: dict[str, _Version] = {}
        self._failed: OrderedDict[str, _Failure] = OrderedDict()
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._long: set[str] = set()  # the tenants whose long text is being read
        self._pending: dict[str, tuple[int, int]] = {}  # waiting texts and their bytes, by tenant
        self._work = asyncio.Event()  # a text or process was added, or a process ended
        self._ended = metrics.counter(
            "fairway_gateway_text_processes_ended_total",
            "Tokenizer processes that ended, by cause",
            ("cause",),
        )
        seconds = metrics.histogram(
            "fairway_gateway_text_seconds",
            "From when a text is queued for tokenising until its tokens are returned",
            ("size",),
        )
        self._seconds = {False: seconds.cell("short"), True: seconds.cell("long")}
        metrics.level(
            "fairway_gateway_text_processes",
            "Tokenizer processes",
            lambda: float(sum(len(version.processes) for version in self._versions.values())),
        )
        metrics.level(
            "fairway_gateway_texts_pending",
            "Texts that wait for a tokenizer process or are being tokenised",
            lambda: float(sum(count for count, _ in self._pending.values())),
        )

    async def run(self) -> None:
        """Start and end processes as needed until cancelled. It sleeps while no check is due."""
        while True:
            self._work.clear()
            idle_s = self._next_check_s(self._clock.monotonic_s())
            if idle_s > 0.0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if idle_s == inf else idle_s):
                        await self._work.wait()
            await self._clock.sleep(TICK_S)
            now_s = self._clock.monotonic_s()
            for version in list(self._versions.values()):
                for process in version.processes:
                    if process.overdue(now_s):
                        process.kill(Cause.HUNG)
                self._tend(version, now_s)

    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        """See ``Texts``. A version that failed is retried only after a delay."""
        failure = self._failed.get(version_digest)
        if failure is not None and self._clock.monotonic_s() < failure.until_s:
            raise type(failure.error)(failure.error.message, version_digest=version_digest)
        version = _Version(version_digest, folder)
        process = TextProcess(self._clock, nice=False)
        try:
            async with self._loads:
                model = await self._open(version, process)
        except FailedPrecondition as error:
            self._record_failure(version_digest, error)
            raise
        self._failed.pop(version_digest, None)
        self.unload(version_digest)
        version.processes.append(process)
        self._versions[version_digest] = version
        return model

    def unload(self, version_digest: str) -> None:
        """See ``Texts``. Texts that wait or are being read end with Unavailable."""
        version = self._versions.pop(version_digest, None)
        if version is not None:
            self._refuse_waiting(version, _UNLOADED)
            for process in version.processes:
                process.kill(Cause.STOPPED)

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Conversation, *, size_bytes: int
    ) -> EncodedText:
        """See ``Texts``."""
        found = await self._read(model, tenant_id, text, size_bytes)
        assert isinstance(found, EncodedText), "no tokens for a text"
        return found

    async def read_rows(
        self, model: TextModel, tenant_id: str, rows: RowTexts, *, size_bytes: int
    ) -> EncodedRows:
        """See ``Texts``."""
        found = await self._read(model, tenant_id, rows, size_bytes)
        assert isinstance(found, EncodedRows), "a text for rows"
        return found

    async def read_picture(self, model: TextModel, tenant_id: str, picture: PictureFile) -> Pixels:
        """See ``Texts``."""
        found = await self._read(model, tenant_id, picture, len(picture.data))
        assert isinstance(found, Pixels), "no pixels for a picture"
        return found

    async def decode(self, model: TextModel, tenant_id: str, run: TokenRun) -> str:
        """See ``Texts``."""
        found = await self._read(model, tenant_id, run, len(run.ids) * _ID_BYTES)
        assert isinstance(found, DecodedText), "no text for tokens"
        return found.text

    async def check(self, model: TextModel, tenant_id: str, constraint: Constraint) -> Constraint:
        """See ``Texts``."""
        found = await self._read(model, tenant_id, constraint, len(constraint.source.encode()))
        assert isinstance(found, Constraint), "no constraint for a constraint"
        return found

    async def _read(
        self,
        model: TextModel,
        tenant_id: str,
        text: AnyText,
        size_bytes: int,
    ) -> AnyRead:
        version = self._versions.get(model.version_digest)
        if version is None:
            raise Unavailable(_UNLOADED, retry_after_s=0.5)
        began_s = self._clock.monotonic_s()
        self._check(version, tenant_id, size_bytes, began_s)
        job = TextJob(tenant_id, text, size_bytes, asyncio.get_running_loop().create_future())
        texts, size = self._pending.get(tenant_id, (0, 0))
        self._pending[tenant_id] = (texts + 1, size + size_bytes)
        job.future.add_done_callback(partial(self._forget, version, job))
        version.queue(job).add(tenant_id, job)
        self._work.set()
        self._dispatch(version)
        if job.is_long:
            self._tend(version, began_s)
        tokens = await job.future
        self._seconds[job.is_long].observe(self._clock.monotonic_s() - began_s)
        return tokens

    def check_integrity(self) -> None:
        assert len(self._long) <= MAX_LONG, "more long texts are read than the bound allows"
        assert all(size >= 0 < count for count, size in self._pending.values())
        for version in self._versions.values():
            assert len(version.processes) <= MAX_VERSION_PROCESSES
            assert sum(not process.nice for process in version.processes) <= 1

    # --- the order of texts ----------------------------------------------------------------------

    def _check(self, version: _Version, tenant_id: str, size_bytes: int, now_s: float) -> None:
        """Raises ShareExceeded or Unavailable where a text may not wait here."""
        suspended_s = version.strikes.suspended_s(tenant_id, now_s)
        if suspended_s:
            raise _suspended(suspended_s)
        if not version.processes and now_s < version.retry_at_s:
            raise Unavailable(
                "the version's tokenizer cannot be loaded now", retry_after_s=version.retry_at_s - now_s
            )
        texts, size = self._pending.get(tenant_id, (0, 0))
        most, most_bytes = share_of(MAX_PENDING), share_of(MAX_PENDING_BYTES)
        if texts >= most:
            raise _share_full(f"{texts} texts", most)
        if size and size + size_bytes > most_bytes:
            raise _share_full(f"{size} bytes of texts", most_bytes)
        all_texts = sum(count for count, _ in self._pending.values())
        all_bytes = sum(waiting for _, waiting in self._pending.values())
        if all_texts >= MAX_PENDING or (size and all_bytes + size_bytes > MAX_PENDING_BYTES):
            raise Unavailable(
                f"{all_texts} texts of {all_bytes} bytes wait to be tokenised here; send it later, or to "
                "another gateway",
                retry_after_s=1.0,
            )

    def _dispatch(self, version: _Version) -> None:
        """Give each idle process the next text."""
        for process in version.processes:
            if process.idle and (job := self._next(version, process)) is not None:
                self._send(version, process, job)

    def _next(self, version: _Version, process: TextProcess) -> TextJob | None:
        while True:
            job = None
            if process.nice and len(self._long) < MAX_LONG:
                job = version.long.take(self._long)
            if job is None:
                job = version.short.take(version.reading)
            if job is None:
                return None
            if suspended_s := version.strikes.suspended_s(job.tenant_id, self._clock.monotonic_s()):
                job.fail(_suspended(suspended_s))
            if not job.future.done():
                return job

    def _send(self, version: _Version, process: TextProcess, job: TextJob) -> None:
        (self._long if job.is_long else version.reading).add(job.tenant_id)
        order = order_of(job, self._limits)
        cpu_s = order.cpu_s + (order.open_cpu_s if isinstance(order, CheckConstraint) else 0.0)
        answer = process.send_order(order, patience_s=self._limits.wait_s(cpu_s))
        # The process reads on for others: that is no step of this tenant's request.
        answer.add_done_callback(partial(self._answered, version, job), context=nobody())

    def _answered(self, version: _Version, job: TextJob, answer: asyncio.Future[Answer]) -> None:
        (self._long if job.is_long else version.reading).discard(job.tenant_id)
        ended = answer.exception()
        if isinstance(ended, ProcessEnded):
            self._lost(version, job, ended.cause)
        elif not job.future.done():
            match answer.result():
                case Encoded(count=count) as found:
                    job.future.set_result(EncodedText(count, ids_of(found)))
                case RowsEncoded(rows=rows):
                    job.future.set_result(rows)
                case PictureDecoded(pixels=pixels):
                    job.future.set_result(pixels)
                case Decoded(decoded=decoded):
                    job.future.set_result(decoded)
                case ConstraintPassed(exact=exact):
                    job.future.set_result(exact)
                case TextRefused() as found:
                    job.future.set_exception(error_of(found))
        self._dispatch(version)
        if job.is_long:  # other long texts may have waited for this one
            for other in self._versions.values():
                self._dispatch(other)

    def _lost(self, version: _Version, job: TextJob, cause: Cause) -> None:
        """The process ended on a text: read it again elsewhere once, or fail it with its cause."""
        may_be_another = cause in (Cause.CRASHED, Cause.FAULT)  # an earlier text may have damaged its memory
        if may_be_another and not job.retried and self._versions.get(version.digest) is version:
            job.retried = True
            if not job.future.done():
                version.queue(job).add_first(job.tenant_id, job)
            return
        if cause is not Cause.STOPPED:
            version.strikes.killed(job.tenant_id, self._clock.monotonic_s())
        job.fail(ended_error(job, cause, self._limits))

    def _forget(self, version: _Version, job: TextJob, _: object) -> None:
        """Remove a text that is read, rejected or abandoned."""
        texts, size = self._pending[job.tenant_id]
        if texts == 1:
            del self._pending[job.tenant_id]
        else:
            self._pending[job.tenant_id] = (texts - 1, size - job.size_bytes)
        version.queue(job).discard(job.tenant_id, job)

    def _refuse_waiting(self, version: _Version, message: str) -> None:
        for queue in (version.short, version.long):
            while (job := queue.take(())) is not None:
                job.fail(Unavailable(message, retry_after_s=1.0))

    # --- the set of processes --------------------------------------------------------------------

    def _next_check_s(self, now_s: float) -> float:
        """Return the time until a check is due: 0 while texts are read or processes start, inf for never."""
        checks = (version.next_check_s(self._limits.idle_s) for version in self._versions.values())
        return max(0.0, min(checks, default=inf) - now_s)

    def _tend(self, version: _Version, now_s: float) -> None:
        """Start missing processes of a version, end those that were idle for long."""
        if self._versions.get(version.digest) is not version:
            return
        starting = any(not process.ready for process in version.processes)
        if now_s >= version.retry_at_s and all(process.nice for process in version.processes):
            self._start(version, nice=False)
        waits = version.short.next_tenant(version.reading) is not None
        needs_long = len(self._long) < MAX_LONG and version.long.next_tenant(self._long) is not None
        if not starting and ((waits and version.pressed) or needs_long) and now_s >= version.retry_at_s:
            self._start_further(version)
        version.pressed = waits
        for process in version.processes:
            if process.nice and process.idle and now_s > process.idle_since_s + self._limits.idle_s:
                process.kill(Cause.STOPPED)

    def _start_further(self, version: _Version) -> None:
        if len(version.processes) >= MAX_VERSION_PROCESSES:
            return
        further = [one for each in self._versions.values() for one in each.processes if one.nice]
        if len(further) >= MAX_FURTHER:  # the process that was idle for longest ends at a later check
            idle = [process for process in further if process.idle]
            if idle:
                min(idle, key=lambda process: process.idle_since_s).kill(Cause.STOPPED)
            return
        self._start(version, nice=True)

    def _start(self, version: _Version, *, nice: bool) -> None:
        process = TextProcess(self._clock, nice=nice)
        version.processes.append(process)
        self._work.set()
        name = f"text process of {version.digest[:19]}"
        self._supervisor.spawn(name, self._grow(version, process), shared=True)

    async def _grow(self, version: _Version, process: TextProcess) -> None:
        try:
            await self._open(version, process)
        except FairwayError as error:
            log.warning("text_process.start_failed", version_digest=version.digest, reason=error.reason)
            version.retry_at_s = self._clock.monotonic_s() + RETRY.longest_s(version.failures)
            version.failures += 1
            if process in version.processes:
                version.processes.remove(process)
            if not version.processes:
                self._refuse_waiting(version, "the version's tokenizer cannot be loaded now")
        else:
            version.failures = 0
            self._dispatch(version)

    async def _open(self, version: _Version, process: TextProcess) -> TextModel:
        """Start a process and load its version. Raises FairwayError, with the process ended."""
        cpu_s = self._limits.load_cpu_s
        try:
            async with version.folder() as folder:
                process.start()
                own(self._supervisor, "text process", process, self._reap(version, process))
                await process.connect()
                order = LoadText(str(folder), version.digest, cpu_s, self._limits.memory_bytes)
                answer = await process.send_order(order, patience_s=self._limits.wait_s(cpu_s))
        except ProcessEnded as ended:
            raise self._limits.load_error(ended.cause, version.digest) from None
        except BaseException:  # cancelled, or its files are missing
            process.kill(Cause.STOPPED)
            raise
        if not isinstance(answer, Loaded):
            process.kill(Cause.STOPPED)
            raise error_of(answer) if isinstance(answer, TextRefused) else InternalError("no answer to Load")
        process.ready = True
        return answer.model

    async def _reap(self, version: _Version, process: TextProcess) -> None:
        """Own a started process until it has ended."""
        cause = await process.wait()
        self._ended.add(cause.value)
        if cause is not Cause.STOPPED:
            log.warning(
                "text_process.ended", version_digest=version.digest, pid=process.pid, cause=cause.value
            )
        if process in version.processes:
            version.processes.remove(process)
            self._work.set()
            self._tend(version, self._clock.monotonic_s())

    def _record_failure(self, digest: str, error: FailedPrecondition) -> None:
        known = self._failed.pop(digest, None)
        count = 1 if known is None else known.count + 1
        until_s = self._clock.monotonic_s() + RETRY.longest_s(count)
        self._failed[digest] = _Failure(error, count, until_s)
        while len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)


def _share_full(what: str, most: int) -> ShareExceeded:
    return ShareExceeded(
        f"{what} of this tenant wait to be tokenised at this gateway; the maximum is {most}; wait until "
        "some are tokenised",
        retry_after_s=1.0,
        limit=most,
    )


def _suspended(suspended_s: float) -> VersionFailing:
    return VersionFailing(
        "texts crashed the processes of this version's tokenizer repeatedly; it is suspended for a while",
        retry_after_s=suspended_s,
    )
