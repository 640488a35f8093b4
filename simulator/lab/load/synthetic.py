"""Endless traces with the shape of the two recorded ones, for where the recorded ones are not at hand.

The figures in the constants are those of the published traces: rate, burstiness, median and spread of
lengths, and how much of a prompt was seen before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Final

from simulator.lab.load.arrivals import Gamma
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.traces import MOONCAKE_BLOCK_TOKENS, TraceRow

# Azure LLM inference trace 2023, conversation.
AZURE_ARRIVALS: Final = Gamma(5.5, cv=1.3)
AZURE_PROMPT: Final = LogNormal(900.0, 0.95, least_tokens=2, most_tokens=4200)
AZURE_OUTPUT: Final = LogNormal(150.0, 0.75, least_tokens=7, most_tokens=1000)
# Mooncake FAST'25 trace, conversation.
MOONCAKE_ARRIVALS: Final = Gamma(3.4, cv=1.0)
MOONCAKE_FIRST_TURN: Final = LogNormal(6000.0, 1.05, least_tokens=890, most_tokens=110_000)
MOONCAKE_NEXT_TURN: Final = LogNormal(1200.0, 1.0, least_tokens=20, most_tokens=20_000)
MOONCAKE_OUTPUT: Final = LogNormal(300.0, 0.7, least_tokens=1, most_tokens=2000)
_CONTINUED_RATIO: Final = 0.4
_OPEN_CONVERSATIONS: Final = 400
_MOST_TOKENS: Final = 126_000


def azure_like(seed: int) -> Iterator[TraceRow]:
    """Yield chats of independent lengths that share nothing."""
    rng = Random(f"{seed}/azure")
    for at_s in AZURE_ARRIVALS.times(Random(f"{seed}/azure/arrivals")):
        yield TraceRow(at_s, AZURE_PROMPT.draw(rng), AZURE_OUTPUT.draw(rng))


def mooncake_like(seed: int) -> Iterator[TraceRow]:
    """Yield turns of conversations: a turn begins with all of the turns before it, the first with block 0."""
    rng = Random(f"{seed}/mooncake")
    said: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_OPEN_CONVERSATIONS)  # tokens, blocks
    fresh = 1
    for at_s in MOONCAKE_ARRIVALS.times(Random(f"{seed}/mooncake/arrivals")):
        output_tokens = MOONCAKE_OUTPUT.draw(rng)
        before = 0
        blocks: tuple[int, ...] = (0,)
        if said and rng.random() < _CONTINUED_RATIO:
            before, blocks = said[rng.randrange(len(said))]
        new_tokens = (MOONCAKE_NEXT_TURN if before else MOONCAKE_FIRST_TURN).draw(rng)
        prompt_tokens = min(before + new_tokens, _MOST_TOKENS)
        kept = blocks[: max(1, before // MOONCAKE_BLOCK_TOKENS)]
        wanted = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        blocks = (*kept, *range(fresh, fresh + wanted - len(kept)))[:wanted]
        fresh += max(0, wanted - len(kept))
        said.append((prompt_tokens, blocks))
        yield TraceRow(at_s, prompt_tokens, output_tokens, blocks)
