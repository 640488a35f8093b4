"""The demands and leases of one fixed-cost version.

``plan`` divides the slots of the serving workers over tenants (``divide``), those of a tenant over its
gateways in proportion to their rows, and those of a gateway over workers by load. Only free slots are leased:
one that is taken back is leased again after its return.

The division is weighted max-min fairness of device time. A slot in use has always a row in flight, and a
worker serves rows in the order of their arrival. So by Little's law the rows per second of a tenant are
proportional to its slots, and its device time to its slots times the device time of its rows. ``divide``
levels that product, over weight, among those who can use more (progressive filling; Bertsekas and Gallager,
Data Networks, 6.5.2).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.core.fixed_cost.slots import DEMAND_TTL_S, SlotDemand, SlotReturn
from services.core.fleet import TenantTokens
from services.core.records import SHARED_NODES, Priority
from services.scheduler.policy.queue.fairness import Account, FairShares
from services.scheduler.slots.leases import HeldLease, Holder, RowWorker, VersionLeases

# Part of the slots that is kept for tenants that begin while others could use all.
NEWCOMERS_RATIO: Final = 1 / 16
_HALVINGS: Final = 20  # the rest is given slot by slot


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """One claimant. ``rows``: the most slots it can use."""

    name: str
    rows: int
    rank: int = 0  # rank of its class; the higher is served first
    weight: float = 1.0
    row_s: float = 1.0  # device time of one of its rows
    order: tuple[float, ...] = ()  # order among equals and for the first slots; the smallest is first
    overdue: bool = False  # it gets one slot before any class

    @property
    def slot_cost(self) -> float:
        """The weighted device time that one slot takes."""
        return self.row_s / self.weight


def divide(slots: int, claims: Sequence[SlotClaim], *, spare_ratio: float = 0.0) -> dict[str, int]:
    """Return the slots of each claimant, in sum at most ``slots``.

    One for each, while they suffice; the rest by class, level within a class, ``spare_ratio`` of them to
    nobody.
    """
    first = sorted(claims, key=lambda claim: (not claim.overdue, -claim.rank, claim.order, claim.name))
    given = dict.fromkeys((claim.name for claim in claims), 0)
    for claim in [claim for claim in first if claim.rows > 0][:slots]:
        given[claim.name] = 1
    left = slots - sum(given.values())
    left = max(0, left - int(slots * spare_ratio))
    for rank in sorted({claim.rank for claim in claims}, reverse=True):
        peers = [claim for claim in claims if claim.rank == rank and given[claim.name] > 0]
        before = sum(given[claim.name] for claim in peers)
        given |= level(left + before, peers, least=given)
        left -= sum(given[claim.name] for claim in peers) - before
    return given


def level(slots: int, claims: Sequence[SlotClaim], *, least: Mapping[str, int]) -> dict[str, int]:
    """Return the slots of each claimant: at most its rows, at least ``least``, otherwise of equal cost.

    ``least`` in sum is at most ``slots``.
    """

    bounds = [(claim.slot_cost, least[claim.name], claim.rows) for claim in claims]

    def at(height: float) -> list[int]:
        return [max(low, min(high, int(height / cost))) for cost, low, high in bounds]

    low, high = 0.0, max((cost * rows for cost, _, rows in bounds), default=0.0) * (1 + 1e-9)
    found = at(high)
    if sum(found) > slots:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if sum(at(middle)) <= slots:
                low = middle
            else:
                high = middle
        found = at(low)
    given = {claim.name: rows for claim, rows in zip(claims, found, strict=True)}
    _give_rest(slots - sum(found), claims, given)
    return given


def _give_rest(slots: int, claims: Sequence[SlotClaim], given: dict[str, int]) -> None:
    """Give what equal heights leave over, each slot to the claimant with the least."""
    heap = [
        (given[claim.name] * claim.slot_cost, claim.order, claim.name, claim)
        for claim in claims
        if given[claim.name] < claim.rows
    ]
    heapq.heapify(heap)
    while slots > 0 and heap:
        _, _, name, claim = heapq.heappop(heap)
        given[name] += 1
        slots -= 1
        if given[name] < claim.rows:
            heapq.heappush(heap, (given[name] * claim.slot_cost, claim.order, name, claim))


TURN_S: Final = 0.25  # how long a slot stays where others wait for one
OVERDUE_S: Final = 30.0  # a tenant without a slot for so long goes before any class
_COST_HALF_LIFE_S: Final = 5.0


@dataclass(slots=True, eq=False)
class GatewayDemand:
    """What one gateway asks for one tenant."""

    demand: SlotDemand
    zone: str
    since_s: float  # time at which it last began to have slots, or to have none
    received_s: float  # time of its last message
    has_slots: bool = False
    was_overdue: bool = False  # whether it was overdue when it got the slots that it has

    def is_overdue(self, now_s: float) -> bool:
        age_s = now_s - self.since_s
        return age_s < TURN_S and self.was_overdue if self.has_slots else age_s >= OVERDUE_S

    def record(self, *, has_slots: bool, now_s: float) -> None:
        """Record whether it has slots; another turn begins when that changes, and after two turns."""
        if has_slots != self.has_slots or (has_slots and now_s - self.since_s >= 2 * TURN_S):
            self.was_overdue = not self.has_slots and self.is_overdue(now_s)
            self.has_slots, self.since_s = has_slots, now_s

    def order(self, now_s: float) -> tuple[float, float]:
        """Return its place where slots are fewer than claimants: turns end, then the longest wait."""
        if not self.has_slots:
            return 1.0, self.since_s
        return (0.0 if now_s - self.since_s < TURN_S else 2.0), self.since_s


@dataclass(slots=True, eq=False)
class TenantRows:
    """One tenant of the pool. ``rows`` and ``device_s`` are recent sums, which measure a row's time."""

    demands: dict[str, GatewayDemand] = field(default_factory=dict)  # demands by gateway
    account: Account | None = None  # its account; None: it has no demand
    priority: Priority = Priority.STANDARD
    rows: float = 0.0
    device_s: float = 0.0
    measured_s: float = -math.inf

    def measure(self, use: TenantTokens, now_s: float) -> None:
        kept = 0.5 ** (min(1e3, now_s - self.measured_s) / _COST_HALF_LIFE_S)
        self.rows = self.rows * kept + use.rows
        self.device_s = self.device_s * kept + use.device_us / 1e6
        self.measured_s = now_s


