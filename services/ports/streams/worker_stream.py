"""Port of a gateway's stream at a worker, independent of gRPC: for the servicer and the in-process client.

The worker merges everything that is pending into one ``StepFrame`` per ``take``, so that a slow reader gets
fewer and larger frames, never a longer queue. Credits bound the pending data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.generation import NotAdmittedReason, SequenceEnd, StartSpec, TokenLogprobs


@dataclass(slots=True)
class StepFrame:
    """All changes since the previous frame, to be processed in the order of the fields."""

    accepted: list[int] = field(default_factory=list)
    not_admitted: list[tuple[int, NotAdmittedReason]] = field(default_factory=list)
    # One per entry, as are offsets, counts and texts.
    handles: list[int] = field(default_factory=list)
    # Output offset of the entry's first token.
    offsets: list[int] = field(default_factory=list)
    # Tokens of the entry.
    counts: list[int] = field(default_factory=list)
    # The tokens of all entries, one entry after another.
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # Log-probabilities of each entry, one value per token.
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finished: list[tuple[int, SequenceEnd]] = field(default_factory=list)
    # Rows of fixed-cost models that ended. A row that was not admitted is in ``not_admitted``.
    rows: list[tuple[int, RowEnd]] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether it contains anything."""
        return bool(self.handles or self.finished or self.accepted or self.not_admitted or self.rows)


class WorkerStream(Protocol):
    """Owned by one caller in the worker's event loop. A handle is its number of a sequence or a row."""

    def start(self, handle: int, spec: StartSpec) -> None:
        """Request admission; a later frame has the result. Raises InvalidInput for a handle in use."""

    def start_row(self, handle: int, spec: RowSpec) -> None:
        """Run a row; a later frame has its end, or that it was not admitted. Raises InvalidInput for a handle
        in use."""

    def refuse(self, handle: int, reason: NotAdmittedReason) -> None:
        """Reject a start that is out of bounds; a later frame has the reason."""

    def credit(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        """Grant ``tokens[i]`` more output tokens to ``handles[i]``. Unknown handles are ignored."""

    def cancel(self, handles: Sequence[int]) -> None:
        """Cancel sequences and free their KV within one engine step, and drop rows that no batch contains.
        Later frames contain none of them."""

    @property
    def only_accepted(self) -> bool:
        """Whether nothing but acceptances is pending, which may wait for the first tokens."""

    def take(self) -> StepFrame | None:
        """Return and clear the pending changes; None when there are none. Call again until None."""

    def close(self) -> None:
        """Cancel every sequence and row of the stream. Idempotent."""


class WorkerStreams(Protocol):
    def open(self, wake: Callable[[], None]) -> WorkerStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something."""
