"""The watch of resources: the current state, then every change, with the fleet state of each.

Tenants, keys, budgets, versions and tags are reported change by change. Deployments and nodes are reported
with their fleet state: after each batch of store changes their views are computed again, and those that
differ from the last report are reported. Nothing is queued here: the next batch is taken from the store once
the previous one was written, so a slow reader holds one batch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from services.controlplane.fleet import FleetSnapshot, read_snapshot, readable, snapshot_of
from services.controlplane.resources.budgets import BudgetView
from services.controlplane.resources.objectives import ObjectiveView
from services.controlplane.resources.resources import R, Stored
from services.controlplane.resources.status import (
    DeploymentView,
    NodeView,
    deployment_view,
    node_names,
    node_view,
    unplaced_in,
)
from services.controlplane.rollouts.records import Rollout
from services.core.aliases import ALIASES, Alias
from services.core.errors import FailedPrecondition
from services.core.records import (
    ASSIGNMENTS,
    BUDGETS,
    DEPLOYMENTS,
    KEYS,
    MODELS,
    NODES,
    OBJECTIVES,
    ROLLOUTS,
    ROOT,
    SCALED,
    TENANTS,
    WORKERS,
    ApiKey,
    Budget,
    Deployment,
    Objective,
    Tag,
    Tenant,
    VersionRecord,
)
from services.core.rollouts.routes import ROUTES
from services.ports.store import Compacted, Entry, KeyChanged, KeyRemoved, Store, WatchBatch


class ResourceKind(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    BUDGET = "budget"
    ROLLOUT = "rollout"
    OBJECTIVE = "objective"
    ALIAS = "alias"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL_VERSION = "model_version"
    MODEL_TAG = "model_tag"


View = (
    Stored[Tenant]
    | Stored[ApiKey]
    | Stored[Budget]
    | Stored[Rollout]
    | BudgetView
    | Stored[Objective]
    | Stored[Alias]
    | ObjectiveView
    | DeploymentView
    | NodeView
    | VersionRecord
    | Tag
)
Name = tuple[ResourceKind, str]
# Deployments and nodes are built from several records. These are the prefixes whose keys contain their name.
_COMPOSED: Final[Mapping[ResourceKind, tuple[str, ...]]] = {
    ResourceKind.DEPLOYMENT: (DEPLOYMENTS,),
    ResourceKind.NODE: (NODES, WORKERS, ASSIGNMENTS),
}
# One record each, under a prefix of their own.
_PLAIN: Final[Mapping[ResourceKind, str]] = {
    ResourceKind.TENANT: TENANTS,
    ResourceKind.KEY: KEYS,
    ResourceKind.BUDGET: BUDGETS,
    ResourceKind.ROLLOUT: ROLLOUTS,
    ResourceKind.OBJECTIVE: OBJECTIVES,
    ResourceKind.ALIAS: ALIASES,
}
_FLEET: Final = (DEPLOYMENTS, SCALED, NODES, WORKERS, ASSIGNMENTS, MODELS, ROUTES)


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """``view`` is None for a deletion. Names of versions and tags read ``model/digest`` and ``model/tag``."""

    kind: ResourceKind
    name: str
    view: View | None


@dataclass(frozen=True, slots=True)
class ResourceChanges:
    """All changes up to ``revision``; resume from it. ``snapshot_end``: the initial state is complete."""

    revision: int
    changes: tuple[ResourceChange, ...]
    snapshot_end: bool = False


async def watch_resources(
    store: Store, kinds: Collection[ResourceKind], after_revision: int
) -> AsyncGenerator[ResourceChanges, None]:
    """Yield the state (unless resuming), then the changes, until closed.

    An empty ``ResourceChanges`` is a keepalive. Raises FailedPrecondition when ``after_revision`` is too old:
    start again with 0.
    """
    watch = ResourceWatch(await read_snapshot(store), kinds, after_revision)
    if not after_revision:
        yield watch.begin()
    try:
        async with aclosing(store.watch(ROOT, watch.revision)) as batches:
            async for batch in batches:
                changes = watch.apply(batch)
                if changes or not batch.events:
                    yield ResourceChanges(watch.revision, changes)
    except Compacted as exc:
        raise FailedPrecondition(
            f"revision {after_revision} is too old to resume from: watch again from 0",
            revision=after_revision,
        ) from exc


class ResourceWatch:
    """The position of one watch. ``revision``: everything up to there was reported."""

    def __init__(self, snapshot: FleetSnapshot, kinds: Collection[ResourceKind], after_revision: int) -> None:
        self.revision = after_revision
        self._snapshot = snapshot
        self._plain = [kind for kind in ResourceKind if kind in kinds and kind not in _COMPOSED]
        self._composed = [kind for kind in _COMPOSED if kind in kinds]
        self._sent: Mapping[Name, View] | None = None  # views of the composed kinds as they were sent last
        self._missed: set[str] = set()

    def begin(self) -> ResourceChanges:
        """Return the current state."""
        self._sent = composed_views(self._snapshot, self._composed)
        self.revision = self._snapshot.revision
        plain = [
            change
            for entry in self._snapshot.entries.values()
            if (change := _change_of(entry.key, entry, self._plain)) is not None
        ]
        plain.sort(key=lambda change: (change.kind, change.name))
        return ResourceChanges(self.revision, (*plain, *_differences({}, self._sent)), snapshot_end=True)

    def apply(self, batch: WatchBatch) -> tuple[ResourceChange, ...]:
        """Apply a batch and return the resulting changes."""
        plain = [
            change
            for event in batch.events
            if (change := _change_of(event.key, _entry_of(event), self._plain)) is not None
        ]
        if not self._composed:
            self.revision = batch.revision
            return tuple(plain)
        keys = self._missed | {event.key for event in batch.events}
        if batch.revision < self._snapshot.revision:  # resuming: the snapshot is newer than the batch
            self._missed = keys
            return tuple(plain)  # the revision does not advance: missed changes are still to be reported
        self._missed = set()
        self._snapshot = _advanced(self._snapshot, batch.revision, batch.events)
        self.revision = batch.revision
        return (*plain, *self._composed_changes(keys))

    def _composed_changes(self, keys: Collection[str]) -> tuple[ResourceChange, ...]:
        if self._sent is not None and not any(key.startswith(_FLEET) for key in keys):
            return ()
        views = composed_views(self._snapshot, self._composed)
        sent, self._sent = self._sent, views
        return _since(keys, views, self._composed) if sent is None else _differences(sent, views)


def composed_views(snapshot: FleetSnapshot, kinds: Collection[ResourceKind]) -> dict[Name, View]:
    """Return every deployment and node in the snapshot, as far as ``kinds`` includes them."""
    found: dict[Name, View] = {}
    unplaced = unplaced_in(snapshot.fleet) if kinds else {}
    if ResourceKind.DEPLOYMENT in kinds:
        for entry in snapshot.under(DEPLOYMENTS):
            if (stored := _stored(entry, Deployment)) is not None:
                name = stored.record.meta.name
                found[ResourceKind.DEPLOYMENT, name] = deployment_view(stored, snapshot, unplaced)
    if ResourceKind.NODE in kinds:
        for name in node_names(snapshot):
            if (node := node_view(name, snapshot, unplaced)) is not None:
                found[ResourceKind.NODE, name] = node
    return found


def _differences(old: Mapping[Name, View], new: Mapping[Name, View]) -> tuple[ResourceChange, ...]:
    changed = [name for name in new if old.get(name) != new[name]]
    removed = [name for name in old if name not in new]
    return tuple(
        ResourceChange(kind, name, new.get((kind, name))) for kind, name in sorted([*changed, *removed])
    )


def _since(
    keys: Iterable[str], views: Mapping[Name, View], kinds: Collection[ResourceKind]
) -> tuple[ResourceChange, ...]:
    """Return every possible change of these keys when nothing was reported before: a superset."""
    names: set[Name] = set()
    for key in keys:
        if key.startswith(_FLEET):
            names |= views.keys()
        for kind in kinds:
            own = next((key.removeprefix(one) for one in _COMPOSED[kind] if key.startswith(one)), None)
            if own is not None:
                names.add((kind, own))
    return tuple(ResourceChange(kind, name, views.get((kind, name))) for kind, name in sorted(names))


def _change_of(key: str, entry: Entry | None, kinds: Collection[ResourceKind]) -> ResourceChange | None:
    """Return the change by an entry, or its deletion, for the kinds that are reported as stored."""
    named = _plain_name(key)
    if named is None or named[0] not in kinds:
        return None
    kind, name = named
    if entry is None:
        return ResourceChange(kind, name, None)
    view: View | None
    match kind:
        case ResourceKind.TENANT:
            view = _stored(entry, Tenant)
        case ResourceKind.KEY:
            view = _stored(entry, ApiKey)
        case ResourceKind.BUDGET:
            view = _stored(entry, Budget)
        case ResourceKind.ROLLOUT:
            view = _stored(entry, Rollout)
        case ResourceKind.OBJECTIVE:
            view = _stored(entry, Objective)
        case ResourceKind.ALIAS:
            view = _stored(entry, Alias)
        case ResourceKind.MODEL_TAG:
            view = readable(entry, Tag)
        case _:
            view = readable(entry, VersionRecord)
    return None if view is None else ResourceChange(kind, name, view)


def _stored(entry: Entry, kind: type[R]) -> Stored[R] | None:
    """Return the record with its revisions, None for an unreadable one."""
    record = readable(entry, kind)
    return None if record is None else Stored(record, entry.create_revision, entry.mod_revision)


def _plain_name(key: str) -> Name | None:
    for kind_of_prefix, prefix in _PLAIN.items():
        if key.startswith(prefix):
            return kind_of_prefix, key.removeprefix(prefix)
    if not key.startswith(MODELS):
        return None
    model, kind, name = [*key.removeprefix(MODELS).split("/", 2), "", ""][:3]
    if kind == "versions":
        return ResourceKind.MODEL_VERSION, f"{model}/{name}"
    return (ResourceKind.MODEL_TAG, f"{model}/{name}") if kind == "tags" else None


def _advanced(
    snapshot: FleetSnapshot, revision: int, events: Iterable[KeyChanged | KeyRemoved]
) -> FleetSnapshot:
    """Return the snapshot with the changes that are newer than it."""
    entries = dict(snapshot.entries)
    moved = False
    for event in events:
        if isinstance(event, KeyRemoved):
            held = entries.get(event.key)
            if held is not None and event.mod_revision > snapshot.revision:
                del entries[event.key]
                moved = True
        elif event.entry.mod_revision > snapshot.revision:
            entries[event.entry.key] = event.entry
            moved = True
    if not moved:
        return replace(snapshot, revision=revision)
    return snapshot_of(revision, entries)


def _entry_of(event: KeyChanged | KeyRemoved) -> Entry | None:
    return None if isinstance(event, KeyRemoved) else event.entry
