"""Resources as they change: what is there, then every change, with what the fleet makes of each.

Level-triggered: after each batch of the store's changes the resources are looked at again, and those that
differ from what was told last are told. So the status of a deployment is told when a worker moves it, and a
reader that is slow gets fewer and later pictures, never an endless queue of them: what is not read is not
made, since a batch is taken from the store only once the one before was written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

import structlog

from services.controlplane.fleet import Snapshot, read_snapshot, snapshot_of
from services.controlplane.resources import Stored
from services.controlplane.status import (
    DeploymentView,
    NodeView,
    deployment_view,
    node_names,
    node_view,
    unplaced_in,
)
from services.core.errors import FailedPrecondition, IntegrityError
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    KEYS,
    MODELS,
    NODES,
    ROOT,
    TENANTS,
    WORKERS,
    ApiKey,
    Deployment,
    Tag,
    Tenant,
    VersionRecord,
    load,
)
from services.ports.store import Changed, Compacted, Entry, Removed, Store

log = structlog.get_logger()


class Kind(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL_VERSION = "model_version"
    MODEL_TAG = "model_tag"


R = TypeVar("R")
View = Stored[Tenant] | Stored[ApiKey] | DeploymentView | NodeView | VersionRecord | Tag
Name = tuple[Kind, str]
# The keys that say something of a kind, and the prefix after which such a key names the resource.
_FLEET: Final = (DEPLOYMENTS, NODES, WORKERS, ASSIGNMENTS, MODELS)
_SOURCES: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.TENANT: (TENANTS,),
    Kind.KEY: (KEYS,),
    Kind.DEPLOYMENT: _FLEET,
    Kind.NODE: (DEPLOYMENTS, NODES, WORKERS, ASSIGNMENTS),
    Kind.MODEL_VERSION: (MODELS,),
    Kind.MODEL_TAG: (MODELS,),
}


@dataclass(frozen=True, slots=True)
class Change:
    """``view`` is None for a deletion. Names read ``model/digest`` and ``model/tag`` for those two kinds."""

    kind: Kind
    name: str
    view: View | None


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes up to ``revision``; resume from it. ``snapshot_end``: all that was there was told."""

    revision: int
    changes: tuple[Change, ...]
    snapshot_end: bool = False


async def watch_resources(
    store: Store, kinds: Collection[Kind], after_revision: int
) -> AsyncGenerator[Changes, None]:
    """Yield the state (unless resuming), then what changed, until closed.

    An empty ``Changes`` is a sign of life. Raises FailedPrecondition when ``after_revision`` is too far
    back: begin anew with 0.
    """
    snapshot = await read_snapshot(store)
    told: Mapping[Name, View] | None = None
    missed: set[str] = set()
    if not after_revision:
        told = views_of(snapshot, kinds)
        yield Changes(snapshot.revision, _differences({}, told), snapshot_end=True)
        after_revision = snapshot.revision
    try:
        async with aclosing(store.watch(ROOT, after_revision)) as batches:
            async for batch in batches:
                keys = missed | {_key_of(event) for event in batch.events}
                if batch.revision < snapshot.revision:  # resuming: the snapshot is ahead of it
                    missed = keys
                    continue
                missed = set()
                snapshot = _advanced(snapshot, batch.revision, batch.events)
                changes: tuple[Change, ...] = ()
                if told is None or any(_concerns(key, kinds) for key in keys):
                    views = views_of(snapshot, kinds)
                    changes = _since(keys, views, kinds) if told is None else _differences(told, views)
                    told = views
                if changes or not batch.events:
                    yield Changes(batch.revision, changes)
    except Compacted as exc:
        raise FailedPrecondition(
            f"revision {after_revision} is too old to resume from: watch again from 0",
            revision=after_revision,
        ) from exc


