"""The port between the planner and a cache of KV that earlier sequences left."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.worker.engine.sequence import SequenceState


class Attached(NamedTuple):
    """``blocks`` hold the first tokens of a sequence, with a reference each for it.

    ``tokens`` are those of the blocks and, where ``copy_from`` is a block, some more: the first ones that it
    holds. That block is to be copied to the sequence's own next one before anything is written there.
    """

    blocks: list[int]
    tokens: int
    copy_from: int | None = None


class PrefixReuse(Protocol):
    """Finds blocks that hold the KV of a sequence's leading tokens. Never of all: the last is computed."""

    def reusable(self, sequence: SequenceState) -> tuple[int, int]:
        """Return how many leading tokens are there, and how many of their blocks others hold right now.

        Those blocks cost no free one.
        """

    def found(self, sequence: SequenceState) -> list[int]:
        """Return the blocks that ``attach`` would give it."""

    def attach(self, sequence: SequenceState) -> Attached:
        """Attach the cached KV to a sequence that starts, and count the request."""

    def advance(self, sequence: SequenceState) -> None:
        """Move a prefilling sequence past what others have computed since it started: ``computed`` rises,
        and ``blocks`` has theirs in place of its own, which are free."""

    def next_name(self, sequence: SequenceState) -> int | None:
        """Return the name of the prefix block that it computes next, None where that is never entered.

        Sequences of which it is the same would compute the same.
        """

    def publish(self, sequence: SequenceState) -> None:
        """Enter the whole blocks that a prefilling sequence has computed; they stay its own.

        Where another was first, ``blocks`` has that one's block, and the sequence's is free.
        """

    def retain(self, sequence: SequenceState) -> None:
        """Enter all that a sequence has computed, before its blocks are released."""

    def discard(self, sequence: SequenceState) -> None:
        """Remove what a sequence has computed from the index: it may be wrong."""

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the names of prefix blocks that came and went since the call before."""
