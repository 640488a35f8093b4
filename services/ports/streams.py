"""Ports of bidirectional streams of messages between two processes: over gRPC, or simulated.

Every stream has a connection of its own. Each end has one task that writes and one that reads. A message
belongs to the receiver once it is written: the sender does not change it afterwards.

A worker's reports to the scheduler and a gateway's stream at a worker are independent of gRPC, for the
servicer and the caller in the same process. What is pending is merged into one message per ``take``: of the
scheduler the number of the newest report that was applied and the newest counter of each tenant, of the
worker one ``StepFrame``. So a slow reader gets fewer and larger messages, never a longer queue. Credits bound
the worker's pending data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, Protocol, TypeVar

from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.fleet import ReportSnapshot, TenantCounter
from services.core.generation import NotAdmittedReason, SequenceEnd, StartSpec, TokenLogprobs
from services.core.rollouts.routes import Withdrawal

Request = TypeVar("Request")
Response = TypeVar("Response")
Out_contra = TypeVar("Out_contra", contravariant=True)
In_co = TypeVar("In_co", covariant=True)


class StreamLost(Exception):
    """The stream is over without an error of the peer: it ended, is unreachable, or the connection broke."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class StreamMethod(Generic[Request, Response]):
    """A streaming RPC: its path, "/package.Service/Method", and the types of its messages."""

    path: str
    request: type[Request]
    response: type[Response]

    @property
    def role(self) -> str:
        """The role that serves it, from the name of its service: "worker" for ``WorkerService``."""
        return self.path.partition("Service/")[0].rpartition(".")[2].lower()


class MessageStream(Protocol[Out_contra, In_co]):
    """One end of an open stream. After its end every call raises why: StreamLost, or the FairwayError with
    which the server ended it."""

    async def write(self, message: Out_contra, /) -> None:
        """Return once the transport accepted the message, which may wait for the peer to read."""

    async def read(self, timeout_s: float) -> In_co:
        """Return the next message. Raises StreamLost when none is received in time, which ends the stream."""

    async def read_each(self, receive: Callable[[In_co], None]) -> NoReturn:
        """Call ``receive`` for each message until the stream ends. ``receive`` must not block; a FairwayError
        that it raises ends the call."""


class ClientStream(MessageStream[Out_contra, In_co], Protocol[Out_contra, In_co]):
    """The client's end. It is read by ``read`` or by ``read_each``, not by both."""

    async def close(self) -> None:
        """End the stream for both ends; a waiting reader raises StreamLost. Idempotent."""


class StreamClient(Protocol):
    @property
    def credentials(self) -> object:
        """What a stream that opens now is opened with: another object after it was replaced."""

    async def open(
        self, address: str, method: StreamMethod[Request, Response], *, timeout_s: float
    ) -> ClientStream[Request, Response]:
        """Return a stream to the address, which the caller closes.

        Raises StreamLost when the peer is not reached in time. A transport may return before it reached the
        peer; the stream then reports the failure.
        """


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer of the leader of ``epoch``: it applied all reports up to ``report``, 0 for none yet.

    ``counters`` are of tenants whose service changed since the previous answer.
    """

    epoch: int
    report: int = 0
    counters: tuple[TenantCounter, ...] = ()


class ReportStream(Protocol):
    """Owned by one caller in the scheduler's event loop."""

    @property
    def epoch(self) -> int:
        """The epoch of the leader that serves this stream."""

    def report(self, number: int, snapshot: ReportSnapshot) -> None:
        """Pass a report on; ``number`` counts the reports of this stream from 1. Raises the error that ended
        the stream."""

    def take(self) -> ReportAnswer | None:
        """Return and clear the pending answer; None when there is none.

        Raises the error that ended the stream: NoLeader when the scheduler no longer leads, Conflict when the
        worker opened another stream.
        """

    def close(self) -> None:
        """Stop placements on the worker until it reports again. Idempotent."""


@dataclass(slots=True)
class StepFrame:
    """All changes since the previous frame, to be processed in the order of the fields."""

    accepted: list[int] = field(default_factory=list)
    # What the STALE_ROUTE entries of ``not_admitted`` were refused for; to be processed before these.
    withdrawn: list[Withdrawal] = field(default_factory=list)
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
    # Scores of the probe, one per id and NaN for an id without one; empty: no id has one.
    probe_scores: list[float] = field(default_factory=list)
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
