"""The events of a request and the handle of its owner. The interface of the faces (gRPC, HTTP).

The token path is a callback, not a queue: a task switch per token would cost more than the token. A sink's
methods run in the event loop, must not block and must not raise.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec import Struct

from fairway.formats.answers import OutputPart
from services.core.aliases import SizeChoice
from services.core.errors import FairwayError
from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage
from services.core.limits import RateState
from services.core.outputs.forms import OutputForm
from services.core.safety import SafetyPins
from services.gateway.policy.degrade import Degradation

MAX_ATTEMPT: Final = 1000  # larger numbers count as this one
BATCH_FACE: Final = "batch"  # face of a batch's lines, which no client waits for


def request_tag(request_id: str) -> bytes:
    """Return a short hash that names a request in what its client holds."""
    return hashlib.sha256(request_id.encode()).digest()[:6]


@dataclass(frozen=True, slots=True)
class DeliveredChoice:
    """Output of one choice that a client has: tokens, characters of text, CRC-32 of the token ids."""

    tokens: int = 0
    chars: int = 0
    checksum: int = 0

    def after(self, ids: Sequence[int], text: str) -> DeliveredChoice:
        """Return what the client has after it received this too."""
        checksum = zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), self.checksum)
        return DeliveredChoice(self.tokens + len(ids), self.chars + len(text), checksum)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a client has of an answer from earlier connections: it receives the rest of the same request."""

    # ``request_tag`` of the request.
    request: bytes
    choices: tuple[DeliveredChoice, ...]


def never() -> bool:
    """A reader that leaves its request to others."""
    return False


class Received(Struct, frozen=True):
    """The receipt of a request at its face."""

    # The receipt on the monotonic clock.
    monotonic_s: float
    # The receipt in Unix time.
    unix_us: int
    # Generated here, never the client's.
    request_id: str
    face: str = "grpc"
    # The client's: a W3C trace context that the request continues, or arbitrary text.
    traceparent: str = ""
    # The number of the generation, where a face makes several of one request.
    part: int = 0
    # A hash that names the whole request of several generations.
    whole: str = ""
    # How often the client sent it before, by the client's own count.
    attempt: int = 0
    # What its client already has; only under an idempotency key.
    delivered: Delivered | None = None
    # Whether its idempotency key is this server's own: clients' keys never name its record.
    internal: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event: the resolved and generated values of the request."""

    request_id: str
    model: str
    version_digest: str
    route_revision: int
    seed: int
    prompt_tokens: int
    # The acceptance time of a request with a key.
    received_unix_us: int = 0
    # Whether this is the answer of an earlier request with the same idempotency key.
    replayed: bool = False
    # Whether this is the answer of an equal earlier request of the tenant.
    cached: bool = False
    # The tenant's rates after this request, where they apply; not under an idempotency key or on a slice.
    request_rate: RateState | None = None
    token_rate: RateState | None = None
    # How the served request differs from the client's.
    degradations: tuple[Degradation, ...] = ()
    # How its outputs are split into parts; None: they are not.
    form: OutputForm | None = None
    weights_digest: str = ""  # digest of the weights; an adapter has that of its base
    base_digest: str = ""  # version that an adapter changes; empty: the version is none
    # Promise of all replicas that are ready: neither company nor a move changes the output.
    exact: bool = False
    size: SizeChoice | None = None  # choice of its model among the sizes of an alias
    safety: SafetyPins | None = None  # safety packs that it obeys; None: none


@dataclass(slots=True)
class Tokens:
    """Output of one choice. ``offset`` is the output offset of ``ids[0]``; logprobs: none or one per id.

    It grows until its reader takes it. One object per frame: its creation must be cheap.
    """

    choice: int
    offset: int
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    # Where the request wants parts: what became final with this text, in order. ``text`` stays whole.
    parts: Sequence[OutputPart] = ()


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    choice: int
    finish_reason: FinishReason
    stop: str
    output_tokens: int
    # The parts that the end made final, where the request wants parts.
    parts: tuple[OutputPart, ...] = ()
    # Where the request wants parts: tokens to the end of the reasoning, its mark included; None: not counted.
    reasoning_tokens: int | None = None


class Finished(Struct, frozen=True):
    """Terminal event of a request that succeeded."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage
    clock: StageClock
    resumes: int = 0
    # The encoded outputs of a request of a fixed-cost model with an idempotency key.
    answer: bytes = b""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """No event for the heartbeat interval; the request is still running."""


Event = Accepted | Tokens | Heartbeat | Finished


class Handle(Protocol):
    """The face's controls of a request that it started."""

    def credit(self, choice: int, tokens: int) -> None:
        """The transport took tokens of a choice."""

    def allow(self, tokens: int) -> None:
        """The client takes ``tokens`` more of every choice."""

    def cancel(self, error: FairwayError | None = None) -> None:
        """The client disconnected; its sink receives ``error``, by default a cancellation."""

    def withdraw(self) -> None:
        """The client requests the end of the request."""


class OutputSink(Protocol):
    """Receives tokens of every choice."""

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None: ...


class RequestSink(OutputSink, Protocol):
    """Receives accepted, tokens of every choice, then exactly one of finished and failed."""

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_failed(self, error: FairwayError) -> None: ...
