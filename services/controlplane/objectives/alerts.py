"""Writes what was measured of each objective, and an event when its alert changes.

Status and event are one commit, under the leader's fence and only if the objective is unchanged. So a change
is reported once, whichever control plane leads.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

import structlog

from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import readable
from services.controlplane.leading import repeat_while_leading
from services.controlplane.objectives.policy.burn import EventCounts, status_of, transitions
from services.controlplane.resources.objectives import Objectives
from services.controlplane.resources.resources import Stored
from services.controlplane.telemetry import AlertTelemetry
from services.core.records import (
    OBJECTIVE_STATUS,
    OBJECTIVES,
    Objective,
    ObjectiveStatus,
    Priority,
    Sli,
    SliStatus,
    dump,
)
from services.ports.clock import Clock
from services.ports.store import Entry, ModRevisionIs, Put, Store
from services.runtime.fleet_state.leadership import Leadership
from services.runtime.idempotent_writes import WriteSet

log = structlog.get_logger()
PERIOD_S: Final = 5.0
_REFRESH_S: Final = 30.0  # a status without a new alert is written at most that often


class MeasuredEvents(Protocol):
    """``SliStore``, as far as alerts read it."""

    def events_of(self, model: str, priority: Priority, sli: Sli, window_s: float) -> EventCounts:
        """Return the events of the window that ends now. Raises NoLeader."""


class ObjectiveAlerts:
    """Runs in every control plane; acts only while it leads."""

    def __init__(
        self,
        store: Store,
        objectives: Objectives,
        slis: MeasuredEvents,
        leadership: Leadership,
        clock: Clock,
        *,
        events: EventRecorder,
        telemetry: AlertTelemetry | None = None,
    ) -> None:
        self._store = store
        self._objectives = objectives
        self._slis = slis
        self._leadership = leadership
        self._clock = clock
        self._events = events
        self._telemetry = telemetry or AlertTelemetry()

    async def run(self) -> None:
        """Check every ``PERIOD_S`` while leading, until cancelled; survives a store outage."""
        await repeat_while_leading(
            self._leadership, self._clock, self.check, each_s=PERIOD_S, failed="objectives.not_checked"
        )

    async def check(self, epoch: int) -> None:
        """Write the status of each objective that changed. Raises NoLeader before the sums are loaded."""
        objectives = await self._objectives.all()
        statuses = [(one.record, self._measured(one.record)) for one in objectives]
        self._telemetry.burns(statuses)
        if not objectives:
            return
        listing = await self._store.list(OBJECTIVE_STATUS)
        found = {entry.key: entry for entry in listing.entries}
        for stored, (_, slis) in zip(objectives, statuses, strict=True):
            entry = found.get(OBJECTIVE_STATUS + stored.record.meta.name)
            status = ObjectiveStatus(slis, self._clock.unix_s(), stored.create_revision)
            await self._write(stored, status, entry, epoch, listing.revision)

    def _measured(self, objective: Objective) -> tuple[SliStatus, ...]:
        return status_of(objective, partial(self._slis.events_of, objective.model, objective.priority))

    async def _write(
        self,
        stored: Stored[Objective],
        status: ObjectiveStatus,
        entry: Entry | None,
        epoch: int,
        revision: int,
    ) -> None:
        objective, now_s = stored.record, status.unix_s
        before = readable(entry, ObjectiveStatus) if entry is not None else None
        if before is not None and before.create_revision != stored.create_revision:
            before = None  # It belongs to a deleted objective of the same name.
        events = transitions(objective, before, status)
        unchanged = before is not None and before.slis == status.slis
        if not events and (unchanged or (before is not None and now_s < before.unix_s + _REFRESH_S)):
            return
        name = objective.meta.name
        conditions = (
            self._leadership.fence(epoch),
            ModRevisionIs(OBJECTIVES + name, stored.mod_revision),
        )
        together = WriteSet(conditions, (Put(OBJECTIVE_STATUS + name, dump(status)),))
        if events:
            await self._events.record_with(events, revision, together)
        else:
            await self._store.commit(together.operations, together.conditions)
