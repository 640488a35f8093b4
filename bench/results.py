"""What a benchmark prints last: ``SAMPLES {json}``, values by round, and ``RESULT {json}``, their medians."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, TypeAlias

Number: TypeAlias = float | int | bool | None
# A list has one value per round; its figure is their median.
Figure: TypeAlias = "Number | Sequence[float] | Mapping[str, Figure]"
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
        elif isinstance(value, Sequence) and not isinstance(value, str) and value:
            found[prefix + name] = [float(each) for each in value]
    return found


def _medians(value: Mapping[str, Figure]) -> dict[str, object]:
    return {
        name: _medians(each)
        if isinstance(each, Mapping)
        else (None if each is None or not _values(each) else _rounded(_median(each)))
        for name, each in value.items()
    }


def _values(value: Number | Sequence[float]) -> bool:
    return not isinstance(value, Sequence) or bool(value)


def _median(value: Number | Sequence[float]) -> float | int | bool:
    assert value is not None
    return median(value) if isinstance(value, Sequence) else value


def _rounded(value: float | int | bool) -> float | int | bool:
    """Return a float with ``DIGITS`` significant digits, an integer as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