def claim_of(name: str, tenant: TenantRows, row_s: float, now_s: float) -> SlotClaim:
    found = tenant.demands.values()
    assert tenant.account is not None, "a tenant with demand has no counter"
    return SlotClaim(
        name,
        sum(wanted.demand.rows for wanted in found),
        rank=tenant.priority.rank,
        weight=tenant.account.weight or 1.0,
        row_s=max(1e-9, tenant.device_s / tenant.rows if tenant.rows > 0.0 else row_s),
        order=(tenant.account.value, *min(wanted.order(now_s) for wanted in found)),
        overdue=any(wanted.is_overdue(now_s) for wanted in found),
    )


GROWTH: Final = 2  # slots for each row of demand while no other tenant wants them
BALANCE_S: Final = 1.0  # interval of moving leases away from loaded workers
_UNEVEN: Final = 0.25  # how far the load of a worker may be from the mean, as a ratio
MAX_DEMANDS: Final = 65536
_KEPT_TENANTS: Final = 4096  # most tenants whose row times are kept without demand
_MOST_CHOICES: Final = 64  # workers that are compared for one growth

Shares = Mapping[Priority, FairShares]


class SlotPool:
    """Single writer: the task of the scheduler's service. Time is an argument, in monotonic seconds."""

    def __init__(
        self, digest: str, leases: VersionLeases, shares: Callable[[str], Shares], now_s: float
    ) -> None:
        """``shares`` returns the service counters of a version's classes."""
        self.leases = leases
        self._digest = digest
        self._shares = shares
        self._tenants: dict[str, TenantRows] = {}
        self._demands = 0
        self._balanced_s = now_s
        self._rotation = 0
        self.is_short = False  # a tenant has fewer slots than its share, or than its rows

    @property
    def idle(self) -> bool:
        """No demand and no lease."""
        return not self._demands and not len(self.leases)

    @property
    def rows(self) -> int:
        """The rows of all demands."""
        return sum(wanted.demand.rows for _, wanted in self._holders())

    @property
    def rows_by_class(self) -> Counter[Priority]:
        """The rows of all demands by class; a tenant's demand has the highest class of its rows."""
        found: Counter[Priority] = Counter()
        for _, wanted in self._holders():
            found[wanted.demand.priority] += wanted.demand.rows
        return +found

    @property
    def rows_by_group(self) -> Counter[str]:
        """The rows of all demands by the group of nodes that may run them."""
        found: Counter[str] = Counter()
        for _, wanted in self._holders():
            found[wanted.demand.node_group] += wanted.demand.rows
        return +found

    # --- demands ----------------------------------------------------------------------------------

    def demand(self, gateway: str, zone: str, wanted: SlotDemand, now_s: float) -> bool:
        """Replace the demand of a gateway for a tenant; without rows it ends. One too many is dropped.

        Return whether it changed anything.
        """
        tenant = self._tenants.get(wanted.tenant)
        known = None if tenant is None else tenant.demands.get(gateway)
        if known is not None:
            known.received_s = now_s
            if (known.demand, known.zone) == (wanted, zone):
                return False
            known.demand, known.zone = wanted, zone
        elif not wanted.rows or self._demands >= MAX_DEMANDS:
            return False
        else:
            tenant = self._tenants.setdefault(wanted.tenant, TenantRows())
            tenant.demands[gateway] = GatewayDemand(wanted, zone, now_s, now_s)
            self._demands += 1
        assert tenant is not None
        if not wanted.rows:
            del tenant.demands[gateway]
            self._demands -= 1
        self._count_waiting(wanted.tenant, tenant)
        return True

    def disconnect(self, gateway: str) -> None:
        """End the demands of a gateway; its leases lapse."""
        for name, tenant in list(self._tenants.items()):
            if tenant.demands.pop(gateway, None) is not None:
                self._demands -= 1
                self._count_waiting(name, tenant)
        self.leases.disconnect(gateway)

    def end_old_demands(self, now_s: float) -> bool:
        """End the demands that were not sent again; return whether there were any."""
        since_s = now_s - DEMAND_TTL_S
        old = [
            (holder[0], wanted)
            for holder, wanted in self._holders()
            if wanted.demand.repeats and wanted.received_s < since_s
        ]
        for gateway, wanted in old:
            self.demand(gateway, wanted.zone, replace(wanted.demand, rows=0), now_s)
        return bool(old)

    def returned(self, gateway: str, found: SlotReturn) -> bool:
        return self.leases.returned(gateway, found)

    def measure(self, use: TenantTokens, now_s: float) -> None:
        """Record rows of a tenant that ended."""
        if (tenant := self._tenants.get(use.tenant)) is not None:
            tenant.measure(use, now_s)

    # --- plan -------------------------------------------------------------------------------------

    def plan(self, workers: Sequence[RowWorker], row_s: float, now_s: float) -> None:
        """Change leases towards the fair division of the workers' slots. ``row_s`` is the mean time of all
        rows."""
        self.leases.settle(now_s)
        serving = {worker.worker_id: worker for worker in workers}
        self.leases.observe(workers, now_s)
        self._leave_lost(serving)
        targets = self._targets(sum(worker.row_slots for worker in workers), row_s, now_s)
        self._balance(workers, now_s)
        self._shrink(targets, workers)
        self._grow(targets, workers)
        self.is_short = False
        for holder, wanted in self._holders():
            slots = self.leases.slots_of(holder)
            self.is_short |= slots < max(targets[holder], wanted.demand.rows)
            wanted.record(has_slots=slots > 0, now_s=now_s)

    def _targets(self, slots: int, row_s: float, now_s: float) -> dict[Holder, int]:
        by_tenant = {name: state.demands for name, state in self._tenants.items() if state.demands}
        claims = [claim_of(name, self._tenants[name], row_s, now_s) for name in by_tenant]
        given = divide(slots, claims, spare_ratio=NEWCOMERS_RATIO)
        if all(given[claim.name] == claim.rows for claim in claims):
            most = int(slots * (1 - NEWCOMERS_RATIO))
            grown = [replace(claim, rows=GROWTH * claim.rows) for claim in claims]
            given = level(max(most, sum(given.values())), grown, least=given)
        targets: dict[Holder, int] = {}
        for tenant, found in by_tenant.items():
            rows = sum(wanted.demand.rows for wanted in found.values())
            grows = given[tenant] > rows
            slot_claims = [
                SlotClaim(
                    gateway,
                    wanted.demand.rows * (GROWTH if grows else 1),
                    weight=wanted.demand.rows,
                    order=wanted.order(now_s),
                )
                for gateway, wanted in found.items()
            ]
            for gateway, slots_there in divide(given[tenant], slot_claims).items():
                targets[gateway, tenant] = slots_there
        return targets

    def _leave_lost(self, serving: Mapping[str, RowWorker]) -> None:
        """Take back what is leased on workers that serve no more, and beyond the slots of those that do."""
        for lease in list(self.leases.all()):
            worker = serving.get(lease.worker.worker_id)
            group = self._group_of(lease.holder[1])
            if lease.slots and (worker is None or worker.node_group != group):
                self.leases.put(lease.holder, lease.worker, 0)
        for worker in serving.values():
            self.leases.drop_worker(worker.worker_id, worker.incarnation)
            excess = self.leases.slots_on(worker.worker_id) - worker.row_slots
            self._take_back(list(self.leases.on(worker.worker_id).values()), excess)

    def _group_of(self, tenant: str) -> str:
        found = self._tenants.get(tenant)
        groups = [] if found is None else [wanted.demand.node_group for wanted in found.demands.values()]
        return groups[0] if groups else SHARED_NODES

    def _balance(self, workers: Sequence[RowWorker], now_s: float) -> None:
        """Now and then, take from workers that are loaded well above the mean what others have room for."""
        if now_s - self._balanced_s < BALANCE_S or len(workers) < 2:
            return
        self._balanced_s = now_s
        loads = {worker.worker_id: self.leases.slots_on(worker.worker_id) for worker in workers}
        mean = sum(loads.values()) / max(1e-9, sum(worker.capacity for worker in workers))
        room = sum(
            max(0, min(self.leases.free_on(worker), int(mean * worker.capacity) - loads[worker.worker_id]))
            for worker in workers
        )
        for worker in workers:
            fair = math.ceil(mean * worker.capacity)
            excess = min(room, loads[worker.worker_id] - fair)
            if excess > 0 and loads[worker.worker_id] > (1 + _UNEVEN) * fair:
                self._take_back(list(self.leases.on(worker.worker_id).values()), excess)
                room -= excess

    def _shrink(self, targets: Mapping[Holder, int], workers: Sequence[RowWorker]) -> None:
        """Take back what is above the targets, where others lack it or it is more than twice the target."""
        lacking = sum(max(0, target - self.leases.slots_of(holder)) for holder, target in targets.items())
        scarce = lacking > sum(max(0, self.leases.free_on(worker)) for worker in workers)
        for holder in dict.fromkeys(lease.holder for lease in self.leases.all()):
            slots, target = self.leases.slots_of(holder), targets.get(holder, 0)
            if slots > target and (scarce or slots > 2 * target):
                self._take_back(list(self.leases.of(holder).values()), slots - target)

    def _take_back(self, leases: Sequence[HeldLease], slots: int) -> None:
        """Take back so many slots of these leases, of the largest first and level."""
        if slots <= 0:
            return
        kept = level(
            max(0, sum(lease.slots for lease in leases) - slots),
            [SlotClaim(str(index), lease.slots) for index, lease in enumerate(leases)],
            least=dict.fromkeys(map(str, range(len(leases))), 0),
        )
        for index, lease in enumerate(leases):
            if kept[str(index)] < lease.slots:
                self.leases.put(lease.holder, lease.worker, kept[str(index)])

    def _grow(self, targets: Mapping[Holder, int], workers: Sequence[RowWorker]) -> None:
        """Lease free slots up to the targets: first to those who have none, then by class."""
        needs = {holder: target - self.leases.slots_of(holder) for holder, target in targets.items()}
        growing = sorted(
            ((holder, wanted) for holder, wanted in self._holders() if needs[holder] > 0),
            key=lambda found: (
                self.leases.slots_of(found[0]) > 0,
                -found[1].demand.priority.rank,
                found[1].since_s,
                found[0],
            ),
        )
        for holder, wanted in growing:
            mine = [worker for worker in workers if worker.node_group == wanted.demand.node_group]
            self._spread(holder, needs[holder], wanted.zone, mine)

    def _spread(self, holder: Holder, need: int, zone: str, workers: Sequence[RowWorker]) -> None:
        """Lease up to ``need`` more slots, on the workers with the lowest load, in its zone first."""
        rooms = [(worker, self.leases.room_for(holder, worker)) for worker in workers]
        rooms = [(worker, room) for worker, room in rooms if room > 0]
        if len(rooms) > _MOST_CHOICES:
            self._rotation = (self._rotation + _MOST_CHOICES) % len(rooms)
            rooms = (rooms + rooms)[self._rotation : self._rotation + _MOST_CHOICES]
        rooms.sort(key=lambda found: self._load_key(found[0], zone))
        while need > 0 and rooms:
            chunk = max(1, need // len(rooms))
            left: list[tuple[RowWorker, int]] = []
            for worker, room in rooms:
                more = min(need, chunk, room)
                if more <= 0:
                    break
                lease = self.leases.of(holder).get(worker.worker_id)
                self.leases.put(holder, worker, more + (lease.slots if lease else 0))
                need -= more
                if room > more:
                    left.append((worker, room - more))
            rooms = left

    def _load_key(self, worker: RowWorker, zone: str) -> tuple[int, bool, float, str]:
        load = self.leases.slots_on(worker.worker_id) / worker.capacity
        return int(8 * load), bool(zone and worker.zone and zone != worker.zone), load, worker.worker_id

    # --- counters ---------------------------------------------------------------------------------

    def _holders(self) -> Iterator[tuple[Holder, GatewayDemand]]:
        for name, tenant in self._tenants.items():
            for gateway, wanted in tenant.demands.items():
                yield (gateway, name), wanted

    def _count_waiting(self, name: str, tenant: TenantRows) -> None:
        """Keep the tenant in the order of its class while it has demand; with its largest weight."""
        found = [wanted.demand for wanted in tenant.demands.values()]
        priority = max((wanted.priority for wanted in found), key=lambda one: one.rank, default=None)
        if tenant.account is not None and priority is not tenant.priority:
            self._shares(self._digest)[tenant.priority].leave(tenant.account)
            tenant.account = None
        if priority is not None:
            weight = max(wanted.tenant_weight for wanted in found)
            shares = self._shares(self._digest)[priority]
            tenant.priority = priority
            if tenant.account is None:
                tenant.account = shares.enter(name, weight)
            else:
                shares.weigh(tenant.account, weight)
        if priority is None and len(self._tenants) > _KEPT_TENANTS:
            del self._tenants[name]
