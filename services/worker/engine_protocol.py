"""The messages between a worker agent and one of its engine processes.

Transport: a Unix stream socket; each message is a 4-byte big-endian length and that many bytes of
msgpack. The agent listens, the engine connects. Commands flow to the engine and are applied between
two steps; events flow back, one ``Stepped`` per engine step for all its sequences.

A *handle* is the agent's integer for one sequence; it is never reused within one engine process.
An *output offset* counts output tokens from 0, tokens produced before a resume included.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from services.core.generation import OutputLimits, Prompt, Sampling

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
LENGTH_PREFIX: Final = struct.Struct(">I")

FinishReason = Literal["stop", "length", "preempted", "error", "not_finite"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that travels on the socket."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine process is started with, as JSON on its command line.

    ``kv_blocks`` 0 lets the engine size its pool from ``kv_memory_bytes``: the most that it may ever have.
    ``memory_bytes`` bounds weights, working memory and KV together; 0: no bound but that.
    Prefill is cut so that a step
    takes ``itl_target_s``; 0: no step is cut but by ``token_budget``. At most ``max_long_prefills`` long
    prompts prefill at a time. ``prefix/cache`` keeps KV for prompts that begin alike, where blocks divide the
    prefix blocks of ``core.prefix``; ``cache_domain_ratio`` of the pool is the share of an isolation domain.
    ``executor`` "null" needs no weights: it emits tokens at ``null_step_s`` seconds a step (0: flat out).
    ``speculation`` proposes up to ``max_proposals`` tokens a step for a sequence, from its own text or by the
    model in ``draft_model_dir``; the tokens are the same with and
    without, where operators are exact.
    ``operators`` "auto" takes the C++ ones on a CPU where they can be compiled, "native" insists on them;
    ``operators_cache`` is the folder of what was compiled, also by Triton, empty: the user's cache folder,
    and Triton's own choice. ``mode`` "exact":
    what a request gets does not depend on what shares its steps, wherever the operators can promise it;
    "free": products are the vendor's where those are faster, and do depend on it (of bfloat16 on a CPU, all
    on CUDA). "auto" is exact on a CPU and free on CUDA.
    """

    socket_path: str
    model_dir: str
    executor: Literal["torch", "null"] = "torch"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    block_size: int = 16
    kv_blocks: int = 0
    kv_memory_bytes: int = 256 * 1024 * 1024
    memory_bytes: int = 0
    token_budget: int = 512
    max_sequences: int = 64
    max_model_len: int = 0
    itl_target_s: float = 0.05
    max_long_prefills: int = 2
    prefix_cache: bool = True
    cache_domain_ratio: float = 0.5
    null_step_s: float = 0.0
    speculation: Literal["off", "prompt_lookup", "draft"] = "off"
    draft_model_dir: str = ""
    max_proposals: int = 8
    operators: Literal["auto", "native", "torch"] = "auto"
    operators_cache: str = ""
    mode: Literal["auto", "exact", "free"] = "auto"
    request_log_per_s: float = 200.0


