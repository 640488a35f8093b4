"""Clients, one batcher and one device, on the kernel's virtual clock.

The batcher's queue, costs, arrivals and decisions are the production policy. It learns the costs of the
device only from the batches that ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from random import Random
from typing import Final

from services.core.estimates.sketch import Sketch
from services.core.fixed_cost.signature import Operation
from services.worker.batcher.policy.arrival_profile import ArrivalProfile
from services.worker.batcher.policy.batch_key import BatchKey
from services.worker.batcher.policy.cost_curve import CostCurve
from services.worker.batcher.policy.linger import BatchObjective, Expected
from services.worker.batcher.policy.start import (
    BatchLimits,
    Device,
    Start,
    StartCause,
)
from services.worker.batcher.policy.waiting import WaitingRow, WaitingRows
from services.worker.batcher.policy.window import Window
from simulator.batcher.costs import BatchCosts
from simulator.kernel.loop import Limits, VirtualTimeLoop
from simulator.lab.load.arrivals import Arrivals

KEY: Final = BatchKey.of("sha256:simulated", Operation.INFER, "float32", (), {})
WARM_UP_RATIO: Final = 0.1  # share of the rows that are not counted, at the start


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Rows that arrive whatever is answered."""

    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that send their next row some time after an answer."""

    clients: int
    turnaround_s: float = 1e-3  # mean; half of it is fixed


@dataclass(frozen=True, slots=True)
class BatcherSpec:
    """One run."""

    load: OpenLoop | ClosedLoop
    costs: BatchCosts
    window: Window
    rows: int = 20_000
    widths: tuple[tuple[int, float], ...] = ((0, 1.0),)  # width and share of the rows
    limits: BatchLimits = field(default_factory=BatchLimits)
    objective: BatchObjective = field(default_factory=BatchObjective)
    seed: int = 0


@dataclass(slots=True)
class BatcherOutcome:
    """What a run measured, without its warm-up."""

    latencies: Sketch = field(default_factory=Sketch)
    within: int = 0  # answered within the objective
    answered: int = 0
    seconds: float = 0.0
    batches: int = 0
    causes: Counter[StartCause] = field(default_factory=Counter)

    @property
    def per_s(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def p99_s(self) -> float:
        return self.latencies.quantile(0.99) or 0.0

    @property
    def mean_s(self) -> float:
        return self.latencies.mean or 0.0


class BatcherWorld:
    """Runs one spec."""

    def __init__(self, spec: BatcherSpec) -> None:
        self._spec = spec
        self._rng = Random(spec.seed)
        self._loop = VirtualTimeLoop(Limits())
        self._waiting = WaitingRows(most_rows=1 << 20)
        self._curve = CostCurve()
        self._profile = ArrivalProfile()
        self._shares: Counter[int] = Counter()
        self._busy_until_s = 0.0
        self._decision = 0  # number of the decision whose timer is pending; a later decision makes it void
        self._sent = 0
        self._began_s = -1.0
        self._warm = int(spec.rows * WARM_UP_RATIO)
        self.outcome = BatcherOutcome()

    def run(self) -> BatcherOutcome:
        """Return the outcome once all rows are answered."""
        spec = self._spec
        with self._loop as loop:
            if isinstance(spec.load, OpenLoop):
                times = islice(spec.load.arrivals.times(Random(spec.seed + 1)), spec.rows)
                loop.at(next(times), self._open, times)
            else:
                for _ in range(spec.load.clients):
                    loop.at(self._rng.random() * spec.load.turnaround_s, self._arrive)
            loop.run_forever()
        return self.outcome

    def _open(self, times: object) -> None:
        assert isinstance(times, islice)
        if (following := next(times, None)) is not None:
            self._loop.at(following, self._open, times)
        self._arrive()

    def _arrive(self) -> None:
        spec, now_s = self._spec, self._loop.now_s
        width = self._rng.choices(*zip(*spec.widths, strict=True))[0] if len(spec.widths) > 1 else 0
        width = width if len(spec.widths) > 1 else spec.widths[0][0]
        target_s = spec.objective.latency_s
        row = WaitingRow(self._sent, "tenant", KEY, width, now_s, now_s + target_s, target_s)
        self._sent += 1
        self._shares[width] += 1
        self._profile.arrived(now_s)
        added = self._waiting.add(row, self._curve, spec.limits, now_s=now_s)
        assert added is None
        self._decide()

    def _decide(self) -> None:
        now_s = self._loop.now_s
        self._decision += 1
        if now_s < self._busy_until_s or not len(self._waiting):
            return
        device = Device(self._curve, self._spec.limits, self._spec.objective.level)
        until_s = float("inf")
        for key, group in self._waiting.groups():
            found = self._spec.window.decide(group, device, self._expected(group.width), now_s)
            if isinstance(found, Start):
                rows = self._waiting.select(key, group.width, found.rows)
                self._start(rows, group.width, found.cause)
                return
            until_s = min(until_s, found.until_s)
        self._loop.at(until_s, self._timer, self._decision)

    def _timer(self, decision: int) -> None:
        if decision == self._decision:
            self._decide()

    def _expected(self, width: int) -> Expected:
        now_s, share = self._loop.now_s, self._shares[width] / self._sent
        returning = tuple((wait_s, back * share) for wait_s, back in self._profile.returning(now_s))
        return Expected(self._profile.rate_per_s(now_s) * share, returning)

    def _start(self, rows: Sequence[WaitingRow], width: int, cause: StartCause) -> None:
        now_s = self._loop.now_s
        self._waiting.remove(row.number for row in rows)
        took_s = self._spec.costs.draw_s(width, len(rows), self._rng)
        self._busy_until_s = now_s + took_s
        if rows[0].number >= self._warm:
            self.outcome.batches += 1
            self.outcome.causes[cause] += 1
        self._loop.at(self._busy_until_s, partial(self._ended, rows, width, took_s))

    def _ended(self, rows: Sequence[WaitingRow], width: int, took_s: float) -> None:
        now_s, spec = self._loop.now_s, self._spec
        self._curve.note(width, len(rows), took_s)
        self._profile.ended(len(rows), now_s)
        for row in rows:
            self._answered(row, now_s)
            if isinstance(spec.load, ClosedLoop) and self._sent + len(rows) < spec.rows:
                pause_s = spec.load.turnaround_s * (0.5 + 0.5 * self._rng.expovariate(1.0))
                self._loop.at(now_s + pause_s, self._arrive)
        self._decide()
        if not len(self._waiting) and now_s >= self._busy_until_s and self._sent >= self._most_sent():
            self._loop.stop()

    def _most_sent(self) -> int:
        if isinstance(self._spec.load, OpenLoop):
            return self._spec.rows
        return self._spec.rows - 2 * self._spec.load.clients

    def _answered(self, row: WaitingRow, now_s: float) -> None:
        if row.number < self._warm:
            return
        outcome, latency_s = self.outcome, now_s - row.arrived_s
        self._began_s = row.arrived_s if self._began_s < 0.0 else self._began_s
        outcome.latencies.add(latency_s)
        outcome.answered += 1
        outcome.within += latency_s <= self._spec.objective.latency_s
        outcome.seconds = now_s - self._began_s
