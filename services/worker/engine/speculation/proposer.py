"""The port of whatever guesses which tokens come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.engine.sequence import SequenceState


class Proposer(Protocol):
    """Proposes tokens. It reads sequences, and keeps by handle what it needs; a wrong guess costs time."""

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Return for each sequence the tokens that may follow its last one, at most as many as stated."""

    def forget(self, handle: int) -> None:
        """Drop what is kept of a sequence that is gone; there may be nothing."""

    def resize(self, blocks: int) -> None:
        """Have a KV pool of so many blocks, if it has one. Raises MemoryError as ``Runner.resize``."""
