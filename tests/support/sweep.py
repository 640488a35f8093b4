"""Which values of a long sweep run in each ``make test``; ``make sim-tests`` runs them all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def daily(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the values as parameters; those that are not kept run in the sweep alone."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.sweep) for value in values]
