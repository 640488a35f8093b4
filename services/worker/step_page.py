"""A page of memory that an engine shares with its agent: the members of the steps that run.

The engine writes the members before it runs a step and clears the count after it; the agent reads the page
once the engine has ended or hangs. So a step costs the comparison of two lists and two writes of eight bytes,
and no message. There are two slots, because a batch may be submitted while the one before it is computed.

Layout, in unsigned 64-bit words: per slot a count, then as many handles. The count is written last: a page
whose writer was killed in between names no step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

_SLOTS: Final = 2
_WORD_BYTES: Final = 8


class Member(Protocol):
    """A sequence of a step."""

    @property
    def handle(self) -> int: ...


class StepPage:
    """One end of the page. ``began`` and ``ended`` belong to the engine, ``members`` to the agent."""

    def __init__(self, words: memoryview, most: int) -> None:
        self._words = words
        self._most = most
        self._next = 0  # slot of the next step
        self._oldest = 0  # slot of the oldest step that has not ended
        # The decodes whose handles are written in each slot.
        self._written: list[Sequence[Member]] = [[], []]

    @classmethod
    def create(cls, path: Path, most: int) -> StepPage:
        """Return the agent's end, on a new file. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, size_of(most))
            return cls(memoryview(mmap.mmap(descriptor, size_of(most))).cast("Q"), most)
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, most: int) -> StepPage:
        """Return the engine's end of the agent's file. Raises OSError, ValueError for a smaller file."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(memoryview(mmap.mmap(descriptor, size_of(most))).cast("Q"), most)
        finally:
            os.close(descriptor)

    def began(self, decodes: Sequence[Member], prefills: Sequence[Member] = ()) -> None:
        """Announce a step, at most two that have not ended."""
        slot, self._next = self._next, 1 - self._next
        words, at = self._words, slot * (self._most + 1)
        if prefills or decodes != self._written[slot]:
            members = [*decodes, *prefills]
            assert len(members) <= self._most, "a step has more members than the page has room"
            for place, sequence in enumerate(members, at + 1):
                words[place] = sequence.handle
            self._written[slot] = decodes
            words[at] = len(members)
        else:
            words[at] = len(decodes)

    def ended(self) -> None:
        """Clear the step that began first."""
        slot, self._oldest = self._oldest, 1 - self._oldest
        self._words[slot * (self._most + 1)] = 0

    def members(self) -> tuple[int, ...]:
        """Return the handles of the announced steps, in order; empty while none runs."""
        found: dict[int, None] = {}
        for slot in range(_SLOTS):
            at = slot * (self._most + 1)
            count = min(self._words[at], self._most)
            found.update(dict.fromkeys(self._words[at + 1 : at + 1 + count]))
        return tuple(found)


def size_of(most: int) -> int:
    """Return the bytes of a page for steps of at most ``most`` members."""
    return _SLOTS * (most + 1) * _WORD_BYTES
