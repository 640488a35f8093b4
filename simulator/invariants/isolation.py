"""Isolation: no more of a worker is leased than it has, no input is condemned but a poison, and a tenant
runs on the nodes of its tier alone, within its part of their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from services.core.errors import PoisonedInput
from services.core.generation import PlaceSpec, StartSpec
from services.core.records import Priority
from services.scheduler.term import Term
from simulator.engine.poison import Poison
from simulator.fleet.assembly import SimFleet
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.grant_watch import ComputedTokens, GrantListener
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
        super().watch(fleet)
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


OUTSIDE: Final = "outside-tier"


class NodeGroups(GrantListener, Invariant):
    """A tenant is granted, starts and computes on the nodes of its group alone.

    ``ran`` counts what was computed, by tenant and worker, so that a test can check where.
    """

    def __init__(self) -> None:
        self.ran: Counter[tuple[str, str]] = Counter()

    def watch(self, fleet: SimFleet) -> None:
        super().watch(fleet)
        self._tenants = {tenant.name: tenant.node_group for tenant in fleet.spec.tenants}
        fleet.grants.listeners.append(self)

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        self._expect("was granted", spec.tenant_id, worker_id)

    def started(self, worker_id: str, spec: StartSpec) -> None:
        self._expect("started", spec.tenant_id, worker_id)

    def produced(self, worker_id: str, tenant: str, priority: Priority, work: ComputedTokens) -> None:
        self.ran[tenant, worker_id] += work.output + work.rows
        self._expect("ran", tenant, worker_id)

    def _expect(self, what: str, tenant: str, worker_id: str) -> None:
        wanted = self._tenants[tenant]
        group = self._fleet.spec.group_of(int(worker_id.rpartition("-")[2]))
        self._fleet.violations.expect(
            group == wanted,
            OUTSIDE,
            lambda: f"{tenant} {what} on {worker_id} of {group or 'the shared nodes'}",
        )


KV_SHARE: Final = "kv-share"


class KvShares(GrantListener, Invariant):
    """A tenant's sequences and cached prefixes hold at most its share of a worker's KV.

    ``most`` is the largest part of a share that was held, so that a test can check that it came near 1.
    """

    def __init__(self) -> None:
        self.most = 0.0
        self._roots: dict[str, dict[int, None]] = {}  # the domains of each tenant's prefixes

    def watch(self, fleet: SimFleet) -> None:
        self._shares = {tenant.name: tenant.kv_share for tenant in fleet.spec.tenants if tenant.kv_share}
        fleet.grants.listeners.append(self)

    def started(self, worker_id: str, spec: StartSpec) -> None:
        self._roots.setdefault(spec.tenant_id, {})[spec.generation.prompt.prefix_root] = None

    def sample(self, fleet: SimFleet) -> None:
        self.touched(fleet, fleet.workers)

    def touched(self, fleet: SimFleet, names: Iterable[str]) -> None:
        for worker in [fleet.workers[name] for name in names if name in fleet.workers]:
            if not worker.process.alive:
                continue
            live = [sequence for table in worker.host.tables() for sequence in table.sequences()]
            for engine in worker.worker.engines.running():
                for tenant, share in self._shares.items():
                    mine = [one.number for one in live if one.spec.tenant_id == tenant]
                    limit = int(share * engine.pool.blocks_total)
                    held = engine.kv_of(mine, self._roots.get(tenant, {}))
                    self.most = max(self.most, held / limit)
                    if held > limit:
                        text = f"{tenant} holds {held} blocks of {worker.name}, its share is {limit}"
                        fleet.violations.add(KV_SHARE, text)
