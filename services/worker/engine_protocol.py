"""The messages between a worker agent and one of its device processes: engines, and batchers of rows.

Transport: a Unix stream socket; each message is a 4-byte big-endian length and that many bytes of
msgpack. The agent listens, the engine connects. The engine applies commands between two steps and sends
events, one ``Stepped`` per engine step for all its sequences.

A *handle* is the agent's integer for one sequence; it is never reused within one engine process.
An *output offset* counts output tokens from 0, including tokens produced before a resume.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import Operation, TensorSpec
from services.core.generation import OutputLimits, Prompt, Sampling

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
LENGTH_PREFIX: Final = struct.Struct(">I")

OUT_OF_MEMORY: Final = "out_of_memory"  # the reason of a failed load

FinishReason = Literal["stop", "length", "preempted", "error", "not_finite", "constraint"]


class EngineMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message on the socket. Fields with default values are not sent."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start configuration of an engine process, as JSON on its command line."""

    socket_path: str  # path of the agent's Unix socket
    model_dir: str  # the version's files
    # "null" needs no weights: it emits tokens at ``null_step_s`` seconds per step (0: without a pause).
    # "vllm" runs the batches on vLLM's workers, with the interpreter of their own environment.
    # "rows" runs batches of a fixed-cost model, and ``kv_memory_bytes`` bounds the working memory of one.
    # "vllm_rows" does so on a vLLM worker.
    executor: Literal["torch", "null", "rows", "vllm", "vllm_rows"] = "torch"
    device: str = "cpu"  # "cpu" or a CUDA device
    dtype: Literal["float32", "bfloat16"] = "float32"  # number format of weights and KV
    threads: int = 0  # CPU threads that the operators use; 0: torch's default
    block_size: int = 16  # tokens per KV block
    # 0: the engine sizes its pool from ``kv_memory_bytes``.
    kv_blocks: int = 0
    # The upper bound of the pool at any time.
    kv_memory_bytes: int = 256 * 1024 * 1024
    # Bounds weights, working memory and KV together; 0: only ``kv_memory_bytes`` applies.
    memory_bytes: int = 0
    token_budget: int = 512  # most tokens per step, prefill and decode
    max_sequences: int = 64  # most sequences per step
    max_model_len: int = 0  # most tokens per sequence; 0: the model's limit
    # Prefill is cut so that a step takes this long; 0: only ``token_budget`` cuts a step.
    itl_target_s: float = 0.05
    # How many long prompts may prefill at a time.
    max_long_prefills: int = 2
    # Retain KV for prompts with a common prefix, where KV blocks divide the prefix blocks of ``core.prefix``.
    prefix_cache: bool = True
    # The share of the pool that one isolation domain may use.
    cache_domain_ratio: float = 0.5
    null_step_s: float = 0.0  # seconds that a step of the "null" executor lasts
    # Proposals come from the sequence's own text or from the model in ``draft_model_dir``. The tokens are the
    # same with and without speculation where operators are exact.
    speculation: Literal["off", "prompt_lookup", "draft"] = "off"
    draft_model_dir: str = ""  # directory of the draft model's files; empty unless speculation is "draft"
    # Most proposed tokens per step and sequence.
    max_proposals: int = 8
    # "auto": the C++ operators on a CPU where they can be compiled; "native": these, or the start fails.
    operators: Literal["auto", "native", "torch"] = "auto"
    # Folder of compiled operators, Triton's included; empty: the user's cache folder, and Triton's default.
    operators_cache: str = ""
    # "exact": a result does not depend on the other sequences of a step, where the operators can ensure it.
    # "free": uses vendor products where they are faster; results then do depend on the batch (bfloat16 on a
    # CPU, everything on CUDA). "auto": exact on a CPU, free on CUDA.
    mode: Literal["auto", "exact", "free"] = "auto"
    tensor_parallel: int = 1  # ranks that share each layer, of "vllm"
    pipeline_parallel: int = 1  # groups of ranks that follow each other, of "vllm"
    nodes: int = 1  # nodes that have equally many of the ranks
    node: int = 0  # place of this node among them; the engine is on the first
    store: str = ""  # host:port at which ranks of several nodes find each other
    store_fd: int = -1  # inherited socket that listens there, on the first node
    model: str = ""  # model of the version whose files other nodes fetch
    version_digest: str = ""  # digest of that version
    request_log_per_s: float = 200.0  # most log lines about single sequences
    # File of the ``StepPage`` on which the engine announces its steps; empty: it does not.
    step_page_path: str = ""


