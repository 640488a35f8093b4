"""Changes of operator-made resources, as the store commits them: what is there, then every change."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from services.core.errors import FailedPrecondition
from services.core.records import (
    DEPLOYMENTS,
    KEYS,
    NODES,
    ROOT,
    TENANTS,
    ApiKey,
    Deployment,
    Node,
    Tenant,
    load,
)
from services.ports.store import Compacted, Entry, Removed, Store

Kind = type[Tenant] | type[ApiKey] | type[Deployment] | type[Node]
PREFIXES: Final[dict[str, Kind]] = {TENANTS: Tenant, KEYS: ApiKey, DEPLOYMENTS: Deployment, NODES: Node}


@dataclass(frozen=True, slots=True)
class Change:
    """``record`` is None for a deletion; ``prefix`` tells the kind, ``name`` the resource."""

    prefix: str
    name: str
    record: Tenant | ApiKey | Deployment | Node | None
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes up to ``revision``; resume from it. ``snapshot_end``: all that was there was told."""

    revision: int
    changes: tuple[Change, ...]
    snapshot_end: bool = False


async def watch_resources(
    store: Store, prefixes: Collection[str], after_revision: int
) -> AsyncGenerator[Changes, None]:
    """Yield the state (unless resuming), then each change after it, until closed.

    An empty ``Changes`` is a sign of life. Raises FailedPrecondition when ``after_revision`` is too far
    back: begin anew with 0.
    """
    if not after_revision:
        listing = await store.list(ROOT)
        found = (_change(entry, prefixes) for entry in listing.entries)
        yield Changes(
            listing.revision, tuple(change for change in found if change is not None), snapshot_end=True
        )
        after_revision = listing.revision
    try:
        async with aclosing(store.watch(ROOT, after_revision)) as batches:
            async for batch in batches:
                changes = (
                    _removal(event, prefixes)
                    if isinstance(event, Removed)
                    else _change(event.entry, prefixes)
                    for event in batch.events
                )
                told = tuple(change for change in changes if change is not None)
                if told or not batch.events:
                    yield Changes(batch.revision, told)
    except Compacted as exc:
        raise FailedPrecondition(
            f"revision {after_revision} is too old to resume from: watch again from 0",
            revision=after_revision,
        ) from exc


def _prefix_of(key: str, prefixes: Collection[str]) -> str | None:
    return next((prefix for prefix in prefixes if key.startswith(prefix)), None)


def _change(entry: Entry, prefixes: Collection[str]) -> Change | None:
    prefix = _prefix_of(entry.key, prefixes)
    if prefix is None:
        return None
    record: Tenant | ApiKey | Deployment | Node = load(entry.value, PREFIXES[prefix])
    return Change(prefix, entry.key.removeprefix(prefix), record, entry.mod_revision)


def _removal(event: Removed, prefixes: Collection[str]) -> Change | None:
    prefix = _prefix_of(event.key, prefixes)
    return (
        None if prefix is None else Change(prefix, event.key.removeprefix(prefix), None, event.mod_revision)
    )
