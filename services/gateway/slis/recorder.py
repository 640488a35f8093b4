"""What this gateway's requests were like since the last report, by arm; each request counts when it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from services.core import faults
from services.core.arms import (
    ArmKey,
    ArmWindow,
    GateWindow,
    SliKey,
    SliReport,
    SliSums,
    cluster_of,
    latency_sketch,
    prompt_size,
    session_hash,
)
from services.core.estimates.sketch import Sketch
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind, TrafficShapes
from services.core.faults import Fault, fault_of
from services.core.generation import Sampling, Usage
from services.core.rollouts.routes import SHADOW_TENANT
from services.runtime.telemetry.metrics import GAP_S, LabelCap, Metrics

MAX_SERIES: Final = 512
MAX_ARMS: Final = 32  # arms of steps in one report: 64 clusters each
MAX_MODELS: Final = 64  # with shapes in one report
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
_MAX_VERSIONS: Final = 200
_DIGEST_CHARS: Final = 19  # "sha256:" and 12 digits


@dataclass(frozen=True, slots=True)
class SliSubject:
    """Where a request counts. ``step``: of the rollout that drew its arm; empty: none.

    ``shapes``: of its choices or rows, whose output lengths are not known yet.
    """

    key: SliKey
    session: int = 0
    step: str = ""
    prompt_size: int = 0
    shapes: tuple[RequestShape, ...] = ()


def subject_of(
    key: SliKey, session_key: str, step: str, prompt_tokens: int, shapes: tuple[RequestShape, ...]
) -> SliSubject:
    """Return the subject of an admitted request of any kind. ``step``: of the rollout that routed it."""
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
        self.itl: Sketch = latency_sketch()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. ``reason``: of its error, ``faults.FINISHED`` for none."""

    reason: str
    usage: Usage
    latencies: RequestLatencies

    def sums(self, subject: SliSubject) -> SliSums:
        """Return what it adds."""
        poisoned = self.reason == POISONED
        ours = poisoned or fault_of(self.reason) is Fault.OURS
        finished, started = self.reason == faults.FINISHED, bool(self.latencies.ttft_s)
        counted = ours or finished
        used = self.usage.output_tokens + self.usage.prompt_tokens if started else 0
        found = SliSums(
            requests=int(counted),
            errors=int(ours and not started),
            poisoned=int(poisoned),
            started=int(started and counted),
            broken=int(ours and started),
            finished=int(finished and started),
            output_tokens=self.usage.output_tokens if finished and started else 0,
            tokens=used,
            device_s=self.usage.device_s if started else 0.0,
            itl=self.latencies.itl,
        )
        for ttft_s in self.latencies.ttft_s:
            found.ttft_of(subject.prompt_size).add(ttft_s)
        if counted:
            found.note_session(subject.session)
        return found


class SliRecorder:
    """The sums since the last cut. The event loop is the only writer."""

    def __init__(self, metrics: Metrics | None = None, *, zone: str = "") -> None:
        metrics = metrics if metrics is not None else Metrics()
        self.zone = zone
        self._series: dict[SliKey, SliSums] = {}
        self._windows: dict[tuple[GateWindow, str], dict[int, SliSums]] = {}
        self._shapes: dict[str, TrafficShapes] = {}
        self._models, self._tenants = metrics.models, metrics.tenants
        self._versions = LabelCap(_MAX_VERSIONS)
        by_arm = ("model", "version", "class")
        self._requests = metrics.counter(
            "fairway_sli_requests_total",
            "Requests that count for availability when they end; result is good, error (before a first "
            "token), broken (after it) or poisoned",
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
        self._tokens = metrics.counter(
            "fairway_sli_tokens_total", "Prompt and output tokens of requests that ran", by_arm
        )
        self._output = metrics.counter(
            "fairway_sli_output_tokens_total", "Output tokens of requests that finished", by_arm
        )
        self._device_s = metrics.counter(
            "fairway_sli_device_seconds_total", "Metered device time of requests that ran", by_arm
        )

    def ended(self, subject: SliSubject, end: RequestEnd) -> None:
        """Count a request that ended; a copy for a shadow version in the comparison of its step alone."""
        sums = end.sums(subject)
        if subject.key.tenant != SHADOW_TENANT:
            self._series_of(subject.key).merge(sums)
            self._export(subject.key, sums)
            if sums.finished:
                self._note_shapes(subject, end.usage)
        elif end.reason in _NOT_THE_VERSION:
            return
        # An answer from the cache, or a mistake of the caller, says nothing about the arm.
        if subject.step and (sums.errors or sums.started or sums.tokens):
            arm = self._arm_of(GateWindow(subject.key.arm.model, subject.step), subject.key.arm)
            if arm is not None:
                arm.setdefault(cluster_of(subject.session), SliSums()).merge(sums)

    def cut(self, unix_s: float) -> SliReport | None:
        """Return what was counted since the last cut, None for nothing."""
        if not self._series and not self._windows:
            return None
        windows: dict[GateWindow, dict[str, ArmWindow]] = {}
        for (window, digest), clusters in self._windows.items():
            windows.setdefault(window, {})[digest] = ArmWindow(clusters)
        report = SliReport(unix_s, self._series, windows, self._shapes)
        self._series, self._windows, self._shapes = {}, {}, {}
        return report

    def _note_shapes(self, subject: SliSubject, usage: Usage) -> None:
        model = subject.key.arm.model
        if not subject.shapes or (model not in self._shapes and len(self._shapes) >= MAX_MODELS):
            return
        found = self._shapes.setdefault(model, TrafficShapes())
        output_tokens = -(-usage.output_tokens // len(subject.shapes))
        for shape in subject.shapes:
            found.add(replace(shape, output_tokens=output_tokens))

    def _series_of(self, key: SliKey) -> SliSums:
        """Return the sums of a key. With too many keys, further tenants share one."""
        if key not in self._series and len(self._series) >= MAX_SERIES:
            key = replace(key, tenant=OTHER_TENANTS)
            if key not in self._series and len(self._series) >= 2 * MAX_SERIES - 1:
                key = SliKey(ArmKey(OTHER_TENANTS, ""), OTHER_TENANTS, key.priority)
        return self._series.setdefault(key, SliSums())

    def _arm_of(self, window: GateWindow, arm: ArmKey) -> dict[int, SliSums] | None:
        found = self._windows.get((window, arm.version_digest))
        if found is None and len(self._windows) < MAX_ARMS:
            found = self._windows[window, arm.version_digest] = {}
        return found

    def _export(self, key: SliKey, sums: SliSums) -> None:
        model, tenant = self._models.of(key.arm.model), self._tenants.of(key.tenant)
        arm = model, self._versions.of(key.arm.version_digest[:_DIGEST_CHARS]), key.priority.value
        if sums.requests:
            result = "poisoned" if sums.poisoned else "broken" if sums.broken else "error"
            self._requests.add(*arm, tenant, result if sums.errors or sums.broken else "good")
        ttft, itl = self._ttft.cell(*arm), self._itl.cell(*arm)
        for sketch in sums.ttft.values():
            for value, weight in sketch.values():
                ttft.observe(value, round(weight))
        for value, weight in sums.itl.values():
            itl.observe(value, round(weight))
        self._tokens.add(*arm, amount=sums.tokens)
        self._output.add(*arm, amount=sums.output_tokens)
        self._device_s.add(*arm, amount=sums.device_s)