# --- agent to engine -----------------------------------------------------------------------------


class Submit(EngineMessage, frozen=True):
    """Run one sequence. The draw at an output position is keyed by (seed, choice, position)."""

    handle: int  # new in this process
    prompt: Prompt
    sampling: Sampling
    limits: OutputLimits  # the engine ignores the stop strings
    # The output offset at which scheduling stops until a ``Credit`` raises it.
    credit_limit: int
    choice: int = 0
    # Output tokens of an earlier run, which this run resumes.
    produced_ids: Sequence[int] = ()
    # A lower value is admitted first; equal ones in order of arrival.
    priority: int = 0
    # The id under which logs name this request.
    request_id: str = ""
    # How many of its next tokens are computed in steps of their own, since it is a suspect of a crash.
    apart_tokens: int = 0
    # It ends with its prefill, without a token: with the last one's hidden state after the final norm.
    embed: bool = False
    # Tokens of the prompt whose log-probabilities an earlier run reported.
    scored_tokens: int = 0
    adapter: int = 0  # loaded adapter that computes it; 0: the base alone
    tenant: str = ""  # the tenant whose KV budget counts its blocks
    kv_share: float = 0.0  # share of the pool that the tenant may hold; 0: no budget
    probe: bool = False  # its tokens come with the scores of the version's probe


class Credit(EngineMessage, frozen=True):
    """Raise output limits: ``limits[i]`` is the absolute output offset that ``handles[i]`` may reach."""

    handles: list[int]
    limits: list[int]


class Park(EngineMessage, frozen=True):
    """Stop these sequences after their next token, until a ``Credit``. Others may take their batch slots.

    Their KV stays until another sequence needs the blocks.
    """

    handles: list[int]


class Cancel(EngineMessage, frozen=True):
    """Drop these sequences and free their KV blocks before the next step. ``Stepped.settled`` answers."""

    handles: list[int]


class Resize(EngineMessage, frozen=True):
    """Resize the KV pool to ``kv_blocks``. ``Resized`` answers it, unless another ``Resize`` arrives first.

    Blocks beyond the new end are not allocated again. Those that sequences hold are freed as the sequences
    release them, and each step preempts one of the holders.
    """

    kv_blocks: int


class Pace(EngineMessage, frozen=True):
    """Cut prefill from the next step on so that a step takes this long, as ``EngineConfig.itl_target_s``."""

    itl_target_s: float


class LoadAdapter(EngineMessage, frozen=True):
    """Load a LoRA adapter of the engine's model. ``AdapterLoaded`` or ``AdapterRefused`` answers."""

    adapter: int  # new in this process, above 0
    folder: str  # folder of the adapter's files


class DropAdapter(EngineMessage, frozen=True):
    """Free a loaded adapter. Sequences that it computes were cancelled before."""

    adapter: int


class ReplaceWeights(EngineMessage, frozen=True):
    """Compute with the weights of another folder, and forget all KV. ``WeightsReplaced`` or
    ``WeightsRefused`` answers.

    Every sequence has ended or was cancelled before. The files differ in the weights' values alone.
    """

    folder: str  # folder of the weights


class RunBatch(EngineMessage, frozen=True):
    """Run these rows of a fixed-cost model as one batch. ``BatchRan`` or ``BatchRaised`` answers.

    One that arrives while another runs is run between the layers of that one, if the model ``pauses``.
    """

    number: int  # the batch's number; its outputs carry it too
    rows: list[tuple[RawTensor, ...]]
    # Tokens to which rows are padded, or tiles of each image; 0: rows of the model have no length.
    width: int = 0


class Shutdown(EngineMessage, frozen=True):
    """End the process after the current step."""


Command = (
    Submit
    | Credit
    | Park
    | Cancel
    | Resize
    | Pace
    | LoadAdapter
    | DropAdapter
    | ReplaceWeights
    | RunBatch
    | Shutdown
)

# --- engine to agent -----------------------------------------------------------------------------


