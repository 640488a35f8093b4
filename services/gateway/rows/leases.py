"""A gateway's slots: what it asks for, its leases, and what it may use while no leader answers.

Single event loop; time is the injected clock's.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.fixed_cost.rows import RowsRequest
from services.core.fixed_cost.slots import REPEAT_S, SlotDemand, SlotLease, SlotRefusal, SlotReturn
from services.core.fleet import PlacementFrame, PoolMember
from services.core.generation import NotAdmittedReason
from services.core.records import Priority
from services.ports.clock import Clock
from services.ports.rows import SlotClient

RISE_S: Final = 0.002  # least time between two messages about a demand that rises
_GAP_S: Final = 0.02  # least time between two other messages about one demand
_FALL_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Demand:
    weight: float = 1.0
    node_group: str = ""
    priorities: Counter[Priority] = field(default_factory=Counter)  # rows by priority
    rows: int = 0
    peak: int = 0
    peak_s: float = 0.0  # when it last had so many rows
    sent: SlotDemand | None = None
    sent_s: float = 0.0

    def wanted(self, digest: str, tenant: str) -> SlotDemand:
        waiting = [priority for priority in Priority if self.priorities[priority]]
        last = Priority.STANDARD if self.sent is None else self.sent.priority
        priority = max(waiting, key=lambda found: found.rank, default=last)
        rows = max(self.rows, self.peak)
        return SlotDemand(
            digest, tenant, rows, self.weight, priority, repeats=True, node_group=self.node_group
        )


class SlotDemands:
    """The rows that this gateway has, of each version and tenant; bounded by them.

    A demand that rises is sent at once, again within 2 ms while it goes on rising: rows wait for its slots.
    Other changes are sent at most every 20 ms. A demand falls a second after its rows, so that the next
    request of a tenant finds its slots still leased. While it lasts it is sent every second, changed or not.
    """

    def __init__(self, slots: SlotClient, clock: Clock) -> None:
        self._slots = slots
        self._clock = clock
        self._demands: dict[tuple[str, str], _Demand] = {}
        self.rises = False  # a demand rose, and waits for ``send_due`` within ``RISE_S``

    def __len__(self) -> int:
        return len(self._demands)

    def enter(self, request: RowsRequest) -> None:
        """Count the rows of a request, and send the demand if it rose."""
        key, rows = (request.version_digest, request.tenant_id), len(request.rows)
        demand = self._demands.get(key)
        if demand is None:
            demand = self._demands[key] = _Demand()
        demand.weight, demand.node_group = request.tenant_weight, request.node_group
        demand.priorities[request.priority] += rows
        demand.rows += rows
        now_s = self._clock.monotonic_s()
        if demand.rows >= demand.peak:
            demand.peak, demand.peak_s = demand.rows, now_s
        if demand.sent is None or demand.rows > demand.sent.rows:
            self._send(key, demand, now_s)

    def leave(self, request: RowsRequest) -> None:
        """Count a row of the request that ended."""
        demand = self._demands[request.version_digest, request.tenant_id]
        if demand.rows == demand.peak:
            demand.peak_s = self._clock.monotonic_s()
        demand.priorities[request.priority] -= 1
        demand.rows -= 1

    def send_due(self) -> None:
        """Send what changed; forget demands that are over."""
        now_s = self._clock.monotonic_s()
        self.rises = False
        for key, demand in list(self._demands.items()):
            if now_s - demand.peak_s >= _FALL_S:
                demand.peak, demand.peak_s = demand.rows, now_s
            self._send(key, demand, now_s)
            if not demand.rows and demand.sent is not None and not demand.sent.rows:
                del self._demands[key]

    def _send(self, key: tuple[str, str], demand: _Demand, now_s: float) -> None:
        wanted, sent, age_s = demand.wanted(*key), demand.sent, now_s - demand.sent_s
        rises = sent is None or wanted.rows > sent.rows
        if sent is None or age_s >= (RISE_S if rises else _GAP_S if wanted != sent else REPEAT_S):
            demand.sent, demand.sent_s = wanted, now_s
            self._slots.demand(wanted)
        elif rises:
            self.rises = True


CLOSED_S: Final = 0.5  # how long a worker is left out that refuses for another reason than room
FULL_S: Final = 0.02  # and one that has no room
_ALONE_SHARE: Final = 4  # one of so many slots of a worker, at most, while no leader answers


@dataclass(frozen=True, slots=True)
class AloneSettings:
    """``after_s``: the time without a leader; workers have the same. ``max_age_s``: of the worker list."""

    after_s: float = 1.5
    max_age_s: float = 120.0


@dataclass(slots=True, eq=False)
class SlotsHere:
    """Slots on one worker that this gateway may fill, of a lease or of its own choice (epoch 0)."""

    lease: SlotLease
    until_s: float
    in_flight: int = 0
    closed_until_s: float = -math.inf
    returned: bool = False  # of this number of the lease

    @property
    def load(self) -> float:
        return self.in_flight / max(1, self.lease.slots)

    def is_open(self, now_s: float) -> bool:
        return self.in_flight < self.lease.slots and self.closed_until_s <= now_s < self.until_s


class GatewayLeases:
    """What the leading scheduler leased to this gateway. ``changed`` is set when there is something new."""

    def __init__(self, clock: Clock, alone: AloneSettings | None = None) -> None:
        self._clock = clock
        self._settings = alone if alone is not None else AloneSettings()
        self._slots: dict[tuple[str, str], dict[str, SlotsHere]] = {}  # by version and tenant, by worker
        self._members: dict[str, dict[str, PoolMember]] = {}  # by version, by worker
        self._alone: dict[str, dict[str, SlotsHere]] = {}  # by version, by worker
        self._leader_s = clock.monotonic_s()
        self._members_s = -math.inf  # when the list of workers was received
        self._unreturned: dict[tuple[str, str, str], SlotsHere] = {}
        self._refused: dict[SlotRefusal, None] = {}
        self.changed = asyncio.Event()

    # --- from the leader --------------------------------------------------------------------------

    def on_frame(self, frame: PlacementFrame | None) -> None:
        """Take what the leader sent; None: only that it answered. Must not block or raise."""
        self._leader_s = self._clock.monotonic_s()
        if frame is not None and frame.members is not None:
            self._replace_members(frame.members)
        if frame is not None and frame.leases:
            self.on_leases(frame.leases)
        if frame is not None and frame.slot_refusals:
            self._refused.update(dict.fromkeys(frame.slot_refusals))
            self.changed.set()

    def on_leases(self, leases: Sequence[SlotLease]) -> None:
        """Replace the leases of these workers, versions and tenants."""
        now_s = self._clock.monotonic_s()
        for lease in leases:
            workers = self._slots.setdefault((lease.digest, lease.tenant), {})
            slots = workers.setdefault(lease.worker_id, SlotsHere(lease, now_s))
            if lease.number != slots.lease.number or lease.epoch != slots.lease.epoch:
                slots.closed_until_s, slots.returned = -math.inf, False
            slots.lease, slots.until_s = lease, now_s + lease.ttl_s
            self._note_return(slots)
        self.changed.set()

    def _replace_members(self, members: Sequence[PoolMember]) -> None:
        self._members_s = self._clock.monotonic_s()
        self._members = {}
        for member in members:
            if member.row_slots:
                self._members.setdefault(member.digest, {})[member.worker_id] = member

    def take_returns(self) -> list[SlotReturn]:
        """Return and clear the returns to send."""
        found, self._unreturned = self._unreturned, {}
        for slots in found.values():
            slots.returned = True
            if not slots.lease.slots:
                self._forget(slots.lease)
        return [
            SlotReturn(slots.lease.worker_id, slots.lease.digest, slots.lease.tenant, slots.lease.number)
            for slots in found.values()
        ]

    def take_refused(self) -> list[SlotRefusal]:
        """Return and clear the demands that no node of their tenants' groups can serve."""
        found, self._refused = self._refused, {}
        return list(found)

    def has_lease(self, digest: str, tenant: str) -> bool:
        """Whether the leader leased slots of the version to the tenant."""
        return (digest, tenant) in self._slots

    def is_served(self, digest: str) -> bool:
        """Whether a worker of the list serves the version."""
        return bool(self._members.get(digest))

    # --- slots ------------------------------------------------------------------------------------

    def choose(self, digest: str, tenant: str, excluded: Collection[str]) -> SlotsHere | None:
        """Return leased slots with room, where the smallest part of them is in use; None without any."""
        return self._least_loaded(self._slots.get((digest, tenant), {}).values(), excluded)

    @property
    def is_alone(self) -> bool:
        """Whether no leader answers, and the last list of workers may be used instead."""
        now_s = self._clock.monotonic_s()
        is_old = now_s - self._members_s > self._settings.max_age_s
        return not is_old and now_s - self._leader_s >= self._settings.after_s

    def choose_alone(self, digest: str, node_group: str, excluded: Collection[str]) -> SlotsHere | None:
        """Return slots on a worker of the group in the last list, while no leader answers; None without."""
        if not self.is_alone:
            return None
        mine = self._alone.setdefault(digest, {})
        members = [one for one in self._members.get(digest, {}).values() if one.node_group == node_group]
        for member in members:
            slots = mine.get(member.worker_id)
            if slots is None or slots.lease.incarnation != member.incarnation:
                mine[member.worker_id] = SlotsHere(_own_lease(member), math.inf)
        return self._least_loaded((mine[member.worker_id] for member in members), excluded)

    def started(self, slots: SlotsHere) -> None:
        slots.in_flight += 1

    def ended(self, slots: SlotsHere, refusal: NotAdmittedReason | None = None) -> None:
        """Count a row that is no longer in flight; with ``refusal``, it never was."""
        slots.in_flight -= 1
        if refusal is not None:
            wait_s = FULL_S if refusal is NotAdmittedReason.NO_ROOM else CLOSED_S
            slots.closed_until_s = self._clock.monotonic_s() + wait_s
        self._note_return(slots)

    def sweep(self) -> None:
        """Forget lapsed leases without rows in flight."""
        now_s = self._clock.monotonic_s()
        for slots in list(self.slots()):
            if not slots.in_flight and slots.until_s <= now_s:
                self._forget(slots.lease)
        for digest, mine in list(self._alone.items()):
            if digest not in self._members and not any(slots.in_flight for slots in mine.values()):
                del self._alone[digest]

    def slots(self) -> Iterator[SlotsHere]:
        """Yield the leases that are held. For tests and telemetry."""
        for workers in self._slots.values():
            yield from workers.values()

    # --- inside -----------------------------------------------------------------------------------

    def _least_loaded(self, found: Iterable[SlotsHere], excluded: Collection[str]) -> SlotsHere | None:
        now_s = self._clock.monotonic_s()
        usable = (slots for slots in found if slots.lease.worker_id not in excluded and slots.is_open(now_s))
        return min(usable, key=lambda slots: (slots.load, slots.lease.worker_id), default=None)

    def _forget(self, lease: SlotLease) -> None:
        workers = self._slots.get((lease.digest, lease.tenant), {})
        workers.pop(lease.worker_id, None)
        if not workers:
            self._slots.pop((lease.digest, lease.tenant), None)

    def _note_return(self, slots: SlotsHere) -> None:
        lease = slots.lease
        if lease.epoch and not slots.returned and slots.in_flight <= lease.slots:
            self._unreturned[lease.worker_id, lease.digest, lease.tenant] = slots
            self.changed.set()


def _own_lease(member: PoolMember) -> SlotLease:
    """Return this gateway's part of a worker's slots, in the form of a lease without a leader."""
    slots = max(1, member.row_slots // _ALONE_SHARE)
    return SlotLease(
        member.worker_id, member.address, member.incarnation, 0, member.digest, "", slots, math.inf
    )
