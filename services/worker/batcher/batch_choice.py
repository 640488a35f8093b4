"""The rows that wait in a batcher: whether one may wait, and which of them make the next batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Final

from services.core.errors import FairwayError, InvalidInput
from services.core.fixed_cost.rows import BatchWindow
from services.core.fixed_cost.signature import TILES, tiles_of
from services.core.fixed_cost.turns import TenantTurns
from services.worker.batcher.policy.arrival_profile import ArrivalProfile
from services.worker.batcher.policy.batch_key import BatchKeys
from services.worker.batcher.policy.cost_curve import CostCurve
from services.worker.batcher.policy.length_buckets import (
    LengthHistogram,
    choose_widths,
    mixed_width,
    width_of,
)
from services.worker.batcher.policy.linger import BatchObjective, Expected, window_of
from services.worker.batcher.policy.start import BatchLimits, Device, Linger, LongBatch, Start, StartCause
from services.worker.batcher.policy.waiting import (
    Tags,
    WaitingRow,
    WaitingRows,
    fitting,
    mean_width,
)
from services.worker.batcher.policy.window import Decided, Window, first_to_start
from services.worker.batcher.runs import BatchRun
from services.worker.batcher.telemetry import BatcherTelemetry
from services.worker.engine_protocol import RowModel
from services.worker.streams.live_row import LiveRow

ROWS_PER_CHOICE: Final = 1024  # rows after which the widths are chosen again
FIRST_ROWS: Final = 64  # rows before the first choice


class ArrivingRows:
    """What is observed of arriving rows: lengths, widths of padding, and when the next rows come.

    ``now_s`` never falls.
    """

    def __init__(self, max_tokens: int, *, pads: bool = True) -> None:
        """``max_tokens`` 0: rows have no length, and one width, 0. Without ``pads`` a width is a length."""
        self._profile = ArrivalProfile()
        self._histogram = LengthHistogram(max_tokens) if max_tokens and pads else None
        self._widths: tuple[int, ...] = (max_tokens,)
        self._counts: Counter[int] = Counter()  # rows of each width since the widths were chosen
        self._until_choice = FIRST_ROWS

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    def note(self, length: int, now_s: float) -> int:
        """Count a row, and return the width to which it is padded."""
        self._profile.arrived(now_s)
        if self._histogram is not None:
            self._histogram.note(length)
        self._until_choice -= 1
        if not self._until_choice:
            self._until_choice = ROWS_PER_CHOICE
            self._choose()
        width = length if self._histogram is None else width_of(self._widths, length)
        self._counts[width] += 1
        return width

    def _choose(self) -> None:
        """Choose the widths of padded rows again; otherwise halve the counts, so that old sizes go."""
        if self._histogram is None:
            self._counts = Counter({width: rows // 2 for width, rows in self._counts.items() if rows > 1})
        elif (widths := choose_widths(self._histogram)) != self._widths:
            self._widths = widths
            self._counts.clear()

    def ended(self, rows: int, now_s: float) -> None:
        """Count a batch whose answers are on their way."""
        self._profile.ended(rows, now_s)

    def expected(self, width: int | None, now_s: float) -> Expected:
        """Return which arrivals of this width, or of all widths for None, are expected."""
        share = 1.0 if width is None else self._counts[width] / max(1, self._counts.total())
        returning = tuple((wait_s, back * share) for wait_s, back in self._profile.returning(now_s))
        return Expected(self._profile.rate_per_s(now_s) * share, returning)


TURN_RATIO: Final = 0.5  # most of the objective that a batch takes while tenants share the device
_LOOKS: Final = 8  # most looks in vain for rows to run between the layers of one batch
_TRANSPORT_GAIN: Final = 0.02  # weight of a row in the mean


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """Rows that start now."""

    rows: list[LiveRow]
    # Tokens to which they are padded, or that stand for them where they are packed.
    width: int
    cause: StartCause
    # How the start was derived; None: between the layers of another batch.
    window: BatchWindow | None = None
    # Rows that the batch might have had; 0: as many as the limits allow.
    most_rows: int = 0


class BatchChoice:
    """Single writer: the batcher. Times are of one monotonic clock."""

    def __init__(
        self,
        version_digest: str,
        model: RowModel,
        *,
        limits: BatchLimits,
        curve: CostCurve,
        window: Window,
        telemetry: BatcherTelemetry | None,
    ) -> None:
        """``window`` decides when a batch starts."""
        self._model = model
        self._limits = limits
        self._curve = curve
        self._window = window
        self._telemetry = telemetry
        self._objective = BatchObjective()
        self._has_tokens = model.has_tokens
        self._length_of: Callable[[Sequence[int]], int] = itemgetter(0) if self._has_tokens else tiles_of
        self._arrivals = ArrivingRows(model.max_tokens, pads=self._has_tokens)
        self._keys = BatchKeys(version_digest, model.operation, model.dtype, has_length=self._has_tokens)
        self._waiting = WaitingRows()
        self._rows: dict[int, LiveRow] = {}  # waiting rows by number
        self._turns = TenantTurns()
        self._transport_s = 0.0  # mean seconds that an answer travels, as gateways observe it

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[LiveRow]:
        """Return the rows that wait."""
        return list(self._rows.values())

    def add(self, row: LiveRow, now_s: float, running: BatchRun | None) -> FairwayError | None:
        """Let the row wait, or return why it cannot. ``running`` is the batch of the serving process."""
        spec, most = row.spec, self._model.max_tokens
        if spec.transport_s:
            self._transport_s += _TRANSPORT_GAIN * (spec.transport_s - self._transport_s)
        if most:
            lengths = [self._length_of(tensor.shape) for tensor in spec.inputs if tensor.shape]
            row.length = max(lengths, default=0)
            if not 1 <= row.length <= most:
                unit = "tokens" if self._has_tokens else TILES
                return InvalidInput(f"the row has {row.length} {unit}; the model takes 1 to {most}")
            row.tokens = row.length if self._has_tokens else 0
        width = self._arrivals.note(row.length, now_s)
        target_s = spec.target_s or self._objective.latency_s
        self._turns.seen(spec.tenant_id, now_s)
        waiting = WaitingRow(
            row.number,
            spec.tenant_id,
            self._keys.of(spec.inputs),
            width,
            now_s,
            now_s + target_s - spec.waited_s,
            target_s,
            row.deadline_s,
            sum(len(tensor.data) for tensor in spec.inputs),
            spec.tenant_weight,
        )
        error = self._waiting.add(
            waiting,
            self._curve,
            self._limits,
            now_s=now_s,
            busy_until_s=0.0 if running is None else running.began_s + self._mean_s(running),
            transport_s=spec.transport_s / 2,  # the way back
        )
        if error is not None:
            return error
        self._rows[row.number] = row
        return None

    def take(self, rows: Iterable[LiveRow]) -> list[LiveRow]:
        """Remove and return those of the rows that wait."""
        found = [row for row in rows if row.number in self._rows]
        self._waiting.remove(row.number for row in found)
        for row in found:
            del self._rows[row.number]
        return found

    def take_late(self, now_s: float) -> list[LiveRow]:
        """Remove and return the rows whose deadline passes before they can be computed."""
        late = self._waiting.unmeetable(self._curve, now_s=now_s)
        return self.take([self._rows[row.number] for row in late])

    def ended(self, rows: int, now_s: float) -> None:
        """Count a batch whose answers are on their way."""
        self._arrivals.ended(rows, now_s)

    def charge(self, rows: Sequence[LiveRow], width: int, now_s: float) -> None:
        """Charge the turns of the tenants for a batch that starts."""
        row_s = self._curve.mean_s(width, len(rows)) / len(rows)
        shares: dict[str, float] = {}
        for row in rows:
            tenant = row.spec.tenant_id
            shares[tenant] = shares.get(tenant, 0.0) + row_s / row.spec.tenant_weight
        self._turns.started(shares)
        for tenant in shares:
            self._turns.seen(tenant, now_s)

    def check_integrity(self) -> None:
        self._waiting.check_integrity()
        assert set(self._rows) == set(self._waiting.numbers()), "rows wait without their batch key"

    # --- the next batch -------------------------------------------------------------------------

    def next(self, now_s: float, *, draining: bool) -> ChosenBatch | Linger | None:
        """Return the batch of an idle device, or how long it does well to wait. None without rows."""
        shared = self._turns.are_shared(now_s)
        least_s = self._waiting.least_target_s(self._objective.latency_s) if shared else math.inf
        device = Device(
            self._curve,
            self._limits,
            self._objective.level,
            transport_s=self._transport_s,
            draining=draining,
            turn_s=TURN_RATIO * least_s,
        )
        tags = self._tags(device) if shared else None
        decided = first_to_start(self._decided(device, tags, now_s), self._curve, now_s)
        if decided is None:
            return None
        if isinstance(decided.found, Linger):
            return decided.found
        return self._chosen(decided, decided.found, device, tags, now_s)

    def between(self, running: BatchRun, now_s: float) -> ChosenBatch | None:
        """Return rows of other tenants to run between the layers of a batch, the least tag first, if that
        pays."""
        own = {row.spec.tenant_id for row in running.rows}
        if now_s < running.look_s or own.issuperset(self._waiting.tenants):
            return None
        whole_s = self._mean_s(running)
        left_s = running.began_s + running.paused_s + whole_s - now_s
        long_batch = LongBatch(len(running.rows), whole_s, left_s, running.lent_s)
        if not long_batch.most_s:
            return None
        device = Device(self._curve, self._limits)
        tags = self._tags(device)
        for key, group in self._waiting.groups(tags):
            most, _ = device.rows_at(group.width)
            found = self._waiting.select(key, group.width, most, tags, without=own)
            others = len(running.rows)
            rest, _ = fitting(found, self._limits, others=others, other_tokens=others * running.width)
            if count := long_batch.rows_between(self._curve, width=group.width, rows=rest):
                rows = self._started(found[:count], group.width, now_s)
                return ChosenBatch(rows, group.width, StartCause.BETWEEN)
        running.look_s = now_s + whole_s / _LOOKS
        return None

    def _tags(self, device: Device) -> Tags:
        row_s = cache(device.row_s)
        rows = self._waiting.by_due()
        return self._turns.tags((row.number, row.tenant, row_s(row.width) / row.weight) for row in rows)

    def _decided(self, device: Device, tags: Tags | None, now_s: float) -> Iterator[Decided]:
        """Yield the decision on each group, in their order.

        A model that packs computes rows of all widths together. While tenants share the device it does not:
        short rows would wait for long ones of others.
        """
        mixes = self._model.packs and tags is None
        groups = self._waiting.mixed_groups(mixed_width) if mixes else self._waiting.groups(tags)
        for key, group in groups:
            expected = self._arrivals.expected(None if group.mixed else group.width, now_s)
            found = self._window.decide(group, device, expected, now_s)
            if self._telemetry is not None:
                self._telemetry.decided(width=group.width, linger_s=found.bound.linger_s)
            yield Decided(key, group, found, expected)

    def _chosen(
        self, decided: Decided, found: Start, device: Device, tags: Tags | None, now_s: float
    ) -> ChosenBatch:
        group = decided.group
        chosen = self._waiting.select(decided.key, None if group.mixed else group.width, found.rows, tags)
        count, cut = fitting(chosen, self._limits)
        chosen = chosen[:count]
        width = mixed_width(mean_width(chosen)) if group.mixed else group.width
        if group.mixed:  # neighbours of one length are computed together
            chosen.sort(key=lambda row: self._rows[row.number].length)
        rows = self._started(chosen, width, now_s)
        window = window_of(width, found.bound, decided.expected, group.target_s)
        most_rows = device.rows_of(group)[0] if cut is None else count
        return ChosenBatch(rows, width, cut or found.cause, window, most_rows)

    def _started(self, chosen: Sequence[WaitingRow], width: int, now_s: float) -> list[LiveRow]:
        """Remove rows that start, and charge their tenants' turns."""
        rows = self.take([self._rows[row.number] for row in chosen])
        self.charge(rows, width, now_s)
        return rows

    def _mean_s(self, run: BatchRun) -> float:
        return self._curve.mean_s(run.width, len(run.rows))
