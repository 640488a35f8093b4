"""What the client takes and gives: frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Literal

from fairway.client.policy import RetryPolicy

Role = Literal["system", "developer", "user", "assistant", "tool"]


def checked_timeout_s(timeout_s: float, name: str = "timeout_s") -> float:
    """Return it. Raises ValueError for one that is no time span: no call is without a deadline."""
    if not 0 < timeout_s < inf:
        raise ValueError(f"{name} must be above 0 seconds, and finite: {timeout_s:g} is not")
    return timeout_s


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Role
    content: str
    name: str = ""


# A text to continue, a chat to answer, or token ids.
Input = str | Sequence[Message] | Sequence[int]


class Priority(Enum):
    """Scheduling class. Lower classes are shed first."""

    BATCH = "batch"
    STANDARD = "standard"
    INTERACTIVE = "interactive"


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SLOW_READER = "slow_reader"
    FILTERED = "filtered"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate. None: the model's or the server's own default.

    ``temperature`` 0 is greedy. ``logprobs``: how many of the most likely tokens to report at each position.
    ``session_key`` keeps requests on one side of a version split.
    """

    max_output_tokens: int | None = None
    min_output_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    choices: int = 1
    logprobs: int | None = None
    priority: Priority | None = None
    session_key: str = ""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Degradation:
    """The model was under pressure, and the tenant's policy prefers less to nothing.

    ``kind``: output_capped or smaller_model. ``original`` was asked for, ``applied`` is given.
    """

    kind: str
    original: str
    applied: str
    pressure_ratio: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the server resolved and drew for a request: with the same seed, it says the same again.

    ``replayed``: an earlier request with the same idempotency key was accepted, and this is its answer. A
    stream that is continued keeps what it heard first; a call that was sent again and had heard nothing may
    meet its own first sending. ``degradations``: in what it is served otherwise than it was asked for.
    """

    request_id: str
    model: str
    version_digest: str
    route_revision: int
    seed: int
    prompt_tokens: int
    replayed: bool = False
    degradations: tuple[Degradation, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position; ``top`` holds (token id, its text, logprob)."""

    token: str
    sampled: float
    top: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output of one choice. ``offset`` is the output offset of ``ids[0]``; logprobs: none, or one per id.

    ``text`` is what became final: characters may lag behind the ids, and come with later ones.
    """

    choice: int
    offset: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    choice: int
    finish_reason: FinishReason
    stop: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StageClock:
    """Where the time of a request went, as the server saw it. The stages follow each other."""

    received_unix_us: int
    validate_s: float
    admit_s: float
    queue_s: float
    dispatch_s: float
    engine_wait_s: float
    prefill_s: float
    decode_s: float
    send_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a generation that ended well. ``resumes``: how often it was placed again after a loss."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage
    clock: StageClock
    resumes: int


Event = Accepted | Tokens | Finished


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    choice: int
    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. ``text`` is the first choice's."""

    accepted: Accepted
    choices: tuple[CompletedChoice, ...]
    finished: Finished

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        return self.finished.usage


@dataclass(frozen=True, slots=True)
class TokenCount:
    """What a generation's input would be billed for, by the version that would serve it now."""

    model: str
    version_digest: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    version_digest: str
    max_context_tokens: int
    ready_replicas: int
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Bounds and habits of a client. Every call has a deadline; these are the ones of calls that name none.

    ``timeout_s``: lists and counts. ``generation_timeout_s``: generations, retries included.
    ``connect_timeout_s``: how long a call waits until any gateway can be reached; with ``wait_for_ready``
    False it waits no longer than until each of them refused the connection.
    ``silence_timeout_s``: a stream on which not even a heartbeat comes for so long is broken (the server
    sends one every 5 s). ``idempotency``: generate a key for every generation that names none.
    """

    timeout_s: float = 10.0
    generation_timeout_s: float = 300.0
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 20.0
    idempotency: bool = True
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_message_bytes: int = 16 * 1024 * 1024
    wait_for_ready: bool = True

    def __post_init__(self) -> None:
        for name in ("timeout_s", "generation_timeout_s", "connect_timeout_s", "silence_timeout_s"):
            checked_timeout_s(getattr(self, name), name)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """``max_concurrency``: generations at once, further ones wait; the server takes at most 1024.

    ``window_tokens``: how far the server may run ahead of the reader of one choice.
    """

    max_concurrency: int = 256
    window_tokens: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.max_concurrency <= 1024:
            raise ValueError("max_concurrency must be 1..1024")
        if not 1 <= self.window_tokens <= 1_048_576:
            raise ValueError("window_tokens must be 1..1048576")
