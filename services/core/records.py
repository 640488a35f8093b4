"""Records stored in etcd and their keys. Values are JSON of these types.

A reader takes ``mod_revision`` and ``create_revision`` from the store, so they are not fields here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from services.core.errors import IntegrityError, UnsupportedFeature
from services.core.estimates.traffic_shapes import RequestShape
from services.core.limits import Limit, LimitKind, Price, Scope, UsageLimits
from services.core.scaling import Scaled, Scaling

ROOT: Final = "/fairway/v1/"
TENANTS: Final = ROOT + "tenants/"
KEYS: Final = ROOT + "keys/"
MODELS: Final = ROOT + "models/"
DEPLOYMENTS: Final = ROOT + "deployments/"
SCALED: Final = ROOT + "scaled/"
NODE_ORDERS: Final = ROOT + "node-orders/"
ROLLOUTS: Final = ROOT + "rollouts/"
NODES: Final = ROOT + "nodes/"
ASSIGNMENTS: Final = ROOT + "assignments/"
WORKERS: Final = ROOT + "workers/"
LEADERS: Final = ROOT + "leaders/"
STORE_GENERATION: Final = ROOT + "store/generation"
GATEWAYS: Final = ROOT + "gateways/"
BUDGETS: Final = ROOT + "budgets/"
BUDGET_ALERTS: Final = ROOT + "budget-alerts/"
OBJECTIVES: Final = ROOT + "objectives/"
# Outside the root: the leader writes it often, and only control planes read it.
OBJECTIVE_STATUS: Final = "/fairway/v1-objective-status/"
QUARANTINE: Final = ROOT + "quarantine/"
# Outside the root: only control planes and the roles that keep data of tenants read them.
TENANT_KEYS: Final = "/fairway/v1-tenant-keys/"
MAX_KEY_GENERATIONS: Final = 16
REGION_LABEL: Final = "region"  # label of workers, and key of a deployment's selector
# Outside the root: writing an event does not wake the watchers of the fleet's state.
EVENTS: Final = "/fairway/v1-events/"
# Outside the root: only what deploys or loads a version reads them.
SIGNERS: Final = "/fairway/v1-signers/"
SIGNATURES: Final = "/fairway/v1-signatures/"


def version_key(model: str, digest: str) -> str:
    return f"{MODELS}{model}/versions/{digest}"


def tag_key(model: str, tag: str) -> str:
    return f"{MODELS}{model}/tags/{tag}"


def model_users_key(model: str) -> str:
    """Key that every commit writes when a tag or a deployment starts to use a version; a deletion checks
    it."""
    return f"{ROOT}guards/model-users/{model}"


def signatures_key(model: str, digest: str) -> str:
    return f"{SIGNATURES}{model}/{digest}"


def pack_users_key(deployment: str) -> str:
    """Key that every commit writes when a tenant starts to use a safety pack; its deletion checks it."""
    return f"{ROOT}guards/pack-users/{deployment}"


def objective_key(model: str, priority: Priority) -> str:
    """Key that the one objective of a model and class holds."""
    return f"{ROOT}guards/objectives/{model}/{priority}"


def quarantine_key(version_digest: str, fingerprint: str) -> str:
    return f"{QUARANTINE}{version_digest}/{fingerprint}"


def leader_key(role: str, shard: str = "0") -> str:
    return f"{LEADERS}{role}/{shard}"


class Priority(StrEnum):
    """Scheduling class. ``rank`` orders the classes: the lowest is shed first."""

    BATCH = "batch"
    STANDARD = "standard"
    INTERACTIVE = "interactive"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS: Final = {Priority.BATCH: 1, Priority.STANDARD: 2, Priority.INTERACTIVE: 3}


class IsolationTier(StrEnum):
    """Which nodes run the requests of a tenant: shared ones, slices of its own, or whole nodes of its own."""

    PACKED = "packed"
    PARTITIONED = "partitioned"
    DEDICATED = "dedicated"


SHARED_NODES: Final = ""


def node_group(tenant: str, isolation: IsolationTier) -> str:
    """Return the name of the nodes that may run a tenant's requests. A node belongs to one group, and a
    request to one."""
    return SHARED_NODES if isolation is IsolationTier.PACKED else f"{isolation}/{tenant}"


class KeyRole(StrEnum):
    """The role of a key or a token. The (access) options in the protos list the methods of each."""

    TENANT = "tenant"
    ADMIN = "admin"
    VIEWER = "viewer"
    OPERATOR = "operator"
    AUDITOR = "auditor"
    TENANT_ADMIN = "tenant-admin"

    @property
    def of_tenant(self) -> bool:
        """Whether it is bound to a tenant: it runs models, and what it reads and changes is the tenant's."""
        return self in (KeyRole.TENANT, KeyRole.TENANT_ADMIN)


