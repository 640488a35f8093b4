"""Events for deployments that the planner cannot place: one when the shortage begins, one when it ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from services.controlplane.policy.assign import Unplaced
from services.controlplane.policy.events import FleetEvent
from services.controlplane.resources.status import unplaced_message
from services.core.records import EventKind
from services.ports.store import Condition, CreateRevisionIs

UNPLACED: Final = "DEPLOYMENT_UNPLACED"
PLACED: Final = "DEPLOYMENT_PLACED"
_BY_ANOTHER: Final = ""  # recorded by an earlier leader; its reasons are not stored


class EventWriter(Protocol):
    """``event_log.EventRecorder``."""

    async def record(self, events: Sequence[FleetEvent], revision: int, *, fence: Condition) -> None: ...

    async def latest(self, reasons: Collection[str]) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The events recorded in a term: the reasons of each deployment that is short of workers."""

    epoch: int
    reasons: Mapping[str, str]


class PlacementEvents:
    """Owner of the recorded shortages. A new leader continues from the stored events."""

    def __init__(self, events: EventWriter) -> None:
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
