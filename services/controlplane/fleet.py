"""One consistent state of the fleet: the input of the planner, resource status and events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import structlog

from services.controlplane.rollouts.records import Rollout
from services.core.errors import IntegrityError
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    MODELS,
    NODES,
    OBJECTIVES,
    ROLLOUTS,
    ROOT,
    SCALED,
    TENANTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    Deployment,
    LoadedVersion,
    Node,
    Objective,
    Tenant,
    VersionRecord,
    VersionState,
    Worker,
)
from services.core.rollouts.routes import ROUTES, ModelRoute, RevisedRoute
from services.core.scaling import Scaled
from services.ports.store import Entry, Store

log = structlog.get_logger()

FleetRecord = (
    Deployment
    | Scaled
    | Worker
    | Node
    | Assignment
    | RevisedRoute
    | Rollout
    | VersionRecord
    | Objective
    | Tenant
)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Records in the store's key order. A deployment has the replicas that scaling decided, if any."""

    deployments: tuple[Deployment, ...] = ()
    workers: tuple[Worker, ...] = ()
    nodes: tuple[Node, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    routes: tuple[RevisedRoute, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    # By version digest: what its engine computes. Without those that were registered without it.
    engines: Mapping[str, str] = field(default_factory=dict)
    objectives: tuple[Objective, ...] = ()
    # The node group of each tenant, by name.
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_rollout(self) -> frozenset[str]:
        """The deployments that have an open rollout, by name."""
        return frozenset(one.deployment for one in self.rollouts if not one.ended)


@dataclass(frozen=True, slots=True)
class Replica:
    """One assigned replica; ``loaded`` is None until its worker reports it."""

    worker_id: str
    assigned: AssignedVersion
    loaded: LoadedVersion | None

    @property
    def ready(self) -> bool:
        return self.loaded is not None and self.loaded.state is VersionState.READY


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything stored as of one revision: entries by key, and the fleet built from them."""

    revision: int
    entries: Mapping[str, Entry]
    fleet: Fleet

    def under(self, prefix: str) -> tuple[Entry, ...]:
        """Return the entries under a prefix, by key."""
        return tuple(entry for key, entry in self.entries.items() if key.startswith(prefix))


async def read_snapshot(store: Store) -> FleetSnapshot:
    """Return the current state, in one read."""
    listing = await store.list(ROOT)
    return snapshot_of(listing.revision, {entry.key: entry for entry in listing.entries})


def snapshot_of(revision: int, entries: Mapping[str, Entry]) -> FleetSnapshot:
    """Return the snapshot of these entries. The fleet omits unreadable records."""
    records: list[FleetRecord | None] = []
    for _, entry in sorted(entries.items()):
        try:
            records.append(decode(entry))
        except IntegrityError as error:
            log.error("fleet.record_skipped", key=entry.key, error=error.message)
    return FleetSnapshot(revision, MappingProxyType(dict(entries)), fleet_of(records))


def readable(entry: Entry, kind: type[R]) -> R | None:
    """Return the record, None for an unreadable one: it must not hide the other records."""
    try:
        return entry.load(kind)
    except IntegrityError as error:
        log.error("record.skipped", key=entry.key, error=error.message)
        return None


def decode(entry: Entry) -> FleetRecord | None:
    """Return the record of a fleet key, None for every other key."""
    if entry.key.startswith(DEPLOYMENTS):
        return replace(entry.load(Deployment), revision=entry.mod_revision)
    if entry.key.startswith(SCALED):
        return entry.load(Scaled)
    if entry.key.startswith(WORKERS):
        return entry.load(Worker)
    if entry.key.startswith(NODES):
        return entry.load(Node)
    if entry.key.startswith(ASSIGNMENTS):
        return entry.load(Assignment)
    if entry.key.startswith(ROUTES):
        # An unreadable one is no split: nothing follows it, and an open rollout writes its own over it.
        nothing = ModelRoute(entry.key.removeprefix(ROUTES), "", ())
        return RevisedRoute(readable(entry, ModelRoute) or nothing, entry.mod_revision)
    if entry.key.startswith(ROLLOUTS):
        return entry.load(Rollout)
    if entry.key.startswith(MODELS) and "/versions/" in entry.key:
        return entry.load(VersionRecord)
    if entry.key.startswith(OBJECTIVES):
        return entry.load(Objective)
    if entry.key.startswith(TENANTS):
        return entry.load(Tenant)
    return None


def fleet_of(records: Iterable[FleetRecord | None]) -> Fleet:
    """Sort records into a fleet; skip None."""
    found = list(records)
    scaled = {record.deployment: record for record in found if isinstance(record, Scaled)}
    return Fleet(
        tuple(
            record.scaled_by(scaled.get(record.meta.name))
            for record in found
            if isinstance(record, Deployment)
        ),
        tuple(record for record in found if isinstance(record, Worker)),
        tuple(record for record in found if isinstance(record, Node)),
        tuple(record for record in found if isinstance(record, Assignment)),
        tuple(record for record in found if isinstance(record, RevisedRoute)),
        tuple(record for record in found if isinstance(record, Rollout)),
        {
            record.digest: record.engine
            for record in found
            if isinstance(record, VersionRecord) and record.engine
        },
        tuple(record for record in found if isinstance(record, Objective)),
        {record.meta.name: record.node_group for record in found if isinstance(record, Tenant)},
    )


def replicas_of(fleet: Fleet, deployment: str) -> tuple[Replica, ...]:
    """Return the assigned replicas of a deployment on live workers, by worker id."""
    workers = {worker.worker_id: worker for worker in fleet.workers}
    found: list[Replica] = []
    for assignment in sorted(fleet.assignments, key=lambda a: a.worker_id):
        worker = workers.get(assignment.worker_id)
        for version in assignment.versions:
            if version.deployment == deployment and worker is not None:
                found.append(Replica(worker.worker_id, version, worker.loaded(version)))
    return tuple(found)


def wanted_in(fleet: Fleet, deployment: Deployment) -> int:
    """Return the replicas that a stored deployment is to have now."""
    name = deployment.meta.name
    return next((one.replicas for one in fleet.deployments if one.meta.name == name), deployment.replicas)
