"""Isolation: no more of a worker is leased than it has, and no input is condemned but a poison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from services.core.errors import PoisonedInput
from simulator.engine.poison import Poison
from simulator.fleet.assembly import SimFleet
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.grant_watch import GrantListener
from simulator.fleet.invariant import Invariant

CONDEMNED: Final = "innocent-condemned"
DEATHS: Final = "poison-deaths"
AGAIN: Final = "condemned-runs"
_KNOWN_S: Final = 5.0  # time until every gateway has the entry
# Engines that one attempt of one request ends. In shared steps it is two by kills or hangs, else one; in
# steps of its own three by kills or hangs, else two. One more is possible where other kills made evidence
# void.
MAX_DEATHS: Final = 6


class Poisons(GrantListener, Invariant):
    """``condemned`` counts the poisons that were found, so that a test can check that it is not zero.

    A client whose gateway is lost begins anew: its losses were that gateway's memory. ``calm``: nothing but
    poisons befalls the fleet, so that what is condemned never runs again.
    """

    def __init__(self, *, calm: bool = False) -> None:
        self._calm = calm
        self.condemned = 0
        self.deaths: Counter[Poison] = Counter()
        self._attempts: Counter[Poison] = Counter()
        self._condemned_s: dict[Poison, float] = {}

    def watch(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        fleet.grants.listeners.append(self)

    def engine_ended(self, worker_id: str, poison: Poison) -> None:
        self.deaths[poison] += 1
        known_s = self._condemned_s.get(poison)
        if self._calm and known_s is not None and self._fleet.loop.now_s > known_s + _KNOWN_S:
            self._fleet.violations.add(AGAIN, f"{poison} ended an engine of {worker_id}")

    def closed(self, record: RequestRecord) -> None:
        """Judge the end of a request."""
        poison, is_condemned = record.request.poison, record.outcome == PoisonedInput.reason
        if poison is None:
            if is_condemned:
                self._fleet.violations.add(CONDEMNED, f"request {record.number} is no poison")
            return
        self.condemned += is_condemned
        if is_condemned:
            self._condemned_s.setdefault(poison, self._fleet.loop.now_s)
        self._attempts[poison] += record.attempts

    def at_rest(self, fleet: SimFleet) -> None:
        for poison, deaths in self.deaths.items():
            most = MAX_DEATHS * max(1, self._attempts[poison])
            if deaths > most:
                fleet.violations.add(DEATHS, f"{poison} ended {deaths} engines, at most {most}")


SLOTS: Final = "slots"


class Slots(Invariant):
    """Gateways hold leases of one leader on at most as many slots as each life of a worker has.

    ``most`` is the largest part of a worker's slots that was leased, so that a test can check that it is
    not 0.
    """

    def __init__(self) -> None:
        self.most = 0.0

    def sample(self, fleet: SimFleet) -> None:
        self.touched(fleet, fleet.workers)

    def touched(self, fleet: SimFleet, names: Iterable[str]) -> None:
        leased = self._leased(fleet)
        for name in names:
            worker = fleet.workers.get(name)
            if worker is None or not worker.process.alive or not (slots := worker.row_slots):
                continue
            for epoch, count in leased.get((name, worker.host.grants.incarnation), Counter()).items():
                self.most = max(self.most, count / slots)
                self._expect(fleet, f"slots of {name} leased by term {epoch}", count, slots)
            rows = sum(map(len, worker.host.row_tables()))
            self._expect(fleet, f"rows on {name}", rows, slots)

    def at_rest(self, fleet: SimFleet) -> None:
        self.sample(fleet)

    def _leased(self, fleet: SimFleet) -> dict[tuple[str, int], Counter[int]]:
        """Return the slots that gateways may fill, by worker, its life, and the leader's epoch."""
        found: dict[tuple[str, int], Counter[int]] = {}
        for gateway in fleet.gateways.values():
            if not gateway.process.alive:
                continue
            now_s = gateway.process.clock.monotonic_s()
            for slots in gateway.leases.slots():
                lease = slots.lease
                if slots.until_s > now_s:
                    by_epoch = found.setdefault((lease.worker_id, lease.incarnation), Counter())
                    by_epoch[lease.epoch] += lease.slots
        return found

    def _expect(self, fleet: SimFleet, what: str, count: int, limit: int) -> None:
        fleet.violations.expect(count <= limit, SLOTS, lambda: f"{count} {what}, limit {limit}")
