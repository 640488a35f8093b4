"""What a worker reports to the scheduler, and how a placement ends: values between the roles.

A worker's ``ReportSnapshot`` has levels (pools, draining) and deltas (``grants_seen``, ``tenants``). The
levels are whole in every snapshot. The deltas are *taken*: whoever builds a snapshot hands over what
happened since the snapshot before, and the reporter keeps it until the leader acknowledged it.
``grants_seen`` and every ``kv_blocks_reserved`` are one atom: they are read in one go, without an await
between, so that the blocks of a seen grant are counted by exactly one of the two sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.core.errors import FairwayError
from services.core.generation import Grant
from services.core.records import Priority


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Room of one loaded version on one worker.

    ``kv_blocks_reserved``: granted, running and preempted sequences, at the larger of their grant and
    their use. ``waiting`` are accepted sequences without a place in the batch; ``running + waiting`` is
    at most ``max_sequences``. ``ready``: it takes new sequences; False while loading, draining or
    restarting its engine. ``steps`` and ``step_seconds`` count since the engine started.
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


@dataclass(frozen=True, slots=True)
class TenantTokens:
    """Tokens of one tenant on one version since the snapshot before."""

    tenant: str
    digest: str
    prefill: int
    output: int


@dataclass(frozen=True, slots=True)
class LiveSequence:
    """A sequence that holds KV on the worker."""

    request_id: str
    choice: int
    tenant: str
    digest: str
    kv_blocks: int
    priority: Priority = Priority.STANDARD


@dataclass(frozen=True, slots=True)
class ReportSnapshot:
    """The state of one worker life at one instant.

    ``epoch`` is the newest leader the worker honours and ``grants_seen`` the sequence numbers of that
    leader's grants that arrived since the snapshot before, admitted or not. ``live`` lists every
    sequence that holds KV; the reporter sends it in the first report of a stream only.
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
class PlacementFrame:
    """What a scheduler tells a gateway in one message. ``epoch`` is its leadership."""

    epoch: int
    outcomes: tuple[Outcome, ...] = field(default=())
