"""What one replica serves, and how many replicas a load needs. Planner and scaler use the same functions.

Let requests prefill P tokens and produce O each, and let n sequences decode together. A step of s seconds
yields n tokens and prefills n * P / O, so a replica serves r = n / (O * s) requests per second.
With the terms of ``CostModel``,

    s(n) = base + max(weight_read, n * (P / O * prefill + decode))
         + n * A * attended + n * P / O * B * prefill_attended

where A is the KV that a decode reads and B the tokens before a prefilled one. r grows with n; the KV, the
number of sequences and the target of the gap between tokens bound n. Prefill and decode are terms of one
step: neither is planned as if it had the device to itself, and no share of the device is counted twice.
KV that has room for n sequences and a fraction holds n, on average half a sequence less than fits. The last
block of a sequence is half empty, and a prefix that sequences share is held once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.core.estimates.cost_model import CostModel

MAX_SEQUENCES: Final = 256  # sequences of one engine, unless its settings state another number
BLOCK_TOKENS: Final = 16  # tokens of a KV block
_SATURATED_RATIO: Final = 0.9  # share of the asymptotic rate from which the computation bounds, not n


class Bound(StrEnum):
    """What keeps a replica from serving more."""

    PREFILL = "prefill"
    DECODE = "decode"
    KV = "kv"
    ITL = "itl"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Means over the requests of a load, in tokens."""

    prefill_tokens: float  # prompt tokens that no cache has
    output_tokens: float
    attended_tokens: float  # KV that one decode reads, a mean over output tokens
    held_tokens: float  # KV that a sequence reserves for itself, a mean over time
    before_tokens: float  # tokens before a prefilled one
    work_ratio: float = 1.0  # mean square of a request's tokens over their squared mean: 1 if all are equal
    shared_tokens: float = 0.0  # KV of the prefixes that sequences share

    @property
    def tokens(self) -> float:
        """Tokens that the mean request computes."""
        return self.prefill_tokens + self.output_tokens


def mix_of(
    requests: Iterable[tuple[int, int, int]], *, private_ratio: float = 1.0, shared_tokens: float = 0.0
) -> RequestMix:
    """Return the means of (prompt, cached prompt, output) tokens. Raises ValueError if none has output.

    ``private_ratio`` of what is cached is held by each sequence; the rest is part of ``shared_tokens``.
    """
    count = prefill = output = attended = held = before = squares = 0.0
    for prompt, cached, produced in requests:
        fresh = prompt - cached
        count += 1
        prefill += fresh
        output += produced
        attended += produced * (prompt + produced / 2)
        held += produced * (fresh + private_ratio * cached + produced)
        before += fresh * (cached + fresh / 2)
        squares += (fresh + produced) ** 2
    if not output:
        raise ValueError("a load needs requests that produce tokens")
    return RequestMix(
        prefill / count,
        output / count,
        attended / output,
        held / output,
        before / prefill if prefill else 0.0,
        squares * count / (prefill + output) ** 2,
        shared_tokens,
    )


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """The highest steady rate of one replica, and what bounds it."""

    requests_per_s: float
    sequences: float  # sequences that decode together at that rate
    kv_sequences: float  # sequences that its KV holds
    step_s: float
    prefill_ratio: float  # share of a step that prefills
    bound: Bound
    prefill_per_s: float  # requests per second that it would prefill without decoding
    decode_per_s: float  # requests per second that it would decode without prefilling

    def tokens_per_s(self, mix: RequestMix) -> float:
        """Return the rate in prompt and output tokens."""
        return self.requests_per_s * mix.tokens


