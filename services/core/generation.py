"""One generation and its parts, as every service but the wire sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from services.core.records import KeyRole, Priority


class FinishReason(StrEnum):
    """Why a sequence ended. The last three never reach a client: the gateway places it again or fails it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SLOW_READER = "slow_reader"
    PREEMPTED = "preempted"
    ENGINE_LOST = "engine_lost"
    ERROR = "error"


# The error of a sequence that ended with ENGINE_LOST since the model gave no numbers for it on that worker.
NOT_FINITE: Final = "NOT_FINITE"


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


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a tenant's or an operator's key. ``models`` empty means every model of the tenant.

    ``secret_hash`` is that of the secret that was shown, so that a stream ends with its secret's grace.
    """

    key_id: str
    role: KeyRole
    tenant_id: str = ""
    models: tuple[str, ...] = ()
    secret_hash: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, as placement, worker and engine receive it."""

    ids: Sequence[int]
    # The chain of ``core.prefix`` over the prompt's whole prefix blocks, from ``prefix_root`` on.
    prefix_hashes: tuple[int, ...] = ()
    prefix_root: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: every default applied, the seed drawn. See Sampling in common.proto.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 switch a filter off.
    ``logprobs`` is None for none, else how many alternatives (0: only the sampled token's own).
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Where an output may end: from ``min_tokens`` on, at a stop string or token, and at ``max_tokens``."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


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
    """A gateway's own placement while nobody leads; the worker may not take it. See worker.proto.

    ``worker_id`` and ``address`` are the gateway's: the worker that hears of it is the one that is meant.
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
    """What the scheduler needs to know of one sequence.

    ``deadline_left_s`` and ``ttft_target_s`` are None without one; ``attempt`` counts its client's from 0.
    ``over_quota``: the tenant uses more than what was promised to it; what was promised is
    ``committed_tokens_per_minute``, 0 without a promise. ``begun``: it was granted a place before.
    """

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
    deadline_left_s: float | None = None
    tenant_weight: float = 1.0
    attempt: int = 0
    ttft_target_s: float | None = None
    over_quota: bool = False
    committed_tokens_per_minute: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class StartSpec:
    """What a worker needs to start or resume one sequence under a grant.

    ``produced_ids`` are output tokens of an earlier run, ``delivered_chars`` how many characters of
    output text the client already has. ``time_left_s`` is None without a deadline.
    """

    generation: GenerationSpec
    choice: int
    tenant_id: str
    grant: AnyGrant
    initial_credit_tokens: int
    produced_ids: tuple[int, ...] = ()
    delivered_chars: int = 0
    time_left_s: float | None = None
    traceparent: str = ""

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose KV the worker needs before it makes the next one."""
        return len(self.generation.prompt.ids) + len(self.produced_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    sampled: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    top_tokens: tuple[str, ...]
    token: str


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The last word of a worker on a sequence. ``output_tokens`` counts those of earlier runs too."""

    reason: FinishReason
    stop: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0
    engine_wait_us: int = 0
    prefill_us: int = 0
    error_reason: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StageClock:
    """Where the time went, microseconds; see StageClock in common.proto."""

    received_unix_us: int
    validate_us: int = 0
    admit_us: int = 0
    queue_us: int = 0
    dispatch_us: int = 0
    engine_wait_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    send_us: int = 0
