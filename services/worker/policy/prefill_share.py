"""How the prefills of a step share its tokens: the shortest rest first, the oldest with a share of its own.

Shortest remaining time first has the least mean delay, and starves the long ones under load (Schrage, 1968);
the oldest prefill therefore gets a quarter of every step whatever else waits. So

- every prefill finishes: the oldest gains at least ``max(1, budget / 4)`` tokens a step, and whoever is next
  becomes the oldest after it;
- a short one is delayed by shorter ones only: a prefill of ``r`` tokens is done within
  ``ceil((r + w) / (budget - share))`` steps, ``w`` being the tokens that came before it in line meanwhile,
  and within one step if ``w + r`` fits beside the oldest one's share, however long that one is.

Classes weigh as in Smith's rule (weighted shortest processing time, 1956): a token of a class counts
``CLASS_FACTOR`` times one of the class above, so a short prompt passes a long one of a higher class, and none
of its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

OLDEST_RATIO: Final = 0.25
CLASS_FACTOR: Final = 4.0
_MOST_CLASSES: Final = 8  # apart, so that the factor stays finite


class Claim(NamedTuple):
    """A prefill with so many tokens to go; ``order`` is (priority, arrival), smaller goes first."""

    tokens: int
    order: tuple[int, int]

    @property
    def rank(self) -> tuple[float, int]:
        """Its place in line: its weighted rest, then its arrival."""
        priority, arrival = self.order
        return self.tokens * CLASS_FACTOR ** max(-_MOST_CLASSES, min(_MOST_CLASSES, priority)), arrival


def shares(claims: Sequence[Claim], budget: int) -> list[int]:
    """Return the tokens of each claim in this step, together ``budget`` unless all claims are less.

    Work-conserving: what the line leaves goes to the oldest, and the reverse.
    """
    if budget <= 0 or not claims:
        return [0] * len(claims)
    if len(claims) == 1:
        return [min(budget, claims[0].tokens)]
    taken = [0] * len(claims)
    oldest = min(range(len(claims)), key=lambda index: claims[index].order[1])
    taken[oldest] = min(claims[oldest].tokens, max(1, int(budget * OLDEST_RATIO)))
    left = budget - taken[oldest]
    for index in sorted(range(len(claims)), key=lambda index: claims[index].rank):
        if left <= 0:
            break
        more = min(claims[index].tokens - taken[index], left)
        taken[index] += more
        left -= more
    return taken
