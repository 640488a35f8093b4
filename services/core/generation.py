"""One generation and its parts: the types that all services share, independent of the wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from msgspec import Struct

from services.core.aliases import SizeChoice
from services.core.outputs.forms import OutputForm
from services.core.poison.suspicion import LossCause, StepRole
from services.core.records import KeyRole, Priority
from services.core.safety import SafetyPins


class FinishReason(StrEnum):
    """Why a sequence ended. A client never receives PREEMPTED, ENGINE_LOST and ERROR: the gateway retries
    the placement or fails it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SLOW_READER = "slow_reader"
    PREEMPTED = "preempted"
    ENGINE_LOST = "engine_lost"
    ERROR = "error"
    # The output stopped and has calls of tools. Gateways set it, workers do not.
    TOOL_CALLS = "tool_calls"
    # A safety pack ended the output. Gateways set it, workers do not.
    FILTERED = "filtered"


# Reason of a sequence that ended with ENGINE_LOST because the model produced no finite numbers there.
NOT_FINITE: Final = "NOT_FINITE"
MAX_CONSTRAINT_BYTES: Final = 64 * 1024
# The schema of any JSON object.
JSON_OBJECT: Final = '{"type":"object"}'


class NotAdmittedReason(StrEnum):
    NO_ROOM = "no_room"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    STALE_INCARNATION = "stale_incarnation"
    STALE_EPOCH = "stale_epoch"
    GRANT_REPLAYED = "grant_replayed"
    STALE_ROUTE = "stale_route"
    NO_FALLBACK = "no_fallback"
    INVALID = "invalid"
    OTHER_NODE_GROUP = "other_node_group"


TOKEN_KEY: Final = "token:"  # no name of a key has a colon


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller, by a key or by an issuer's token."""

    # Name of the key; for a token, ``TOKEN_KEY`` and its subject.
    key_id: str
    role: KeyRole
    tenant_id: str = ""
    # Empty: every model of the tenant.
    models: tuple[str, ...] = ()
    # Hash of the presented secret; a stream ends when the grace period of that secret ends.
    secret_hash: str = field(default="", repr=False, compare=False)
    # Who the token was issued to; empty for a key.
    subject: str = ""
    issuer: str = ""
    # End of the token; 0: of no token, or of work that outlives it.
    expire_unix_s: float = 0.0

    @property
    def of_token(self) -> bool:
        """Whether it has no stored key."""
        return self.key_id.startswith(TOKEN_KEY)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, as placement, worker and engine receive it."""

    ids: Sequence[int]
    # The chain of ``core.prefix`` over the prompt's whole prefix blocks, from ``prefix_root`` on.
    prefix_hashes: tuple[int, ...] = ()
    prefix_root: int = 0


class ConstraintKind(StrEnum):
    """The language of ``Constraint.source``."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # pattern of the whole output, without look-around and back-references
    CHOICE = "choice"  # a JSON list of strings; the output is one of them
    GRAMMAR = "grammar"  # Lark or GBNF


