"""Sends what a gateway measured to the leading control plane, and again after a failover.

A report is kept until it is in a snapshot of the control plane. A new leader begins from the last snapshot
and receives the later reports again; their numbers make each count once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Final, Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from services.core import faults
from services.core.arms import (
    ArmKey,
    ArmWindow,
    GateWindow,
    SliKey,
    SliReceipt,
    SliReport,
    SliSums,
    cluster_of,
    latency_sketch,
    prompt_size,
    session_hash,
)
from services.core.errors import FairwayError, is_final
from services.core.estimates.finished import FinishedRequest, NotableRequests, RequestSample
from services.core.estimates.sketch import Sketch
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind, TrafficShapes
from services.core.faults import Fault, fault_of
from services.core.generation import Sampling, Usage
from services.core.rollouts.routes import SHADOW_TENANT
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import GAP_S, CounterCell, HistogramCell, LabelCap, Metrics

MAX_SERIES: Final = 512
MAX_ARMS: Final = 32  # arms of steps in one report: 64 clusters each
MAX_MODELS: Final = 64  # most models with shapes in one report
OTHER_TENANTS: Final = "(other)"
POISONED: Final = "POISONED_INPUT"
# Ends of a copy that show a lack of room, or the end of its rollout, and nothing of its version.
_NOT_THE_VERSION: Final = frozenset(
    {
        "QUEUE_FULL",
        "QUEUE_TIMEOUT",
        "OVERLOADED",
        "DEADLINE_UNMEETABLE",
        "DEADLINE_EXCEEDED",
        "NO_WORKER_AVAILABLE",
        "NO_LEADER",
        "DRAINING",
        "STALE_ROUTE",
        "VERSION_GONE",
    }
)
_MAX_VERSIONS: Final = 400
_DIGEST_CHARS: Final = 19  # "sha256:" and 12 digits


class SliSubject(Struct, frozen=True):
    """Where a request counts. ``step`` is the rollout's that drew its arm; empty: none.

    ``shapes`` are those of its choices or rows, whose output lengths are not known yet.
    """

    key: SliKey
    session: int = 0
    step: str = ""
    prompt_size: int = 0
    shapes: tuple[RequestShape, ...] = ()


def subject_of(
    key: SliKey, session_key: str, step: str, prompt_tokens: int, shapes: tuple[RequestShape, ...]
) -> SliSubject:
    """Return the subject of an admitted request of any kind. ``step`` is the rollout's that routed it."""
    return SliSubject(key, session_hash(key.tenant, session_key), step, prompt_size(prompt_tokens), shapes)


def sampling_kind(sampling: Sampling) -> SamplingKind:
    """Return which parts of the sampler a request uses: the rarest of them."""
    if sampling.logprobs is not None:
        return SamplingKind.LOGPROBS
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    if penalties != (0.0, 0.0, 1.0) or sampling.logit_bias:
        return SamplingKind.PENALISED
    return SamplingKind.SAMPLED if sampling.temperature else SamplingKind.GREEDY