class VersionState(StrEnum):
    """State of one assigned version on one worker."""

    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    # Its successor takes new requests; it still runs requests that were accepted for it.
    RETIRING = "retiring"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Meta:
    """Common fields of every resource that operators create. Times are Unix seconds by the control plane's
    clock."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    create_unix_s: float = 0.0
    update_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Degrade:
    """Degraded service that a tenant prefers to a rejection under pressure.

    ``max_output_tokens``: outputs are cut to that length; 0: no cut. ``smaller_models``: the deployment that
    serves instead, by the requested deployment.
    """

    max_output_tokens: int = 0
    smaller_models: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingConsent:
    """What a tenant permits its data to be used for beyond its requests. Without a purpose: nothing."""

    purpose: str = ""
    granted_by: str = ""  # person or contract of the tenant that agreed
    recorded_by: str = ""  # caller that recorded it
    record_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """Limits of a customer. 0 means no limit."""

    meta: Meta
    display_name: str = ""
    requests_per_minute: int = 0
    max_concurrency: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0
    max_priority: Priority = Priority.STANDARD
    disabled: bool = False
    degrade: Degrade = field(default_factory=Degrade)
    committed_tokens_per_minute: int = 0  # 0: no commitment, so no use exceeds it
    input_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0
    max_context_tokens: int = 0
    max_output_tokens: int = 0
    max_timeout_s: float = 0.0
    user_limits: UsageLimits = field(default_factory=UsageLimits)  # limits of each end user
    isolation: IsolationTier = IsolationTier.PACKED
    isolation_waits: bool = False  # whether its requests wait while no node of its group serves their version
    kv_share: float = 0.0  # share of a worker's KV blocks that it may hold; 0: no budget
    retention_s: float = 0.0  # most time that prompts and outputs are stored; 0: that of the installation
    residency: str = ""  # region that its prompts and outputs do not leave; empty: any
    training_consent: TrainingConsent = field(default_factory=lambda: TrainingConsent())
    egress_tokens_per_second: int = 0  # output that leaves for its clients, of all gateways together
    stream_tokens_per_second: int = 0  # output that leaves for each stream
    safety_pack: str = ""  # deployment of the safety pack that its requests obey; empty: none

    @property
    def node_group(self) -> str:
        return node_group(self.meta.name, self.isolation)

    @property
    def limits(self) -> UsageLimits:
        """Return the limits of all its requests together."""
        return UsageLimits(
            self.requests_per_minute,
            self.max_concurrency,
            self.tokens_per_minute,
            self.input_tokens_per_minute,
            self.output_tokens_per_minute,
            self.max_context_tokens,
            self.max_output_tokens,
            self.max_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A generation of a tenant's data key, encrypted by a key-encryption key. Bytes are hex."""

    key_id: str  # the id in the header of what it sealed
    wrapper: str  # name of the key-encryption key
    data: str
    create_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantKeyring:
    """The data keys of a tenant. Key: ``TENANT_KEYS`` and the tenant's name.

    The first seals, all open. An erased tenant has none, and gets none: nothing of it opens.
    """

    generations: tuple[WrappedKey, ...] = ()
    rotate_unix_s: float = 0.0  # a key made earlier seals nothing more
    erase_unix_s: float = 0.0
    collect_unix_s: float = 0.0  # time at which what was stored of an erased tenant was deleted


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key. ``meta.name`` is the public key id; ``secret_hash`` is hex sha256 of the secret part."""

    meta: Meta
    role: KeyRole
    secret_hash: str
    tenant: str = ""
    models: tuple[str, ...] = ()
    expire_unix_s: float = 0.0
    previous_secret_hash: str = ""
    previous_expire_unix_s: float = 0.0
    limits: UsageLimits = field(default_factory=UsageLimits)


GATEWAY_EXECUTOR: Final = "gateway"  # executor of safety packs: no worker runs them
OWNER_LABEL: Final = "owner"  # key of the label that names the owner of a deployment


@dataclass(frozen=True, slots=True)
class Deployment:
    """A served model. ``meta.name`` is the model name in requests; its mod_revision is the route revision."""

    meta: Meta
    model: str
    version: str
    version_digest: str
    replicas: int
    node_selector: dict[str, str] = field(default_factory=dict)
    priority: Priority = Priority.STANDARD
    executor: str = "torch"
    price: Price = field(default_factory=Price)
    output_form: str = ""  # how its versions write calls and reasoning; empty: as their files show
    tensor_parallel: int = 1  # devices that share each layer
    pipeline_parallel: int = 1  # groups of devices that follow each other
    tenant: str = ""  # the tenant whose nodes run it; empty: shared nodes
    scaling: Scaling | None = None  # bounds within which its replicas follow the load; None: ``replicas``
    # Time in which running requests may finish before an update replaces the weights in their engines; None:
    # an update loads its version beside the one before.
    in_place_s: float | None = None
    # Revision of the stored record, as the planner read it; 0 elsewhere.
    revision: int = field(default=0, compare=False)

    def scaled_by(self, decided: Scaled | None) -> Deployment:
        """Return it with the replicas that were decided for it, if it has bounds."""
        if self.scaling is None or decided is None:
            return self
        return replace(self, replicas=decided.replicas)

    @property
    def of_pack(self) -> bool:
        """Whether its versions are safety packs: gateways apply them, and it has no replicas."""
        return self.executor == GATEWAY_EXECUTOR

    @property
    def owner(self) -> str:
        """Return its owner: its tenant, else its label ``owner``."""
        return self.tenant or self.meta.labels.get(OWNER_LABEL, "")

    @property
    def devices(self) -> int:
        """Return how many devices of a worker one replica takes."""
        return self.tensor_parallel * self.pipeline_parallel

    def serving_digest(self, ready: Mapping[str, int], restarting: Mapping[str, int]) -> str:
        """Return the version that takes new requests, from the READY and RESTARTING replicas of each version.

        During an update this is the old version until as many replicas of the new one are READY. RESTARTING
        replicas of the old version count, because their engines return soon. Planner and gateways apply this
        rule to the same records, so that they agree without a message.
        """
        new = ready.get(self.version_digest, 0)
        before = {
            digest: count
            for digest in (ready.keys() | restarting.keys()) - {self.version_digest}
            if (count := ready.get(digest, 0) + restarting.get(digest, 0))
        }
        if not before or new >= min(max(1, self.replicas), max(before.values())):
            return self.version_digest
        return max(before, key=lambda digest: (before[digest], digest))


EACH_USER: Final = "*"


@dataclass(frozen=True, slots=True)
class Budget:
    """What the requests of a tenant, one of its keys or an end user may cost, in micro-dollars. 0: no limit.

    ``user`` is an end user, or ``EACH_USER`` for each that has no budget of its own. Periods are UTC.
    """

    meta: Meta
    tenant: str
    key: str = ""
    user: str = ""
    limit_micros: int = 0  # per calendar month
    day_limit_micros: int = 0
    currency: str = "USD"

    @property
    def scope(self) -> Scope:
        """Return whose requests it covers."""
        return Scope.KEY if self.key else Scope.USER if self.user else Scope.TENANT

    def limits(self, user: str = "") -> tuple[Limit, ...]:
        """Return its limits. ``user`` names the end user, where the budget is of each."""
        name = self.key or user or self.user
        both = ((LimitKind.MONTH_MICROS, self.limit_micros), (LimitKind.DAY_MICROS, self.day_limit_micros))
        return tuple(Limit(kind, micros, self.scope, name) for kind, micros in both if micros)


@dataclass(frozen=True, slots=True)
class BudgetAlert:
    """The highest threshold that was reported of a budget in its month and on its day."""

    month: str = ""
    month_percent: int = 0
    day: str = ""
    day_percent: int = 0


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """A quantile of latencies that must not exceed ``seconds``; 0: no target."""

    seconds: float = 0.0
    quantile: float = 0.95


@dataclass(frozen=True, slots=True)
class Objective:
    """What the requests of one model and class are promised; 0: nothing."""

    meta: Meta
    # The deployment. Model and class have one objective.
    model: str
    priority: Priority = Priority.STANDARD
    # Share of requests without an error before the first token.
    availability: float = 0.0
    # Share of begun streams that the platform does not break.
    completion: float = 0.0
    ttft: LatencyTarget = field(default_factory=LatencyTarget)
    itl: LatencyTarget = field(default_factory=LatencyTarget)
    # From the first byte of a request until its end, of those that finish.
    total: LatencyTarget = field(default_factory=LatencyTarget)
    # Its latencies replace the targets of the settings; otherwise it only observes.
    shapes_serving: bool = False


class Sli(StrEnum):
    """A service level indicator: a share of good events."""

    AVAILABILITY = "availability"
    COMPLETION = "completion"
    TTFT = "ttft"
    ITL = "itl"
    TOTAL = "total"  # new ones stand last: stored bins have no names


class BurnAlert(StrEnum):
    """How urgently an error budget is spent too fast."""

    NONE = "none"
    SLOW = "slow"
    FAST = "fast"
    ACUTE = "acute"


@dataclass(frozen=True, slots=True)
class SliStatus:
    """One indicator of an objective. ``burn_rates`` follow ``burn.WINDOWS_S``, the shortest window first."""

    sli: Sli
    budget_left_ratio: float
    events: int
    bad_events: int
    alert: BurnAlert = BurnAlert.NONE
    burn_rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectiveStatus:
    """What the leader measured last. Key: ``OBJECTIVE_STATUS`` and the objective's name.

    ``create_revision`` is that of the measured objective.
    """

    slis: tuple[SliStatus, ...]
    unix_s: float
    create_revision: int = 0

    def alert_of(self, sli: Sli) -> BurnAlert:
        return next((one.alert for one in self.slis if one.sli is sli), BurnAlert.NONE)


@dataclass(frozen=True, slots=True)
class InPlace:
    """How a version takes over the engine of its deployment's version before."""

    finish_s: float  # time in which running requests may finish before they are returned
    # Requests for the version before that were resolved at an older revision get this version.
    route_revision: int