class Progress(EngineMessage, frozen=True):
    """Progress of loading. ``done_ratio`` is 0..1 within ``phase``."""

    phase: str
    done_ratio: float


class RowCosts(msgspec.Struct, frozen=True):
    """What the warm-up measured. Seconds and bytes of working memory, of a batch with one row, of a row more,
    of a token more, or of a tile more of an image whose size is free."""

    batch_s: float
    row_s: float
    token_s: float
    row_bytes: int
    token_bytes: int


class RowModel(msgspec.Struct, frozen=True):
    """A loaded fixed-cost model: its part of the batch key, its limits and its costs."""

    operation: Operation
    dtype: str  # number format of the computation
    inputs: tuple[TensorSpec, ...]
    max_tokens: int  # longest row in tokens, or largest image in tiles; 0: rows have no length
    packs: bool  # it computes no padding
    costs: RowCosts
    pauses: bool = False  # other batches may run between its layers

    @property
    def has_tokens(self) -> bool:
        """Whether a row's length is its tokens, so that rows of different lengths may share a batch."""
        return any(spec.has_length for spec in self.inputs)


# What an engine may promise. "exact": the tokens of a sequence do not depend on the others of a step, on how
# its prompt was cut, or on where it was resumed; a canary has shown it. "resize": the KV pool can change its
# size. "adapters": LoRA adapters change the sequences that name them and no bit of others, as shown likewise.
# "probe": the version has a probe, and the tokens of sequences that ask for it come with its scores.
Capability = Literal["exact", "resize", "adapters", "probe"]


class Ready(EngineMessage, frozen=True):
    """The model is loaded and warmed; the step loop runs."""

    kv_blocks_total: int  # size of the KV pool
    block_size: int  # tokens per KV block
    max_model_len: int  # most tokens per sequence
    vocab_size: int  # number of ids of the model's vocabulary
    kv_bytes_per_block: int  # size of a block over all layers
    weight_bytes: int  # measured
    # Duration of a step with the full token budget, measured in the warm-up.
    full_step_s: float = 0.0
    # Memory that loading and the largest step took in addition to weights and KV.
    working_bytes: int = 0
    # Facts of a fixed-cost model; the working memory of its batch counts as one KV block.
    rows: RowModel | None = None
    capabilities: frozenset[Capability] = frozenset()  # what this engine promises with this model
    # Floating-point operations of the model for one token, without attention's; 0: unknown.
    flops_per_token: int = 0


class LoadFailed(EngineMessage, frozen=True):
    """Loading failed with an error that a retry would repeat. The process exits after it.

    With the reason "does_not_fit" the byte counts are the least that the model needs.
    """

    reason: str
    message: str
    weight_bytes: int = 0
    working_bytes: int = 0
    kv_bytes: int = 0


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position. An output's are after penalties and bias and before the
    filters; a prompt's are those of the model."""

    sampled: float
    top_ids: list[int]
    top_logprobs: list[float]
    # The prompt token's place by probability, from 1; 0: none.
    rank: int = 0


