"""KV, slots and grants balance: the accounting is always consistent, and empty once nothing runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from simulator.fleet.assembly import SimFleet

BALANCE: Final = "balance"
CRASHED: Final = "task-crashed"


class Balance:
    def watch(self, fleet: SimFleet) -> None: ...

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
            if process.alive and failures and (name, process.life) not in fleet.told_crashes:
                fleet.told_crashes[name, process.life] = None
                fleet.violations.add(CRASHED, f"{name}: {', '.join(failures)}")


def leftovers(fleet: SimFleet) -> dict[str, int]:
    """Return the resources still held, by name; empty in a fleet at rest."""
    found: dict[str, int] = {"clients": len(fleet.clients.present)}
    for name, worker in fleet.workers.items():
        found |= {f"{name} {what}": count for what, count in worker.held().items()}
    for name, gateway in fleet.gateways.items():
        found[f"{name} requests"] = gateway.service.running
        found[f"{name} placements"] = gateway.placement.pending
        found[f"{name} untaken tokens"] = gateway.service.buffered_tokens
        found[f"{name} unsettled"] = gateway.limiter.unsettled
    term = fleet.term
    if term is not None:
        found["outstanding grants"] = term.fleet.outstanding
        found["queued placements"] = len(term.queue)
    for tenant in fleet.spec.tenants:
        found[f"slots of {tenant.name}"] = fleet.slots_held(tenant.name)
    return {name: count for name, count in found.items() if count}
