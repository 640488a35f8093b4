"""Worker reports and placement outcomes: values between the roles.

A worker's ``ReportSnapshot`` has levels (pools, draining) and deltas (``grants_seen``, ``tenants``). Every
snapshot contains all levels. A delta is *taken*: building a snapshot hands over the events since the previous
snapshot, and the reporter stores them until the leader has acknowledged them. ``grants_seen`` and every
``kv_blocks_reserved`` are read together, without an await between, so that the blocks of a seen grant are
counted by exactly one of the two sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from services.core.errors import FairwayError
from services.core.fixed_cost.slots import SlotLease, SlotRefusal
from services.core.generation import Grant
from services.core.records import Priority, VersionState, Worker

LONG_PROMPT_TOKENS = 4096
MAX_COUNTER_TOKENS = 1e18  # the leader rejects a report with a larger counter


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Free and used capacity of one loaded version on one worker."""

    digest: str
    kv_blocks_total: int
    # Of granted, running and preempted sequences: the larger of grant and use. Shared blocks count once.
    kv_blocks_reserved: int
    block_size: int
    running: int
    # Accepted, without a place in the batch; without sequences whose readers grant no credit.
    waiting: int
    max_sequences: int
    max_model_len: int
    # Prompt tokens that wait for prefill.
    queued_prefill_tokens: int = 0
    # Accepts new sequences; False while loading, draining or restarting its engine.
    ready: bool = True
    # The fields from here to attended_tokens count since the engine started.
    steps: int = 0
    step_seconds: float = 0.0
    # Tokens prefilled inside the steps.
    prefill_tokens: int = 0
    # Tokens decoded inside the steps.
    decode_tokens: int = 0
    # Tokens of KV that the decodes read.
    attended_tokens: int = 0
    # Accepted prompts with at least LONG_PROMPT_TOKENS left to compute and no token yet.
    long_prefills: int = 0
    # Prefix blocks that entered the cache since the last snapshot.
    prefix_added: tuple[int, ...] = ()
    # Prefix blocks that left it.
    prefix_removed: tuple[int, ...] = ()
    # Blocks that live sequences now refer to and that several used.
    prefix_shared: tuple[int, ...] = ()
    # Blocks that are no longer shared.
    prefix_unshared: tuple[int, ...] = ()
    # Lowest class whose tenants, without a sequence here, take the slot of another tenant while none is free;
    # 0: none.
    yields_to_rank: int = 0
    # Of a fixed-cost version: rows that may be in flight here, in batches and before them; 0: a version of
    # sequences. ``running`` and ``waiting`` count rows then, and no field of KV or tokens is set.
    row_slots: int = 0
    # Device time of a row, a recent mean; 0: none was measured.
    row_us: int = 0
    # Pools of one worker with the same value are versions of one engine: its levels, room and slots are in
    # each of them. Empty: an engine of its own.
    engine: str = ""
    # The tightest ITL target that an objective gives the versions of its engine; 0: none.
    itl_target_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantTokens:
    """Tokens, or rows, of one tenant and class on one version since the previous snapshot."""

    tenant: str
    digest: str
    prefill: int  # prompt tokens
    output: int
    priority: Priority = Priority.STANDARD
    cached: int = 0  # prompt tokens that were read from the prefix cache
    rows: int = 0  # rows of a fixed-cost version that ended
    device_us: int = 0  # device time of a fixed-cost version's batches


@dataclass(frozen=True, slots=True)
class SequenceUsage:
    """Total tokens of one sequence on this worker so far; the latest report replaces earlier ones."""

    request_id: str
    choice: int
    tenant: str
    digest: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ended: bool = False
    placed_alone: bool = False  # its gateway placed it while there was no leader
    priority: Priority = Priority.STANDARD


class TenantCounter(Struct, frozen=True, gc=False):
    """Service of one tenant in one class of a pool, in weighted tokens, as counted by a leader.
    ``floor_tokens``: the counter at which a tenant without service started at that time."""

    tenant: str
    digest: str
    priority: Priority
    virtual_tokens: float
    floor_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportedSequence:
    """A sequence that holds KV on the worker."""

    request_id: str
    choice: int
    tenant: str
    digest: str
    kv_blocks: int
    priority: Priority = Priority.STANDARD
    placed_alone: bool = False  # its gateway placed it while there was no leader


@dataclass(frozen=True, slots=True)
class ReportSnapshot:
    """The state of one incarnation of a worker at one instant."""

    worker_id: str
    incarnation: int
    address: str
    zone: str = ""
    draining: bool = False
    pools: tuple[PoolSnapshot, ...] = ()
    epoch: int = 0  # newest leadership that the worker accepts grants of
    # Sequence numbers of that leader's grants received since the previous snapshot, admitted or not.
    grants_seen: tuple[int, ...] = ()
    tenants: tuple[TenantTokens, ...] = ()
    live: tuple[
        ReportedSequence, ...
    ] = ()  # every sequence that holds KV; only in the first report of a stream
    usage: tuple[SequenceUsage, ...] = ()
    # Tenant counters from the last leader; only in the first report of a stream.
    counters: tuple[TenantCounter, ...] = ()
    device_type: str = ""
    cost_per_hour: float = 0.0
    # Numbers ``tenants`` and ``usage`` over all streams; a repetition has the same number; 0: none.
    deltas_number: int = 0
    node_group: str = ""  # the group whose requests alone it admits; empty: shared
    preemptible: bool = False  # its node may be taken away at short notice


@dataclass(frozen=True, slots=True)
class Granted:
    """A placement that ended with a grant. ``placement_id`` is the gateway's number."""

    placement_id: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class PlacementRefused:
    """A placement that ended without a grant, and the error."""

    placement_id: int
    error: FairwayError


Outcome = Granted | PlacementRefused


@dataclass(frozen=True, slots=True)
class PoolPressure:
    """Load of a pool, 0 (idle) to 1. ``predicted_wait_s``: until a placement that is submitted now starts."""

    digest: str
    pressure_ratio: float
    predicted_wait_s: float


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One pool of one worker, with the facts a gateway needs for fallback placement while there is no
    leader."""

    worker_id: str
    address: str
    incarnation: int
    digest: str
    kv_tokens_room: int
    kv_tokens_total: int
    block_size: int
    slots: int
    max_model_len: int
    row_slots: int = 0  # rows of a fixed-cost version that may be in flight there
    node_group: str = ""


@dataclass(frozen=True, slots=True)
class PlacementFrame:
    """One message from a scheduler to a gateway."""

    epoch: int  # the scheduler's leadership
    outcomes: tuple[Outcome, ...] = field(default=())
    pressures: tuple[PoolPressure, ...] | None = None  # the full list; None: unchanged
    members: tuple[PoolMember, ...] | None = None  # the new list; None: unchanged
    leases: tuple[SlotLease, ...] = ()  # replacements of the leases of their workers, versions and tenants
    questions: tuple[str, ...] = ()  # requests whose rows the gateway is to explain
    slot_refusals: tuple[SlotRefusal, ...] = ()


def replicas_in(state: VersionState, workers: Iterable[Worker]) -> dict[str, Counter[str]]:
    """Return the replicas in a state on workers that are not draining, by deployment and version digest.

    One that refuses earlier routes is withdrawn: it is no replica, also while its engine restarts.
    """
    found: dict[str, Counter[str]] = {}
    for worker in workers:
        for version in worker.versions if not worker.draining else ():
            if version.state is state and not version.least_route_revision:
                found.setdefault(version.deployment, Counter())[version.version_digest] += 1
    return found
