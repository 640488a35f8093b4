"""What is stored in etcd, and under which keys. Values are JSON of these types.

A reader takes ``mod_revision`` and ``create_revision`` from the store, so they are not fields here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from services.core.errors import IntegrityError

ROOT: Final = "/fairway/v1/"
TENANTS: Final = ROOT + "tenants/"
KEYS: Final = ROOT + "keys/"
MODELS: Final = ROOT + "models/"
DEPLOYMENTS: Final = ROOT + "deployments/"
ROLLOUTS: Final = ROOT + "rollouts/"
NODES: Final = ROOT + "nodes/"
ASSIGNMENTS: Final = ROOT + "assignments/"
WORKERS: Final = ROOT + "workers/"
LEADERS: Final = ROOT + "leaders/"
STORE_GENERATION: Final = ROOT + "store/generation"
GATEWAYS: Final = ROOT + "gateways/"
# Outside the root: what follows the fleet's state is not woken by what is told of it.
EVENTS: Final = "/fairway/v1-events/"


def version_key(model: str, digest: str) -> str:
    return f"{MODELS}{model}/versions/{digest}"


def tag_key(model: str, tag: str) -> str:
    return f"{MODELS}{model}/tags/{tag}"


def model_users_key(model: str) -> str:
    """Written with every commit that makes a tag or a deployment use a version: who deletes one looks."""
    return f"{ROOT}guards/model-users/{model}"


def leader_key(role: str, shard: str = "0") -> str:
    return f"{LEADERS}{role}/{shard}"


class Priority(StrEnum):
    """Scheduling class. ``rank`` orders them: the lower class is shed first."""

    BATCH = "batch"
    STANDARD = "standard"
    INTERACTIVE = "interactive"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS: Final = {Priority.BATCH: 1, Priority.STANDARD: 2, Priority.INTERACTIVE: 3}


class KeyRole(StrEnum):
    TENANT = "tenant"
    ADMIN = "admin"


class VersionState(StrEnum):
    """Where one assigned version is on one worker."""

    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"  # its successor takes what is new; it still takes what was accepted for it
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Meta:
    """What every operator-made resource carries. Times are Unix seconds by the control plane's clock."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    create_unix_s: float = 0.0
    update_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Degrade:
    """What a tenant would rather have than be refused under pressure.

    ``max_output_tokens``: outputs are cut to so many, 0: not. ``smaller_models``: what answers instead, by
    the deployment that was asked for.
    """

    max_output_tokens: int = 0
    smaller_models: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Limits of a customer. 0 means no limit.

    ``committed_tokens_per_minute`` are promised to it; 0: nothing is, and nothing is above it.
    """

    meta: Meta
    display_name: str = ""
    requests_per_minute: int = 0
    max_concurrency: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0
    max_priority: Priority = Priority.STANDARD
    disabled: bool = False
    degrade: Degrade = field(default_factory=Degrade)
    committed_tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``meta.name`` is the public key id; ``secret_hash`` is hex sha256 of the secret part."""

    meta: Meta
    role: KeyRole
    secret_hash: str
    tenant: str = ""
    models: tuple[str, ...] = ()
    expire_unix_s: float = 0.0
    previous_secret_hash: str = ""
    previous_expire_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """``meta.name`` is the model name that clients ask for; its mod_revision is the route revision."""

    meta: Meta
    model: str
    version: str
    version_digest: str
    replicas: int
    node_selector: dict[str, str] = field(default_factory=dict)
    priority: Priority = Priority.STANDARD
    executor: str = "torch"

    def serving_digest(self, ready: Mapping[str, int], restarting: Mapping[str, int]) -> str:
        """Return the version that takes new requests, by its READY and RESTARTING replicas of each version.

        During an update that is the version before, until as many replicas of the new one are READY; an
        engine of the one before that is started again is back before long.
        Planner and gateways apply this rule to the same records, so that they agree without a message.
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


@dataclass(frozen=True, slots=True)
class AssignedVersion:
    """What a worker is to run for a deployment.

    ``priority`` orders who has the worker's memory first. ``served``: an update replaces it, and it served
    when that began. ``retiring``: it takes only what was accepted for it, and leaves once that has ended.
    """

    deployment: str
    model: str
    version_digest: str
    executor: str = "torch"
    priority: Priority = Priority.STANDARD
    served: bool = False
    retiring: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """Desired: what one worker is to run. Key: ``ASSIGNMENTS + worker_id``."""

    worker_id: str
    versions: tuple[AssignedVersion, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """Observed: one assigned version on one worker.

    ``reason`` says in a stable word why it failed, ``failed_attempts`` how often in a row, and
    ``retry_unix_s`` when it is tried again; 0 when time alone brings no new attempt. ``weight_bytes``,
    ``working_bytes`` and ``kv_bytes`` are granted to its engine; ``needed_bytes`` is the least it is loaded
    with, 0 while unknown. ``spare_bytes`` of its KV it gives back to a version of its own or of a higher
    priority that waits for memory.
    """

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
    reason: str = ""
    failed_attempts: int = 0
    retry_unix_s: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0
    needed_bytes: int = 0
    working_bytes: int = 0
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker, under its lease. The key's create_revision is its incarnation.

    ``memory_bytes`` is what its device may give to engines; ``memory_free_bytes`` of it is granted to none.
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

    def loaded(self, assigned: AssignedVersion) -> LoadedVersion | None:
        """Return what became of an assigned version; None until the worker reports it."""
        for version in self.versions:
            if (version.deployment, version.version_digest) == (assigned.deployment, assigned.version_digest):
                return version
        return None


def replicas_in(state: VersionState, workers: Iterable[Worker]) -> dict[str, Counter[str]]:
    """Return the replicas in a state on workers that stay, by deployment and version digest."""
    found: dict[str, Counter[str]] = {}
    for worker in workers:
        for version in worker.versions if not worker.draining else ():
            if version.state is state:
                found.setdefault(version.deployment, Counter())[version.version_digest] += 1
    return found


@dataclass(frozen=True, slots=True)
class Node:
    """What operators say of a worker; outlives it.

    Cordoned: it gets nothing new. Draining: what it runs moves away.
    """

    worker_id: str
    cordoned: bool = False
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Gateway:
    """A live gateway, under its lease: the others count it for their shares of the limits."""

    address: str


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads a role's shard, under its lease. The key's create_revision is the epoch."""

    leader_id: str
    address: str


