"""What tenants and sequences used: since the last report to the scheduler, and of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from services.core.fleet import SequenceUsage, TenantTokens
from services.core.generation import FinishReason, Usage
from services.core.records import Priority
from services.core.usage import DeviceInterval, Residence, SequenceDeviceUse
from services.ports.clock import Clock
from services.ports.usage import UsageOutbox
from services.worker.engine_protocol import Stepped
from services.worker.streams.live_sequence import WorkerSequence

MAX_ENDED: Final = 65536

Key = tuple[str, str, Priority]
MAX_UNSETTLED: Final = 65536
INTERVAL_S: Final = 10.0
IDLE_INTERVAL_S: Final = 60.0  # the interval while nothing runs


class Tally:
    """Accumulates usage until it is taken. Tokens and rows are counted by (tenant, version, class). The
    newest ``MAX_ENDED`` ended sequences are retained."""

    def __init__(self, *, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._prefill: dict[Key, tuple[int, int]] = {}
        self._output: dict[Key, int] = {}
        self._rows: dict[Key, tuple[int, float]] = {}
        self._ended: dict[tuple[str, int], SequenceUsage] = {}

    def add_prefill(self, key: Key, tokens: int, cached_tokens: int) -> None:
        """Count a prompt, ``cached_tokens`` of which came from the prefix cache."""
        had_tokens, had_cached = self._prefill.get(key, (0, 0))
        self._prefill[key] = had_tokens + tokens, had_cached + cached_tokens

    def add_output(self, key: Key, tokens: int) -> None:
        if tokens:
            self._output[key] = self._output.get(key, 0) + tokens

    def add_rows(self, key: Key, rows: int, device_s: float) -> None:
        """Count rows of a fixed-cost model, and the device time of batches that they are charged."""
        had_rows, had_s = self._rows.get(key, (0, 0.0))
        self._rows[key] = had_rows + rows, had_s + device_s

    def add_ended(self, usage: SequenceUsage) -> None:
        """Store the final usage of a sequence; it replaces an earlier one of the same sequence."""
        key = usage.request_id, usage.choice
        self._ended.pop(key, None)
        self._ended[key] = usage
        if len(self._ended) > self._max_ended:
            del self._ended[next(iter(self._ended))]

    def take(self, limit: int) -> tuple[TenantTokens, ...]:
        """Return and remove at most ``limit`` entries, in order of tenant, version and class."""
        keys = sorted({*self._prefill, *self._output, *self._rows})[:limit]
        found: list[TenantTokens] = []
        for tenant, digest, priority in keys:
            key = tenant, digest, priority
            prefill, cached = self._prefill.pop(key, (0, 0))
            output = self._output.pop(key, 0)
            rows, device_s = self._rows.pop(key, (0, 0.0))
            device_us = round(device_s * 1e6)
            found.append(TenantTokens(tenant, digest, prefill, output, priority, cached, rows, device_us))
        return tuple(found)

    def take_ended(self, limit: int) -> tuple[SequenceUsage, ...]:
        """Return and remove the final usage of at most ``limit`` sequences, the oldest first."""
        keys = list(self._ended)[:limit]
        return tuple(self._ended.pop(key) for key in keys)


class UsageAccounting:
    """Charges each token once. Single writer: the sequence table; tally and device are the worker's.

    The engine settles a sequence after its end, since a step under way may be charged to it.
    """

    def __init__(
        self,
        tally: Tally,
        device: DeviceTime | None = None,
        *,
        max_unsettled: int = MAX_UNSETTLED,
    ) -> None:
        """Without ``device`` no device time is reported."""
        self._tally = tally
        self._device = device
        self._max_unsettled = max_unsettled
        self._unsettled: dict[int, tuple[WorkerSequence, float]] = {}  # ended, and when
        self._uncharged_s = 0.0  # time of steps that computed, not charged to any sequence yet

    @property
    def unsettled(self) -> int:
        """How many ended sequences the engine has not settled."""
        return len(self._unsettled)

    @property
    def uncharged_s(self) -> float:
        """Time of steps that computed which no sequence has been charged yet."""
        return self._uncharged_s

    def note_step(self, event: Stepped, live: Mapping[int, WorkerSequence]) -> None:
        """Add the time of a step, and the charges that the engine reports with it."""
        computed = event.prefill_tokens or event.attended_tokens
        if self._device is not None:
            self._device.busy_s += event.step_s
            if computed:
                self._device.attributed_s += event.step_s
        if computed:
            self._uncharged_s += event.step_s
        for number, total_us in event.device_us.items():
            sequence = live.get(number)
            if sequence is None and (ended := self._unsettled.get(number)) is not None:
                sequence = ended[0]
            if sequence is not None:
                self._charge(sequence, total_us - sequence.device_us)

    def settle(self, numbers: Iterable[int]) -> None:
        """Report ended sequences that are charged no more."""
        for number in numbers:
            if (ended := self._unsettled.pop(number, None)) is not None:
                self._report(*ended)

    def share_uncharged(self, running: Iterable[WorkerSequence]) -> None:
        """Share what an ended engine had not charged equally over the sequences that it ran."""
        sequences = [*running, *(sequence for sequence, _ in self._unsettled.values())]
        charge_us = round(max(0.0, self._uncharged_s) * 1e6 / max(1, len(sequences)))
        for sequence in sequences:
            self._charge(sequence, charge_us)
        if self._device is not None:
            self._device.attributed_s -= self._uncharged_s
        self._uncharged_s = 0.0

    def settle_all(self) -> None:
        """Report every ended sequence: the engine process has ended too."""
        self.settle(list(self._unsettled))

    def add_prefill(self, sequence: WorkerSequence) -> None:
        """Charge the prefilled tokens. Called once, with the first token."""
        tokens = sequence.spec.prefill_tokens
        self._tally.add_prefill(self._key_of(sequence), tokens, sequence.cached_tokens)

    def add_output(self, sequence: WorkerSequence) -> None:
        """Charge the output since the last call."""
        output = sequence.output_tokens
        self._tally.add_output(self._key_of(sequence), output - sequence.charged_output)
        sequence.charged_output = output

    def add_ended(self, sequence: WorkerSequence, reason: FinishReason, now_s: float) -> None:
        """Add the final record of a sequence; ``ended`` is true if it completed its output."""
        generation = sequence.spec.generation
        self._tally.add_ended(
            SequenceUsage(
                request_id=generation.request_id,
                choice=sequence.spec.choice,
                tenant=sequence.spec.tenant_id,
                digest=sequence.version_digest,
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=sequence.output_tokens,
                cached_tokens=min(sequence.cached_tokens, sequence.prompt_tokens),
                ended=reason in (FinishReason.STOP, FinishReason.LENGTH),
                placed_alone=sequence.fallback,
                priority=generation.priority,
            )
        )
        self._unsettled[sequence.number] = sequence, now_s
        if len(self._unsettled) > self._max_unsettled:
            self.settle([next(iter(self._unsettled))])

    def _charge(self, sequence: WorkerSequence, charge_us: int) -> None:
        sequence.device_us += charge_us
        self._uncharged_s -= charge_us / 1e6

    def _report(self, sequence: WorkerSequence, ended_s: float) -> None:
        if self._device is not None:
            self._device.sequence_ended(sequence, ended_s)

    def _key_of(self, sequence: WorkerSequence) -> Key:
        return sequence.spec.tenant_id, sequence.version_digest, sequence.spec.generation.priority


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A worker's device, as reported. ``cost_per_hour`` is in any one currency; 0: unknown."""

    worker_id: str
    device_type: str = ""
    cost_per_hour: float = 0.0


