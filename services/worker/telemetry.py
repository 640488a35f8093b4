"""Telemetry of the worker's engines and sequences: metrics, a log line per sequence, spans.

A step costs three binary searches, whatever its size; a sequence costs work only at its end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from services.core.generation import NotAdmittedReason
from services.ports.clock import Clock
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.metrics import COUNTS, GAP_S, LATENCY_S, Labels, Metrics, Reading
from services.runtime.telemetry.tracing import Tracing
from services.worker.batcher.telemetry import BatchInstruments
from services.worker.engine_protocol import Stepped
from services.worker.step_recorder import StepRecorder
from services.worker.streams.live_sequence import WorkerSequence

log = structlog.get_logger()

_LOAD_S: Final = (*LATENCY_S, 1800.0)


@dataclass(frozen=True, slots=True)
class EngineLevels:
    """The current levels of one version."""

    model: str  # the deployment's name
    state: str  # phase of the slot
    kv_blocks_used: int  # allocated in the engine
    kv_blocks_reserved: int  # blocks reserved for sequences with a slot
    kv_blocks_total: int  # size of the pool
    # Sequences with a slot and a token.
    running: int
    # Sequences without a token, or waiting to return.
    waiting: int
    # Sequences without credit.
    parked: int
    # Prompt tokens accepted and not yet prefilled.
    queued_prefill_tokens: int
    # Time since the engine's last message.
    silent_s: float
    # Resident memory of the engine process.
    rss_bytes: int
    # Granted device memory.
    device_bytes: int
    # Rows of a fixed-cost version in batches that run.
    rows_running: int = 0
    # Rows that wait for a batch.
    rows_waiting: int = 0


_BY_MODEL: Final[Labels] = ("model",)


class WorkerTelemetry:
    """The instruments of a worker process."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        clock: Clock,
        tracing: Tracing | None = None,
        lines: LineBudget | None = None,
    ) -> None:
        """Without ``metrics`` the counts are not exported."""
        self.clock = clock
        self.metrics = metrics = metrics if metrics is not None else Metrics()
        self.tracing = tracing if tracing is not None else Tracing(clock)
        self._lines = lines
        self.step_s = metrics.histogram(
            "fairway_worker_step_seconds",
            "Engine step: from its plan until its tokens are sampled",
            _BY_MODEL,
            bounds=GAP_S,
        )
        self.batch = metrics.histogram(
            "fairway_worker_step_sequences", "Sequences with a token in a step", _BY_MODEL, bounds=COUNTS
        )
        self.tokens = metrics.counter(
            "fairway_worker_tokens_total", "Computed tokens: prefill and output", ("model", "kind")
        )
        self.steps = _StepCounters(metrics)
        self.batches = BatchInstruments(metrics)
        self.preemptions = metrics.counter(
            "fairway_worker_preemptions_total", "Sequences whose KV was released for others", _BY_MODEL
        )
        self.shared_lost = metrics.counter(
            "fairway_worker_shared_blocks_lost_total",
            "Shared KV blocks evicted before use, which sequences computed again",
            _BY_MODEL,
        )
        self.recorder = StepRecorder(clock, metrics)
        self._open_engines(metrics)

    def _open_engines(self, metrics: Metrics) -> None:
        self._ended = metrics.counter(
            "fairway_worker_sequences_ended_total", "Sequences that ended, by reason", ("model", "reason")
        )
        self._restarts = metrics.counter(
            "fairway_worker_engine_restarts_total",
            "Engine processes that exited, or were killed for hanging",
            _BY_MODEL,
        )
        self._lacked_memory = metrics.counter(
            "fairway_worker_out_of_memory_total",
            "Engine processes that ended for want of memory while they loaded or served: an allocation "
            "failed, or the kernel killed it",
            ("model", "while"),
        )
        self.flops = metrics.counter(
            "fairway_worker_model_flops_total",
            "Floating-point operations of the model for the computed tokens, without attention's; absent for "
            "models whose number is unknown",
            _BY_MODEL,
        )
        self._damaged = metrics.counter(
            "fairway_worker_damaged_model_folders_total", "Cached model versions found damaged"
        )
        self._not_admitted = metrics.counter(
            "fairway_worker_not_admitted_total", "Starts rejected with NOT_ADMITTED, by reason", ("reason",)
        )
        self._fallback_starts = metrics.counter(
            "fairway_worker_fallback_starts_total", "Sequences accepted from fallback placement"
        )
        self._load = metrics.histogram(
            "fairway_worker_load_seconds",
            "Version load, by part: fetch, the download of its files; engine, from its start until it is "
            "loaded; probe, until the version has answered its probe",
            ("model", "part"),
            bounds=_LOAD_S,
        )

    def version(self, model: str, flops_per_token: int = 0) -> VersionTelemetry:
        """Return the instruments of one engine. ``flops_per_token`` 0: unknown."""
        self.expect(model)
        return VersionTelemetry(self, model, self.metrics.models.of(model), flops_per_token)

    def expect(self, model: str) -> None:
        """Export the model's failures from 0 on: a series that begins above 0 shows no increase."""
        label = self.metrics.models.of(model)
        self._restarts.cell(label)
        for during in ("load", "serve"):
            self._lacked_memory.cell(label, during)
        self._damaged.cell()

    def restarted(self, model: str) -> None:
        """Count an engine process that ended without a request to stop."""
        self._restarts.add(self.metrics.models.of(model))

    def lacked_memory(self, model: str, during: str) -> None:
        """Count an engine process that ended for want of memory."""
        self._lacked_memory.add(self.metrics.models.of(model), during)

    def found_damaged(self) -> None:
        """Count a version whose local files differ from what was published."""
        self._damaged.add()

    def not_admitted(self, reason: NotAdmittedReason) -> None:
        self._not_admitted.add(reason.value)

    def fallback_started(self) -> None:
        """Count an accepted sequence of a fallback placement."""
        self._fallback_starts.add()

    def loaded(self, model: str, part: str, elapsed_s: float) -> None:
        self._load.observe(elapsed_s, self.metrics.models.of(model), part)

    def ended(self, model: str, label: str, sequence: WorkerSequence, reason: str) -> None:
        self._ended.add(label, reason)
        now_s = self.clock.monotonic_s()
        spec = sequence.spec
        if spec.traceparent:
            self._trace(sequence, model, reason, now_s)
        if self._lines is not None and self._lines.take():
            log.info(
                "sequence.ended",
                request_id=spec.generation.request_id,
                choice=spec.choice,
                tenant=spec.tenant_id,
                model=model,
                reason=reason,
                fallback=sequence.fallback,
                output_tokens=sequence.output_tokens,
                engine_wait_ms=_ms(sequence.accepted_s, sequence.prefill_started_s),
                prefill_ms=_ms(sequence.prefill_started_s, sequence.first_token_s),
                decode_ms=_ms(sequence.first_token_s, now_s),
            )

    def _trace(self, sequence: WorkerSequence, model: str, reason: str, now_s: float) -> None:
        spec, record = sequence.spec, self.tracing.record
        whole = record(
            "sequence",
            spec.traceparent,
            (sequence.accepted_s, now_s),
            attributes={
                "fairway.request_id": spec.generation.request_id,
                "fairway.choice": spec.choice,
                "fairway.model": model,
                "fairway.reason": reason,
                "fairway.fallback": sequence.fallback,
                "fairway.output_tokens": sequence.output_tokens,
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": sequence.prompt_tokens,
                "gen_ai.usage.output_tokens": sequence.output_tokens,
            },
        )
        started_s, first_s = sequence.prefill_started_s, sequence.first_token_s
        record("engine_wait", whole, (sequence.accepted_s, now_s if started_s is None else started_s))
        if started_s is not None:
            record("prefill", whole, (started_s, now_s if first_s is None else first_s))
        if first_s is not None:
            record("decode", whole, (first_s, now_s))


