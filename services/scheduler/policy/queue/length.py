"""Limits on long prompts, so that a burst of them neither fills a pool nor delays other prompts.

Three limits, none of which keeps an idle worker from a placement:
- prompts of LONG_PROMPT_TOKENS and more in prefill at a time, per worker: each chunk of a long prefill uses
  its part of a step's token budget, and a second one doubles the time of the first.
- prompt tokens that wait for prefill on a worker, as many as it computes within a share of the placement's
  time to first token: further prompts stay in the scheduler's queue, where they are ordered.
- KV that the long prompts of one tenant hold, as a share of the pool.

Chunked prefill: Agrawal et al., Sarathi-Serve, OSDI'24. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.core.fleet import LONG_PROMPT_TOKENS

# The placement filters that apply these limits. A placement that they reject waits as it does for KV room.
FILTER_NAMES = frozenset({"has_long_prefill_slot", "has_prefill_room"})


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """Limits of long prompts and of the prefill backlog."""

    max_long_prefills: int = 2
    tenant_long_kv_ratio: float = 0.5
    backlog_ratio: float = 0.5  # the share of the time to first token that may pass behind other prefills
    default_ttft_s: float = 10.0  # target of placements that have none
    min_backlog_tokens: int = 2048  # always admitted: a step's worth
    # Largest backlog, in seconds of prefill, for a placement whose tenant holds more than its share
    # (``HeldShares``); one chunk is always admitted.
    giving_way_backlog_s: float = 0.05

    def __post_init__(self) -> None:
        if self.max_long_prefills < 1:
            raise ValueError("a worker takes at least one long prompt at a time")
        if not 0.0 < self.tenant_long_kv_ratio <= 1.0 or not 0.0 < self.backlog_ratio <= 1.0:
            raise ValueError("a share is above 0 and at most 1")


def is_long(prompt_tokens: int) -> bool:
    return prompt_tokens >= LONG_PROMPT_TOKENS


def has_long_prefill_slot(prompt_tokens: int, long_prefills: int, policy: LengthPolicy) -> bool:
    """Whether a worker takes the prompt. ``long_prefills``: reported ones and outstanding grants."""
    return not is_long(prompt_tokens) or long_prefills < policy.max_long_prefills


def prefill_backlog_tokens(
    prefill_tokens_per_s: float, ttft_target_s: float | None, policy: LengthPolicy
) -> int:
    """Return how many prompt tokens may be queued ahead of a placement with this target on a worker of this
    rate."""
    target_s = policy.default_ttft_s if ttft_target_s is None else ttft_target_s
    return max(policy.min_backlog_tokens, round(policy.backlog_ratio * target_s * prefill_tokens_per_s))


def has_prefill_room(
    queued_prefill_tokens: int,
    prefill_tokens_per_s: float,
    ttft_target_s: float | None,
    policy: LengthPolicy,
) -> bool:
    """Whether the worker's prefill queue leaves the placement enough time. True for an idle worker."""
    if queued_prefill_tokens <= 0:
        return True
    return queued_prefill_tokens <= prefill_backlog_tokens(prefill_tokens_per_s, ttft_target_s, policy)


def within_long_share(
    prompt_tokens: int, reserved_tokens: int, held_tokens: int, pool_tokens: int, policy: LengthPolicy
) -> bool:
    """Whether a tenant whose long prompts hold ``held_tokens`` of the pool may start this one.

    True for a tenant that holds none.
    """
    if not is_long(prompt_tokens) or not held_tokens:
        return True
    return held_tokens + reserved_tokens <= policy.tenant_long_kv_ratio * pool_tokens
