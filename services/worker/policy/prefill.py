"""Prefill in a step: how many prompt tokens join its decodes, and how its prefills share them. Pure.

Budget: chunked prefill bounds the ITL of running streams (Sarathi-Serve, OSDI'24); here the chunk size
follows the measured step times. After a step of ``p`` prompt tokens that took ``t`` seconds, the budget for a
target ``T`` is ``p * T / t``. For a step time ``b + a * p`` with ``b < T`` this map is increasing and concave
in ``p``, and its only fixed point is where the step takes ``T``. So the budget approaches that point from
either side without passing it. ``b`` and ``a``, which change with the batch and the context, need not be
known.

If ``b`` alone is above the target, no budget meets it, but prefill must not stop. So the time of steps with
hardly any prompt tokens is tracked too, and prefill may then add ``SLACK_RATIO`` to it.

Shares: shortest remaining time first has the least mean delay, but starves long prefills under load (Schrage,
1968). The oldest prefill therefore gets a quarter of every step in any case. So

- every prefill finishes: the oldest gains at least ``max(1, budget / 4)`` tokens a step, and the next in age
  becomes the oldest after it;
- a short one is delayed by shorter ones only: a prefill of ``r`` tokens finishes within
  ``ceil((r + w) / (budget - share))`` steps, where ``w`` counts the tokens that preceded it meanwhile, and
    within one step if ``w + r`` fits besides the share of the oldest one, however long that one is.

Classes are weighted as in Smith's rule (weighted shortest processing time, 1956): a token of a class counts
``CLASS_FACTOR`` times a token of the class above. So a short prompt overtakes a long one of a higher class,
but not one of its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

MIN_PREFILL_TOKENS: Final = 16
FLOOR_RATIO: Final = 1 / 64  # share of the maximum that a step prefills however long it takes
# Share of the target that steps aim at: time per token grows with the context, and the budget lags.
AIM_RATIO: Final = 0.9
MOST_GROWTH: Final = 1.25  # per step: limits the effect of one fast outlier
MOST_SHRINK: Final = 0.5  # per step: limits the effect of one slow outlier
SLACK_RATIO: Final = 0.25
LIGHT_WEIGHT: Final = 0.2  # weight of the newest step in the mean of light steps


class PrefillBudget:
    """Tokens per step, between a floor and ``most_tokens``, so that a step stays within ``target_s``.

    ``full_step_s`` is the measured duration of a step of ``most_tokens``, 0 if unknown.
    """

    def __init__(self, target_s: float, *, most_tokens: int, full_step_s: float = 0.0) -> None:
        if not target_s > 0.0 or most_tokens < 1:
            raise ValueError(f"a target of {target_s} s with {most_tokens} tokens is no budget")
        self._target_s = target_s * AIM_RATIO
        self._most = float(most_tokens)
        self._floor = min(self._most, max(float(MIN_PREFILL_TOKENS), self._most * FLOOR_RATIO))
        self._light_s = 0.0  # duration of a step with at most the floor; 0: none measured yet
        known = self._target_s / full_step_s if full_step_s > 0.0 else 1.0
        self._tokens = min(self._most, max(self._floor, self._most * known))

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def aim(self, target_s: float) -> None:
        """Change the target: the budget moves at once as far as a step's time is proportional to its tokens,
        and the next measurements correct it."""
        aimed_s = target_s * AIM_RATIO
        tokens = self._tokens * aimed_s / self._target_s
        self._target_s, self._tokens = aimed_s, min(self._most, max(self._floor, tokens))

    def measured(self, prefill_tokens: int, step_s: float) -> None:
        """Adapt to a step that prefilled ``prefill_tokens``, which may be 0."""
        if step_s <= 0.0:
            return
        self._note_light(prefill_tokens, step_s)
        if prefill_tokens < 1:
            return
        target_s, now = self._reachable_s(), self._tokens
        # Rounded down to whole tokens, a budget that grows by less than one would not change.
        spent = now if prefill_tokens == int(now) else prefill_tokens
        fitting = spent * target_s / step_s
        if prefill_tokens < int(now) and step_s <= target_s and fitting < now:
            return  # it used less than its budget, so this measurement would shrink the budget wrongly
        bounded = min(now * MOST_GROWTH, max(now * MOST_SHRINK, fitting))
        self._tokens = min(self._most, max(self._floor, bounded))

    def _reachable_s(self) -> float:
        light_s = self._light_s
        return self._target_s if light_s <= self._target_s else light_s * (1.0 + SLACK_RATIO)

    def _note_light(self, prefill_tokens: int, step_s: float) -> None:
        if prefill_tokens <= self._floor:
            past_s = self._light_s or step_s
            self._light_s = past_s + LIGHT_WEIGHT * (step_s - past_s)
        else:  # A step with fewer prompt tokens would not have taken longer.
            self._light_s = min(self._light_s, step_s)


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
