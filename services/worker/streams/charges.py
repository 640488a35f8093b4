"""Usage of tenants and sequences since the last report to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from services.core.fleet import SequenceUsage, TenantTokens
from services.core.generation import FinishReason
from services.core.records import Priority
from services.worker.engine_protocol import Stepped
from services.worker.streams.device_time import DeviceTime
from services.worker.streams.live_sequence import WorkerSequence

MAX_ENDED: Final = 65536

Key = tuple[str, str, Priority]
MAX_UNSETTLED: Final = 65536


class Tally:
    """Accumulates usage until it is taken. Tokens and rows are counted by (tenant, version, class). The
    newest ``MAX_ENDED`` ended sequences are retained; ``ended_dropped`` counts the others."""

    def __init__(self, *, max_ended: int = MAX_ENDED) -> None:
        self.ended_dropped = 0
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
            self.ended_dropped += 1

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
