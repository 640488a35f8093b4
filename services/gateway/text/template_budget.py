"""What one rendering of a chat template may cost, and the errors that end it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from jinja2.runtime import Context

MAX_INT_BITS: Final = 128

# A name that no template can spell: it contains a blank.
BUDGET: Final = "fairway budget"


class TemplateRefused(Exception):
    """The template called ``raise_exception``; the text is from its author."""


class TemplateTooCostly(Exception):
    """The template exceeded its characters, steps or time."""


class TemplateBudget:
    """The remaining budget of one rendering. Any thread, one at a time."""

    def __init__(
        self, *, max_chars: int, max_steps: int, deadline_s: float, monotonic_s: Callable[[], float]
    ) -> None:
        self._chars_left = max_chars
        self._steps_left = max_steps
        self._deadline_s = deadline_s
        self._monotonic_s = monotonic_s

    def charge(self, chars: int = 0) -> None:
        """Count one step and some characters. Raises TemplateTooCostly."""
        self._steps_left -= 1
        self._chars_left -= chars
        if self._chars_left < 0:
            raise TemplateTooCostly("too much text")
        if self._steps_left < 0:
            raise TemplateTooCostly("too many steps")
        if self._monotonic_s() > self._deadline_s:
            raise TemplateTooCostly("too much time")


def weight(value: object, budget: TemplateBudget) -> int:
    """Charge and return the approximate length of ``str(value)``, without building it."""
    if isinstance(value, str):
        budget.charge(len(value))
        return len(value)
    size = 24
    if isinstance(value, int):
        check_int(value)
    budget.charge(size)
    if isinstance(value, Mapping):
        size += sum(weight(key, budget) + weight(item, budget) for key, item in value.items())
    elif isinstance(value, list | tuple):
        size += sum(weight(item, budget) for item in value)
    return size


def check_int(value: int) -> None:
    if value.bit_length() > MAX_INT_BITS:
        raise TemplateTooCostly("a number is too large")


def budget_of(context: Context) -> TemplateBudget:
    found = context.resolve_or_missing(BUDGET)
    assert isinstance(found, TemplateBudget), "a template is rendered without a budget"
    return found
