"""The port between the planner and a cache of KV that earlier sequences left."""

from __future__ import annotations

from typing import Protocol

from services.worker.engine.sequence import SequenceState


class PrefixReuse(Protocol):
    """Finds blocks that hold the KV of a sequence's leading tokens. Never of all: the last is computed."""

    def reusable(self, sequence: SequenceState) -> tuple[int, int]:
        """Return how many leading tokens are there, and how many of their blocks others hold right now.

        Those blocks cost no free one.
        """

    def attach(self, sequence: SequenceState) -> list[int]:
        """Return the blocks of those tokens, in order, with a reference each for the sequence."""
