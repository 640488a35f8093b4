"""Prompts as token ids: a function of the request's number and of the prefix that it shares."""

from __future__ import annotations

from typing import Final

from simulator.fleet.clients.client import SimRequest
from simulator.fleet.spec import VOCABULARY

_LONGEST: Final = 1 << 18
_RAMP: Final = list(range(VOCABULARY)) * (_LONGEST // VOCABULARY + 2)
_NAME_TOKENS: Final = 3  # ids that spell a number to the base of the vocabulary


def prompt_ids(request: SimRequest, number: int) -> list[int]:
    """Return the prompt: ``prefix_tokens`` named by ``prefix_id`` or ``blocks``, the rest by the number.

    Two prompts agree exactly in what they share, so that a cache hit is never by chance.
    """
    if request.blocks:
        named = [id for block in request.blocks for id in _named(block, request.block_tokens, 3)]
        rest = request.prompt_tokens - len(named)
        return named + _named(number, rest, 2) if rest > 0 else named[: request.prompt_tokens]
    shared = min(request.prefix_tokens, request.prompt_tokens)
    return _named(request.prefix_id, shared, 1) + _named(number, request.prompt_tokens - shared, 2)


def _named(name: int, tokens: int, kind: int) -> list[int]:
    """Return a run of ids that begins with its name."""
    spelled = [kind, name % VOCABULARY, name // VOCABULARY % VOCABULARY][:tokens]
    start = name * 7919 % VOCABULARY
    return spelled + _RAMP[start : start + max(0, tokens - _NAME_TOKENS)]
