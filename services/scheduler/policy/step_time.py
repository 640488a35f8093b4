"""Step-time model of each type of worker, fitted from worker reports.

    seconds = a * steps + b * prompt tokens + c * decoded tokens + d * tokens of KV that the decodes read

It is fitted with ``core.estimates.least_squares``: each worker has the decayed normal equations of its own
samples, and a type's model solves the sum over its typical workers. A worker is typical while the measured
time of its recent steps over the predicted time is within ``TYPICAL_RATIO`` of its peers' (lower) median; the
others are left out and the fit is repeated, as in least trimmed squares (Rousseeuw, 1984). So a minority of
slow workers does not distort the model of the rest. Pure; single writer; bounded by the pools that its owner
passes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add
from statistics import median_low
from typing import Final, NamedTuple

from msgspec import Struct

from services.core.estimates.least_squares import NormalEquations, non_negative
from services.core.fleet import PoolSnapshot

SAMPLE_S: Final = 1.0
FIT_S: Final = 2.0
TYPICAL_RATIO: Final = 1.5
MIN_SAMPLES: Final = 8.0  # per type, before its model is used
MAX_ERROR_RATIO: Final = 0.5
_KEEP_LONG: Final = 0.98  # per sample: the fit covers about fifty
_KEEP_SHORT: Final = 0.7  # the slowness of a worker covers about three
_MIN_BUSY_S: Final = 1e-3
_ROUNDS: Final = 3
_SIZE: Final = 4


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds per step, per prompt token, per decoded token and per token of KV that a decode reads.

    ``samples``: effective number of samples in the fit; ``error_ratio``: typical residual over the measured
    time.
    """

    per_step_s: float
    per_prefill_s: float
    per_decode_s: float
    per_attended_s: float
    samples: float = 0.0
    error_ratio: float = 1.0

    def seconds(self, steps: float, prefill: float, decode: float, attended: float) -> float:
        """Return the total time of steps with this work."""
        return (
            self.per_step_s * steps
            + self.per_prefill_s * prefill
            + self.per_decode_s * decode
            + self.per_attended_s * attended
        )


# Used until there are enough reports: 20,000 prompt tokens per second in steps of 10 ms.
PRIOR: Final = StepModel(10e-3, 50e-6, 50e-6, 0.0)


class WorkerKind(NamedTuple):
    """A type of workers that are expected to be equally fast."""

    device_type: str
    digest: str


class Measured(Struct, frozen=True, gc=False):
    """Steps of a worker since its previous report: measured and predicted time."""

    worker_id: str
    kind: WorkerKind
    steps: int
    measured_s: float
    predicted_s: float
    attended_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Track:
    """Reports of one pool of one worker. ``seen``: steps, seconds and work since its engine started."""

    kind: WorkerKind
    seen: tuple[float, ...]
    sampled_s: float
    pending: list[float]
    recent: list[float]
    sums: NormalEquations
    typical: bool = True
    slowness_ratio: float = 1.0