class _StepCounters:
    """The counters of steps, except of prefilled and output tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self.device_s = metrics.counter(
            "fairway_worker_device_seconds_total",
            "Time of engine steps: shares of prefills and decodes; unattributed: steps that computed nothing",
            ("model", "kind"),
        )
        self.attended = metrics.counter(
            "fairway_worker_attended_tokens_total", "KV tokens read by decode steps", _BY_MODEL
        )
        self.proposed = metrics.counter(
            "fairway_worker_proposed_tokens_total",
            "Tokens proposed by speculation and verified",
            _BY_MODEL,
        )
        self.accepted = metrics.counter(
            "fairway_worker_accepted_tokens_total",
            "Proposed tokens that the model accepted",
            _BY_MODEL,
        )


class VersionTelemetry:
    """The instruments of one engine process of one version."""

    __slots__ = (
        "_accepted",
        "_attended",
        "_batch",
        "_decode_s",
        "_flops",
        "_flops_per_token",
        "_label",
        "_model",
        "_output",
        "_owner",
        "_preempted",
        "_preemptions",
        "_prefill",
        "_prefill_s",
        "_proposed",
        "_shared_lost",
        "_shared_lost_blocks",
        "_step_s",
        "_unattributed_s",
    )

    def __init__(self, owner: WorkerTelemetry, model: str, label: str, flops_per_token: int) -> None:
        self._owner = owner
        self._flops_per_token = flops_per_token
        self._flops = owner.flops.cell(label) if flops_per_token else None
        self._model = model
        self._label = label
        self._step_s = owner.step_s.cell(label)
        self._batch = owner.batch.cell(label)
        self._prefill = owner.tokens.cell(label, "prefill")
        self._output = owner.tokens.cell(label, "output")
        self._prefill_s = owner.steps.device_s.cell(label, "prefill")
        self._decode_s = owner.steps.device_s.cell(label, "decode")
        self._unattributed_s = owner.steps.device_s.cell(label, "unattributed")
        self._attended = owner.steps.attended.cell(label)
        self._proposed = owner.steps.proposed.cell(label)
        self._accepted = owner.steps.accepted.cell(label)
        self._preemptions = owner.preemptions.cell(label)
        self._preempted = 0
        self._shared_lost = owner.shared_lost.cell(label)
        self._shared_lost_blocks = 0

    def stepped(self, event: Stepped, *, shared_lost_blocks: int = 0) -> None:
        """Count a step. ``shared_lost_blocks``: the total since the engine's start; blocks lost in this step
        are counted with the next one, which computes them."""
        count = len(event.handles)
        self._step_s.observe(event.step_s)
        if count:
            self._batch.observe(len(set(event.handles)) if event.accepted_tokens else count)
            self._output.value += count
            self._attended.value += event.attended_tokens
        if event.attended_tokens or event.prefill_tokens:
            self._decode_s.value += max(0.0, event.step_s - event.prefill_s)
        else:
            self._unattributed_s.value += event.step_s
        if self._flops is not None:
            self._flops.value += self._flops_per_token * (count + event.prefill_tokens)
        if event.prefill_tokens:
            self._prefill.value += event.prefill_tokens
            self._prefill_s.value += event.prefill_s
        if event.proposed_tokens:
            self._proposed.value += event.proposed_tokens
            self._accepted.value += event.accepted_tokens
        if event.preemptions != self._preempted:
            self._preemptions.add(event.preemptions - self._preempted)
            self._preempted = event.preemptions
        if shared_lost_blocks != self._shared_lost_blocks:
            self._shared_lost.value += shared_lost_blocks - self._shared_lost_blocks
            self._shared_lost_blocks = shared_lost_blocks

    def ended(self, sequence: WorkerSequence, reason: str) -> None:
        self._owner.ended(self._model, self._label, sequence, reason)


def export_levels(metrics: Metrics, engines: Callable[[], Iterable[EngineLevels]]) -> None:
    """Export the levels of the worker's versions; two versions of one deployment are combined."""
    label = metrics.models.of

    def together(join: _Join, of: Callable[[EngineLevels], Mapping[Labels, float]]) -> Callable[[], Reading]:
        def read() -> Reading:
            found: dict[Labels, float] = {}
            for engine in engines():
                for rest, value in of(engine).items():
                    key = (label(engine.model), *rest)
                    found[key] = join(found.get(key, 0.0), value)
            return found.items()

        return read

    for name, text, states in _BY_STATE:
        metrics.gauge(name, text, together(operator.add, states), ("model", "state"))
    for name, text, join, of in _GAUGES:
        metrics.gauge(name, text, together(join, _alone(of)), ("model",))


