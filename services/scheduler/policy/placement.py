"""Which worker a sequence goes to: filter, score, pick. Pure: no clock, no I/O, no global random source.

The design is that of the endpoint picker of the Kubernetes inference gateway. Candidates already stand for
what the scheduler knows: reported room less outstanding grants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from services.scheduler.policy.kv_admission import Demand, can_ever_fit


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pool of one worker. ``kv_tokens_*`` are whole blocks, in tokens; room may be negative.

    ``heard``: its reports arrive and honour this leader. ``slots`` are sequences it may still take.
    """

    worker_id: str
    kv_tokens_total: int
    kv_tokens_room: int
    block_size: int
    slots: int
    max_model_len: int
    queued_prefill_tokens: int = 0
    ready: bool = True
    draining: bool = False
    heard: bool = True

    @property
    def serving(self) -> bool:
        """It takes new sequences, as far as it has room."""
        return self.ready and self.heard and not self.draining


@dataclass(frozen=True, slots=True)
class PlaceQuery:
    demand: Demand
    excluded_workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    worker_id: str
    scores: tuple[tuple[str, float], ...]  # those in the draw, so that the caller can log it


@dataclass(frozen=True, slots=True)
class NoWorker:
    """``rejected``: worker and name of the filter that dropped it.

    ``never_fits``: there are serving workers that it may use, and each would refuse it even when empty.
    ``waits_for_room``: a serving worker that it may use has no room for it now.
    """

    rejected: tuple[tuple[str, str], ...]
    never_fits: bool
    waits_for_room: bool


Filter = Callable[[PlaceQuery, Candidate], bool]
Scorer = Callable[[PlaceQuery, Candidate], float]  # 0..1, 1 is best


def ready(_: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.ready


def heard(_: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.heard


def not_draining(_: PlaceQuery, candidate: Candidate) -> bool:
    return not candidate.draining


def not_excluded(query: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.worker_id not in query.excluded_workers


def fits_when_empty(query: PlaceQuery, candidate: Candidate) -> bool:
    return can_ever_fit(
        query.demand, kv_tokens_total=candidate.kv_tokens_total, max_model_len=candidate.max_model_len
    )


def has_kv_room(query: PlaceQuery, candidate: Candidate) -> bool:
    return query.demand.reserved_tokens <= candidate.kv_tokens_room


def has_sequence_slot(_: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.slots > 0


def may_use(query: PlaceQuery, candidate: Candidate) -> bool:
    """Whether the worker would take it when empty."""
    return not_excluded(query, candidate) and fits_when_empty(query, candidate)


def kv_headroom(_: PlaceQuery, candidate: Candidate) -> float:
    return max(0.0, candidate.kv_tokens_room / candidate.kv_tokens_total)


def prefill_headroom(query: PlaceQuery, candidate: Candidate) -> float:
    """1 with nothing queued, 1/2 when as much is queued as this prompt adds (at least a step's worth)."""
    scale = max(query.demand.prompt_tokens, 512)
    return scale / (scale + candidate.queued_prefill_tokens)


@dataclass(frozen=True, slots=True)
class PlacementProfile:
    """``spread``: those within it of the best score share the draw, so that equal workers fill evenly."""

    filters: tuple[Filter, ...] = (
        ready,
        heard,
        not_draining,
        not_excluded,
        fits_when_empty,
        has_kv_room,
        has_sequence_slot,
    )
    scorers: tuple[tuple[Scorer, float], ...] = ((kv_headroom, 1.0), (prefill_headroom, 1.0))
    spread: float = 0.02


ROOM_FILTERS = frozenset({has_kv_room.__name__, has_sequence_slot.__name__})
SERVING_FILTERS = frozenset({ready.__name__, heard.__name__, not_draining.__name__, not_excluded.__name__})


def choose(
    query: PlaceQuery, candidates: Iterable[Candidate], profile: PlacementProfile, rng: Random
) -> Chosen | NoWorker:
    """Choose one worker. The same arguments and the same state of ``rng`` give the same answer."""
    rejected: list[tuple[str, str]] = []
    passed: list[tuple[str, float]] = []
    for candidate in candidates:
        for check in profile.filters:
            if not check(query, candidate):
                rejected.append((candidate.worker_id, check.__name__))
                break
        else:
            score = 0.0
            for scorer, weight in profile.scorers:
                score += weight * scorer(query, candidate)
            passed.append((candidate.worker_id, score))
    if not passed:
        return _no_worker(rejected)
    floor = max(score for _, score in passed) - profile.spread
    draw = tuple(found for found in passed if found[1] >= floor)
    return Chosen(draw[rng.randrange(len(draw))][0] if len(draw) > 1 else draw[0][0], draw)


def _no_worker(rejected: Sequence[tuple[str, str]]) -> NoWorker:
    serving = [reason for _, reason in rejected if reason not in SERVING_FILTERS]
    waits = any(reason in ROOM_FILTERS for reason in serving)
    return NoWorker(tuple(rejected), never_fits=bool(serving) and not waits, waits_for_room=waits)
