"""KV, slots and grants balance, and every queue is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.adapters.links.muxed_placement import PlacementSettings
from services.scheduler.term import Term
from services.worker.streams.sequence_slots import PARKED_PER_SLOT
from simulator.fleet.assembly import SimFleet
from simulator.fleet.fleet import leftovers
from simulator.fleet.invariant import Invariant

BALANCE: Final = "balance"
CRASHED: Final = "task-crashed"


class Balance(Invariant):
    """The accounting is always consistent, and empty once nothing runs."""

    def sample(self, fleet: SimFleet) -> None:
        self.touched(fleet, fleet.workers)
        self.touched(fleet, fleet.schedulers)
        fleet.violations.integrity(BALANCE, "store", fleet.store.check_integrity)
        self._no_task_crashed(fleet)

    def touched(self, fleet: SimFleet, names: Iterable[str]) -> None:
        found = fleet.violations
        for name in names:
            if (worker := fleet.workers.get(name)) is not None:
                if worker.process.alive:
                    found.integrity(BALANCE, name, worker.check_integrity)
            elif (term := fleet.schedulers[name].term) is not None:
                found.integrity(BALANCE, name, term.check_integrity)

    def at_rest(self, fleet: SimFleet) -> None:
        self.sample(fleet)
        for name, left in leftovers(fleet).items():
            fleet.violations.add(BALANCE, f"at rest, {left} left: {name}")

    def _no_task_crashed(self, fleet: SimFleet) -> None:
        for name, process in fleet.processes.items():
            failures = process.supervisor.failures
            if process.alive and failures and (name, process.life) not in fleet.reported_crashes:
                fleet.reported_crashes[name, process.life] = None
                fleet.violations.add(CRASHED, f"{name}: {', '.join(failures)}")


BOUNDS: Final = "bounded-queues"


class Bounds(Invariant):
    """Nowhere does more wait than its limit allows."""

    def sample(self, fleet: SimFleet) -> None:
        self.touched(fleet, fleet.workers)
        self.touched(fleet, fleet.schedulers)
        self._gateways(fleet)

    def touched(self, fleet: SimFleet, names: Iterable[str]) -> None:
        for name in names:
            if (worker := fleet.workers.get(name)) is not None:
                self._expect(fleet, f"sequences of {name}", worker.running, worker.kind.max_sequences)
                parked, most = worker.parked, worker.kind.max_sequences * PARKED_PER_SLOT
                self._expect(fleet, f"sequences without a slot of {name}", parked, most)
            elif (term := fleet.schedulers[name].term) is not None:
                self._term(fleet, name, term)

    def at_rest(self, fleet: SimFleet) -> None:
        self.sample(fleet)

    def _term(self, fleet: SimFleet, name: str, term: Term) -> None:
        limits = fleet.spec.term.queue
        self._expect(fleet, f"placements at {name}", len(term.queue), limits.max_total)
        for waiting in term.queue.waiting.by_version().values():
            self._expect(fleet, f"placements of a pool at {name}", len(waiting), limits.max_per_pool)
        self._expect(fleet, f"commands at {name}", len(term.streams), term.settings.max_inbox)

    def _gateways(self, fleet: SimFleet) -> None:
        limits, settings = fleet.spec.gateway, PlacementSettings()
        for name, gateway in fleet.gateways.items():
            running = gateway.service.running
            self._expect(fleet, f"requests at {name}", running, limits.max_requests)
            self._expect(fleet, f"placements of {name}", gateway.placement.pending, settings.max_pending)
            untaken = gateway.service.buffered_tokens
            self._expect(fleet, f"untaken tokens at {name}", untaken, running * limits.window_tokens)

    def _expect(self, fleet: SimFleet, what: str, count: int, limit: int) -> None:
        fleet.violations.expect(count <= limit, BOUNDS, lambda: f"{count} {what}, limit {limit}")