def _alone(of: Callable[[EngineLevels], float]) -> Callable[[EngineLevels], Mapping[Labels, float]]:
    return lambda engine: {(): of(engine)}


_Join = Callable[[float, float], float]
_BY_STATE: Final[tuple[tuple[str, str, Callable[[EngineLevels], Mapping[Labels, float]]], ...]] = (
    (
        "fairway_worker_kv_blocks",
        "KV blocks: used, reserved for running sequences, total",
        lambda engine: {
            ("used",): engine.kv_blocks_used,
            ("reserved",): engine.kv_blocks_reserved,
            ("total",): engine.kv_blocks_total,
        },
    ),
    (
        "fairway_worker_sequences",
        "Sequences: running, waiting, and parked until their clients read",
        lambda engine: {
            ("running",): engine.running,
            ("waiting",): engine.waiting,
            ("parked",): engine.parked,
        },
    ),
    (
        "fairway_worker_rows",
        "Rows of fixed-cost versions: running in batches, waiting for one",
        lambda engine: {("running",): engine.rows_running, ("waiting",): engine.rows_waiting},
    ),
    (
        "fairway_worker_version_state",
        "Versions of a deployment in each state",
        lambda engine: {(engine.state,): 1.0},
    ),
)
_GAUGES: Final[tuple[tuple[str, str, _Join, Callable[[EngineLevels], float]], ...]] = (
    (
        "fairway_worker_queued_prefill_tokens",
        "Prompt tokens accepted and not yet prefilled",
        operator.add,
        lambda engine: float(engine.queued_prefill_tokens),
    ),
    (
        "fairway_worker_engine_silence_seconds",
        "Time since the engine's last report, due after each step and each second",
        max,
        lambda engine: engine.silent_s,
    ),
    (
        "fairway_worker_engine_rss_bytes",
        "Resident memory of the engine process",
        operator.add,
        lambda engine: float(engine.rss_bytes),
    ),
    (
        "fairway_worker_device_memory_bytes",
        "Device memory granted to an engine: weights, workspace and KV",
        operator.add,
        lambda engine: float(engine.device_bytes),
    ),
)


def _ms(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else round((end_s - start_s) * 1e3, 3)
