"""Port of a worker: a gateway runs sequences, and rows of fixed-cost models, on it.

The control path uses calls. The token path uses a callback, because a task switch per token would cost more
than the token. A sink's methods are called in the event loop and must not block or raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.generation import NotAdmittedReason, SequenceEnd, StartSpec, TokenLogprobs


class SequenceSink(Protocol):
    """Receives, in this order: accepted or not_admitted; tokens, their scores before them; finished or lost.
    Nothing follows the last."""

    def on_accepted(self) -> None: ...

    def on_not_admitted(self, reason: NotAdmittedReason) -> None: ...

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        """Receive the probe's scores of the tokens of the ``on_tokens`` that follows, one each: from 0 to 1,
        or NaN for a token of the prompt. Only where ``StartSpec.probe`` requests them.

        A token's score judges prompt and output before it, so the token itself is judged by the next score.
        """

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """``offset`` is the output offset of ``ids[0]``; ``logprobs`` is empty or one per id."""

    def on_finished(self, end: SequenceEnd) -> None: ...

    def on_lost(self, message: str) -> None:
        """The connection to the worker broke; whether it produced further tokens is unknown."""


class RunningSequence(Protocol):
    def credit(self, tokens: int) -> None:
        """Allow the worker to send that many more tokens."""

    def cancel(self) -> None:
        """Stop the sequence and free its KV within one engine step. The sink receives no further calls."""


class WorkerClient(Protocol):
    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        """Send a start to the worker of the grant. A connection error is reported to ``on_lost``."""


class RowSink(Protocol):
    """Receives one call."""

    def on_not_admitted(self, reason: NotAdmittedReason) -> None: ...

    def on_row_ended(self, end: RowEnd) -> None: ...

    def on_lost(self, message: str) -> None:
        """The connection to the worker broke. The row may run again: it has no effect but its outputs."""


class RunningRow(Protocol):
    def cancel(self) -> None:
        """Drop the row, unless a batch contains it. The sink receives no further calls."""


class RowClient(Protocol):
    def start_row(self, address: str, spec: RowSpec, sink: RowSink) -> RunningRow:
        """Send a row to the worker at this address. A connection error is reported to ``on_lost``."""
