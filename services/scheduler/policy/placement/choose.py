"""Placement of a sequence on a worker: filter, score, pick. Pure: no clock, no I/O, no global random source.

The design is that of the endpoint picker of the Kubernetes inference gateway. Candidates are based on
reported room less outstanding grants. ``pool_seats`` selects the candidates: the holders of the longest
cached prefix and a random sample (Mitzenmacher, The Power of Two Choices, 2001).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

from services.scheduler.policy.placement.candidate import (
    Candidate,
    Filter,
    Offer,
    PlaceQuery,
    PromptFilter,
    Scorer,
    delay_of_others_s,
    fast_ttft,
    fits_when_empty,
    has_kv_room,
    has_sequence_slot,
    heard,
    in_node_group,
    interruptible,
    kv_headroom,
    length_filters,
    low_cost,
    not_draining,
    not_ejected,
    not_excluded,
    predict_ttft_s,
    prefix_hit,
    ready,
    same_zone,
)
from services.scheduler.policy.queue.length import FILTER_NAMES as LENGTH_FILTERS
from services.scheduler.policy.queue.length import LengthPolicy

MAX_NAMED: Final = 16  # rejected workers that a decision names
_NOTHING_CACHED: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PlacementProfile:
    """Filters, weighted scorers and sampling of a placement.

    ``prompt_filters`` get the prompt tokens that a worker would compute. ``spread``: all workers within it of
    the best score are in the draw, so that equal workers fill evenly. ``sample``: number of workers with room
    that are candidates besides at most ``holders`` of the prefix; None: all of them.
    """

    filters: tuple[Filter, ...] = (
        ready,
        heard,
        not_draining,
        not_ejected,
        not_excluded,
        in_node_group,
        fits_when_empty,
        has_kv_room,
        has_sequence_slot,
    )
    prompt_filters: tuple[PromptFilter, ...] = length_filters(LengthPolicy())
    scorers: tuple[tuple[Scorer, float], ...] = (
        (fast_ttft, 2.0),
        (kv_headroom, 1.0),
        (prefix_hit, 0.5),
        (same_zone, 0.2),
        (low_cost, 0.2),
        (interruptible, 0.5),
    )
    spread: float = 0.02
    sample: int | None = 6
    holders: int = 4


@dataclass(frozen=True, slots=True)
class Rejections:
    """``counts`` by name of the filter; ``named``: some of the workers, each with its filter."""

    counts: tuple[tuple[str, int], ...] = ()
    named: tuple[tuple[str, str], ...] = ()


NO_REJECTIONS: Final = Rejections()


class Ranked(NamedTuple):
    offer: Offer
    score: float


class Chosen(Struct, frozen=True):
    """The chosen worker. ``ranked``: all that passed the filters; ``floor``: lowest score in the draw."""

    worker_id: str
    offer: Offer
    ranked: tuple[Ranked, ...]
    floor: float
    rejections: Rejections = NO_REJECTIONS

    @property
    def scores(self) -> tuple[tuple[str, float], ...]:
        """The workers in the draw, with their scores."""
        return tuple(
            (found.offer.candidate.worker_id, found.score)
            for found in self.ranked
            if found.score >= self.floor
        )

    def parts(self, query: PlaceQuery, profile: PlacementProfile) -> tuple[tuple[str, ScoreParts], ...]:
        """Return the result of every scorer for each worker in the draw. ``profile`` is the one that
        chose."""
        return tuple(
            (
                found.offer.candidate.worker_id,
                tuple((scorer.__name__, scorer(query, found.offer)) for scorer, _ in profile.scorers),
            )
            for found in self.ranked
            if found.score >= self.floor
        )


ScoreParts = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class NoWorker:
    """Result of a placement without a worker.

    ``never_fits``: there are serving workers that the query may use, and each would refuse it even when
    empty. ``waits_for_room``: a serving worker that it may use has no room for it now. ``rejections`` are
    counted when it waits for no room.
    """

    rejections: Rejections
    never_fits: bool
    waits_for_room: bool


NO_ROOM: Final = NoWorker(NO_REJECTIONS, never_fits=False, waits_for_room=True)
ROOM_FILTERS = frozenset({has_kv_room.__name__, has_sequence_slot.__name__, *LENGTH_FILTERS})
SERVING_FILTERS = frozenset(
    {
        ready.__name__,
        heard.__name__,
        not_draining.__name__,
        not_ejected.__name__,
        not_excluded.__name__,
        in_node_group.__name__,
    }
)


def choose(
    query: PlaceQuery,
    candidates: Iterable[Candidate],
    profile: PlacementProfile,
    rng: Random,
    *,
    cached_tokens: Mapping[str, int] = _NOTHING_CACHED,
    filters: Sequence[Filter] | None = None,
) -> Chosen | NoWorker:
    """Choose one worker. The same arguments and the same state of ``rng`` give the same result.

    ``cached_tokens``: cached prompt tokens by worker, 0 for others. ``filters``: those of the profile that
    these candidates may fail; all of them by default.
    """
    checks = profile.filters if filters is None else filters
    rejected: dict[str, int] = {}
    named: list[tuple[str, str]] = []
    ranked: list[Ranked] = []
    for candidate in candidates:
        cached = cached_tokens.get(candidate.worker_id, 0)
        reason = _refusal(query, candidate, cached, checks, profile.prompt_filters)
        if reason:
            rejected[reason] = rejected.get(reason, 0) + 1
            if len(named) < MAX_NAMED:
                named.append((candidate.worker_id, reason))
            continue
        offer = offer_of(query, candidate, cached)
        score = 0.0
        for scorer, weight in profile.scorers:
            score += weight * scorer(query, offer)
        ranked.append(Ranked(offer, score))
    rejections = Rejections(tuple(rejected.items()), tuple(named)) if rejected else NO_REJECTIONS
    if not ranked:
        return no_worker(rejections)
    floor = max(found.score for found in ranked) - profile.spread
    draw = [found.offer for found in ranked if found.score >= floor]
    offer = draw[rng.randrange(len(draw))] if len(draw) > 1 else draw[0]
    return Chosen(offer.candidate.worker_id, offer, tuple(ranked), floor, rejections)


def _refusal(
    query: PlaceQuery,
    candidate: Candidate,
    cached_tokens: int,
    filters: Sequence[Filter],
    prompt_filters: Sequence[PromptFilter],
) -> str:
    """Return the name of the first filter that rejects the candidate, empty when it passes all."""
    for check in filters:
        if not check(query, candidate):
            return check.__name__
    uncached_tokens = query.demand.prompt_tokens - cached_tokens
    for prompt_check in prompt_filters:
        if not prompt_check(query, candidate, uncached_tokens):
            return prompt_check.__name__
    return ""


def offer_of(query: PlaceQuery, candidate: Candidate, cached_tokens: int) -> Offer:
    """Return the offer of the candidate for the query."""
    model, ahead_tokens = candidate.step_model, candidate.queued_prefill_tokens
    uncached_tokens = query.demand.prompt_tokens - cached_tokens
    ttft_s = candidate.slowness_ratio * predict_ttft_s(
        model,
        ahead_tokens=ahead_tokens,
        uncached_tokens=uncached_tokens,
        running=candidate.running,
        attended_tokens=candidate.attended_tokens,
    )
    delay_s = delay_of_others_s(model, ahead_tokens=ahead_tokens, uncached_tokens=uncached_tokens)
    return Offer(candidate, cached_tokens, ttft_s, candidate.slowness_ratio * delay_s)


def no_worker(rejections: Rejections) -> NoWorker:
    """Return the result when these filters rejected every worker."""
    serving = [reason for reason, _ in rejections.counts if reason not in SERVING_FILTERS]
    waits = any(reason in ROOM_FILTERS for reason in serving)
    return NoWorker(rejections, never_fits=bool(serving) and not waits, waits_for_room=waits)
