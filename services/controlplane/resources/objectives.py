"""Objectives: the operations of operators, and what was measured of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from services.controlplane.fleet import readable
from services.controlplane.resources.resources import Resources, Stored
from services.core.errors import FailedPrecondition, InvalidInput
from services.core.records import (
    OBJECTIVE_STATUS,
    OBJECTIVES,
    Objective,
    ObjectiveStatus,
    objective_key,
)
from services.ports.clock import Clock
from services.ports.store import Delete, ModRevisionIs, Put, Store
from services.runtime.idempotent_writes import WriteSet

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ObjectiveView:
    """An objective and what the leader measured last, None: nothing yet."""

    stored: Stored[Objective]
    status: ObjectiveStatus | None = None


class Objectives:
    """Stateless. An objective counts requests that end after the leading control plane receives it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._objectives = Resources(store, clock, OBJECTIVES, Objective)

    async def create(self, objective: Objective, *, request_id: str = "") -> ObjectiveView:
        """Store an objective. Raises InvalidInput, FailedPrecondition when model and class have one."""
        _require_a_promise(objective)
        request = self._objectives.request("create", objective, request_id)
        stored = await self._objectives.replayed(request)
        if stored is None:
            key = objective_key(objective.model, objective.priority)
            held = await self._store.get(key)
            if held is not None:
                other = held.value.decode()
                raise FailedPrecondition(
                    f"{objective.model} has an objective for {objective.priority} requests: {other}",
                    objective=other,
                )
            name = objective.meta.name
            together = WriteSet((ModRevisionIs(key, 0),), (Put(key, name.encode()),))
            stored = await self._objectives.create(objective, request, together=together)
            log.info("objective.created", objective=name, model=objective.model)
        return (await self.views([stored]))[0]

    async def get(self, name: str) -> ObjectiveView:
        return (await self.views([await self._objectives.get(name)]))[0]

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[ObjectiveView, ...], str]:
        """Return a page sorted by name, and the next page's token."""
        page, following = await self._objectives.page(size=size, token=token)
        return await self.views(page), following

    async def update(self, objective: Objective, *, etag: str = "", request_id: str = "") -> ObjectiveView:
        """Replace the promises and labels. Raises InvalidInput for another model or class."""
        _require_a_promise(objective)

        def changed(old: Objective) -> Objective:
            if replace(objective, model=old.model, priority=old.priority) != objective:
                raise InvalidInput(
                    "model and class of an objective never change: create another objective",
                    field="objective.model",
                )
            return objective

        request = self._objectives.request("update", objective, request_id, etag=etag)
        stored = await self._objectives.update(objective.meta.name, changed, request, etag=etag)
        log.info("objective.updated", objective=objective.meta.name)
        return (await self.views([stored]))[0]

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove an objective. Its alerts end; the counts of its model go on for another one."""
        request = self._objectives.request("delete", name, request_id, etag=etag)
        if not await self._objectives.done(request):
            old = (await self._objectives.get(name)).record
            free = (Delete(objective_key(old.model, old.priority)), Delete(OBJECTIVE_STATUS + name))
            await self._objectives.delete(name, request, etag=etag, together=WriteSet(operations=free))
            log.info("objective.deleted", objective=name)

    async def all(self) -> tuple[Stored[Objective], ...]:
        return await self._objectives.all()

    async def views(self, objectives: Sequence[Stored[Objective]]) -> tuple[ObjectiveView, ...]:
        """Return the objectives with what was measured, in their order."""
        if not objectives:
            return ()
        found = {
            entry.key.removeprefix(OBJECTIVE_STATUS): readable(entry, ObjectiveStatus)
            for entry in (await self._store.list(OBJECTIVE_STATUS)).entries
        }
        views = []
        for stored in objectives:
            status = found.get(stored.record.meta.name)
            mine = status is not None and status.create_revision == stored.create_revision
            views.append(ObjectiveView(stored, status if mine else None))
        return tuple(views)


def _require_a_promise(objective: Objective) -> None:
    promises = (
        objective.availability,
        objective.completion,
        objective.ttft.seconds,
        objective.itl.seconds,
        objective.total.seconds,
    )
    if not any(promises):
        raise InvalidInput(
            "an objective promises availability, completion, a TTFT, an ITL or a total latency",
            field="objective.availability",
        )
