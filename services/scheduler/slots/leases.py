"""The leases of one version, and which slots of its workers they hold.

A lease holds its slots from the moment it is sent. Slots that are taken back are held until the gateway
returned them (``SlotReturn``: it has no more rows in flight than the newest lease allows), or until the
larger lease has lapsed. So the leases that gateways may use on a worker never exceed its slots, whatever is
delayed or lost.

Single writer: the task of the scheduler's service. Time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from services.core.fixed_cost.slots import SlotLease, SlotReturn

DRAIN_S: Final = 1.0  # time after which no row of an earlier leader runs on a worker
Holder: TypeAlias = tuple[str, str]  # a gateway and a tenant


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """``margin_s``: how long a lease may be on its way to its gateway, as a grant (``FleetLimits``)."""

    ttl_s: float = 2.0
    margin_s: float = 3.0

    @property
    def hold_s(self) -> float:
        """How long slots are held at most after they were taken back."""
        return self.ttl_s + self.margin_s


@dataclass(frozen=True, slots=True)
class RowWorker:
    """A serving worker of a fixed-cost version."""

    worker_id: str
    address: str
    incarnation: int
    row_slots: int
    rows: int = 0  # rows in flight there by its last report
    zone: str = ""
    slowness_ratio: float = 1.0
    node_group: str = ""

    @property
    def capacity(self) -> float:
        """Its slots, fewer for a slow device: what leases are spread by."""
        return self.row_slots / max(1.0, self.slowness_ratio)


@dataclass(slots=True, eq=False)
class HeldLease:
    """The lease of a holder on a worker."""

    holder: Holder
    worker: RowWorker  # the worker when its slots last changed
    slots: int = 0
    held: int = 0  # the most rows that its gateway may have in flight there
    number: int = 0
    sent_s: float = -math.inf
    # Time at which ``held`` falls to ``slots``, unless the gateway returns them before.
    settles_s: float = math.inf


@dataclass(slots=True)
class _EarlierRows:
    """Rows under leases of an earlier leader, or of none: in none of these leases."""

    incarnation: int
    rows: int
    until_s: float  # time by which they have ended, whatever is reported


_NO_LEASES: Final[Mapping[str, HeldLease]] = MappingProxyType({})


class VersionLeases:
    """The leases of one version."""

    def __init__(self, digest: str, epoch: int, terms: LeaseTerms, numbers: Iterator[int]) -> None:
        """``numbers``: never repeated within a term."""
        self._digest = digest
        self._epoch = epoch
        self.terms = terms
        self._holders: dict[Holder, dict[str, HeldLease]] = {}
        self._workers: dict[str, dict[Holder, HeldLease]] = {}
        self._count = 0
        self._held: dict[str, int] = {}  # slots that gateways hold, by worker
        self._earlier: dict[str, _EarlierRows] = {}  # rows of an earlier leader, by worker
        self._slots: dict[str, int] = {}  # leased slots by worker
        self._numbers = numbers
        self._entries = itertools.count()
        self._settling: list[tuple[float, int, HeldLease]] = []  # a heap; outdated entries are ignored
        # Leases to send, by gateway, worker and tenant.
        self.unsent: dict[str, dict[tuple[str, str], HeldLease]] = {}

    def __len__(self) -> int:
        return self._count

    def of(self, holder: Holder) -> Mapping[str, HeldLease]:
        """Return the holder's leases by worker."""
        return self._holders.get(holder, _NO_LEASES)

    def on(self, worker_id: str) -> Mapping[Holder, HeldLease]:
        """Return the leases on a worker by holder."""
        return self._workers.get(worker_id, {})

    def all(self) -> Iterator[HeldLease]:
        for leases in self._holders.values():
            yield from leases.values()

    def slots_of(self, holder: Holder) -> int:
        return sum(lease.slots for lease in self.of(holder).values())

    def slots_on(self, worker_id: str) -> int:
        return self._slots.get(worker_id, 0)

    def observe(self, workers: Iterable[RowWorker], now_s: float) -> None:
        """Count the rows that ran on workers before slots were leased there, until they have ended."""
        known, self._earlier = self._earlier, {}
        for worker in workers:
            found = known.get(worker.worker_id)
            if found is None or found.incarnation != worker.incarnation:
                found = _EarlierRows(worker.incarnation, worker.rows, now_s + DRAIN_S)
            self._earlier[worker.worker_id] = found
            found.rows = min(found.rows, worker.rows) if now_s < found.until_s else 0

    def free_on(self, worker: RowWorker) -> int:
        """Return the slots that nobody holds, after ``observe``."""
        held = self._held.get(worker.worker_id, 0) + self._earlier[worker.worker_id].rows
        return worker.row_slots - max(held, worker.rows)

    def room_for(self, holder: Holder, worker: RowWorker) -> int:
        """Return by how many slots the holder's lease there may grow; what it still holds is free for it."""
        lease = self.of(holder).get(worker.worker_id)
        mine = lease.held - lease.slots if lease and lease.worker.incarnation == worker.incarnation else 0
        return max(0, self.free_on(worker)) + mine

    def put(self, holder: Holder, worker: RowWorker, slots: int) -> None:
        """Lease the holder that many slots on the worker, in place of its earlier lease there."""
        lease = self.of(holder).get(worker.worker_id)
        if lease is not None and lease.worker.incarnation != worker.incarnation:
            self._change(lease, 0, 0)
        if lease is None:
            lease = HeldLease(holder, worker)
            self._count += 1
            self._holders.setdefault(holder, {})[worker.worker_id] = lease
            self._workers.setdefault(worker.worker_id, {})[holder] = lease
        lease.worker, lease.number = worker, next(self._numbers)
        self._change(lease, slots, max(slots, lease.held))
        self._await_return(lease)
        self._send(lease)

    def returned(self, gateway: str, found: SlotReturn) -> bool:
        """Free what the gateway no longer uses; return whether that freed any slot."""
        lease = self.of((gateway, found.tenant)).get(found.worker_id)
        if lease is None or lease.number != found.number or lease.held == lease.slots:
            return False
        self._settle(lease)
        return True

    def disconnect(self, gateway: str) -> None:
        """Take back the leases of a gateway that cannot be reached: they lapse."""
        for lease in [lease for lease in self.all() if lease.holder[0] == gateway]:
            lease.number = next(self._numbers)  # a return of what it has frees nothing: it may still use it
            self._change(lease, 0, lease.held)
            self._await_return(lease)
        self.unsent.pop(gateway, None)

    def drop_worker(self, worker_id: str, incarnation: int) -> None:
        """Forget the leases on lives of the worker before this one: no row runs under them."""
        for lease in list(self.on(worker_id).values()):
            if lease.worker.incarnation < incarnation:
                self._change(lease, 0, 0)
                self._settle(lease)

    def settle(self, now_s: float) -> bool:
        """Free the slots of lapsed leases; return whether there were any."""
        freed = False
        while self.settles_s() <= now_s:
            _, _, lease = heapq.heappop(self._settling)
            self._settle(lease)
            freed = True
        return freed

    def settles_s(self) -> float:
        """Return when ``settle`` next has work."""
        while self._settling and self._settling[0][2].settles_s != self._settling[0][0]:
            heapq.heappop(self._settling)
        return self._settling[0][0] if self._settling else math.inf

    def renew(self, now_s: float) -> None:
        """Send again what would lapse otherwise."""
        for lease in self.all():
            if lease.slots and now_s - lease.sent_s >= self.terms.ttl_s / 2:
                self._send(lease)

    def take(self, gateway: str, most: int, now_s: float) -> list[SlotLease]:
        """Return and clear the leases to send to a gateway now, at most so many."""
        unsent = self.unsent.get(gateway, {})
        found = [unsent.pop(key) for key in list(unsent)[:most]]
        if not unsent:
            self.unsent.pop(gateway, None)
        for lease in found:
            lease.sent_s = now_s
        return [self._lease(lease) for lease in found]

    def check_integrity(self) -> None:
        """Raise AssertionError when the sums and the leases disagree."""
        for worker_id, leases in self._workers.items():
            assert self._held[worker_id] == sum(lease.held for lease in leases.values()), "held slots leaked"
            assert self._slots[worker_id] == sum(lease.slots for lease in leases.values())
            assert all(self._holders[holder][worker_id] is lease for holder, lease in leases.items())
        assert self._count == sum(len(leases) for leases in self._workers.values())
        assert self._count == sum(len(leases) for leases in self._holders.values())
        for lease in self.all():
            assert 0 <= lease.slots <= lease.held, "a lease has slots that it does not hold"
            assert lease.slots == lease.held > 0 or lease.settles_s < math.inf, "slots are held for ever"

    # --- inside -----------------------------------------------------------------------------------

    def _lease(self, lease: HeldLease) -> SlotLease:
        worker = lease.worker
        return SlotLease(
            worker_id=worker.worker_id,
            address=worker.address,
            incarnation=worker.incarnation,
            epoch=self._epoch,
            digest=self._digest,
            tenant=lease.holder[1],
            slots=lease.slots,
            ttl_s=self.terms.ttl_s,
            number=lease.number,
        )

    def _send(self, lease: HeldLease) -> None:
        gateway, tenant = lease.holder
        self.unsent.setdefault(gateway, {})[lease.worker.worker_id, tenant] = lease

    def _await_return(self, lease: HeldLease) -> None:
        """Hold what was taken back until the last lease that was sent has lapsed for certain."""
        if lease.held > lease.slots:
            lease.settles_s = lease.sent_s + self.terms.hold_s
            heapq.heappush(self._settling, (lease.settles_s, next(self._entries), lease))
        else:
            lease.settles_s = math.inf

    def _settle(self, lease: HeldLease) -> None:
        self._change(lease, lease.slots, lease.slots)
        lease.settles_s = math.inf
        if lease.slots:
            return
        self._count -= 1
        gateway, tenant = lease.holder
        worker_id = lease.worker.worker_id
        self.unsent.get(gateway, {}).pop((worker_id, tenant), None)
        del self._holders[lease.holder][worker_id], self._workers[worker_id][lease.holder]
        if not self._holders[lease.holder]:
            del self._holders[lease.holder]
        if not self._workers[worker_id]:
            del self._workers[worker_id], self._held[worker_id], self._slots[worker_id]

    def _change(self, lease: HeldLease, slots: int, held: int) -> None:
        worker_id = lease.worker.worker_id
        self._held[worker_id] = self._held.get(worker_id, 0) + held - lease.held
        self._slots[worker_id] = self._slots.get(worker_id, 0) + slots - lease.slots
        lease.slots, lease.held = slots, held
