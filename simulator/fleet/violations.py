"""The violations of invariants that a run finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_KEPT: Final = 50


@dataclass(frozen=True, slots=True)
class Violation:
    """``invariant`` is the stable name of what did not hold; ``at_s`` is the simulation's time."""

    invariant: str
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at_s:.6f} s: {self.text}"


class Violations:
    """The first ``MAX_KEPT`` in full, the rest as counts."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.found: list[Violation] = []
        self.counts: Counter[str] = Counter()

    def add(self, invariant: str, text: str) -> None:
        self.counts[invariant] += 1
        if len(self.found) < MAX_KEPT:
            self.found.append(Violation(invariant, self._now_s(), text))

    def expect(self, holds: bool, invariant: str, text: Callable[[], str]) -> None:
        """Add a violation unless it holds. ``text`` is called only then."""
        if not holds:
            self.add(invariant, text())

    def integrity(self, invariant: str, name: str, check: Callable[[], None]) -> None:
        """Run a ``check_integrity``; what it asserts becomes a violation of ``name``."""
        try:
            check()
        except AssertionError as error:
            self.add(invariant, f"{name}: {error}")
