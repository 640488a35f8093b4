"""A cell is one input at one face: what it may be answered, and what is wrong with an answer. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

# Within its own limits a refusal takes milliseconds; the machine may be loaded.
MAX_ANSWER_S: Final = 15.0
# Texts of a program's inside: where it lies, what it is made of, how it failed.
_LEAK: Final = re.compile(
    r"Traceback|File \"|site-packages|\bservices/\w+/|object at 0x|0x[0-9a-f]{8}|/tmp/|/home/|/root/"
)


class Outcome(StrEnum):
    SERVED = "served"
    REFUSED = "refused"  # by a status that names the caller's mistake, or by the end of its connection
    FAILED = "failed"  # by a status that names the server's


@dataclass(frozen=True, slots=True)
class Answer:
    outcome: Outcome
    status: str
    text: str = ""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    group: str
    input: str
    face: str
    send: Callable[[], Awaitable[Answer]]
    served: bool = False  # whether it may be served, where that harms nobody


@dataclass(slots=True)
class Tally:
    """What a run found. ``crashes``: processes that ended, and canaries that were not served afterwards."""

    cells: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    def add(self, cell: Cell, answer: Answer) -> str:
        """Count an answer; return what is wrong with it, "" when nothing is."""
        self.cells[cell.group] = self.cells.get(cell.group, 0) + 1
        found = problem(cell, answer)
        if found:
            found = f"{cell.group}, {cell.input}, {cell.face}: {found}"
            self.unexpected.append(found)
        return found

    @property
    def passed(self) -> bool:
        return bool(self.cells) and not self.unexpected and not self.crashes

    @property
    def result(self) -> str:
        """The last line of a run."""
        figures = {
            "cells": sum(self.cells.values()),
            "unexpected": len(self.unexpected),
            "crashes": len(self.crashes),
        }
        return f"RESULT {json.dumps(figures)}"


def problem(cell: Cell, answer: Answer) -> str:
    """Return what is wrong with an answer, "" when nothing is."""
    said = f"{answer.status} {answer.text[:160]!r}"
    if answer.outcome is Outcome.FAILED:
        return f"the server failed: {said}"
    if answer.outcome is Outcome.SERVED and not cell.served:
        return f"it was served: {said}"
    if answer.outcome is Outcome.REFUSED and (leak := _LEAK.search(answer.text)):
        return f"the refusal has {leak[0]!r}: {said}"
    if answer.took_s > MAX_ANSWER_S:
        return f"it took {answer.took_s:.1f} s: {said}"
    return ""


def of_http(status: int, text: str, took_s: float) -> Answer:
    """Return an answer over HTTP; status 0: the connection ended without one."""
    if 200 <= status < 300:
        outcome = Outcome.SERVED
    else:
        outcome = Outcome.REFUSED if status < 500 or status == 501 else Outcome.FAILED
    return Answer(outcome, f"{status}", text, took_s)


FAILURES: Final = frozenset({"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED"})


def of_grpc(code: str, text: str, took_s: float) -> Answer:
    if code == "OK":
        return Answer(Outcome.SERVED, code, text, took_s)
    return Answer(Outcome.FAILED if code in FAILURES else Outcome.REFUSED, code, text, took_s)


def grouped(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """Return the cells of each input, in their order."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.group, cell.input), []).append(cell)
    return found
