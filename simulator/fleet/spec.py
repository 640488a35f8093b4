"""What a simulated fleet is made of: everything that a run depends on, besides its load and its faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.adapters.quotas.quota import SETTLED_KEEP_S
from services.controlplane.scaling.policy.nodes import NodeLimits
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.core.records import SHARED_NODES, IsolationTier, Priority, node_group
from services.core.scaling import Scaling
from services.gateway.service_types import GatewayLimits
from services.scheduler.term import TermSettings
from simulator.batcher.costs import BatchCosts
from simulator.engine.sim_batches import SimRowVersion
from simulator.engine.sim_executor import FRAGILE, VersionFaults

MODEL: Final = "sim"
VERSION_DIGEST: Final = "sha256:" + "51" * 32
VOCABULARY: Final = 32_000
ROWS_MODEL: Final = "rows"
ROWS_DIGEST: Final = "sha256:" + "52" * 32


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A customer and its limits; 0 is none. ``degraded_tokens`` is the length to which its outputs may be cut
    under pressure; ``kv_share`` its part of each worker's KV."""

    name: str
    weight: float = 1.0
    max_priority: Priority = Priority.INTERACTIVE
    requests_per_minute: int = 0
    max_concurrency: int = 0
    committed_tokens_per_minute: int = 0
    degraded_tokens: int = 0
    isolation: IsolationTier = IsolationTier.PACKED
    isolation_waits: bool = False
    kv_share: float = 0.0

    @property
    def node_group(self) -> str:
        return node_group(self.name, self.isolation)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The network: one way takes ``base_s`` plus an exponentially distributed time of mean ``jitter_s``."""

    base_s: float = 0.0002
    jitter_s: float = 0.0001


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One kind of worker. ``preset`` names a cost model of ``simulator.engine.cost_model.PRESETS``.

    ``kv_blocks`` of ``block_size`` tokens each; ``step_tokens`` is the engine's budget of tokens per step.
    """

    preset: str = "a10"
    kv_blocks: int = 2048
    block_size: int = 16
    max_sequences: int = 256
    step_tokens: int = 2048
    zones: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A version that the workers can load; the first of a fleet is the deployment's.

    ``step_ratio`` times the time of the worker's cost model is the time of its steps. ``load_s`` passes until
    its first engine in a life of a worker is ready; ``loads`` states whether it ever is.
    """

    digest: str = VERSION_DIGEST
    step_ratio: float = 1.0
    load_s: float = 0.0
    loads: bool = True
    faults: VersionFaults = FRAGILE


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """A fixed-cost version that the first ``workers`` also serve. ``costs`` names a measured model.

    ``by_layers``: see ``SimRowVersion``.
    """

    workers: int
    costs: str = "minilm"
    by_layers: bool = False

    @property
    def version(self) -> SimRowVersion:
        costs = BatchCosts.measured(self.costs)
        return SimRowVersion(ROWS_MODEL, ROWS_DIGEST, costs, by_layers=self.by_layers)


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """Bounds of the deployment, and the provider of its nodes.

    A node takes one of ``start_s`` from its order until its worker runs. ``faulty_ratio`` of the orders and
    calls fail in one of the ways of ``NodeFault``.
    """

    bounds: Scaling
    tuning: ScalerTuning = field(default_factory=ScalerTuning)
    nodes: NodeLimits = field(default_factory=NodeLimits)
    start_s: tuple[float, float] = (60.0, 180.0)
    faulty_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A fleet."""

    workers: int = 20
    gateways: int = 2
    schedulers: int = 2
    seed: int = 0
    # Dealt out in turn.
    worker_kinds: tuple[WorkerSpec, ...] = (WorkerSpec(),)
    tenants: tuple[TenantSpec, ...] = (TenantSpec("tenant-0"),)
    # What every scheduler decides by: another queue order or placement profile makes a baseline.
    term: TermSettings = field(default_factory=TermSettings)
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    link: LinkSpec = field(default_factory=LinkSpec)
    max_context_tokens: int = 16_384
    lease_ttl_s: int = 5
    leader_ttl_s: int = 3
    slow_reader_s: float = 30.0
    # How long an engine loads; None: as its cost model has it.
    engine_restart_s: float | None = None
    # How long an engine may keep steps without events to itself.
    coalesce_s: float = 0.1
    # The gateways have a record store.
    idempotency: bool = True
    # How long Redis stores that a request was settled.
    settled_keep_s: float = SETTLED_KEEP_S
    # Every process has clocks of its own.
    skewed: bool = False
    versions: tuple[VersionSpec, ...] = (VersionSpec(),)
    # Control planes. Without one, each worker has the first version assigned; with them, gateways report to
    # the leading one, and it assigns ``replicas``.
    planes: int = 0
    # Replicas of the deployment; 0: one on each worker.
    replicas: int = 0
    # A pool of a fixed-cost version; without control planes only.
    rows: RowsSpec | None = None
    # Node groups of the first workers; the others are shared. Without control planes only.
    node_groups: tuple[str, ...] = ()
    # The replicas follow the load, on the workers and on nodes that are ordered; with control planes only.
    scaling: ScalingSpec | None = None

    @property
    def least_replicas(self) -> int:
        """Replicas that serve in a fleet at rest."""
        return self.replicas if self.scaling is None else self.scaling.bounds.min_replicas

    def group_of(self, worker: int) -> str:
        """Return the node group of the worker with a number."""
        return self.node_groups[worker] if worker < len(self.node_groups) else SHARED_NODES

    def row_versions(self, worker: int) -> tuple[SimRowVersion, ...]:
        """Return the fixed-cost versions of the worker with a number."""
        return (self.rows.version,) if self.rows is not None and worker < self.rows.workers else ()
