"""What a run of the matrix says: a line per drill as it ends, then a table, then one line for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Row:
    """The result of one drill. Times in seconds, measured."""

    name: str
    what: list[str] = field(default_factory=list)
    requests: int = 0
    finished: int = 0
    resumed: int = 0
    moved: int = 0
    deferred: int = 0
    parted: int = 0
    silence_s: float = 0.0
    heal_s: float = 0.0
    slots_s: float = 0.0
    limits: tuple[float, float] = (0.0, 0.0)
    lost: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not (self.lost or self.leaks or self.wrong)


def line(row: Row) -> str:
    """Return a drill's result in one line."""
    if row.skipped:
        return f"{row.name:<28} skipped: {row.skipped}"
    state = "ok    " if row.passed else "FAILED"
    return (
        f"{row.name:<28} {state} {row.requests:>4} requests {row.finished:>4} finished"
        f" {row.resumed:>3} resumed {row.moved:>3} moved {row.deferred:>2} deferred {row.parted:>2} parted"
        f"  silence {row.silence_s:>5.1f} of {row.limits[0]:>4.1f} s"
        f"  healed {row.heal_s:>5.1f} of {row.limits[1]:>4.1f} s  slots {row.slots_s:>4.1f} s"
    )


def failures(row: Row, *, most: int = 12) -> list[str]:
    """Return what went wrong, one finding a line."""
    found = [*(f"LOST {each}" for each in row.lost), *(f"LEAK {each}" for each in row.leaks), *row.wrong]
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return [f"    {each}" for each in [*found[:most], *more]]


def result(rows: Sequence[Row]) -> str:
    """Return the last line of a run."""
    run = [row for row in rows if not row.skipped]
    counts = {
        "drills": len(run),
        "passed": sum(row.passed for row in run),
        "lost_requests": sum(len(row.lost) for row in run),
        "leaks": sum(len(row.leaks) for row in run),
    }
    return f"RESULT {json.dumps(counts)}"