def capacity_of(
    costs: CostModel, mix: RequestMix, *, itl_target_s: float = math.inf, max_sequences: int = MAX_SEQUENCES
) -> ReplicaCapacity | None:
    """Return what one replica serves, None where its KV holds no request or no step meets the target."""
    per_output = mix.prefill_tokens / mix.output_tokens
    prefill_s = per_output * (costs.prefill_token_s + mix.before_tokens * costs.prefill_attended_token_s)
    decode_s = costs.decode_sequence_s + mix.attended_tokens * costs.attended_token_s
    linear_s = per_output * costs.prefill_token_s + costs.decode_sequence_s

    def step_s(sequences: float) -> float:
        hidden_s = max(0.0, costs.weight_read_s - sequences * linear_s)
        return costs.base_s + hidden_s + sequences * (prefill_s + decode_s)

    kv_tokens = costs.kv_memory_bytes / costs.kv_bytes_per_token - mix.shared_tokens
    room = kv_tokens / (mix.held_tokens + BLOCK_TOKENS / 2)
    kv = room - min(0.5, max(0.0, room - 1.0))
    by_target = _largest(step_s, itl_target_s, float(max_sequences))
    sequences = min(kv, by_target, float(max_sequences))
    if sequences < 1.0:
        return None
    found_s = step_s(sequences)
    rate = sequences / (mix.output_tokens * found_s)
    prefill_ratio = sequences * prefill_s / found_s
    if sequences * (prefill_s + decode_s) >= _SATURATED_RATIO * found_s:
        bound = Bound.PREFILL if prefill_s > decode_s else Bound.DECODE
    elif sequences == kv:
        bound = Bound.KV
    else:
        bound = Bound.ITL if sequences == by_target < max_sequences else Bound.SEQUENCES
    decoding_s = costs.base_s + max(costs.weight_read_s, sequences * costs.decode_sequence_s)
    decoding_s += sequences * mix.attended_tokens * costs.attended_token_s
    prefill_per_s = 1.0 / (prefill_s * mix.output_tokens) if prefill_s else math.inf
    decode_per_s = sequences / (mix.output_tokens * decoding_s)
    return ReplicaCapacity(rate, sequences, kv, found_s, prefill_ratio, bound, prefill_per_s, decode_per_s)


def _largest(step_s: Callable[[float], float], target_s: float, most: float) -> float:
    """Return the most sequences whose step takes at most ``target_s``. A step never shortens with more."""
    if step_s(most) <= target_s:
        return most
    low, high = 0.0, most
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) <= target_s else (low, middle)
    return low


def spare_replicas(
    load_replicas: float,
    work_s: float,
    absorb_s: float,
    *,
    burst_ratio: float = 1.0,
    z: float = 2.33,
    sequences: float = 1.0,
) -> float:
    """Return the headroom for arrivals that vary around their rate, in replicas.

    ``load_replicas`` of work arrive per second in requests of ``work_s`` replica-seconds each, independently
    (or with ``burst_ratio`` times the variance), and a replica serves ``sequences`` at once. With x replicas
    spare, a request waits longer than ``absorb_s`` with the probability

        a(x * sqrt(sequences / (load * burst))) * exp(-2 * x * absorb / (work * burst))

    where a(b) = 1 / (1 + b * P(Z < b) / p(b)) is the probability to wait at all, with Z normal of density p
    (Halfin and Whitt, Heavy-traffic limits for queues with many exponential servers, 1981), and the backlog
    of a busy fleet decays exponentially (Kingman, 1961). The least x is returned whose probability is
    P(Z > ``z``).
    """
    if load_replicas <= 0.0:
        return 0.0
    allowed = math.erfc(z / math.sqrt(2.0)) / 2.0

    def late(spare: float) -> float:
        b = spare * math.sqrt(sequences / (load_replicas * burst_ratio))
        density = math.exp(-b * b / 2.0) / math.sqrt(2.0 * math.pi)
        waits = density / (density + b * (1.0 - math.erfc(b / math.sqrt(2.0)) / 2.0))
        return waits * math.exp(-2.0 * spare * absorb_s / (work_s * burst_ratio))

    low, high = 0.0, (z + 1.0) * math.sqrt(load_replicas * burst_ratio / sequences)  # late(high) < allowed
    while high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if late(middle) > allowed else (low, middle)
    return high


def with_zones(replicas: float, zones: int) -> int:
    """Return how many replicas, equal in each zone, leave ``replicas`` when one of ``zones`` is lost."""
    if zones < 2:
        return math.ceil(replicas - 1e-9)
    return zones * math.ceil(replicas / (zones - 1) - 1e-9)
