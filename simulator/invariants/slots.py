"""Leased slots of fixed-cost versions: never more than a worker has, and no more rows than slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from simulator.fleet.assembly import SimFleet
from simulator.fleet.invariant import Invariant

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
