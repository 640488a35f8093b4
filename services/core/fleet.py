"""What a worker reports to the scheduler, and how a placement ends: values between the roles.

A worker's ``ReportSnapshot`` has levels (pools, draining) and deltas (``grants_seen``, ``tenants``). The
levels are whole in every snapshot. The deltas are *taken*: whoever builds a snapshot hands over what
happened since the snapshot before, and the reporter keeps it until the leader acknowledged it.
``grants_seen`` and every ``kv_blocks_reserved`` are one atom: they are read in one go, without an await
between, so that the blocks of a seen grant are counted by exactly one of the two sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from services.core.errors import FairwayError
from services.core.generation import Grant
from services.core.records import Priority

LONG_PROMPT_TOKENS = 4096
MAX_COUNTER_TOKENS = 1e18  # no report with a larger one is taken


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Room of one loaded version on one worker.

    ``kv_blocks_reserved``: granted, running and preempted sequences, at the larger of their grant and
    their use, what several of them share once. ``waiting`` are accepted sequences without a place in the
    batch; those whose readers give no credit are in neither. ``yields_to_rank`` is 0, or the lowest class of
    which a tenant without a sequence here gets the place of another's while none is free. ``ready``: it
    takes new sequences; False while loading, draining or restarting its engine. ``steps``, ``step_seconds``
    and what was computed inside the steps count since the engine started: tokens prefilled, tokens decoded,
    tokens of KV that the decodes read. ``long_prefills`` are accepted prompts with LONG_PROMPT_TOKENS and
    more to compute that have no token yet. ``prefix_added`` and ``prefix_removed`` are deltas: prefix blocks
    that came into and left the cache, and so are ``prefix_shared`` and ``prefix_unshared``: those that live
    sequences refer to and that more than one had use of. ``kv_blocks_reserved`` of the same snapshot counts
    each of these once, and one sequence more that begins with them takes no block for them.
    """

    digest: str
    kv_blocks_total: int
    kv_blocks_reserved: int
    block_size: int
    running: int
    waiting: int
    max_sequences: int
    max_model_len: int
    queued_prefill_tokens: int = 0
    ready: bool = True
    steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0
    long_prefills: int = 0
    prefix_added: tuple[int, ...] = ()
    prefix_removed: tuple[int, ...] = ()
    prefix_shared: tuple[int, ...] = ()
    prefix_unshared: tuple[int, ...] = ()
    yields_to_rank: int = 0


@dataclass(frozen=True, slots=True)
class TenantTokens:
    """Tokens of one tenant and class on one version since the snapshot before.

    ``prefill`` are the tokens of its prompts, ``cached`` those of them that came from the prefix cache.
    """

    tenant: str
    digest: str
    prefill: int
    output: int
    priority: Priority = Priority.STANDARD
    cached: int = 0


@dataclass(frozen=True, slots=True)
class SequenceUsage:
    """Tokens of one sequence on this worker so far; the last one said counts. ``placed_alone``: by its
    gateway, while nobody led."""

    request_id: str
    choice: int
    tenant: str
    digest: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ended: bool = False
    placed_alone: bool = False
    priority: Priority = Priority.STANDARD


class TenantCounter(Struct, frozen=True, gc=False):
    """Service of one tenant in one class of a pool, in weighted tokens, as a leader counts it, and what a
    tenant without service started from there then."""

    tenant: str
    digest: str
    priority: Priority
    virtual_tokens: float
    floor_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class LiveSequence:
    """A sequence that holds KV on the worker. ``placed_alone``: by its gateway, while nobody led."""

    request_id: str
    choice: int
    tenant: str
    digest: str
    kv_blocks: int
    priority: Priority = Priority.STANDARD
    placed_alone: bool = False


@dataclass(frozen=True, slots=True)
class ReportSnapshot:
    """The state of one worker life at one instant.

    ``epoch`` is the newest leader the worker honours and ``grants_seen`` the sequence numbers of that
    leader's grants that arrived since the snapshot before, admitted or not. ``live`` lists every
    sequence that holds KV, ``counters`` what the last leader said of tenants; the reporter sends both in
    the first report of a stream only. ``deltas_number`` counts what ``tenants`` and ``usage`` tell of, over
    all streams: what is told again has the number that it had. 0: it has none.
    """

    worker_id: str
    incarnation: int
    address: str
    zone: str = ""
    draining: bool = False
    pools: tuple[PoolSnapshot, ...] = ()
    epoch: int = 0
    grants_seen: tuple[int, ...] = ()
    tenants: tuple[TenantTokens, ...] = ()
    live: tuple[LiveSequence, ...] = ()
    usage: tuple[SequenceUsage, ...] = ()
    counters: tuple[TenantCounter, ...] = ()
    device_type: str = ""
    cost_per_hour: float = 0.0
    deltas_number: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """A placement that ended with the right to start. ``placement_id`` is the gateway's number."""

    placement_id: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Refused:
    """A placement that ended without a grant, and why."""

    placement_id: int
    error: FairwayError


Outcome = Granted | Refused


@dataclass(frozen=True, slots=True)
class PoolPressure:
    """How hard a pool is pressed, 0 (idle) to 1; ``predicted_wait_s`` until what is submitted now starts."""

    digest: str
    pressure_ratio: float
    predicted_wait_s: float


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One pool of one worker, as far as a gateway needs it to place by itself while nobody leads."""

    worker_id: str
    address: str
    incarnation: int
    digest: str
    kv_tokens_room: int
    kv_tokens_total: int
    block_size: int
    slots: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PlacementFrame:
    """What a scheduler tells a gateway in one message. ``epoch`` is its leadership.

    ``pressures`` are whole, ``members`` replace those sent before; None: unchanged.
    """

    epoch: int
    outcomes: tuple[Outcome, ...] = field(default=())
    pressures: tuple[PoolPressure, ...] | None = None
    members: tuple[PoolMember, ...] | None = None