@dataclass(frozen=True, slots=True)
class Constraint:
    """The output is a text of this language, as far as it goes: only ``max_tokens`` can cut it short."""

    kind: ConstraintKind
    source: str
    # Written by a gateway from one that it checked: schemas in it are as the engine takes them.
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: every default applied, the seed drawn. See Sampling in common.proto."""

    seed: int
    # 0: greedy.
    temperature: float = 1.0
    # 1.0: no filter.
    top_p: float = 1.0
    # 0: no filter.
    top_k: int = 0
    # 0.0: no filter.
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # None: none. Else how many alternatives; 0: only the sampled token's own.
    logprobs: int | None = None
    # What the output must match; None: any text.
    constraint: Constraint | None = None
    # The same as ``logprobs`` for the prompt's tokens.
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Where an output may end: from ``min_tokens`` on, at a stop string or token, and at ``max_tokens``.

    ``max_tokens`` is 0 where only the log-probabilities of the prompt are requested.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Special tokens whose spelling is part of the text.
    spelled_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """A generation that passed the validator: version pinned, prompt tokenised, limits applied."""

    request_id: str
    model: str
    version_digest: str
    route_revision: int
    prompt: Prompt
    sampling: Sampling
    limits: OutputLimits
    choices: int = 1
    priority: Priority = Priority.STANDARD
    session_key: str = ""
    step: str = ""  # step of the rollout that drew its version; empty: no draw
    form: OutputForm | None = None  # form by which the gateway splits its outputs; None: it does not
    constrained_form: OutputForm | None = None  # form of calls in outputs that are not split
    continues_prompt: bool = False  # the text of its outputs goes on from the prompt's
    weights_digest: str = ""  # digest of the weights; an adapter has that of its base
    base_digest: str = ""  # version that an adapter changes; empty: the version is none
    # Promise of all replicas that are ready: neither company nor a move changes the output.
    exact: bool = False
    size: SizeChoice | None = None  # choice of its model among the sizes of an alias
    safety: SafetyPins | None = None  # safety packs that it obeys; None: none

    @property
    def scored_tokens(self) -> int:
        """How many tokens of the prompt the stream of each choice begins with."""
        return len(self.prompt.ids) if self.sampling.prompt_logprobs is not None else 0


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to start one sequence on one worker. See Grant in scheduler.proto."""

    worker_id: str
    address: str
    incarnation: int
    epoch: int
    sequence: int
    kv_blocks: int
    ttl_s: float
    version_digest: str
    route_revision: int = 0


@dataclass(frozen=True, slots=True)
class FallbackGrant:
    """A gateway's own placement while there is no leader; the worker may reject it. See worker.proto.

    ``worker_id`` and ``address`` stay in the gateway: they select the worker that receives the start.
    """

    worker_id: str
    address: str
    incarnation: int
    last_epoch: int
    kv_blocks: int
    version_digest: str


AnyGrant = Grant | FallbackGrant


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """One sequence to place, with all facts that the scheduler uses."""

    request_id: str
    choice: int
    tenant_id: str
    priority: Priority
    model: str
    version_digest: str
    route_revision: int
    prompt_tokens: int
    max_output_tokens: int
    arrival_unix_us: int
    queue_ttl_s: float
    ticket: bytes
    excluded_workers: tuple[str, ...] = ()
    traceparent: str = ""
    prefix_hashes: tuple[int, ...] = ()
    deadline_left_s: float | None = None  # None: no deadline
    tenant_weight: float = 1.0
    attempt: int = 0  # counts the client's attempts from 0
    ttft_target_s: float | None = None  # None: no target
    over_quota: bool = False  # the tenant uses more than its committed rate
    committed_tokens_per_minute: int = 0  # 0: nothing is committed
    begun: bool = False  # it was granted before
    node_group: str = ""  # the only nodes that may run it; empty: the shared ones
    isolation_waits: bool = False  # it waits while none of these serves its version
    kv_share: float = 0.0  # share of a worker's KV that its tenant may hold; 0: no budget
    size_reason: str = ""  # why this size of an alias serves it; empty: it named a deployment
    safety: str = ""  # safety packs that it obeys, for its explanation; empty: none


