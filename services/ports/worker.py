"""How a gateway runs sequences on workers.

The control path is calls; the token path is a callback, since a task switch per token would cost more
than the token. A sink's methods are called in the event loop, must not block and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.generation import NotAdmittedReason, SequenceEnd, StartSpec, TokenLogprobs


class SequenceSink(Protocol):
    """Receives, in this order: accepted or not_admitted; tokens; finished or lost. Nothing after the last."""

    def on_accepted(self) -> None: ...

    def on_not_admitted(self, reason: NotAdmittedReason) -> None: ...

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """``offset`` is the output offset of ``ids[0]``; ``logprobs`` is empty or one per id."""

    def on_finished(self, end: SequenceEnd) -> None: ...

    def on_lost(self, message: str) -> None:
        """The connection to the worker broke; what it still produced is unknown."""


class RunningSequence(Protocol):
    def credit(self, tokens: int) -> None:
        """Let the worker send that many tokens more."""

    def cancel(self) -> None:
        """Stop it and free its KV within one engine step. The sink hears nothing more."""


class WorkerClient(Protocol):
    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        """Send a start to the worker that the grant names. A connection error reaches ``on_lost``."""
