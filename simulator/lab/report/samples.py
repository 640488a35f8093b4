"""What a fleet looked like at some instants, evenly spread and bounded in number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_SAMPLES: Final = 480


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker. What is not a level counts since its engine started: a smaller value is a new engine.

    ``busy_s`` are seconds inside steps, ``kv_ratio`` is the share of KV blocks that is reserved.
    """

    name: str
    prefill_tokens: int
    decode_tokens: int
    busy_s: float
    running: int
    waiting: int
    kv_ratio: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet. ``waiting`` are placements in the leader's queue; ``pressure_ratio`` is the leader's."""

    at_s: float
    waiting: int
    pressure_ratio: float
    workers: tuple[WorkerSample, ...]


@dataclass(slots=True)
class _Totals:
    """Sums over engine lives."""

    tokens: int = 0
    busy_s: float = 0.0
    last_tokens: int = 0
    last_busy_s: float = 0.0

    def take(self, worker: WorkerSample) -> float:
        """Add what happened since the sample before; return the seconds that it was busy."""
        tokens = worker.prefill_tokens + worker.decode_tokens
        began_anew = tokens < self.last_tokens or worker.busy_s < self.last_busy_s
        busy_s = worker.busy_s - (0.0 if began_anew else self.last_busy_s)
        self.tokens += tokens - (0 if began_anew else self.last_tokens)
        self.busy_s += busy_s
        self.last_tokens, self.last_busy_s = tokens, worker.busy_s
        return busy_s


class Timeline:
    """Keeps samples: all while they are few, then every second, every fourth, and so on.

    ``names`` of more than 32 workers are not kept over time: a long run on a thousand workers stays small.
    """

    KEPT_WORKERS: Final = 32

    def __init__(self) -> None:
        self.points: list[tuple[float, int, float, float]] = []  # at_s, waiting, pressure, KV reserved
        self.busy: dict[str, list[tuple[float, float]]] = {}  # at_s, utilisation since the point before
        self.totals: dict[str, _Totals] = {}
        self.first_s: float | None = None
        self.last_s = 0.0
        self._stride = 1
        self._seen = 0
        self._busy_since: dict[str, float] = {}
        self._kept_s = 0.0

    def add(self, sample: Sample) -> None:
        """Take one more sample; they come in order of time."""
        if self.first_s is None:
            self.first_s = self._kept_s = sample.at_s
        self.last_s = sample.at_s
        for worker in sample.workers:
            busy_s = self.totals.setdefault(worker.name, _Totals()).take(worker)
            self._busy_since[worker.name] = self._busy_since.get(worker.name, 0.0) + busy_s
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        self._keep(sample)
        if len(self.points) >= MAX_SAMPLES:
            self.points = self.points[::2]
            self.busy = {name: _halved(points) for name, points in self.busy.items()}
            self._stride *= 2

    def utilisation(self, name: str) -> float:
        """Return the share of the sampled time that the worker spent inside steps."""
        lasted_s = self.last_s - (self.first_s or 0.0)
        return min(1.0, self.totals[name].busy_s / lasted_s) if lasted_s > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """Return each worker's part of all tokens that were computed."""
        whole = sum(totals.tokens for totals in self.totals.values())
        return {name: totals.tokens / whole if whole else 0.0 for name, totals in self.totals.items()}

    def _keep(self, sample: Sample) -> None:
        kv_ratio = sum(worker.kv_ratio for worker in sample.workers) / max(1, len(sample.workers))
        self.points.append((sample.at_s, sample.waiting, sample.pressure_ratio, kv_ratio))
        lasted_s = sample.at_s - self._kept_s
        if lasted_s > 0:
            for worker in sample.workers[: self.KEPT_WORKERS]:
                ratio = min(1.0, self._busy_since[worker.name] / lasted_s)
                self.busy.setdefault(worker.name, []).append((sample.at_s, ratio))
        self._busy_since.clear()
        self._kept_s = sample.at_s


def _halved(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge neighbours: the mean of both at the later one's instant."""
    return [
        (points[index + 1][0], (points[index][1] + points[index + 1][1]) / 2)
        for index in range(0, len(points) - 1, 2)
    ]
