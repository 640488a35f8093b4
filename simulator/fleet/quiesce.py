"""Bringing a fleet to rest: everything healed, everything ended, nothing held."""

from __future__ import annotations

from typing import Final

from simulator.fleet.assembly import SimFleet
from simulator.invariants.balance import leftovers

REST: Final = "comes-to-rest"
_LOOK_S: Final = 0.5
_PATIENCE_S: Final = 180.0  # longer than any lease, deadline or slot lasts


async def heal_all(fleet: SimFleet) -> None:
    """Undo every fault: all processes run, all links carry, nothing is slow."""
    for name, process in list(fleet.processes.items()):
        if process.paused:
            process.resume()
        elif not process.alive:
            fleet.restart(name)
    fleet.network.heal()
    for worker in fleet.workers.values():
        worker.slow(1.0)


async def come_to_rest(fleet: SimFleet) -> None:
    """Return once no component holds a resource; add a violation when that does not happen in time."""
    deadline_s = fleet.loop.now_s + _PATIENCE_S
    while not fleet.ready or leftovers(fleet):
        if fleet.loop.now_s > deadline_s:
            fleet.violations.add(REST, f"not after {_PATIENCE_S:g} s: ready={fleet.ready} {leftovers(fleet)}")
            return
        await fleet.wait(_LOOK_S)
