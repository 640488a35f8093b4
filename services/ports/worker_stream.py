"""One gateway's stream at a worker, without a wire: what the gRPC servicer and the in-process client drive.

The worker side merges everything that is pending into one ``StepFrame`` per ``take``, so that a reader
that lags gets fewer and larger frames, never a longer queue: credits bound what can be pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.core.generation import NotAdmittedReason, SequenceEnd, StartSpec, TokenLogprobs


@dataclass(slots=True)
class StepFrame:
    """What happened since the frame before. To be read in the order of the fields.

    Entry i of ``handles``, ``offsets``, ``counts`` and ``texts`` belongs together; ``ids`` holds the
    entries' tokens one after another, ``counts[i]`` each; ``logprobs`` maps an entry to one per token.
    """

    accepted: list[int] = field(default_factory=list)
    not_admitted: list[tuple[int, NotAdmittedReason]] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finished: list[tuple[int, SequenceEnd]] = field(default_factory=list)


class WorkerStream(Protocol):
    """Owned by one caller in the worker's event loop. A handle is the caller's number of a sequence."""

    def start(self, handle: int, spec: StartSpec) -> None:
        """Ask for admission; the answer is in a later frame. Raises InvalidInput for a handle in use."""

    def credit(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        """Allow ``tokens[i]`` more output tokens to ``handles[i]``. Unknown handles are ignored."""

    def cancel(self, handles: Sequence[int]) -> None:
        """Free their KV within one engine step. No frame names them any more."""

    def take(self) -> StepFrame | None:
        """Return what is pending and forget it; None when nothing is. Ask again until None."""

    def close(self) -> None:
        """Cancel every sequence of the stream. Idempotent."""


class WorkerStreams(Protocol):
    def open(self, wake: Callable[[], None]) -> WorkerStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something."""