class RequestLatencies:
    """The latencies of one request's choices. Called once per frame: it must be cheap."""

    __slots__ = ("itl", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.itl: Sketch | None = None  # None: no gap so far

    def gap(self, seconds: float, tokens: int) -> None:
        """Count the time between two tokens of a choice, ``tokens`` times."""
        if self.itl is None:
            self.itl = latency_sketch()
        self.itl.add(seconds, tokens)


class RequestEnd(Struct, frozen=True):
    """How a request ended. ``reason`` is its error's, ``faults.FINISHED`` for none."""

    reason: str
    usage: Usage
    latencies: RequestLatencies
    # Seconds from the first byte until the end.
    total_s: float = 0.0

    def counted(self) -> RequestCounts:
        poisoned = self.reason == POISONED
        ours = poisoned or fault_of(self.reason) is Fault.OURS
        finished, started = self.reason == faults.FINISHED, bool(self.latencies.ttft_s)
        counted = ours or finished
        return RequestCounts(
            requests=int(counted),
            errors=int(ours and not started),
            poisoned=int(poisoned),
            started=int(started and counted),
            broken=int(ours and started),
            finished=int(finished and started),
            output_tokens=self.usage.output_tokens if finished and started else 0,
            tokens=self.usage.output_tokens + self.usage.prompt_tokens if started else 0,
            device_s=self.usage.device_s if started else 0.0,
            prompt_tokens=self.usage.prompt_tokens if started else 0,
            cached_tokens=self.usage.cached_tokens if started else 0,
            total_s=self.total_s if finished else 0.0,
        )


class ScreenEnd(Struct, frozen=True):
    """What a safety pack did to one request. Its latency is ``hold_s``, its cost that of its classifiers."""

    # Whether it blocked, stopped or redacted something, or as a shadow would have.
    intervened: bool
    flagged: bool
    # Seconds by which the first piece of the output was released later than it came.
    hold_s: float = 0.0
    # Tokens of input and output that it judged.
    tokens: int = 0
    # Device time of its verdicts.
    device_s: float = 0.0
    # Whether something ended for want of a verdict.
    unjudged: bool = False

    def counted(self) -> RequestCounts:
        return RequestCounts(
            requests=1,
            errors=int(self.unjudged),
            poisoned=0,
            started=1,
            broken=0,
            finished=0,
            output_tokens=0,
            tokens=self.tokens,
            device_s=self.device_s,
            interventions=int(self.intervened),
            flagged=int(self.flagged),
        )


class RequestCounts(Struct, frozen=True, gc=False):
    """What one request adds to the fields of ``SliSums`` with these names, and its total latency."""

    requests: int
    errors: int
    poisoned: int
    started: int
    broken: int
    finished: int
    output_tokens: int
    tokens: int
    device_s: float
    interventions: int = 0
    flagged: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    total_s: float = 0.0  # 0: it did not finish

    def add_to(self, sums: SliSums, subject: SliSubject, latencies: RequestLatencies) -> None:
        sums.requests += self.requests
        sums.errors += self.errors
        sums.poisoned += self.poisoned
        sums.started += self.started
        sums.broken += self.broken
        sums.finished += self.finished
        sums.output_tokens += self.output_tokens
        sums.tokens += self.tokens
        sums.device_s += self.device_s
        sums.interventions += self.interventions
        sums.flagged += self.flagged
        sums.prompt_tokens += self.prompt_tokens
        sums.cached_tokens += self.cached_tokens
        if self.total_s:
            sums.total.add(self.total_s)
        for ttft_s in latencies.ttft_s:
            sums.ttft_of(subject.prompt_size).add(ttft_s)
        if latencies.itl is not None:
            sums.itl.merge(latencies.itl)
        if self.requests:
            sums.note_session(subject.session)


class SliRecorder:
    """The sums since the last cut. The event loop is the only writer."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        zone: str = "",
        gateway: str = "",
        rng: Random | None = None,
        log_s: Callable[[], float] = float,
    ) -> None:
        """``rng`` draws the sample; ``log_s`` returns how long this process has written its log."""
        metrics = metrics if metrics is not None else Metrics()
        self.zone = zone
        self.gateway = gateway
        self.log_s = log_s
        self._series: dict[SliKey, SliSums] = {}
        self._windows: dict[tuple[GateWindow, str], defaultdict[int, SliSums]] = {}
        self._shapes: defaultdict[str, TrafficShapes] = defaultdict(TrafficShapes)
        self._notable = NotableRequests()
        self._sample = RequestSample(rng if rng is not None else Random(0))
        self._cells: dict[SliKey, _Cells] = {}
        self._models, self._tenants = metrics.models, metrics.tenants
        self._versions = LabelCap(_MAX_VERSIONS)
        by_arm = ("model", "version", "class")
        self._requests = metrics.counter(
            "fairway_sli_requests_total",
            "Requests that count for availability when they end; result is good, broken (after a first "
            "token), or, before one, poisoned or error",
            ("model", "version", "class", "tenant", "result"),
        )
        self._ttft = metrics.histogram(
            "fairway_sli_ttft_seconds",
            "From the first byte of a request until the first token of each choice, counted at its end",
            by_arm,
        )
        self._itl = metrics.histogram(
            "fairway_sli_itl_seconds",
            "From one token of a choice until the next, weighted by token, counted at its end",
            by_arm,
            bounds=GAP_S,
        )
        self._total = metrics.histogram(
            "fairway_sli_total_seconds",
            "From the first byte of a request until its terminal event is passed to the transport, of those "
            "that finished",
            by_arm,
        )
        self._tokens = metrics.counter(
            "fairway_sli_tokens_total", "Prompt and output tokens of requests that ran", by_arm
        )
        self._output = metrics.counter(
            "fairway_sli_output_tokens_total", "Output tokens of requests that finished", by_arm
        )
        self._device_s = metrics.counter(
            "fairway_sli_device_seconds_total", "Metered device time of requests that ran", by_arm
        )
        self._of_tenant = metrics.counter(
            "fairway_sli_tenant_device_seconds_total",
            "Metered device time of requests that ran, by tenant",
            ("model", "tenant"),
        )

    def ended(self, subject: SliSubject, end: RequestEnd) -> None:
        """Count a request that ended; a copy for a shadow version in the comparison of its step alone."""
        key, counts = subject.key, end.counted()
        if key.tenant != SHADOW_TENANT:
            counts.add_to(self._series_of(key), subject, end.latencies)
            self._export(key, counts, end.latencies)
            if counts.finished:
                self._note_shapes(subject, end.usage)
        elif end.reason in _NOT_THE_VERSION:
            return
        # An answer from the cache, or a mistake of the caller, does not depend on the arm.
        if subject.step and (counts.errors or counts.started or counts.tokens):
            arm = self._arm_of(GateWindow(key.arm.model, subject.step), key.arm)
            if arm is not None:
                counts.add_to(arm[cluster_of(subject.session)], subject, end.latencies)

    def note(self, request: FinishedRequest) -> None:
        """Keep a request that ended, if it is notable or drawn for the sample."""
        self._notable.add(request)
        self._sample.add(request)

    def screened(self, subject: SliSubject, end: ScreenEnd) -> None:
        """Count what a safety pack did to a request. ``subject`` names the pack's deployment and version."""
        counts, latencies = end.counted(), RequestLatencies()
        latencies.ttft_s.append(end.hold_s)
        counts.add_to(self._series_of(subject.key), subject, latencies)
        if subject.step:
            arm = self._arm_of(GateWindow(subject.key.arm.model, subject.step), subject.key.arm)
            if arm is not None:
                counts.add_to(arm[cluster_of(subject.session)], subject, latencies)

    def cut(self, unix_s: float) -> SliReport | None:
        """Return what was counted since the last cut, None for nothing."""
        requests, sampled = self._notable.cut(), self._sample.cut()
        if not self._series and not self._windows and not sampled:
            return None
        windows: dict[GateWindow, dict[str, ArmWindow]] = {}
        for (window, digest), clusters in self._windows.items():
            windows.setdefault(window, {})[digest] = ArmWindow(clusters)
        report = SliReport(unix_s, self._series, windows, self._shapes, requests, sampled)
        self._series, self._windows, self._shapes = {}, {}, defaultdict(TrafficShapes)
        return report

    def _note_shapes(self, subject: SliSubject, usage: Usage) -> None:
        model = subject.key.arm.model
        if not subject.shapes or (model not in self._shapes and len(self._shapes) >= MAX_MODELS):
            return
        found = self._shapes[model]
        output_tokens = -(-usage.output_tokens // len(subject.shapes))
        for shape in subject.shapes:
            found.add(replace(shape, output_tokens=output_tokens) if output_tokens else shape)

    def _series_of(self, key: SliKey) -> SliSums:
        """Return the sums of a key. With too many keys, further tenants share one."""
        found = self._series.get(key)
        if found is not None:
            return found
        if len(self._series) >= MAX_SERIES:
            key = replace(key, tenant=OTHER_TENANTS)
            if key not in self._series and len(self._series) >= 2 * MAX_SERIES - 1:
                key = SliKey(ArmKey(OTHER_TENANTS, ""), OTHER_TENANTS, key.priority)
        return self._series.setdefault(key, SliSums())

    def _arm_of(self, window: GateWindow, arm: ArmKey) -> defaultdict[int, SliSums] | None:
        found = self._windows.get((window, arm.version_digest))
        if found is None and len(self._windows) < MAX_ARMS:
            found = self._windows[window, arm.version_digest] = defaultdict(SliSums)
        return found

    def _export(self, key: SliKey, counts: RequestCounts, latencies: RequestLatencies) -> None:
        cells = self._cells.get(key)
        if cells is None:
            if len(self._cells) >= 2 * MAX_SERIES:
                self._cells.clear()
            cells = self._cells[key] = self._cells_of(key)
        if counts.requests:
            result = "broken" if counts.broken else "poisoned" if counts.poisoned else "error"
            good = not (counts.errors or counts.broken)
            self._requests.add(*cells.arm, cells.tenant, "good" if good else result)
        for ttft_s in latencies.ttft_s:
            cells.ttft.observe(ttft_s)
        if latencies.itl is not None:
            for value, weight in latencies.itl.values():
                cells.itl.observe(value, round(weight))
        cells.tokens.value += counts.tokens
        cells.output.value += counts.output_tokens
        cells.device_s.value += counts.device_s
        cells.tenant_device_s.value += counts.device_s
        if counts.total_s:
            cells.total.observe(counts.total_s)

    def _cells_of(self, key: SliKey) -> _Cells:
        version = self._versions.of(key.arm.version_digest[:_DIGEST_CHARS])
        arm = self._models.of(key.arm.model), version, key.priority.value
        tenant = self._tenants.of(key.tenant)
        return _Cells(
            arm,
            tenant,
            self._ttft.cell(*arm),
            self._itl.cell(*arm),
            self._tokens.cell(*arm),
            self._output.cell(*arm),
            self._device_s.cell(*arm),
            self._of_tenant.cell(arm[0], tenant),
            self._total.cell(*arm),
        )


class _Cells(Struct, frozen=True):
    """The metrics of one key. ``arm`` and ``tenant``: their label values."""

    arm: tuple[str, str, str]
    tenant: str
    ttft: HistogramCell
    itl: HistogramCell
    tokens: CounterCell
    output: CounterCell
    device_s: CounterCell
    tenant_device_s: CounterCell
    total: HistogramCell


log = structlog.get_logger()

PERIOD_S: Final = 2.0
MAX_KEPT: Final = 300  # ten minutes
_AT_ONCE: Final = 4
_LAST_SEND_S: Final = 2.0


class SliReports(Protocol):
    """The leading control plane's store of service level indicators."""

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        """Count reports of a source, which numbers them; ``oldest`` is the first that it still has.

        A report with a number that is already counted is skipped. With a gap before ``first`` that the source
        can fill, nothing is counted. Raises FairwayError, within a bounded time.
        """


class SliReporter:
    """``source`` is unique to this life of the process. The owner runs ``run``."""

    def __init__(
        self,
        recorder: SliRecorder,
        reports: SliReports,
        clock: Clock,
        source: str,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self._recorder = recorder
        self._reports = reports
        self._clock = clock
        self._source = source
        self._kept: deque[SliReport] = deque()
        self._first = 1  # number of the first kept report
        self._last = 0  # number of the last one that the leader has counted
        self._lost = 0
        if metrics is not None:
            metrics.counted(
                "fairway_sli_reports_lost_total",
                "Reports that no control plane stored in time, or that one refused for good",
                lambda: [((), float(self._lost))],
            )

    @property
    def kept(self) -> int:
        """Reports that are not durable yet."""
        return len(self._kept)

    async def run(self) -> None:
        """Report every ``PERIOD_S`` until cancelled; survives an outage of the control plane."""
        while True:
            await self._clock.sleep(PERIOD_S)
            try:
                await self.send()
            except FairwayError as error:
                log.info("slis.not_sent", reason=error.reason)

    async def close(self) -> None:
        """Try once to send the rest. ``run`` has ended."""
        with suppress(TimeoutError, FairwayError):
            async with asyncio.timeout(_LAST_SEND_S):
                await self.send()

    async def send(self) -> None:
        """Cut a report, and send what the leader has not counted. Raises FairwayError."""
        report = self._recorder.cut(self._clock.unix_s())
        if report is not None:
            self._keep(report)
        if not self._kept:
            return
        at_once = _AT_ONCE
        while True:
            begin = max(self._last + 1, self._first)
            at = min(begin - self._first, len(self._kept))
            batch = [self._kept[at + more] for more in range(min(at_once, len(self._kept) - at))]
            try:
                receipt = await self._reports.report(self._source, begin, self._first, batch)
            except FairwayError as error:
                if not is_final(error) or not batch:
                    raise
                if at_once == 1:
                    if not (batch[0].series or batch[0].windows or batch[0].shapes or batch[0].sampled):
                        raise  # the leader refuses whatever is sent, so the next period tries again
                    log.error("slis.report_refused", number=begin, reason=error.reason, error=error.message)
                    self._kept[at] = SliReport(batch[0].cut_unix_s, {}, {})  # an empty one has its number
                    self._lost += 1
                at_once = 1
                continue
            progress = receipt.last != self._last
            self._last = receipt.last
            while self._kept and self._first <= receipt.durable:
                self._kept.popleft()
                self._first += 1
            if not progress or self._last >= self._first + len(self._kept) - 1:
                return

    def _keep(self, report: SliReport) -> None:
        self._kept.append(report)
        if len(self._kept) > MAX_KEPT:
            self._kept.popleft()
            self._lost += self._first > self._last
            self._first += 1