class DeviceTime:
    """Device time of a worker, reported to the usage outbox by sequence and by interval.

    ``busy`` time is that of engine steps; sequences are charged the ``attributed`` part of it. Where several
    engines run at once on the device their steps overlap: busy time is their sum, and idle time what is left
    of the interval, if anything. Single writer: the worker's event loop.
    """

    def __init__(
        self,
        kind: DeviceKind,
        outbox: UsageOutbox,
        clock: Clock,
        *,
        residents: Callable[[], tuple[Residence, ...]] = tuple,
    ) -> None:
        """``residents`` returns what is loaded now: an interval's idle time is charged to what is loaded at
        its end."""
        self._residents = residents
        self._kind = kind
        self._outbox = outbox
        self._clock = clock
        self.busy_s = 0.0
        self.attributed_s = 0.0
        self._began_s = self._interval_s = clock.monotonic_s()
        self._interval_unix_s = clock.unix_s()
        self._reported_busy_s = 0.0
        self._reported_attributed_s = 0.0
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Time since the start in which no engine was in a step. It never falls."""
        elapsed_s = self._clock.monotonic_s() - self._began_s
        self._idle_s = max(self._idle_s, elapsed_s - self.busy_s)
        return self._idle_s

    def sequence_ended(self, sequence: WorkerSequence, ended_s: float) -> None:
        """Report a sequence that ended at ``ended_s``, monotonic, and is charged no more."""
        spec = sequence.spec
        self._report_use(
            request_id=spec.generation.request_id,
            choice=spec.choice,
            tenant=spec.tenant_id,
            model=sequence.model,
            version_digest=sequence.version_digest,
            usage=usage_here(sequence),
            age_s=self._clock.monotonic_s() - ended_s,
        )

    def rows_ended(
        self, *, request_id: str, tenant: str, model: str, version_digest: str, usage: Usage
    ) -> None:
        """Report the rows of one request that ran on this worker, once the last has ended."""
        self._report_use(
            request_id=request_id,
            choice=0,
            tenant=tenant,
            model=model,
            version_digest=version_digest,
            usage=usage,
            age_s=0.0,
        )

    def sweep(self, now_s: float) -> None:
        """Report the interval when it is due: sooner if an engine ran in it."""
        elapsed_s = now_s - self._interval_s
        if elapsed_s >= INTERVAL_S and (self.busy_s > self._reported_busy_s or elapsed_s >= IDLE_INTERVAL_S):
            self._report(now_s)

    def close(self) -> None:
        """Report the interval under way."""
        self._report(self._clock.monotonic_s())

    def _report_use(
        self,
        *,
        request_id: str,
        choice: int,
        tenant: str,
        model: str,
        version_digest: str,
        usage: Usage,
        age_s: float,
    ) -> None:
        kind = self._kind
        self._outbox.add(
            SequenceDeviceUse(
                request_id=request_id,
                choice=choice,
                tenant=tenant,
                model=model,
                version_digest=version_digest,
                worker_id=kind.worker_id,
                device_type=kind.device_type,
                cost_per_hour=kind.cost_per_hour,
                ended_unix_s=self._clock.unix_s() - age_s,
                usage=usage,
                device_s=usage.device_s,
            )
        )

    def _report(self, now_s: float) -> None:
        began_unix_s, ended_unix_s = self._interval_unix_s, self._clock.unix_s()
        busy_s = self.busy_s - self._reported_busy_s
        # What corrects an earlier interval by more than this one has is left to the next.
        attributed_s = min(busy_s, max(0.0, self.attributed_s - self._reported_attributed_s))
        self._interval_s, self._interval_unix_s = now_s, ended_unix_s
        self._reported_busy_s += busy_s
        self._reported_attributed_s += attributed_s
        kind = self._kind
        self._outbox.add(
            DeviceInterval(
                kind.worker_id,
                kind.device_type,
                kind.cost_per_hour,
                began_unix_s,
                ended_unix_s,
                busy_s=busy_s,
                attributed_s=attributed_s,
                residents=self._residents(),
            )
        )


def usage_here(sequence: WorkerSequence) -> Usage:
    """Return the tokens that this worker computed or read from its cache, without output of earlier runs."""
    prefilled = sequence.spec.prefill_tokens
    if sequence.first_token_s is None:
        prefilled -= sequence.prefill_left
    return Usage(
        prompt_tokens=min(prefilled, sequence.prompt_tokens),
        output_tokens=sequence.output_tokens - len(sequence.spec.produced_ids),
        cached_tokens=min(sequence.cached_tokens, sequence.prompt_tokens),
        device_s=sequence.device_us / 1e6,
    )