# --- agent to engine -----------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Run one sequence. ``produced_ids`` are output tokens of an earlier run that it resumes.

    The sequence is not scheduled past output offset ``credit_limit`` until a ``Credit`` raises it.
    A lower ``priority`` is admitted first; equal ones in the order of arrival. ``request_id`` is for the log.
    The draw at an output position is keyed by (seed, choice, position). The engine ignores stop strings.
    """

    handle: int
    prompt: Prompt
    sampling: Sampling
    limits: OutputLimits
    credit_limit: int
    choice: int = 0
    produced_ids: Sequence[int] = ()
    priority: int = 0
    request_id: str = ""


class Credit(Message, frozen=True):
    """Raise output limits: ``limits[i]`` is the absolute output offset that ``handles[i]`` may reach."""

    handles: list[int]
    limits: list[int]


class Park(Message, frozen=True):
    """Stop these sequences after their next token, until a ``Credit``: their places in the batch are others'.

    Their KV stays while nobody needs it.
    """

    handles: list[int]


class Cancel(Message, frozen=True):
    """Forget these sequences and free their KV blocks before the next step. No event answers it."""

    handles: list[int]


class Resize(Message, frozen=True):
    """Have a KV pool of so many blocks. ``Resized`` answers it, unless another one comes before.

    Blocks beyond the end are given to nobody from now on; those that sequences hold are given back as they
    are let go, and at each step one of their holders is preempted.
    """

    kv_blocks: int


class Shutdown(Message, frozen=True):
    """End the process after the current step."""


Command = Submit | Credit | Park | Cancel | Resize | Shutdown

# --- engine to agent -----------------------------------------------------------------------------


class Progress(Message, frozen=True):
    """Loading goes on. ``done_ratio`` is 0..1 within ``phase``."""

    phase: str
    done_ratio: float


class Ready(Message, frozen=True):
    """The model is loaded and warmed; the step loop runs."""

    kv_blocks_total: int
    block_size: int
    max_model_len: int
    vocab_size: int
    kv_bytes_per_block: int
    weight_bytes: int
    # How long a step with all of its token budget takes, by the measure of the warm-up.
    full_step_s: float = 0.0
    # What loading and the largest step took beside weights and KV.
    working_bytes: int = 0


class LoadFailed(Message, frozen=True):
    """Loading ended with an error that a retry would meet again. The process exits after it.

    With the reason "does_not_fit" the bytes say what it needs at least.
    """

    reason: str
    message: str
    weight_bytes: int = 0
    working_bytes: int = 0
    kv_bytes: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one output position, after penalties and bias, before the filters."""

    sampled: float
    top_ids: list[int]
    top_logprobs: list[float]


class Stepped(Message, frozen=True):
    """What one step produced, in columns: entry i of ``handles`` and of ``tokens`` belong together.

    A handle may come several times, its tokens in order: proposals were accepted. ``logprobs`` has as many
    entries for it, in the same order. ``proposed_tokens`` were verified in the step, ``accepted_tokens`` of
    them are output, unless a stop token came before them.
    A sequence that finishes with "stop" by a stop token or end-of-sequence reports that token too, and
    ``finished`` names it in the same step. "preempted" hands the sequence back to the agent: its KV is
    freed and nothing more comes for it. "error" fails that sequence alone (``errors[handle]`` says why), and
    so does "not_finite": the model gave no numbers for it. ``preemptions`` counts those of the process so
    far, handed back or not. ``attended_tokens`` are those of KV that the step's decodes read.
    ``prefix_added`` and ``prefix_removed`` are prefix blocks that came into and left the cache;
    ``cached[handle]`` is how many tokens of a prompt came from it, in the step that first computes the
    sequence, from an engine that has a cache. Such an engine holds a block once: a sequence that computed
    what is cached refers to the cached block from the step of its first token on. A block that a sequence
    refers to is not removed.
    """

    step: int
    step_s: float
    handles: list[int]
    tokens: list[int]
    finished: dict[int, FinishReason]
    prefill_tokens: int
    kv_blocks_used: int
    running: int
    waiting: int
    logprobs: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, str] = {}
    preemptions: int = 0
    attended_tokens: int = 0
    prefix_added: list[int] = []
    prefix_removed: list[int] = []
    cached: dict[int, int] = {}
    proposed_tokens: int = 0
    accepted_tokens: int = 0


class Heartbeat(Message, frozen=True):
    """Sent every second while idle: proves that the loop moves when there is nothing to step."""

    step: int
    kv_blocks_used: int
    running: int
    waiting: int


class Resized(Message, frozen=True):
    """The pool has ``kv_blocks_total`` blocks, and no memory for more of them.

    More than were asked for where a sequence of ``max_model_len`` needs them, fewer where memory was short.
    """

    kv_blocks_total: int


Event = Progress | Ready | LoadFailed | Stepped | Heartbeat | Resized


def _as_list(value: object) -> list[int]:
    """Return what has no encoding of its own: prompts are any sequence of ids."""
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to an engine")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_list)
_commands: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_events: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event)


def encode(message: Message) -> bytes:
    """Return the framed bytes. Raises ValueError for a message above ``MAX_MESSAGE_BYTES``."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return LENGTH_PREFIX.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """Parse one unframed command. Raises msgspec.DecodeError for anything else."""
    return _commands.decode(body)


def decode_event(body: bytes) -> Event:
    """Parse one unframed event. Raises msgspec.DecodeError for anything else."""
    return _events.decode(body)