@dataclass(frozen=True, slots=True)
class StartSpec:
    """Everything a worker needs to start or resume one sequence under a grant."""

    generation: GenerationSpec
    choice: int
    tenant_id: str
    grant: AnyGrant
    initial_credit_tokens: int
    produced_ids: tuple[int, ...] = ()  # output tokens of an earlier run
    delivered_chars: int = 0  # characters of output text that the client has already received
    time_left_s: float | None = None  # None: no deadline
    traceparent: str = ""
    apart_tokens: int = 0  # tokens of a suspect of a crash that come from steps of its own
    embed: bool = False  # it ends with its prefill: with the last token's hidden state, without output
    scored_tokens: int = 0  # prompt tokens whose log-probabilities an earlier run sent
    node_group: str = ""  # the one of ``PlaceSpec``
    kv_share: float = 0.0  # the one of ``PlaceSpec``
    probe: bool = False  # its output comes with the scores of the version's probe
    unmerged: bool = False  # each token comes with its text, however many wait to be sent
    begun: bool = False  # another choice of its request has output

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose KV the worker needs before it makes the next one."""
        return len(self.generation.prompt.ids) + len(self.produced_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probabilities: ``sampled`` is its own. A prompt's first has none, ``sampled`` is 0."""

    sampled: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    top_tokens: tuple[str, ...]
    token: str
    text: str = ""  # text of the output or prompt that became final with the token
    rank: int = 0  # a prompt token's place by probability, from 1; 0: none
    token_bytes: bytes = b""  # the bytes of a part of a character; empty: those of the text
    top_bytes: tuple[bytes, ...] = ()  # the same for each of top_ids; none: all are those of the texts


class StepTotals(Struct, frozen=True, gc=False):
    """Engine steps of an interval and the work of all sequences in them."""

    steps: int = 0
    step_us: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0  # tokens of KV that the decodes read

    def since(self, earlier: StepTotals) -> StepTotals:
        """Return what was added after ``earlier``, which is of the same engine.

        A total that was taken while a step is read still counts first tokens of other sequences as decoded.
        """
        return StepTotals(
            self.steps - earlier.steps,
            self.step_us - earlier.step_us,
            self.prefill_tokens - earlier.prefill_tokens,
            max(0, self.decode_tokens - earlier.decode_tokens),
            self.attended_tokens - earlier.attended_tokens,
        )


NO_STEPS: Final = StepTotals()


class RunFacts(Struct, frozen=True, gc=False):
    """How a sequence, or the rows of a request, fared on the worker that ended it. 0: unknown, or none."""

    worker_id: str = ""
    prefill_us: int = 0  # time from its first prefill step until its first token left the engine
    before: StepTotals = NO_STEPS  # steps from its acceptance until its first token
    after: StepTotals = NO_STEPS  # steps from then until its end
    blocked_us: int = 0  # time without credit, for want of a reader
    returning_us: int = 0  # time with credit and without a slot, which others had
    preemptions: int = 0  # how often it lost its slot or its KV to others
    log_us: int = 0  # time in which its gateway wrote its log
    batch_wait_us: int = 0  # longest wait of its rows for a batch
    batch_rows: int = 0  # rows of that batch
    batch_width: int = 0  # tokens to which that batch was padded
    row_tokens: int = 0  # tokens of the longest row


NO_RUN: Final = RunFacts()


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How a sequence ended on a worker. ``output_tokens`` includes those of earlier runs."""

    reason: FinishReason
    stop: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0
    engine_wait_us: int = 0
    prefill_us: int = 0
    error_reason: str = ""
    error_message: str = ""
    device_us: int = 0  # its shares of engine steps on that worker, as far as they are known
    # Cause of an ENGINE_LOST; ``step_role`` is the part that the sequence had in the step that ran.
    loss_cause: LossCause = LossCause.OUTSIDE
    step_role: StepRole = StepRole.NONE
    embedding: bytes = b""  # hidden state of a sequence that embeds, as 32-bit little-endian floats
    run: RunFacts = NO_RUN  # facts of its steps


@dataclass(frozen=True, slots=True)
class Usage:
    """``device_s``: shares of engine steps, measured and not compared. Those of the last steps,
    or of a lost worker, may be missing."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    device_s: float = field(default=0.0, compare=False)


NO_USAGE: Final = Usage(0, 0)


class StageClock(Struct, frozen=True, gc=False):
    """Duration of each stage in microseconds; see StageClock in common.proto."""

    received_unix_us: int
    validate_us: int = 0
    admit_us: int = 0
    queue_us: int = 0
    dispatch_us: int = 0
    engine_wait_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    send_us: int = 0
