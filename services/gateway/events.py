"""What a request's owner hears, and how it answers. The faces (gRPC, HTTP) are written against this.

The token path is a callback, not a queue: a task switch per token would cost more than the token. A
sink's methods run in the event loop, must not block and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.errors import FairwayError
from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Received:
    """When and as what a request reached its face. ``request_id`` is ours, never the client's."""

    monotonic_s: float
    unix_us: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event: what was resolved and drawn for the request."""

    request_id: str
    model: str
    version_digest: str
    route_revision: int
    seed: int
    prompt_tokens: int


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


class RequestSink(Protocol):
    """Hears accepted, tokens of every choice, then exactly one of finished and failed."""

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_failed(self, error: FairwayError) -> None: ...
