"""Applies the planner's assignments, as leader, fenced by its epoch, and records what cannot be placed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord, fleet_of
from services.controlplane.policy.assign import (
    Action,
    DropAssignment,
    PutAssignment,
    Unplaced,
    plan,
    serving_terms,
)
from services.controlplane.policy.events import FleetEvent
from services.controlplane.resources.status import unplaced_message
from services.controlplane.rollouts.policy.effects import kept_versions
from services.controlplane.scaling.policy.residency import Residency
from services.controlplane.telemetry import INCOMPLETE, STORE_LOST, WRITTEN, ReconcilerTelemetry
from services.core.errors import StoreUnavailable
from services.core.estimates.traffic_shapes import RequestShape
from services.core.records import ASSIGNMENTS, EventKind, dump
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    CreateRevisionIs,
    Delete,
    LeaseLost,
    ModRevisionIs,
    Put,
    Store,
)
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Leadership

log = structlog.get_logger()

UNPLACED: Final = "DEPLOYMENT_UNPLACED"
PLACED: Final = "DEPLOYMENT_PLACED"
_BY_ANOTHER: Final = ""  # recorded by an earlier leader; its reasons are not stored
PERIOD_S: Final = 5.0
_SETTLE_S: Final = 0.05
_RETRY_S: Final = 0.5


Probes = Callable[[], Mapping[str, tuple[RequestShape, ...]]]
_NONE_LEAVES: Final = Residency()


class Reconciler:
    """Reads the informer's view and writes assignments. Runs in every control plane; acts only while it
    leads.

    ``informer`` contains everything under the root by ``fleet.decode``, so that a plan reads a single
    revision. Each write has the fence of our epoch, so the store rejects those of a deposed leader.
    """

    def __init__(
        self,
        store: Store,
        informer: Informer[FleetRecord | None],
        leadership: Leadership,
        clock: Clock,
        telemetry: ReconcilerTelemetry | None = None,
        *,
        events: EventRecorder,
        probes: Probes = dict,
        likely: Callable[[], Mapping[str, float]] = dict,
        residency: Callable[[], Residency] = lambda: _NONE_LEAVES,
    ) -> None:
        """``probes`` returns the shapes of each model's traffic that new versions are probed with; ``likely``
        how likely deployments need another replica; ``residency`` which idle ones leave full workers.
        """
        self._probes = probes
        self._likely = likely
        self._residency = residency
        self._telemetry = telemetry if telemetry is not None else ReconcilerTelemetry(clock)
        self._store = store
        self._informer = informer
        self._leadership = leadership
        self._clock = clock
        self._placement_events = PlacementEvents(events)

    async def run(self) -> None:
        """Reconcile on each change and every ``PERIOD_S``, until cancelled; survives a store outage."""
        while True:
            epoch = await self._leadership.wait_leading()
            revision = self._informer.revision
            self._telemetry.round_began()
            try:
                done = self._informer.synced and await self.reconcile(epoch)
                self._telemetry.round_ended(WRITTEN if done else INCOMPLETE)
            except (StoreUnavailable, LeaseLost) as error:
                log.warning("reconcile.store_lost", error=repr(error))
                self._telemetry.round_ended(STORE_LOST)
                done = False
            await self._informer.wait_changed(revision, PERIOD_S if done else _RETRY_S)
            await self._clock.sleep(_SETTLE_S)  # changes arrive in bursts: one plan for all

    async def reconcile(self, epoch: int) -> bool:
        """Make one pass over the view. Returns whether every write succeeded."""
        view, revision = self._informer.view, self._informer.revision
        fleet = fleet_of(held.record for held in view.values())
        residency = self._residency()
        actions = plan(
            fleet.deployments,
            fleet.workers,
            fleet.nodes,
            fleet.assignments,
            fleet.routes,
            terms=serving_terms(fleet.objectives, self._probes()),
            engines=fleet.engines,
            groups=fleet.groups,
            likely=self._likely(),
            estimates=residency.needs,
            leaving=tuple(residency.leaving),
            kept=kept_versions(fleet.rollouts, fleet.deployments),
            beside=fleet.in_rollout,
        )
        unplaced = [action for action in actions if isinstance(action, Unplaced)]
        self._telemetry.unplaced(len(unplaced))
        written = True
        for action in actions:
            if isinstance(action, Unplaced):
                continue
            if self._leadership.epoch != epoch:
                return False
            worker_id = (
                action.worker_id if isinstance(action, DropAssignment) else action.assignment.worker_id
            )
            held = view.get(ASSIGNMENTS + worker_id)
            written &= await self._write(action, epoch, 0 if held is None else held.mod_revision)
        if self._leadership.epoch == epoch:
            names = {deployment.meta.name for deployment in fleet.deployments}
            unplaced = [one for one in unplaced if one.deployment in names]  # a rollout reports its arms
            await self._placement_events.record(unplaced, self._fence(epoch), revision, deployments=names)
        return written

    def _fence(self, epoch: int) -> CreateRevisionIs:
        return self._leadership.fence(epoch)

    async def _write(self, action: Action, epoch: int, mod_revision: int) -> bool:
        assert not isinstance(action, Unplaced)
        if isinstance(action, PutAssignment):
            worker_id, why = action.assignment.worker_id, action.reasons
            operation: Put | Delete = Put(ASSIGNMENTS + worker_id, dump(action.assignment))
        else:
            worker_id, why = action.worker_id, ("served elsewhere or not wanted, and the worker has ended",)
            operation = Delete(ASSIGNMENTS + worker_id)
        done = await self._store.commit(
            [operation],
            [self._fence(epoch), ModRevisionIs(operation.key, mod_revision)],
        )
        self._telemetry.acted(type(action).__name__, "written" if isinstance(done, Committed) else "refused")
        if isinstance(done, Committed):
            log.info("assignment.written", worker=worker_id, reasons=why, epoch=epoch)
            return True
        log.info("assignment.refused", worker=worker_id, epoch=epoch)  # deposed, or the view is old
        return False


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The events recorded in a term: the reasons of each deployment that is short of workers."""

    epoch: int
    reasons: Mapping[str, str]


