"""Placement query, candidate worker, the times predicted on it, and the filters and scorers of the two. Pure.

A scorer returns 0 to 1, 1 is best. Time has most of the weight: the predicted time to the first token, and
the additional wait of other prompts. It combines the load (prompt tokens ahead, decoding sequences, a slow
device) with the savings of the cache, so that a hot prefix is computed on another worker when waiting is more
expensive. The prefix hit score keeps equal workers from caching everything each; the KV score spreads
sequences whose prompts need no computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec import Struct

from services.core.fleet import LONG_PROMPT_TOKENS
from services.core.records import SHARED_NODES
from services.scheduler.policy.placement.shared_prefix import NOTHING_SHARED, SharedRun
from services.scheduler.policy.queue import length
from services.scheduler.policy.queue.length import LengthPolicy
from services.scheduler.policy.step_time import PRIOR, StepModel

CHUNK_TOKENS: Final = 512
AHEAD_RATIO: Final = 1.5


class Demand(Struct, frozen=True, gc=False):
    """Tokens that a sequence needs from a pool: KV blocks are reserved for its prompt and a predicted output.

    Reserving the worst case would leave most of the memory unused, because few outputs reach their limit. A
    sequence that exceeds its prediction takes more blocks on its worker, which preempts when none are free
    (PagedAttention, SOSP'23). Prompt blocks that live sequences of a worker share need no new room
    (``shared_prefix``).

    ``prompt_tokens``: to be prefilled. ``reserved_tokens``: the prompt and the predicted output.
    ``worst_case_tokens``: the prompt and the maximum output.
    """

    prompt_tokens: int
    reserved_tokens: int
    worst_case_tokens: int


def demand_of(prompt_tokens: int, max_output_tokens: int, predicted_output_tokens: int) -> Demand:
    """Return the demand; the reservation is at most the request's own worst case."""
    predicted = min(max_output_tokens, max(1, predicted_output_tokens))
    return Demand(prompt_tokens, prompt_tokens + predicted, prompt_tokens + max_output_tokens)


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks for that many tokens."""
    return -(-tokens // block_size)


def can_ever_fit(demand: Demand, *, kv_tokens_total: int, max_model_len: int) -> bool:
    """Whether an empty pool can run the sequence. ``max_model_len`` bounds prompt and output together, as the
    engine does; 0 means no such bound."""
    if max_model_len and demand.worst_case_tokens > max_model_len:
        return False
    return demand.reserved_tokens <= kv_tokens_total


class RoomSummary(Struct, frozen=True, gc=False):
    """Over the serving workers, in tokens: the largest room with a sequence slot, the smallest pool, the
    shortest model length, and the sum of all pools.

    It decides most unsuccessful placements without evaluating each worker.
    """

    serving: bool
    room_tokens: int = 0
    smallest_pool_tokens: int = 0
    shortest_model_len: int = 0
    pool_tokens: int = 0

    def is_short_for(self, demand: Demand, *, shared_tokens: int = 0) -> bool:
        """True when no serving worker has room now and every one of them would have it when empty.

        ``shared_tokens``: prompt tokens that workers may share at best. False decides nothing: evaluate each
        worker.
        """
        return (
            self.room_tokens < demand.reserved_tokens - shared_tokens
            and demand.reserved_tokens <= self.smallest_pool_tokens
            and demand.worst_case_tokens <= self.shortest_model_len
        )


def predict_ttft_s(
    model: StepModel, *, ahead_tokens: int, uncached_tokens: int, running: int, attended_tokens: int
) -> float:
    """Return the seconds from the grant to the first token.

    ``ahead_tokens`` are queued for prefill besides this prompt's ``uncached_tokens``, of which at least one
    is always computed. ``running`` sequences read ``attended_tokens`` of KV in a step.

    Workers prefill the shortest rest first, and the oldest prompt with a quarter of each step
    (``worker.policy.prefill``; Schrage, 1968), so only a part of the queue is ahead of a prompt. In a
    long queue about ``AHEAD_RATIO`` times a prompt's own tokens run before it, whatever its length, as
    simulated fleets near their capacity show (1.0 to 1.5 below 4,096 tokens, 1.8 above).

    Prompts run in steps of at most ``CHUNK_TOKENS`` prompt tokens, each of which also decodes the running
    sequences (Sarathi-Serve, OSDI'24). The current step ends first: half a step on average.
    """
    own_tokens = max(1, uncached_tokens)
    tokens = own_tokens + min(ahead_tokens, int(AHEAD_RATIO * own_tokens))
    step_s = model.per_step_s + model.per_decode_s * running + model.per_attended_s * attended_tokens
    steps = -(-tokens // CHUNK_TOKENS) + (0.5 if running or ahead_tokens > 0 else 0.0)
    return model.per_prefill_s * tokens + steps * step_s


def delay_of_others_s(model: StepModel, *, ahead_tokens: int, uncached_tokens: int) -> float:
    """Return the total delay in seconds of the queued prompts that a prompt of ``uncached_tokens`` causes
    where ``ahead_tokens`` are queued.

    A queue that is served shortest first contains mostly long prompts, about one for every
    ``LONG_PROMPT_TOKENS``, and each is delayed by all that the prompt computes.
    """
    if ahead_tokens <= 0:
        return 0.0
    per_token_s = model.per_prefill_s + model.per_step_s / CHUNK_TOKENS
    return per_token_s * max(1, uncached_tokens) * ahead_tokens / LONG_PROMPT_TOKENS


class Candidate(Struct, frozen=True, gc=False):
    """One pool of one worker, as input of filters and scorers."""

    worker_id: str
    kv_tokens_total: int  # whole blocks, in tokens
    kv_tokens_room: int  # whole blocks, in tokens; may be negative
    block_size: int
    slots: int  # sequences that it may still take
    max_model_len: int
    # Prompt tokens of accepted requests and outstanding grants, without the cached part.
    queued_prefill_tokens: int = 0
    ready: bool = True
    draining: bool = False
    reporting: bool = True  # its reports arrive and confirm this leader's epoch
    ejected: bool = False  # slower than its peers, or its circuit is open
    zone: str = ""
    running: int = 0  # sequences that decode
    attended_tokens: int = 0  # tokens of KV that these read in a step
    long_prefills: int = 0
    step_model: StepModel = PRIOR
    slowness_ratio: float = 1.0  # measured over predicted step time
    cost_ratio: float = 1.0  # the cheapest peer's price of a token over this one's
    node_group: str = SHARED_NODES
    preemptible: bool = False  # its node may be taken away at short notice

    @property
    def serving(self) -> bool:
        """Whether it takes new sequences, within its room."""
        return self.ready and self.reporting and not self.draining and not self.ejected


class PlaceQuery(Struct, frozen=True):
    """One placement to decide."""

    demand: Demand
    excluded_workers: tuple[str, ...] = ()
    prefix_hashes: tuple[int, ...] = ()  # names of the prompt's blocks, first to last
    zone: str = ""  # the gateway's zone; empty: unknown
    ttft_target_s: float | None = None  # None: no target
    # Its tenant holds more than its share, with more than that waiting (``HeldShares``).
    over_share: bool = False
    node_group: str = SHARED_NODES  # the only nodes that may run it
    is_batch: bool = False  # it may wait, so that an interruption costs its client little
    shared: SharedRun = NOTHING_SHARED  # the part of the prompt that needs no room on workers that share it


class Offer(NamedTuple):
    """A candidate evaluated for one query: cached prompt tokens, predicted time from the grant to the first
    token, and the total additional wait of the prompts queued there."""

    candidate: Candidate
    cached_tokens: int
    ttft_s: float
    delay_of_others_s: float = 0.0


Filter = Callable[[PlaceQuery, Candidate], bool]
# The last argument is the prompt tokens that the candidate would compute.
PromptFilter = Callable[[PlaceQuery, Candidate, int], bool]
Scorer = Callable[[PlaceQuery, Offer], float]  # 0..1, 1 is best


def ready(_: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.ready


def heard(_: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.reporting


def not_draining(_: PlaceQuery, candidate: Candidate) -> bool:
    return not candidate.draining


def not_ejected(_: PlaceQuery, candidate: Candidate) -> bool:
    return not candidate.ejected


def not_excluded(query: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.worker_id not in query.excluded_workers


def in_node_group(query: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.node_group == query.node_group


def fits_when_empty(query: PlaceQuery, candidate: Candidate) -> bool:
    return can_ever_fit(
        query.demand, kv_tokens_total=candidate.kv_tokens_total, max_model_len=candidate.max_model_len
    )


def has_kv_room(query: PlaceQuery, candidate: Candidate) -> bool:
    missing_tokens = query.demand.reserved_tokens - candidate.kv_tokens_room
    if missing_tokens <= 0 or query.shared is NOTHING_SHARED:
        return missing_tokens <= 0
    return missing_tokens <= query.shared.tokens_on(candidate.worker_id)


def within_kv_budget(share: float, demand: Demand, held_tokens: int, candidate: Candidate) -> bool:
    """Whether a tenant that holds so much of the pool may reserve the demand within its share of it."""
    return held_tokens + demand.reserved_tokens <= int(share * candidate.kv_tokens_total)


def has_sequence_slot(_: PlaceQuery, candidate: Candidate) -> bool:
    return candidate.slots > 0


def length_filters(policy: LengthPolicy) -> tuple[PromptFilter, ...]:
    """Return the filters that keep long prompts from filling a worker; they are named as in ``length``.

    The length of a prompt is the part that the worker would compute: a cached prompt delays no other.
    """

    def has_long_prefill_slot(_: PlaceQuery, candidate: Candidate, uncached_tokens: int) -> bool:
        if candidate.long_prefills < policy.max_long_prefills:
            return True
        return length.has_long_prefill_slot(uncached_tokens, candidate.long_prefills, policy)

    def has_prefill_room(query: PlaceQuery, candidate: Candidate, uncached_tokens: int) -> bool:
        queued_tokens = candidate.queued_prefill_tokens
        if queued_tokens <= (CHUNK_TOKENS if query.over_share else policy.min_backlog_tokens):
            return True
        if uncached_tokens <= min(policy.min_backlog_tokens, query.demand.prompt_tokens // 2):
            return True  # computing it elsewhere would cost more than it adds here
        chunk_s = candidate.slowness_ratio * candidate.step_model.seconds(1, CHUNK_TOKENS, 0, 0)
        tokens_per_s = CHUNK_TOKENS / max(1e-9, chunk_s)
        if query.over_share and queued_tokens > policy.giving_way_backlog_s * tokens_per_s:
            return False
        return length.has_prefill_room(queued_tokens, tokens_per_s, query.ttft_target_s, policy)

    return has_long_prefill_slot, has_prefill_room


def may_use(query: PlaceQuery, candidate: Candidate) -> bool:
    """Whether the worker would take the sequence when empty."""
    usable = not_excluded(query, candidate) and in_node_group(query, candidate)
    return usable and fits_when_empty(query, candidate)


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


def interruptible(query: PlaceQuery, offer: Offer) -> float:
    """Return 1 for batch work on a preemptible node, and for all other work on a node that stays."""
    return float(offer.candidate.preemptible == query.is_batch)


def low_cost(_: PlaceQuery, offer: Offer) -> float:
    """Return the price of a token on the cheapest worker of the version over the price here."""
    return offer.candidate.cost_ratio
