"""A small fleet on a hand clock: the production pools and gateway leases, model workers, delayed messages.

Every message of a stream arrives in order after a random delay. Workers run batches of what waits, first come
first served, and their rows take the device time of their tenant. Tenants are closed loops: a row that ended
is followed by the next.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from services.adapters.links.reporter import ReporterSettings, report_gap_s
from services.core.errors import Conflict
from services.core.fixed_cost.rows import RowsRequest
from services.core.fixed_cost.slots import SlotDemand, SlotReturn
from services.core.fleet import PoolSnapshot, ReportSnapshot, TenantTokens
from services.core.generation import NotAdmittedReason
from services.core.records import Priority
from services.gateway.rows.leases import GatewayLeases, SlotDemands, SlotsHere
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.step_time import StepTimes
from services.scheduler.queue.service_ledger import LedgerPolicy, ServiceLedger
from services.scheduler.slots.pools import SlotPools
from tests.support.clocks import HandClock

DIGEST = "sha256:" + "a" * 64
STEP_S = 0.002
REPORTER = ReporterSettings()
DELAY_S = 0.012  # the most
BATCH_ROWS = 16


@dataclass(slots=True)
class Tenant:
    """A closed loop of so many rows at each of its gateways."""

    name: str
    rows: int
    row_s: float = 0.001
    weight: float = 1.0
    priority: Priority = Priority.STANDARD


@dataclass(slots=True, eq=False)
class ModelRow:
    tenant: str
    gateway: ModelRowGateway
    slots: SlotsHere
    incarnation: int
    epoch: int
    connection: int  # of its gateway


class Wire:
    """Messages of one stream, in order."""

    def __init__(self, fleet: SlotFleet) -> None:
        self._fleet = fleet
        self._messages: deque[tuple[float, Callable[[], None]]] = deque()
        self.is_open = True

    def send(self, deliver: Callable[[], None]) -> None:
        now_s = self._fleet.clock.now_s
        last_s = self._messages[-1][0] if self._messages else 0.0
        self._messages.append((max(last_s, now_s + self._fleet.rng.uniform(0, DELAY_S)), deliver))

    def deliver(self) -> None:
        while self.is_open and self._messages and self._messages[0][0] <= self._fleet.clock.now_s:
            self._messages.popleft()[1]()


class ModelRowWorker:
    def __init__(self, fleet: SlotFleet, worker_id: str, row_slots: int) -> None:
        self.fleet = fleet
        self.worker_id = worker_id
        self.row_slots = row_slots
        self.incarnation = 1
        self.gap_s = 0.0
        self.alive = True
        self.epoch = 0
        self.stream = 0
        self.wire = Wire(fleet)
        self.waiting: list[ModelRow] = []
        self.batch: list[ModelRow] = []
        self.ends_s = 0.0
        self.reported_s = -1.0
        self.done: Counter[str] = Counter()
        self.most_in_flight = 0

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.batch)

    def accept(self, row: ModelRow) -> None:
        if not self.alive or row.incarnation != self.incarnation:
            row.gateway.back(row, lambda: row.gateway.refused(row, NotAdmittedReason.STALE_INCARNATION))
        elif row.epoch < self.epoch:
            row.gateway.back(row, lambda: row.gateway.refused(row, NotAdmittedReason.STALE_EPOCH))
        else:
            self.waiting.append(row)
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def step(self) -> None:
        now_s = self.fleet.clock.now_s
        if self.batch and now_s >= self.ends_s:
            for row in self.batch:
                self.done[row.tenant] += 1
                self.fleet.served[row.tenant] += self.fleet.tenants[row.tenant].row_s
                self.fleet.finished[row.tenant] += 1
                row.gateway.back(row, lambda row=row: row.gateway.ended(row))  # type: ignore[misc]
            self.batch = []
        if self.waiting and not self.batch:
            self.batch, self.waiting = self.waiting[:BATCH_ROWS], self.waiting[BATCH_ROWS:]
            self.ends_s = now_s + sum(self.fleet.tenants[row.tenant].row_s for row in self.batch)
        if self.alive and now_s - self.reported_s >= self.gap_s:
            self.report()

    def report(self) -> None:
        self.reported_s = self.fleet.clock.now_s
        done, self.done = self.done, Counter()
        snapshot = ReportSnapshot(
            self.worker_id,
            self.incarnation,
            f"{self.worker_id}:1",
            pools=(
                PoolSnapshot(
                    DIGEST,
                    0,
                    0,
                    1,
                    running=len(self.batch),
                    waiting=len(self.waiting),
                    max_sequences=0,
                    max_model_len=0,
                    row_slots=self.row_slots,
                    row_us=1000,
                ),
            ),
            epoch=self.epoch,
            tenants=tuple(
                TenantTokens(
                    tenant,
                    DIGEST,
                    0,
                    0,
                    self.fleet.tenants[tenant].priority,
                    rows=rows,
                    device_us=round(rows * self.fleet.tenants[tenant].row_s * 1e6),
                )
                for tenant, rows in done.items()
            ),
        )
        self.gap_s = report_gap_s(snapshot.pools, REPORTER)
        stream, leader = self.stream, self.fleet.leader
        self.wire.send(lambda: leader.report(stream, snapshot))

    def connect(self) -> None:
        """Open a stream to the present leader, whose epoch it takes over."""
        self.stream = self.fleet.next_number()
        self.wire = Wire(self.fleet)
        self.epoch = self.fleet.leader.epoch
        self.reported_s = -1.0


class ModelRowGateway:
    """Implements ``ports.slots.SlotClient`` with delayed messages."""

    def __init__(self, fleet: SlotFleet, gateway_id: str, tenants: list[Tenant]) -> None:
        self.fleet = fleet
        self.gateway_id = gateway_id
        self.alive = True
        self.repeats = True
        self.connection = 0
        self.ended_rows = 0
        self.leases = GatewayLeases(fleet.clock)
        self.demands = SlotDemands(self, fleet.clock)
        self.waiting: Counter[str] = Counter()
        self.current: dict[tuple[str, str], SlotDemand] = {}
        self.up, self.down = Wire(fleet), Wire(fleet)
        self.to_workers = {worker.worker_id: Wire(fleet) for worker in fleet.workers}
        self.from_workers = Wire(fleet)
        for tenant in tenants:
            self.enter(tenant.name, tenant.rows)

    def enter(self, tenant: str, rows: int) -> None:
        self.waiting[tenant] += rows
        self.demands.enter(self._request(tenant, rows))

    def _request(self, tenant: str, rows: int) -> RowsRequest:
        found = self.fleet.tenants[tenant]
        return RowsRequest("r", tenant, "m", DIGEST, ((),) * rows, found.priority, tenant_weight=found.weight)

    def demand(self, wanted: SlotDemand) -> None:
        known = self.current.get((wanted.digest, wanted.tenant))
        if not self.repeats:
            wanted = replace(wanted, repeats=False)
            if wanted == known:
                return
        self.current[wanted.digest, wanted.tenant] = wanted
        leader = self.fleet.leader
        self.up.send(lambda: leader.demand(self, [wanted], []))

    def slots_returned(self, found: SlotReturn) -> None:
        leader = self.fleet.leader
        self.up.send(lambda: leader.demand(self, [], [found]))

    def connect(self) -> None:
        """Open streams to the present leader and send every demand again."""
        self.up, self.down = Wire(self.fleet), Wire(self.fleet)
        leader, demands = self.fleet.leader, list(self.current.values())
        self.leases.take_returns()
        self.up.send(lambda: leader.demand(self, demands, []))

    def step(self) -> None:
        if not self.alive:
            return
        self.demands.send_due()
        for found in self.leases.take_returns():
            self.slots_returned(found)
        for tenant in [tenant for tenant, rows in self.waiting.items() if rows]:
            while self.waiting[tenant] and (slots := self.leases.choose(DIGEST, tenant, ())) is not None:
                self.waiting[tenant] -= 1
                self.leases.started(slots)
                lease = slots.lease
                row = ModelRow(tenant, self, slots, lease.incarnation, lease.epoch, self.connection)
                worker = self.fleet.worker(lease.worker_id)
                self.to_workers[lease.worker_id].send(lambda row=row, worker=worker: worker.accept(row))  # type: ignore[misc]

    def back(self, row: ModelRow, deliver: Callable[[], None]) -> None:
        if self.alive and row.connection == self.connection:
            self.from_workers.send(deliver)

    def ended(self, row: ModelRow) -> None:
        self.ended_rows += 1
        self.leases.ended(row.slots)
        self.waiting[row.tenant] += 1

    def refused(self, row: ModelRow, reason: NotAdmittedReason) -> None:
        self.leases.ended(row.slots, reason)
        self.waiting[row.tenant] += 1

    def usable(self, worker: ModelRowWorker) -> int:
        """How many rows it may have in flight on a worker: leased now, or sent before."""
        now_s = self.fleet.clock.now_s
        found = [slots for slots in self.leases.slots() if slots.lease.worker_id == worker.worker_id]
        current = [
            slots
            for slots in found
            if slots.lease.epoch == worker.epoch and slots.lease.incarnation == worker.incarnation
        ]
        return sum(slots.lease.slots if slots.until_s > now_s else 0 for slots in current)


class ModelLeader:
    """The part of a term that leases slots."""

    pools_type: type[SlotPools] = SlotPools

    def __init__(self, fleet: SlotFleet, epoch: int) -> None:
        self.fleet = fleet
        self.epoch = epoch
        self.view = FleetView(epoch, FleetLimits(), StepTimes())
        self.ledger = ServiceLedger(LedgerPolicy())
        self.pools = fleet.pools_type(self.view, self.ledger.shares)

    def demand(self, gateway: ModelRowGateway, demands: list[SlotDemand], returned: list[SlotReturn]) -> None:
        self.pools.demand(gateway.gateway_id, "", demands, returned, self.fleet.clock.now_s)

    def report(self, stream: int, snapshot: ReportSnapshot) -> None:
        now_s = self.fleet.clock.now_s
        try:
            changed = self.view.apply(stream, snapshot, now_s)
        except Conflict:
            return
        self.ledger.report(snapshot)
        self.pools.reported(snapshot, now_s)
        self.pools.changed(changed)

    def step(self) -> None:
        now_s = self.fleet.clock.now_s
        self.pools.changed(self.view.expire(now_s))
        self.ledger.expire(now_s)
        self.pools.run(now_s)
        for gateway_id in self.pools.take_gateways():
            leases = self.pools.take_leases(gateway_id, now_s)
            gateway = self.fleet.gateway(gateway_id)
            if gateway.alive:
                gateway.down.send(lambda gateway=gateway, leases=leases: gateway.leases.on_leases(leases))  # type: ignore[misc]
        self.pools.check_integrity()


@dataclass(eq=False)
class SlotFleet:
    seed: int
    tenants: dict[str, Tenant]
    row_slots: tuple[int, ...] = (32, 32)
    gateways_of: tuple[tuple[str, ...], ...] = ()  # tenants of each gateway
    pools_type: type[SlotPools] = SlotPools
    clock: HandClock = field(default_factory=HandClock)
    served: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # device seconds
    finished: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self._numbers = 0
        self.leader = ModelLeader(self, 1)
        self.workers = [
            ModelRowWorker(self, f"w{index}", slots) for index, slots in enumerate(self.row_slots)
        ]
        self.gateways: list[ModelRowGateway] = []
        for index, names in enumerate(self.gateways_of):
            self.gateways.append(ModelRowGateway(self, f"g{index}", [self.tenants[name] for name in names]))
        for worker in self.workers:
            worker.connect()

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def worker(self, worker_id: str) -> ModelRowWorker:
        return next(found for found in self.workers if found.worker_id == worker_id)

    def gateway(self, gateway_id: str) -> ModelRowGateway:
        return next(found for found in self.gateways if found.gateway_id == gateway_id)

    # --- faults -----------------------------------------------------------------------------------

    def lose_worker(self, worker: ModelRowWorker) -> None:
        """It and its rows are gone; its gateways observe that at once."""
        worker.alive = False
        self.leader.pools.changed(self.leader.view.close_stream(worker.stream))
        rows, worker.waiting, worker.batch = [*worker.waiting, *worker.batch], [], []
        for row in rows:
            row.gateway.back(row, lambda row=row: row.gateway.refused(row, NotAdmittedReason.NOT_READY))  # type: ignore[misc]

    def restart_worker(self, worker: ModelRowWorker) -> None:
        worker.incarnation += 1
        worker.alive = True
        worker.connect()

    def lose_gateway(self, gateway: ModelRowGateway) -> None:
        """Its rows that no batch contains are dropped by the workers."""
        gateway.alive = False
        gateway.connection += 1
        self.leader.pools.disconnect(gateway.gateway_id)
        for worker in self.workers:
            worker.waiting = [row for row in worker.waiting if row.gateway is not gateway]
        for wire in (gateway.up, gateway.down, gateway.from_workers, *gateway.to_workers.values()):
            wire.is_open = False

    def change_leader(self) -> None:
        """Another leads; the streams to the one before are cut."""
        for gateway in self.gateways:
            gateway.up.is_open = gateway.down.is_open = False
        self.leader = ModelLeader(self, self.leader.epoch + 1)
        for worker in self.workers:
            if worker.alive:
                worker.wire.is_open = False
                worker.connect()
        for gateway in self.gateways:
            if gateway.alive:
                gateway.connect()

    # --- time -------------------------------------------------------------------------------------

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s += STEP_S
            for worker in self.workers:
                worker.wire.deliver()
                worker.step()
            for gateway in self.gateways:
                for wire in (gateway.up, gateway.down, gateway.from_workers, *gateway.to_workers.values()):
                    wire.deliver()
                gateway.step()
            self.leader.step()
            self.check()
            each()

    def check(self) -> None:
        """No worker is over-leased: neither by what the leader holds, nor by what gateways may use."""
        pool = self.leader.pools._pools.get(DIGEST)
        for worker in self.workers:
            held = (
                0
                if pool is None
                else sum(
                    lease.held
                    for lease in pool.leases.on(worker.worker_id).values()
                    if lease.worker.incarnation == worker.incarnation
                )
            )
            assert held <= worker.row_slots, f"{worker.worker_id}: {held} slots are held"
            usable = sum(gateway.usable(worker) for gateway in self.gateways if gateway.alive)
            assert usable <= worker.row_slots, f"{worker.worker_id}: {usable} slots can be used"
            assert worker.in_flight <= worker.row_slots, f"{worker.worker_id}: {worker.in_flight} rows"
