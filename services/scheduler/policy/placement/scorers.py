"""What makes one worker a better place than another: each scorer gives 0 to 1, 1 is best. Pure.

Time carries most of the weight: the predicted one to the first token, and that by which others wait longer.
It holds the load (prompt tokens ahead, sequences that decode, a slow device) and what the cache saves at
once, so that a hot prefix moves on to a further worker when waiting behind it costs more than computing it
again. The prefix hit on top keeps equal workers from each caching everything; KV room spreads sequences
whose prompts cost nothing.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.policy.placement.candidate import Offer, PlaceQuery

TTFT_SCALE_S: Final = 1.0  # the target where a request names none


def prefix_hit(query: PlaceQuery, offer: Offer) -> float:
    """The share of the prompt that is cached."""
    return offer.cached_tokens / max(1, query.demand.prompt_tokens)


def fast_ttft(query: PlaceQuery, offer: Offer) -> float:
    """1 at once, 1/2 at the request's target; what others wait longer counts like its own wait."""
    target_s = query.ttft_target_s or TTFT_SCALE_S
    return target_s / (target_s + offer.ttft_s + offer.delay_of_others_s)


def kv_headroom(_: PlaceQuery, offer: Offer) -> float:
    """The share of the pool that is free."""
    candidate = offer.candidate
    return max(0.0, candidate.kv_tokens_room / candidate.kv_tokens_total)


def prefill_headroom(query: PlaceQuery, offer: Offer) -> float:
    """1 with nothing queued, 1/2 when as much is queued as this prompt adds (at least a step's worth)."""
    scale = max(query.demand.prompt_tokens, 512)
    return scale / (scale + offer.candidate.queued_prefill_tokens)


def same_zone(query: PlaceQuery, offer: Offer) -> float:
    """1 where tokens do not cross zones, as far as both are known."""
    zone = offer.candidate.zone
    return 1.0 if not query.zone or not zone or zone == query.zone else 0.0


def low_cost(_: PlaceQuery, offer: Offer) -> float:
    """The price of a token on the cheapest worker of the version over the price here."""
    return offer.candidate.cost_ratio
