"""Engine commands of tests, from their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine_protocol import Submit


def make_submit(
    handle: int,
    ids: Sequence[int],
    credit_limit: int,
    produced_ids: Sequence[int] = (),
    *,
    max_tokens: int = 16,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    prefix_hashes: Sequence[int] = (),
    prefix_root: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    choice: int = 0,
    priority: int = 0,
    **sampling: Any,
) -> Submit:
    """Return a Submit; what has no name of its own here is a field of ``Sampling``."""
    return Submit(
        handle,
        Prompt(ids, tuple(prefix_hashes), prefix_root),
        Sampling(logit_bias=tuple((logit_bias or {}).items()), **sampling),
        OutputLimits(max_tokens, min_tokens, (), stop_token_ids, ignore_eos),
        credit_limit,
        choice,
        produced_ids,
        priority,
    )
