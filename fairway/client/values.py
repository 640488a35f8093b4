"""Arguments and results of the client: frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, Literal

from fairway.client.policy import RetryPolicy
from fairway.formats.answers import OutputPart, ToolCall

Role = Literal["system", "developer", "user", "assistant", "tool"]


def checked_timeout_s(timeout_s: float, name: str = "timeout_s") -> float:
    """Return it. Raises ValueError for an invalid time span: every call has a deadline."""
    if not 0 < timeout_s < inf:
        raise ValueError(f"{name} must be above 0 seconds, and finite: {timeout_s:g} is not")
    return timeout_s


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters``: a JSON schema of an object; None: no arguments.

    ``strict``: the arguments match the schema in every call, and not only in required ones.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. ``tool_calls`` are of an assistant's, ``tool_call_id`` is of a tool's."""

    role: Role
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


# A text to continue, a chat to answer, or token ids.
Input = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is a JSON value that the schema permits; ``JsonSchema({"type": "object"})``: any object."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches the expression, which has neither look-around nor back-references."""

    pattern: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """The output is one of these texts."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The output is a text of a context-free grammar in Lark or GBNF."""

    source: str


# What an output must match, until ``max_output_tokens`` cuts it short.
Constraint = JsonSchema | Regex | OneOf | Grammar


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
    TOOL_CALLS = "tool_calls"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a generation. None: the default of the model or the server."""

    max_output_tokens: int | None = None  # per choice
    min_output_tokens: int = 0  # no stop before this many
    # 0: greedy.
    temperature: float | None = None
    top_p: float | None = None  # nucleus: smallest set of tokens with this probability
    top_k: int | None = None  # only the k most likely tokens
    min_p: float | None = None  # only tokens with this share of the highest probability
    presence_penalty: float | None = None  # subtracted once from the logit of a token in the output
    frequency_penalty: float | None = None  # subtracted per occurrence in the output
    # divides positive, multiplies negative logits of tokens in prompt or output
    repetition_penalty: float | None = None
    # Added to the logits, by token id.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: the gateway draws one
    constraint: Constraint | None = None  # what the output must match; None: any text
    tools: Sequence[Tool] = ()  # of a chat
    # auto: the model decides; required: at least one call. Otherwise the name of the tool to call once.
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True  # False: at most one call
    parts: bool = False  # of a chat: content, reasoning and calls apart, as always with tools
    stop: Sequence[str] = ()  # strings that end a choice; not part of its text
    stop_token_ids: Sequence[int] = ()  # tokens that end a choice
    # Number of answers.
    choices: int = 1
    # How many of the most likely tokens to report at each position.
    logprobs: int | None = None
    # As ``logprobs``, of the prompt; ``max_output_tokens`` may then be 0.
    prompt_logprobs: int | None = None
    priority: Priority | None = None  # None: the server's default class
    # Requests with one key stay on one side of a version split.
    session_key: str = ""
    user: str = ""  # the caller's name of its end user, whose limits and budgets apply
    ignore_eos: bool = False  # do not stop at the end-of-sequence token
    version: str = ""  # digest or arm of the version that answers; empty: the model's split decides


@dataclass(frozen=True, slots=True)
class Degradation:
    """A reduction under pressure, which the tenant's policy allows instead of a rejection.

    ``kind``: output_capped or smaller_model. ``original`` was requested, ``applied`` is used.
    """

    kind: str
    original: str
    applied: str
    pressure_ratio: float


@dataclass(frozen=True, slots=True)
class SafetyDigests:
    """The safety packs that a request obeys; an empty digest: none."""

    default_digest: str  # of the safety_policy.json of its version
    deployment: str  # deployment of the tenant's pack
    pack_digest: str  # version of the tenant's pack


@dataclass(frozen=True, slots=True)
class ModeratedCategory:
    """The verdict of one category. ``action``: what the pack does: block, stop, redact or flag."""

    name: str
    flagged: bool
    score: float  # highest of its labels, 1 where a list or personal data matches
    action: str


@dataclass(frozen=True, slots=True)
class Moderation:
    """The verdict on one text, with every category of the pack."""

    flagged: bool
    categories: tuple[ModeratedCategory, ...]


@dataclass(frozen=True, slots=True)
class Moderated:
    """The verdicts on the texts, in order."""

    request_id: str
    pack: str  # deployment of the pack
    pack_digest: str
    results: tuple[Moderation, ...]
    skipped: tuple[str, ...] = ()  # rules of the pack that judge generations alone


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server's resolution of a request. ``seed`` makes the sampling of an equal request repeatable."""

    request_id: str  # assigned by the server
    model: str  # name of the served deployment
    version_digest: str  # of the model version
    route_revision: int  # of the route that selected the version
    seed: int  # in use, drawn by the server if not given
    prompt_tokens: int  # length of the prompt
    # This is the answer to an earlier request with the same idempotency key. A continued stream keeps its
    # first value; a call that was sent again without a response may attach to its own first attempt.
    replayed: bool = False
    # How the served request differs from the requested one.
    degradations: tuple[Degradation, ...] = ()
    weights_digest: str = ""  # digest of the weights; an adapter has that of its base
    base_digest: str = ""  # version that an adapter changes; empty: the version is none
    exact: bool = False  # promise of all ready replicas: neither company nor a move changes the output
    safety: SafetyDigests | None = None  # the safety packs that it obeys; None: none


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position; ``top`` contains (token id, its text, logprob)."""

    token: str
    sampled: float
    top: tuple[tuple[int, str, float], ...]
    token_bytes: bytes = b""  # the bytes of a part of a character; empty: those of ``token``
    top_bytes: tuple[bytes, ...] = ()  # the same for each of ``top``; none: all are those of the texts


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output of one choice. ``offset`` is the output offset of ``ids[0]``; logprobs: none, or one per id.
    With ``Options.prompt_logprobs`` the output begins with the prompt's ids, which have no text.

    ``text`` is the text that became final: characters may arrive later than their ids. ``parts``: the output
    by its meaning, with ``Options.tools`` or ``Options.parts``; it may lag behind the text.
    """

    choice: int
    offset: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    parts: tuple[OutputPart, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """The end of a choice. ``parts``: the last of its output, which follow those of its ``Tokens``."""

    choice: int
    finish_reason: FinishReason
    stop: str
    output_tokens: int
    parts: tuple[OutputPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """``device_s``: shares of engine steps; those of the last steps, or of a lost worker, may be missing."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    device_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageClock:
    """Time per stage of a request, measured by the server. The stages follow each other."""

    # Wall clock when the first byte of the request was handled, Unix microseconds.
    received_unix_us: int
    # Parsing, validation, rendering, tokenising.
    validate_s: float
    # Quotas and limits.
    admit_s: float
    # Submitted to the scheduler until granted.
    queue_s: float
    # Granted until accepted by the engine.
    dispatch_s: float
    # Accepted until its first prefill step begins.
    engine_wait_s: float
    # First prefill step until the first token is at the gateway.
    prefill_s: float
    # First token until last token.
    decode_s: float
    # Last token until the terminal event is passed to the transport.
    send_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a successful generation. ``resumes``: how often it was placed again after a loss."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage
    clock: StageClock
    resumes: int


Event = Accepted | Tokens | Finished


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    choice: int
    text: str  # the whole output
    ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    content: str = ""  # with tools or parts without reasoning and calls, otherwise the text
    reasoning: str = ""  # with tools or parts
    calls: tuple[ToolCall, ...] = ()
    # Of each token of the prompt, if requested; the first has 0 and no alternatives.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer. ``text`` is the first choice's."""

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
    """The billed prompt tokens of an input, for the version that would serve it now."""

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
    """Limits and behaviour of a client. Every call has a deadline; these are the defaults."""

    # Lists and counts.
    timeout_s: float = 10.0
    # Generations, including retries.
    generation_timeout_s: float = 300.0
    # How long a call waits for a reachable gateway.
    connect_timeout_s: float = 5.0
    # A stream without any message for this long is broken (the server sends a heartbeat every 5 s).
    silence_timeout_s: float = 20.0
    # Generate a key for every generation without one.
    idempotency: bool = True
    retry: RetryPolicy = field(default_factory=RetryPolicy)  # limits of retries
    max_message_bytes: int = 16 * 1024 * 1024  # of one gRPC message, in both directions
    # False: a call fails as soon as every gateway has refused the connection.
    wait_for_ready: bool = True

    def __post_init__(self) -> None:
        for name in ("timeout_s", "generation_timeout_s", "connect_timeout_s", "silence_timeout_s"):
            checked_timeout_s(getattr(self, name), name)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """``max_concurrency``: generations at once, further ones wait; the server accepts at most 1024.

    ``window_tokens``: how far the server may send ahead of the reader of one choice.
    """

    max_concurrency: int = 256
    window_tokens: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.max_concurrency <= 1024:
            raise ValueError("max_concurrency must be 1..1024")
        if not 1 <= self.window_tokens <= 1_048_576:
            raise ValueError("window_tokens must be 1..1048576")