@dataclass(frozen=True, slots=True)
class StoreGeneration:
    """Which store this is, written once. ``base_revision``: what readers add to each of its revisions.

    A restored store counts its revisions from the backup on; the base keeps what readers see from going back.
    """

    generation: str
    base_revision: int = 0


class EventKind(StrEnum):
    """What kind of resource an event is about."""

    TENANT = "tenant"
    KEY = "key"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL = "model"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class EventRecord:
    """What happened, once. Key: ``EVENTS`` and a name that sorts by time. ``reason`` is a stable word."""

    time_unix_s: float
    kind: EventKind
    resource: str
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A registered version. Its manifest is a blob named by ``digest``."""

    model: str
    digest: str
    size_bytes: int
    create_unix_s: float


@dataclass(frozen=True, slots=True)
class Tag:
    model: str
    tag: str
    digest: str


Record = TypeVar("Record")


def dump(record: object) -> bytes:
    """Return the JSON bytes of a record, keys in order of declaration."""
    return msgspec.json.encode(record)


def load(data: bytes, kind: type[Record]) -> Record:
    """Parse a record. Unknown fields are ignored: an older reader survives a newer writer.

    Raises IntegrityError for anything that is not one.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise IntegrityError(f"stored {kind.__name__} is malformed: {exc}") from exc
