"""Prediction of an engine's next steps from its own recent ones.

    seconds = a + b * prefilled tokens + c * output tokens + d * tokens of KV that the decodes read

Fitted by ``core.estimates.least_squares``. It shows which steps of an engine were slow for their work; an
engine that is slow in every step is found by the scheduler, which compares workers.
"""

from __future__ import annotations

from typing import Final

from services.core.estimates.least_squares import NormalEquations, non_negative

_SAMPLED: Final = 8  # every so many steps one is a sample, after the first ones
_DENSE: Final = 32
_KEEP_RATIO: Final = 0.99  # per sample: the fit covers about a hundred
_FIRST_FIT: Final = 8  # samples before the first fit; later ones follow at twice as many, up to the last
_LAST_FIT: Final = 64


class StepPace:
    """Single writer: the recorder of one engine."""

    __slots__ = ("_due", "_every", "_factors", "_samples", "_steps", "_sums")

    def __init__(self) -> None:
        self._sums = NormalEquations.zero(4, _KEEP_RATIO)
        self._factors = (0.0, 0.0, 0.0, 0.0)
        self._steps = self._samples = 0
        self._due = self._every = _FIRST_FIT

    def predicted_s(self, prefilled: int, output: int, attended: int) -> float:
        """Return the time of a step with this work; 0 before the first fit."""
        per_step_s, per_prefill_s, per_output_s, per_attended_s = self._factors
        return per_step_s + prefilled * per_prefill_s + output * per_output_s + attended * per_attended_s

    def observe(self, prefilled: int, output: int, attended: int, step_s: float) -> None:
        """Learn from a step that took ``step_s``."""
        self._steps += 1
        if step_s <= 0.0 or (self._steps > _DENSE and self._steps % _SAMPLED):
            return
        self._sums.add((1.0, prefilled, output, attended), step_s)
        self._samples += 1
        if self._samples >= self._due:
            one, two, three, four = (value or 0.0 for value in non_negative((self._sums,)).values)
            self._factors = one, two, three, four
            self._every = min(2 * self._every, _LAST_FIT)
            self._due = self._samples + self._every
