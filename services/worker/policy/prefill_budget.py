"""How many prompt tokens a step may prefill beside its decodes. Pure: the caller brings the measured times.

Chunked prefill bounds the gap that running streams see (Sarathi-Serve, OSDI'24); here the chunk follows what
steps really take. After a step of ``p`` prompt tokens that took ``t`` seconds, the budget for a target ``T``
is ``p * T / t``. For a step time ``b + a * p`` with ``b < T`` this map is increasing and concave in ``p``,
with its only fixed point where the step takes ``T``, so the budget nears that point from either side without
passing it; ``b`` and ``a``, which move with the batch and the context, need not be known.

Where ``b`` alone is above the target, no budget meets it and none may stop the prefill: what steps with
hardly any prompt take is followed too, and prefill may then add ``SLACK_RATIO`` to that.
"""

from __future__ import annotations

from typing import Final

MIN_PREFILL_TOKENS: Final = 16
FLOOR_RATIO: Final = 1 / 64  # of the most: what a step prefills however long it takes
AIM_RATIO: Final = 0.9  # of the target: the time per token grows with the context, and the budget follows
MOST_GROWTH: Final = 1.25  # per step: one step that was fast by chance is not believed
MOST_SHRINK: Final = 0.5  # and one that was slow by chance does not stop the prefill
SLACK_RATIO: Final = 0.25
LIGHT_WEIGHT: Final = 0.2  # of the newest step in the mean of light ones


class PrefillBudget:
    """Tokens per step, between a floor and ``most_tokens``, so that a step stays within ``target_s``.

    ``full_step_s`` is what a step of ``most_tokens`` is known to take, 0 if nothing is.
    """

    def __init__(self, target_s: float, *, most_tokens: int, full_step_s: float = 0.0) -> None:
        if not target_s > 0.0 or most_tokens < 1:
            raise ValueError(f"a target of {target_s} s with {most_tokens} tokens is no budget")
        self._target_s = target_s * AIM_RATIO
        self._most = float(most_tokens)
        self._floor = min(self._most, max(float(MIN_PREFILL_TOKENS), self._most * FLOOR_RATIO))
        self._light_s = 0.0  # what a step with at most the floor takes, 0 until one was seen
        known = self._target_s / full_step_s if full_step_s > 0.0 else 1.0
        self._tokens = min(self._most, max(self._floor, self._most * known))

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def measured(self, prefill_tokens: int, step_s: float) -> None:
        """Follow a step that prefilled so many tokens, perhaps none."""
        if step_s <= 0.0:
            return
        self._note_light(prefill_tokens, step_s)
        if prefill_tokens < 1:
            return
        target_s, now = self._reachable_s(), self._tokens
        # Cut to whole tokens, a budget that grows by less than one would stay where it is.
        spent = now if prefill_tokens == int(now) else prefill_tokens
        fitting = spent * target_s / step_s
        if prefill_tokens < int(now) and step_s <= target_s and fitting < now:
            return  # it did not use its budget: the map says where it came from, not where it leads
        bounded = min(now * MOST_GROWTH, max(now * MOST_SHRINK, fitting))
        self._tokens = min(self._most, max(self._floor, bounded))

    def _reachable_s(self) -> float:
        light_s = self._light_s
        return self._target_s if light_s <= self._target_s else light_s * (1.0 + SLACK_RATIO)

    def _note_light(self, prefill_tokens: int, step_s: float) -> None:
        if prefill_tokens <= self._floor:
            past_s = self._light_s or step_s
            self._light_s = past_s + LIGHT_WEIGHT * (step_s - past_s)
        else:  # without the prompt it would have taken no longer
            self._light_s = min(self._light_s, step_s)