class StepTimes:
    """The models of all types, and the slowness of each worker relative to the model of its type."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._models: dict[WorkerKind, StepModel] = {}
        self._fit_s = 0.0

    def observe(self, worker_id: str, device_type: str, pool: PoolSnapshot, now_s: float) -> Measured | None:
        """Apply a report; return the steps since the previous one, None when there were none."""
        key = worker_id, pool.digest
        seen = (
            pool.step_seconds,
            pool.steps,
            pool.prefill_tokens,
            pool.decode_tokens,
            pool.attended_tokens,
        )
        track = self._tracks.get(key)
        if track is None or track.kind.device_type != device_type or seen[1] < track.seen[1]:
            kind = WorkerKind(device_type, pool.digest) if track is None else track.kind
            if kind.device_type != device_type:
                kind = WorkerKind(device_type, pool.digest)
            self._tracks[key] = _Track(
                kind, seen, now_s, [0.0] * 5, [0.0] * 5, NormalEquations.zero(_SIZE, _KEEP_LONG)
            )
            return None
        if seen[1] == track.seen[1]:
            return None
        delta = [new - old if new > old else 0.0 for new, old in zip(seen, track.seen, strict=True)]
        track.seen = seen
        predicted_s = self.model(track.kind).seconds(*delta[1:])
        track.pending = list(map(add, track.pending, delta))
        if now_s - track.sampled_s >= SAMPLE_S and track.pending[0] >= _MIN_BUSY_S:
            self._sample(track, now_s)
        return Measured(worker_id, track.kind, int(delta[1]), delta[0], predicted_s, int(delta[4]))

    def model(self, kind: WorkerKind) -> StepModel:
        """Return the model of a type, ``PRIOR`` while samples are too few or too contradictory."""
        return self._models.get(kind, PRIOR)

    def slowness(self, worker_id: str, digest: str) -> float:
        """Return measured over predicted time of the worker's recent steps; 1 without samples."""
        track = self._tracks.get((worker_id, digest))
        return 1.0 if track is None or not track.recent[1] else track.slowness_ratio

    def forget(self, worker_id: str, digests: Iterable[str]) -> None:
        """Remove the reports of pools of a worker."""
        for digest in digests:
            self._tracks.pop((worker_id, digest), None)

    def advance(self, now_s: float) -> bool:
        """Fit the models again when they are due; return whether they were."""
        if now_s - self._fit_s < FIT_S:
            return False
        self._fit_s = now_s
        kinds: dict[WorkerKind, list[_Track]] = {}
        for track in self._tracks.values():
            if track.recent[1]:
                kinds.setdefault(track.kind, []).append(track)
        models = {kind: _fit(tracks) for kind, tracks in kinds.items()}
        self._models = {kind: model for kind, model in models.items() if model is not None}
        return True

    def _sample(self, track: _Track, now_s: float) -> None:
        """Add the work since the last sample to the worker's equations."""
        measured_s, *work = track.pending
        track.pending = [0.0] * 5
        track.sampled_s = now_s
        track.recent = [
            old * _KEEP_SHORT + new for old, new in zip(track.recent, (measured_s, *work), strict=True)
        ]
        model = self._models.get(track.kind)
        if model is not None:
            track.slowness_ratio = _ratio(track, model)
        if track.typical:  # the work of an untypical worker is no evidence for its type
            track.sums.add(work, measured_s)


def _fit(tracks: list[_Track]) -> StepModel | None:
    """Return the model of the typical workers of a type, and mark which are typical."""
    model = _solve([track for track in tracks if track.typical] or tracks)
    typical = [track.typical for track in tracks]
    for _ in range(_ROUNDS):
        ratios = [_ratio(track, model) for track in tracks]
        middle = median_low(ratios) or 1.0
        typical = [1 / TYPICAL_RATIO <= ratio / middle <= TYPICAL_RATIO for ratio in ratios]
        fitting = [track for track, fits in zip(tracks, typical, strict=True) if fits]
        model = _solve(fitting)
    for track, fits in zip(tracks, typical, strict=True):
        track.typical = fits
        track.slowness_ratio = _ratio(track, model)
    trusted = model.samples >= MIN_SAMPLES and model.error_ratio <= MAX_ERROR_RATIO
    return model if trusted else None


def _ratio(track: _Track, model: StepModel) -> float:
    """Return measured over predicted time of the worker's recent steps."""
    predicted_s = model.seconds(*track.recent[1:])
    return track.recent[0] / predicted_s if predicted_s > 0 else 1.0


def _solve(tracks: Sequence[_Track]) -> StepModel:
    """Return the model of the workers' samples. A coefficient without samples keeps its prior."""
    solution = non_negative([track.sums for track in tracks])
    prior = (PRIOR.per_step_s, PRIOR.per_prefill_s, PRIOR.per_decode_s, PRIOR.per_attended_s)
    known = [
        default if value is None else value for value, default in zip(solution.values, prior, strict=True)
    ]
    return StepModel(
        known[0],
        known[1],
        known[2],
        known[3],
        samples=solution.samples,
        error_ratio=solution.error_ratio,
    )
