"""How the prefills of a step share its tokens: shortest remaining first, with a fixed share for the oldest.

Shortest remaining time first has the least mean delay, but starves long prefills under load (Schrage, 1968).
The oldest prefill therefore gets a quarter of every step in any case. So

- every prefill finishes: the oldest gains at least ``max(1, budget / 4)`` tokens a step, and the next in age
  becomes the oldest after it;
- a short one is delayed by shorter ones only: a prefill of ``r`` tokens finishes within
  ``ceil((r + w) / (budget - share))`` steps, where ``w`` counts the tokens that preceded it meanwhile, and
  within one step if ``w + r`` fits beside the share of the oldest one, however long that one is.

Classes are weighted as in Smith's rule (weighted shortest processing time, 1956): a token of a class counts
``CLASS_FACTOR`` times a token of the class above. So a short prompt overtakes a long one of a higher class,
but not one of its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

OLDEST_RATIO: Final = 0.25
CLASS_FACTOR: Final = 4.0
_MOST_CLASSES: Final = 8  # largest class distance, so that the factor stays finite


class PrefillClaim(NamedTuple):
    """A prefill with ``tokens`` left; ``order`` is (priority, arrival), the smaller runs first."""

    tokens: int
    order: tuple[int, int]

    @property
    def rank(self) -> tuple[float, int]:
        """Its position in the queue: weighted remaining tokens, then arrival."""
        priority, arrival = self.order
        return self.tokens * CLASS_FACTOR ** max(-_MOST_CLASSES, min(_MOST_CLASSES, priority)), arrival


def shares(claims: Sequence[PrefillClaim], budget: int) -> list[int]:
    """Return the tokens of each claim in this step, together ``budget`` unless the claims are smaller.

    Work-conserving: the oldest gets what the others leave, and the reverse.
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
