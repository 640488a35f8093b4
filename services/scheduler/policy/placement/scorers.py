"""Scorers that rank workers for a placement: each returns 0 to 1, 1 is best. Pure.

Time has most of the weight: the predicted time to the first token, and the additional wait of other prompts.
It combines the load (prompt tokens ahead, decoding sequences, a slow device) with the savings of the cache,
so that a hot prefix is computed on another worker when waiting is more expensive. The prefix hit score keeps
equal workers from caching everything each; the KV score spreads sequences whose prompts need no computation.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.policy.placement.candidate import Offer, PlaceQuery

TTFT_SCALE_S: Final = 1.0  # the target of a request without one


def prefix_hit(query: PlaceQuery, offer: Offer) -> float:
    """Return the cached share of the prompt."""
    return offer.cached_tokens / max(1, query.demand.prompt_tokens)


def fast_ttft(query: PlaceQuery, offer: Offer) -> float:
    """Return 1 for an immediate first token, 1/2 at the request's target; the wait of others counts like its
    own."""
    target_s = query.ttft_target_s or TTFT_SCALE_S
    return target_s / (target_s + offer.ttft_s + offer.delay_of_others_s)


def kv_headroom(_: PlaceQuery, offer: Offer) -> float:
    """Return the free share of the pool."""
    candidate = offer.candidate
    return max(0.0, candidate.kv_tokens_room / candidate.kv_tokens_total)


def prefill_headroom(query: PlaceQuery, offer: Offer) -> float:
    """Return 1 with nothing queued, 1/2 when as much is queued as this prompt adds (at least a step's
    worth)."""
    scale = max(query.demand.prompt_tokens, 512)
    return scale / (scale + offer.candidate.queued_prefill_tokens)


def same_zone(query: PlaceQuery, offer: Offer) -> float:
    """Return 1 where tokens stay within a zone, or where a zone is unknown."""
    zone = offer.candidate.zone
    return 1.0 if not query.zone or not zone or zone == query.zone else 0.0


def low_cost(_: PlaceQuery, offer: Offer) -> float:
    """Return the price of a token on the cheapest worker of the version over the price here."""
    return offer.candidate.cost_ratio