@dataclass(frozen=True, slots=True)
class AssignedVersion:
    """A version that a worker runs for a deployment."""

    deployment: str
    model: str
    version_digest: str
    executor: str = "torch"
    # Orders the use of the worker's memory.
    priority: Priority = Priority.STANDARD
    # An update replaces the version, which served when the update began.
    served: bool = False
    # It runs only requests that were accepted for it, and is unloaded when these have ended.
    retiring: bool = False
    # Requests that were resolved before it are not started: they get the successor.
    least_route_revision: int = 0
    successor_digest: str = ""
    # A retiring version stays loaded until then for a revert, while no other version needs its memory.
    warm_until_unix_s: float = 0.0
    # Of an arm of a split: its part of the KV memory that the arms divide here, relative to the others'.
    kv_share: int = 0
    # Target for the time between two tokens of a stream, by the model's objectives; 0: the worker's setting.
    itl_target_s: float = 0.0
    # Of the model's traffic when the version was assigned: it is probed with them before it is READY.
    probes: tuple[RequestShape, ...] = field(default=(), compare=False)
    tensor_parallel: int = 1  # devices that share each layer
    pipeline_parallel: int = 1  # groups of devices that follow each other
    owner: str = ""  # the owner of the deployment, as its idle time is charged
    in_place: InPlace | None = None  # how it replaces the weights of the version before; None: it does not

    @property
    def engine(self) -> tuple[str, int, int]:
        """Return what another engine would be needed for."""
        return self.executor, self.tensor_parallel, self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class Assignment:
    """Desired state: the versions that one worker is to run. Key: ``ASSIGNMENTS + worker_id``."""

    worker_id: str
    versions: tuple[AssignedVersion, ...] = ()
    node_group: str = SHARED_NODES  # the group whose requests alone it runs
    # Versions that it fetches and does not run, the likeliest to be assigned first.
    prefetch: tuple[AssignedVersion, ...] = ()
    # Versions whose files it holds for a revert: they are never evicted from its disk.
    pinned: tuple[AssignedVersion, ...] = ()
    ends_unix_s: float = 0.0  # announced end of its node, before which its sequences move; 0: none


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """Observed state: one assigned version on one worker."""

    deployment: str
    model: str
    version_digest: str
    state: VersionState
    message: str = ""
    progress_ratio: float = 0.0
    kv_blocks_total: int = 0
    block_size: int = 0
    max_model_len: int = 0
    engine_restarts: int = 0
    reason: str = ""  # stable word: why it failed
    failed_attempts: int = 0  # failures in a row
    retry_unix_s: float = 0.0  # time of the next attempt; 0: no attempt is scheduled
    weight_bytes: int = 0  # granted to its engine, as are ``working_bytes`` and ``kv_bytes``
    kv_bytes: int = 0
    needed_bytes: int = 0  # smallest grant that it can be loaded with; 0: unknown
    working_bytes: int = 0
    # KV memory that it releases to a version of its own or a higher priority that waits for memory.
    spare_bytes: int = 0
    capabilities: tuple[str, ...] = ()  # what its engine promises, sorted
    least_route_revision: int = 0  # the worker refuses requests for it that were resolved before

    @property
    def granted_bytes(self) -> int:
        """The memory of its engine."""
        return self.weight_bytes + self.working_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker, under its lease. The key's create_revision is its incarnation.

    ``memory_bytes``: memory of its device for engines; ``memory_free_bytes``: the part not granted to any
    engine.
    """

    worker_id: str
    address: str
    zone: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    memory_bytes: int = 0
    draining: bool = False
    versions: tuple[LoadedVersion, ...] = ()
    memory_free_bytes: int = 0
    devices: int = 1  # devices of its kind in one group: the most ranks of an engine
    slice: str = ""  # the part of a device that it runs on, a MIG profile or a share; empty: whole devices
    cost_per_hour: float = 0.0  # its node's cost in any one currency; 0: unknown
    prefetched: tuple[str, ...] = ()  # digests of versions that it holds without running them, sorted

    def loaded(self, assigned: AssignedVersion) -> LoadedVersion | None:
        """Return the observed state of an assigned version; None until the worker reports it."""
        for version in self.versions:
            if (version.deployment, version.version_digest) == (assigned.deployment, assigned.version_digest):
                return version
        return None


@dataclass(frozen=True, slots=True)
class Node:
    """Operator settings of a worker; they outlive the worker.

    Cordoned: it gets no new versions. Draining: its versions move to other workers.
    """

    worker_id: str
    cordoned: bool = False
    draining: bool = False
    tenant: str = ""  # the tenant that it is assigned to; empty: it is shared
    ends_unix_s: float = 0.0  # its announced end, as of a preemptible one; 0: none

    def group(self, slice_: str) -> str:
        """Return its group, if its worker declares that slice."""
        if not self.tenant:
            return SHARED_NODES
        return node_group(self.tenant, IsolationTier.PARTITIONED if slice_ else IsolationTier.DEDICATED)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A live gateway, under its lease. Gateways count each other to compute their shares of the limits."""

    address: str


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of a role's shard, under its lease. The key's create_revision is the epoch."""

    leader_id: str
    address: str


@dataclass(frozen=True, slots=True)
class StoreGeneration:
    """Identity of the store, written once. ``base_revision``: readers add it to each of its revisions.

    A restored store continues its revisions from the backup; the base prevents readers from seeing a lower
    revision.
    """

    generation: str
    base_revision: int = 0


class EventKind(StrEnum):
    """The kind of resource that an event concerns."""

    TENANT = "tenant"
    KEY = "key"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL = "model"
    LEADER = "leader"
    BUDGET = "budget"
    ROLLOUT = "rollout"
    OBJECTIVE = "objective"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event. Key: ``EVENTS`` and a name that sorts by time. ``reason`` is a stable word."""

    time_unix_s: float
    kind: EventKind
    resource: str
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A registered version. Its manifest is the blob with this ``digest``."""

    model: str
    digest: str
    size_bytes: int
    create_unix_s: float
    # See ``core.rollouts.computation``; empty: of a version that was registered without it.
    computation: str = ""
    # By executor, why it does not serve the version; an empty text: it does. Empty: nothing was checked.
    engine_problems: dict[str, str] = field(default_factory=dict)
    base_model: str = ""  # model of an adapter's base; empty: no adapter
    base_digest: str = ""  # version that an adapter changes; empty: no adapter
    kind: str = ""  # kind that its manifest states; empty: of a version that was registered without it

    @property
    def engine(self) -> str:
        """What its engine computes: versions with the same share one. Empty where it is unknown."""
        return f"{self.base_model or self.model} {self.computation}" if self.computation else ""

    @property
    def servable_by(self) -> tuple[str, ...]:
        """The executors that serve it."""
        return tuple(name for name, problem in self.engine_problems.items() if not problem)

    def executor(self, wished: str, *, field: str) -> str:
        """Return the executor of a deployment; empty: the first that serves the version.

        Raises UnsupportedFeature for one that does not.
        """
        if not wished:
            return next(iter(self.servable_by), "torch")
        problem = self.engine_problems.get(wished, "")
        if wished == GATEWAY_EXECUTOR and wished not in self.engine_problems:
            problem = "gateways apply safety packs alone"
        if problem:
            others = "".join(f"; use executor: {name}" for name in self.servable_by[:1])
            raise UnsupportedFeature(
                f"executor {wished} does not serve {self.model} {self.digest[:19]}: {problem}{others}",
                field=field,
            )
        return wished


@dataclass(frozen=True, slots=True)
class Signatures:
    """The signatures of a version, as bundles of model-signing. Key: ``signatures_key``."""

    bundles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tag:
    model: str
    tag: str
    digest: str


Record = TypeVar("Record")


def dump(record: object) -> bytes:
    """Return the JSON bytes of a record, keys in order of declaration."""
    return msgspec.json.encode(record)


def load(data: bytes, kind: type[Record], key: str = "") -> Record:
    """Parse a record. Unknown fields are ignored, so that an older reader can read a newer record.

    Raises IntegrityError when the bytes, stored under ``key``, are no such record.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as exc:
        if not key:
            raise IntegrityError(f"stored {kind.__name__} is malformed: {exc}") from exc
        raise IntegrityError(
            f"the {kind.__name__} at {key} in the store is malformed: {exc}; restore the key, or delete it",
            key=key,
        ) from exc