class Stepped(EngineMessage, frozen=True):
    """The output of one step, in columns: entry i of ``handles`` belongs to entry i of ``tokens``.

    A handle can occur several times, its tokens in order, when proposals were accepted. An engine with a
    prefix cache holds a cached block once: a sequence that computed a block that is already cached refers to
    the cached block from the step of its first token on. A block that a sequence refers to is not removed.
    """

    step: int  # number of the step
    step_s: float  # its duration
    handles: list[int]  # one entry per token
    # A "stop" by a stop token or end-of-sequence includes that token.
    tokens: list[int]
    # Why each sequence ended in this step. "preempted" returns the sequence to the agent: its KV is freed and
    # no more events follow. "error" fails that sequence alone; so does "not_finite": the model returned no
    # finite numbers, and "constraint": the constraint allows no further output.
    finished: dict[int, FinishReason]
    prefill_tokens: int  # prompt tokens computed in the step
    kv_blocks_used: int  # allocated after the step
    running: int  # sequences in the batch
    waiting: int  # sequences that wait for admission
    # One entry per token of the handle, in the same order.
    logprobs: dict[int, list[SampledLogprobs]] = {}
    # By handle: of the next tokens of its prompt, in order. The first token of a prompt has an empty entry.
    prompt_logprobs: dict[int, list[SampledLogprobs]] = {}
    # The messages of the handles that finished with "error", "not_finite" or "constraint".
    errors: dict[int, str] = {}
    # Preemptions of the process so far, returned to the agent or not.
    preemptions: int = 0
    # Tokens of KV that the step's decodes read.
    attended_tokens: int = 0
    # Prefix blocks that entered the cache in this step.
    prefix_added: list[int] = []
    # Prefix blocks that left the cache in this step. One that is also in ``prefix_added`` came again.
    prefix_removed: list[int] = []
    # By handle: prompt tokens found in the cache, in the step that first computes the sequence. Empty without
    # a cache.
    cached: dict[int, int] = {}
    # Proposals that the step verified.
    proposed_tokens: int = 0
    # Proposals that became output, unless a stop token preceded them.
    accepted_tokens: int = 0
    # Part of the step's duration that prefills were charged; its decodes were charged the rest.
    prefill_s: float = 0.0
    # Microseconds of step time that each handle was charged so far. They include settled handles; now and
    # then they are complete.
    device_us: dict[int, int] = {}
    # Handles that finished or were cancelled, each once: they are charged no more.
    settled: list[int] = []
    # By handle, of those that embed, in the step that finished them: 32-bit little-endian floats.
    embeddings: dict[int, bytes] = {}
    # One entry per token: the score of the version's probe for the text before the token. Of a sequence that
    # does not request it the entry means nothing; empty where none does.
    probe_scores: list[float] = []
    # By handle: prompt tokens that the step computed. After a preemption they include output tokens.
    prefilled: dict[int, int] = {}
    # Handles preempted since the step before; their KV is computed again, here or on another worker.
    preempted: list[int] = []


class EngineHeartbeat(EngineMessage, frozen=True):
    """Sent every second while idle: shows that the step loop runs although there is nothing to step."""

    step: int
    kv_blocks_used: int
    running: int
    waiting: int


class Resized(EngineMessage, frozen=True):
    """The pool has ``kv_blocks_total`` blocks and memory for no more.

    More than requested if a sequence of ``max_model_len`` needs them, fewer if memory was short.
    """

    kv_blocks_total: int


class AdapterLoaded(EngineMessage, frozen=True):
    """The adapter computes sequences from now on."""

    adapter: int
    size_bytes: int  # memory that it takes


class AdapterRefused(EngineMessage, frozen=True):
    """The adapter cannot be loaded. The engine goes on without it."""

    adapter: int
    message: str
    reason: Literal["adapter_refused", "does_not_fit"] = "adapter_refused"


class WeightsReplaced(EngineMessage, frozen=True):
    """Sequences are computed with the new weights from now on; no KV of the old ones is left."""

    pause_s: float  # time in which no step could run


class WeightsRefused(EngineMessage, frozen=True):
    """The weights cannot be replaced. If nothing was changed the engine goes on, otherwise it exits."""

    reason: str  # stable word
    message: str
    changed: bool = False  # whether some of the old weights are gone


class BatchRan(EngineMessage, frozen=True):
    """The outputs of a batch, in the order of its rows."""

    number: int
    run_s: float  # seconds that the device computed, less batches between its layers
    outputs: list[tuple[RawTensor, ...]]  # empty for a row with a problem
    problems: dict[int, str] = {}  # reasons why rows were not run, by place in the batch


class BatchRaised(EngineMessage, frozen=True):
    """The model raised an exception; the process goes on."""

    number: int
    run_s: float
    message: str


Event = (
    Progress
    | Ready
    | LoadFailed
    | Stepped
    | EngineHeartbeat
    | Resized
    | AdapterLoaded
    | AdapterRefused
    | WeightsReplaced
    | WeightsRefused
    | BatchRan
    | BatchRaised
)


class StepLink(Protocol):
    """The agent, as a step that is running may use it."""

    def receive(self) -> None:
        """Apply the commands that have arrived."""

    def send(self, message: EngineMessage) -> None:
        """Send a message. Raises an error of the engine process once the agent is gone."""


def _as_list(value: object) -> list[int]:
    """Return a list of ids for a prompt of any sequence type, which msgpack cannot encode itself."""
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to an engine")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_list)
_commands: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_events: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event)


def encode(message: EngineMessage) -> bytes:
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