class PlacementEvents:
    """Records deployments that the planner cannot place: when the shortage begins, and when it ends.

    A new leader continues from the stored events.
    """

    def __init__(self, events: EventRecorder) -> None:
        self._events = events
        self._recorded = _Recorded(0, {})

    async def record(
        self,
        unplaced: Sequence[Unplaced],
        fence: CreateRevisionIs,
        revision: int,
        *,
        deployments: Collection[str],
    ) -> None:
        """Record what changed since the last call; ``deployments`` are the existing ones.

        ``fence`` holds while the term lasts. Raises StoreUnavailable; the next call then retries.
        """
        epoch = fence.revision
        if self._recorded.epoch != epoch:
            last = await self._events.latest((UNPLACED, PLACED))
            open_ = {name: _BY_ANOTHER for name, reason in last.items() if reason == UNPLACED}
            self._recorded = _Recorded(epoch, open_)
        reasons, events = placement_events_of(self._recorded.reasons, unplaced, deployments)
        if events:
            await self._events.record(events, revision, fence=fence)
        self._recorded = _Recorded(epoch, reasons)


def placement_events_of(
    recorded: Mapping[str, str], unplaced: Sequence[Unplaced], deployments: Collection[str]
) -> tuple[dict[str, str], tuple[FleetEvent, ...]]:
    """Return the current reasons, and the events to record. A change of figures alone makes no event."""
    now = {
        one.deployment: f"{one.missing}:"
        + ",".join(sorted({why.partition(":")[0] for _, why in one.rejected}))
        for one in unplaced
    }
    events = [
        FleetEvent(EventKind.DEPLOYMENT, one.deployment, UNPLACED, unplaced_message(one), warning=True)
        for one in unplaced
        if recorded.get(one.deployment) not in (_BY_ANOTHER, now[one.deployment])
    ]
    events += [
        FleetEvent(EventKind.DEPLOYMENT, name, PLACED, "every replica has a worker")
        for name in sorted(recorded)
        if name not in now and name in deployments
    ]
    return now, tuple(events)
