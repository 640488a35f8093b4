"""What a request's owner hears, and how it answers. The faces (gRPC, HTTP) are written against this.

The token path is a callback, not a queue: a task switch per token would cost more than the token. A
sink's methods run in the event loop, must not block and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from services.core.errors import FairwayError
from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage
from services.gateway.policy.degrade import Degradation

MAX_ATTEMPT: Final = 1000  # more are counted as so many


@dataclass(frozen=True, slots=True)
class Received:
    """When and as what a request reached its face. ``request_id`` is ours, never the client's.

    ``traceparent`` is the client's: a W3C trace context that the request continues, or anything else.
    A face that makes several generations of one request numbers them, and names the whole by a hash.
    ``attempt``: how often its client sent it before, as far as it says so.
    """

    monotonic_s: float
    unix_us: int
    request_id: str
    face: str = "grpc"
    traceparent: str = ""
    part: int = 0
    whole: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event: what was resolved and drawn for the request.

    ``replayed``: an earlier request with the same idempotency key was, and this is its answer.
    ``received_unix_us``: when it was accepted, of a request with a key. ``degradations``: in what it is
    served otherwise than it was asked for.
    """

    request_id: str
    model: str
    version_digest: str
    route_revision: int
    seed: int
    prompt_tokens: int
    received_unix_us: int = 0
    replayed: bool = False
    degradations: tuple[Degradation, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output of one choice. ``offset`` is the output offset of ``ids[0]``; logprobs: none or one per id."""

    choice: int
    offset: int
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    choice: int
    finish_reason: FinishReason
    stop: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal event of a request that ended well."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage
    clock: StageClock
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing came for the heartbeat interval; the request is alive."""


Event = Accepted | Tokens | Heartbeat | Finished


class Handle(Protocol):
    """How a face answers the request that it started."""

    def credit(self, choice: int, tokens: int) -> None:
        """The transport took tokens of a choice."""

    def allow(self, tokens: int) -> None:
        """The client takes that many tokens more of every choice."""

    def cancel(self, error: FairwayError | None = None) -> None:
        """The client left; its sink hears ``error``, by default that it was cancelled."""

    def withdraw(self) -> None:
        """The client asked for the request to end."""


class RequestSink(Protocol):
    """Hears accepted, tokens of every choice, then exactly one of finished and failed."""

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_failed(self, error: FairwayError) -> None: ...