def views_of(snapshot: Snapshot, kinds: Collection[Kind]) -> dict[Name, View]:
    """Return every resource of these kinds as it stands in the snapshot."""
    found: dict[Name, View] = {}
    unplaced = unplaced_in(snapshot.fleet) if {Kind.DEPLOYMENT, Kind.NODE} & set(kinds) else {}
    if Kind.TENANT in kinds:
        for entry in snapshot.under(TENANTS):
            if (tenant := _loaded(entry, Tenant)) is not None:
                found[Kind.TENANT, tenant.meta.name] = _stored(tenant, entry)
    if Kind.KEY in kinds:
        for entry in snapshot.under(KEYS):
            if (key := _loaded(entry, ApiKey)) is not None:
                found[Kind.KEY, key.meta.name] = _stored(key, entry)
    if Kind.DEPLOYMENT in kinds:
        for entry in snapshot.under(DEPLOYMENTS):
            if (deployment := _loaded(entry, Deployment)) is not None:
                view = deployment_view(_stored(deployment, entry), snapshot, unplaced)
                found[Kind.DEPLOYMENT, deployment.meta.name] = view
    if Kind.NODE in kinds:
        for name in node_names(snapshot):
            node = node_view(name, snapshot, unplaced)
            if node is not None:
                found[Kind.NODE, name] = node
    for entry in snapshot.under(MODELS):
        named = _model_name(entry.key)
        if named is not None and named[0] in kinds:
            model = _loaded(entry, Tag) if named[0] is Kind.MODEL_TAG else _loaded(entry, VersionRecord)
            if model is not None:
                found[named] = model
    return found


def _differences(old: Mapping[Name, View], new: Mapping[Name, View]) -> tuple[Change, ...]:
    changed = [name for name in new if old.get(name) != new[name]]
    gone = [name for name in old if name not in new]
    return tuple(Change(kind, name, new.get((kind, name))) for kind, name in sorted([*changed, *gone]))


def _since(keys: Iterable[str], views: Mapping[Name, View], kinds: Collection[Kind]) -> tuple[Change, ...]:
    """Return what may have changed when these keys did and nothing was told before: too much, never less."""
    names: set[Name] = set()
    for key in keys:
        for kind in kinds:
            if not _concerns(key, (kind,)):
                continue
            own = _own_name(kind, key)
            if own is not None:
                names.add((kind, own))
            if kind in (Kind.DEPLOYMENT, Kind.NODE):
                names |= {name for name in views if name[0] is kind}
    return tuple(Change(kind, name, views.get((kind, name))) for kind, name in sorted(names))


def _own_name(kind: Kind, key: str) -> str | None:
    """Return the name of the resource of this kind that the key is about."""
    if key.startswith(MODELS):
        named = _model_name(key)
        return named[1] if named is not None and named[0] is kind else None
    prefixes = {
        Kind.TENANT: (TENANTS,),
        Kind.KEY: (KEYS,),
        Kind.DEPLOYMENT: (DEPLOYMENTS,),
        Kind.NODE: (NODES, WORKERS, ASSIGNMENTS),
    }.get(kind, ())
    return next((key.removeprefix(prefix) for prefix in prefixes if key.startswith(prefix)), None)


def _model_name(key: str) -> Name | None:
    model, kind, name = [*key.removeprefix(MODELS).split("/", 2), "", ""][:3]
    if kind == "versions":
        return Kind.MODEL_VERSION, f"{model}/{name}"
    return (Kind.MODEL_TAG, f"{model}/{name}") if kind == "tags" else None


def _concerns(key: str, kinds: Collection[Kind]) -> bool:
    return any(key.startswith(prefix) for kind in kinds for prefix in _SOURCES[kind])


def _advanced(snapshot: Snapshot, revision: int, events: Iterable[Changed | Removed]) -> Snapshot:
    """Return the snapshot with the changes that are newer than it."""
    entries = dict(snapshot.entries)
    moved = False
    for event in events:
        if isinstance(event, Removed):
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


def _key_of(event: Changed | Removed) -> str:
    return event.key if isinstance(event, Removed) else event.entry.key


def _stored(record: R, entry: Entry) -> Stored[Any]:
    return Stored(record, entry.create_revision, entry.mod_revision)


def _loaded(entry: Entry, kind: type[R]) -> R | None:
    """Return the record, None for one that cannot be read: it must not end every watch."""
    try:
        return load(entry.value, kind)
    except IntegrityError as error:
        log.error("watch.record_skipped", key=entry.key, error=error.message)
        return None
