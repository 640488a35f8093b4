"""No class inversion: while a request is refused for overload, none of a lower class stays queued."""

from __future__ import annotations

from typing import Final

from services.core.errors import Overloaded
from services.core.generation import PlaceSpec
from services.scheduler.policy.overload.shedding import ShedRank, shed_rank
from services.scheduler.term import Term
from simulator.fleet.assembly import SimFleet
from simulator.fleet.grant_watch import GrantListener
from simulator.fleet.invariant import Invariant

INVERSION: Final = "class-inversion"


class Shedding(GrantListener, Invariant):
    """``refusals`` counts what was refused for overload, so that a test can check that it is not zero."""

    def __init__(self) -> None:
        self.refusals = 0

    def watch(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        fleet.grants.listeners.append(self)

    def refused(self, term: Term, spec: PlaceSpec, reason: str) -> None:
        if reason != Overloaded.reason:
            return
        self.refusals += 1
        refused = _class_rank(spec)
        for item in term.queue.waiting.by_version().get(spec.version_digest, ()):
            if _class_rank(item.spec) < refused:
                self._fleet.violations.add(
                    INVERSION,
                    f"{spec.request_id} ({spec.priority}) was refused while "
                    f"{item.spec.request_id} ({item.spec.priority}) waits",
                )
                return


def _class_rank(spec: PlaceSpec) -> ShedRank:
    """The rank by class alone: what a tenant uses beyond its quota only lowers it further."""
    return shed_rank(spec.priority, over_quota=False, begun=spec.begun)
