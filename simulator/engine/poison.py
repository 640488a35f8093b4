"""Prompts that end the simulated engine that computes them. Their first ids say how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

_MARK: Final = 31_999  # no other prompt begins with it
POISON_TOKENS: Final = 4


class EngineEnding(IntEnum):
    """How the engine ends."""

    RAISES = 1  # an exception in the step
    SIGNALS = 2  # a signal that the process raises itself
    KILLED = 3  # another process kills it, as when it takes all memory
    HANGS = 4


@dataclass(frozen=True, slots=True)
class Poison:
    """The input with this number ends the engine in each step that samples it from ``after_tokens`` output
    tokens on."""

    ending: EngineEnding
    number: int
    after_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        """The first ids of its prompt."""
        return [_MARK, self.ending, self.number, self.after_tokens]


def poison_of(prompt: Sequence[int]) -> Poison | None:
    """Return the poison that a prompt begins with."""
    if len(prompt) < POISON_TOKENS or prompt[0] != _MARK:
        return None
    return Poison(EngineEnding(prompt[1]), prompt[2], prompt[3])


class EngineEnds(Exception):
    """A member of the batch ends the engine."""

    def __init__(self, poison: Poison) -> None:
        super().__init__(poison.ending.name)
        self.poison = poison
