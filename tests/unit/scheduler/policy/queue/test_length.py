"""Long prompts, one by one."""

from __future__ import annotations

import pytest

from services.core.fleet import LONG_PROMPT_TOKENS
from services.scheduler.policy.queue.length import (
    LengthPolicy,
    has_long_prefill_slot,
    has_prefill_room,
    is_long,
    prefill_backlog_tokens,
    within_long_share,
)

POLICY = LengthPolicy(
    max_long_prefills=2,
    tenant_long_kv_ratio=0.5,
    backlog_ratio=0.5,
    default_ttft_s=10.0,
    min_backlog_tokens=1000,
)


def test_a_worker_takes_so_many_long_prompts_at_a_time_and_any_number_of_others() -> None:
    assert is_long(LONG_PROMPT_TOKENS)
    assert not is_long(LONG_PROMPT_TOKENS - 1)
    assert has_long_prefill_slot(LONG_PROMPT_TOKENS, 1, POLICY)
    assert not has_long_prefill_slot(LONG_PROMPT_TOKENS, 2, POLICY)
    assert has_long_prefill_slot(LONG_PROMPT_TOKENS - 1, 100, POLICY)


def test_what_may_be_queued_follows_the_target_and_the_rate() -> None:
    assert prefill_backlog_tokens(8000.0, 2.0, POLICY) == 8000
    assert prefill_backlog_tokens(8000.0, None, POLICY) == 40_000
    assert prefill_backlog_tokens(8000.0, 0.01, POLICY) == 1000, "a step's worth at any rate"
    assert has_prefill_room(8000, 8000.0, 2.0, POLICY)
    assert not has_prefill_room(8001, 8000.0, 2.0, POLICY)
    assert has_prefill_room(0, 0.0, 0.001, POLICY), "an idle worker takes it"


def test_a_tenant_has_its_share_of_the_pool_for_long_prompts() -> None:
    long = LONG_PROMPT_TOKENS
    assert within_long_share(long, 5000, 5000, 20_000, POLICY)
    assert not within_long_share(long, 5001, 5000, 20_000, POLICY)
    assert within_long_share(long, 30_000, 0, 20_000, POLICY), "the first one always"
    assert within_long_share(long - 1, 30_000, 20_000, 20_000, POLICY), "short ones are not counted"


def test_settings_that_would_let_nobody_start_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LengthPolicy(max_long_prefills=0)
    with pytest.raises(ValueError, match="share"):
        LengthPolicy(tenant_long_kv_ratio=0.0)
