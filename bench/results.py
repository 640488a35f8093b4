"""What a benchmark prints last: ``SAMPLES {json}``, values by round, and ``RESULT {json}``, their medians."""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

# A list has one value per round; its figure is their median. A text is printed, and no figure.
Figure: TypeAlias = "float | int | bool | str | list[float] | Mapping[str, Figure] | None"
RESULT: Final = "RESULT "
SAMPLES: Final = "SAMPLES "
DIGITS: Final = 5


def print_result(figures: Mapping[str, Figure]) -> None:
    """Both lines are on stdout; ``RESULT`` is the last."""
    samples = {name: [_rounded(value) for value in values] for name, values in flat(figures).items()}
    print(SAMPLES + json.dumps({name: values for name, values in samples.items() if len(values) > 1}))
    print(RESULT + json.dumps(_medians(figures)), flush=True)


def flat(figures: Mapping[str, Figure], prefix: str = "") -> dict[str, list[float]]:
    """Return the values of each figure by round; nested names are joined by dots, None is left out."""
    found: dict[str, list[float]] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found[prefix + name] = [float(value)]
        elif isinstance(value, list) and value:
            found[prefix + name] = [float(each) for each in value]
    return found


def _medians(figures: Mapping[str, Figure]) -> dict[str, object]:
    """Return the figures with the median in place of a list; None for an empty one."""
    found: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found[name] = _medians(value)
        elif isinstance(value, list):
            found[name] = _rounded(median(value)) if value else None
        else:
            found[name] = _rounded(value)
    return found


def _rounded(value: T) -> T | float:
    """Return a float with ``DIGITS`` significant digits, anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
