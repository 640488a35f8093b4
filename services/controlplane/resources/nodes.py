"""Nodes: the operators' settings of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import structlog

from services.controlplane.fleet import read_snapshot
from services.controlplane.resources.resources import require_etag
from services.controlplane.resources.status import NodeView, node_names, node_view, unplaced_in
from services.core.errors import Conflict, FailedPrecondition, NotFound
from services.core.paging import page_of
from services.core.records import (
    ASSIGNMENTS,
    NODES,
    TENANTS,
    WORKERS,
    IsolationTier,
    Node,
    Tenant,
    dump,
    load,
)
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Condition,
    CreateRevisionIs,
    Delete,
    ModRevisionIs,
    Operation,
    Put,
    Store,
)
from services.runtime.idempotent_writes import (
    Answered,
    RequestLog,
    WriteAnswer,
    WriteRequest,
    WriteSet,
    fingerprint_of,
)

log = structlog.get_logger()

_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class _Change:
    """A verb and its change of a node; a node without operator settings has the etag "0"."""

    verb: str
    apply: Callable[[Node], Node]


_CORDON: Final = _Change("cordon", lambda node: replace(node, cordoned=True))
_UNCORDON: Final = _Change(
    "uncordon", lambda node: replace(node, cordoned=False, draining=False, ends_unix_s=0.0)
)
_DRAIN: Final = _Change("drain", lambda node: replace(node, cordoned=True, draining=True))


class Nodes:
    """Stateless: every answer is one read, every write is conditional on it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._requests = RequestLog(store)

    async def get(self, name: str) -> NodeView:
        """Return a worker that is live, has operator settings or has an assignment. Raises NotFound."""
        snapshot = await read_snapshot(self._store)
        found = node_view(name, snapshot, unplaced_in(snapshot.fleet))
        if found is None:
            raise NotFound(f"there is no node {name}", name=name)
        return found

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[NodeView, ...], str]:
        """Return a page, all as of one revision."""
        snapshot = await read_snapshot(self._store)
        names, following = page_of(node_names(snapshot), lambda name: name, size=size, token=token)
        unplaced = unplaced_in(snapshot.fleet)
        views = (node_view(name, snapshot, unplaced) for name in names)
        return tuple(view for view in views if view is not None), following

    async def cordon(self, name: str, *, etag: str = "", request_id: str = "") -> NodeView:
        """Stop new assignments to a node."""
        return await self._change(name, _CORDON, etag, request_id)

    async def uncordon(self, name: str, *, etag: str = "", request_id: str = "") -> NodeView:
        """Allow new assignments to a node again; ends a drain that is under way."""
        return await self._change(name, _UNCORDON, etag, request_id)

    async def drain(
        self, name: str, *, ends_in_s: float = 0.0, etag: str = "", request_id: str = ""
    ) -> NodeView:
        """Stop new assignments and start moving the replicas away; the view's drain shows the progress.

        ``ends_in_s``: time until the node ends, before which its sequences move in any case; 0: it does not.
        """
        if not ends_in_s:
            return await self._change(name, _DRAIN, etag, request_id)
        ends_unix_s = self._clock.unix_s() + ends_in_s
        change = _Change(
            f"drain {ends_in_s:g}",
            lambda node: replace(node, cordoned=True, draining=True, ends_unix_s=ends_unix_s),
        )
        return await self._change(name, change, etag, request_id)

    async def assign(self, name: str, tenant: str, *, etag: str = "", request_id: str = "") -> NodeView:
        """Assign a node to a tenant, or to all if ``tenant`` is empty.

        Raises FailedPrecondition for a tenant whose isolation the node does not offer, and while the node's
        slice is unknown, because it has no lease.
        """
        if tenant:
            view = await self.get(name)
            if view.worker is None:
                raise FailedPrecondition(f"node {name} is not alive: start it, then assign it", name=name)
            entry = await self._store.get(TENANTS + tenant)
            if entry is None:
                raise NotFound(f"there is no tenant {tenant}", tenant=tenant)
            wanted, slice_ = entry.load(Tenant), view.worker.slice
            if wanted.node_group != replace(view.node, tenant=tenant).group(slice_):
                offers = f"declares the slice {slice_}" if slice_ else "declares no slice"
                fitting = IsolationTier.PARTITIONED if slice_ else IsolationTier.DEDICATED
                raise FailedPrecondition(
                    f"tenant {tenant} is {wanted.isolation}, and node {name} {offers}: choose another node, "
                    f"or `fairway tenants update {tenant} --isolation {fitting}`",
                    name=name,
                    tenant=tenant,
                )
        change = _Change(f"assign {tenant}", lambda node: replace(node, tenant=tenant))
        return await self._change(name, change, etag, request_id)

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Delete a node without a lease, and its assignment.

        Raises NotFound, FailedPrecondition while it holds its lease, EtagMismatch, Conflict.
        """
        request = _request("delete", name, request_id, etag)
        if await self._requests.answered(request) is not None:
            return
        view = await self.get(name)
        require_etag(f"node {name}", view.mod_revision, etag)
        if view.worker is not None:
            raise FailedPrecondition(
                f"node {name} lives at {view.worker.address}: drain it, stop it, then delete it", name=name
            )
        deletions: list[Operation] = [Delete(NODES + name), Delete(ASSIGNMENTS + name)]
        # If the worker registers at this moment, it keeps its assignment.
        conditions: list[Condition] = [
            CreateRevisionIs(WORKERS + name, 0),
            ModRevisionIs(NODES + name, view.mod_revision),
        ]
        done = await self._requests.commit(WriteSet(conditions, deletions), request, WriteAnswer())
        if not isinstance(done, Committed) and await self._requests.answered(request) is None:
            raise Conflict(f"node {name} changed meanwhile; try again", name=name)
        log.info("node.deleted", node=name)

    async def _change(self, name: str, change: _Change, etag: str, request_id: str) -> NodeView:
        request = _request(change.verb, name, request_id, etag)
        for _ in range(_TRIES):
            if (found := await self._requests.answered(request)) is not None:
                return await self._again(name, found)
            view = await self.get(name)
            require_etag(f"node {name}", view.mod_revision, etag)
            node = change.apply(view.node)
            data = dump(node)
            write = WriteSet([ModRevisionIs(NODES + name, view.mod_revision)], [Put(NODES + name, data)])
            if isinstance(await self._requests.commit(write, request, WriteAnswer(data)), Committed):
                log.info("node.updated", node=name, cordoned=node.cordoned, draining=node.draining)
                return await self.get(name)
        raise Conflict(f"node {name} is being changed by others; try again", name=name)

    async def _again(self, name: str, found: Answered) -> NodeView:
        """Return the earlier answer with the worker's present state; the node may be deleted since."""
        snapshot = await read_snapshot(self._store)
        node = load(found.answer.record, Node)
        view = node_view(name, snapshot, unplaced_in(snapshot.fleet)) or NodeView(node, 0, None, 0)
        return replace(view, node=node, mod_revision=found.revision)


def _request(verb: str, name: str, request_id: str, etag: str) -> WriteRequest:
    return WriteRequest("node", request_id, fingerprint_of(verb, name.encode(), etag))
