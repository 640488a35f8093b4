"""The waiting placements, one queue per model version, and the pass that grants them.

Who owns a placement when: from ``submit`` to its outcome the queue does, under (gateway session, placement
id). ``submit`` ends in exactly one of a ``Granted``, a ``Refused``, or a withdrawal by its gateway, which
gets no outcome. A grant stays remembered until it was given back or lapsed, so that a cancellation that
crossed it returns the room.

Work is done for versions that changed: a pass tries a version's queue in order, looks past a bounded
number of placements without room, and stops early when no worker has any.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from services.core.errors import FairwayError, InvalidInput, QueueFull
from services.core.fleet import Granted, Outcome, Refused
from services.core.generation import Grant, PlaceSpec
from services.scheduler.fleet_view import FleetView
from services.scheduler.policy.drain_rate import MIN_WAIT_S, DrainRate
from services.scheduler.policy.kv_admission import Demand, demand_of
from services.scheduler.policy.placement import (
    Chosen,
    NoWorker,
    PlacementProfile,
    PlaceQuery,
    choose,
    may_use,
)
from services.scheduler.policy.queue_order import ArrivalOrder, OrderPolicy, QueueOrder, order_key
from services.scheduler.policy.room import NO_ROOM, RoomSummary, room_of
from services.scheduler.refusals import queue_full, timed_out, too_long
from services.scheduler.telemetry import GRANTED, WITHDRAWN, QueueObserver, Unobserved

_ENTRY_BYTES: Final = 1024  # what a waiting placement takes besides its strings


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait. ``predicted_output_tokens`` is reserved per sequence unless its own limit is less."""

    predicted_output_tokens: int = 256
    max_per_pool: int = 8192
    max_per_tenant: int = 4096
    max_bytes_per_tenant: int = 16 * 1024 * 1024
    max_total: int = 65536


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued placement. ``key`` and ``number`` order it; ``bypassed`` counts those granted before it
    although they were behind it, on a worker that it may use."""

    session: int
    placement_id: int
    spec: PlaceSpec
    demand: Demand
    key: int
    number: int
    deadline_s: float
    size_bytes: int
    queued_s: float = 0.0
    bypassed: int = 0

    @property
    def query(self) -> PlaceQuery:
        return PlaceQuery(self.demand, self.spec.excluded_workers)


@dataclass(slots=True, eq=False)
class _Pool:
    order: QueueOrder[Waiting]
    rate: DrainRate = field(default_factory=DrainRate)


@dataclass(slots=True)
class _Share:
    """What one tenant has waiting, over all versions."""

    count: int = 0
    size_bytes: int = 0


class FlowQueue:
    """Single writer: the task of the scheduler's service. Outcomes gather until ``take_outcomes``."""

    def __init__(
        self,
        fleet: FleetView,
        limits: QueueLimits,
        order: OrderPolicy,
        profile: PlacementProfile,
        rng: Random,
        *,
        new_order: Callable[[], QueueOrder[Waiting]] = ArrivalOrder,
        observer: QueueObserver | None = None,
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._order = order
        self._profile = profile
        self._rng = rng
        self._new_order = new_order
        self._observer = observer or Unobserved()
        self._pools: dict[str, _Pool] = {}
        self._waiting: dict[tuple[int, int], Waiting] = {}
        self._granted: dict[tuple[int, int], Grant] = {}
        self._forget: deque[tuple[float, tuple[int, int], Grant]] = deque()
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._tenants: dict[str, _Share] = {}
        self._dirty: dict[str, None] = {}
        self._outcomes: list[tuple[int, Outcome]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._waiting)

    # --- what gateways ask ------------------------------------------------------------------------

    def submit(
        self, session: int, placement_id: int, spec: PlaceSpec, arrival_unix_us: int, now_s: float
    ) -> None:
        """Queue a placement. It is tried in the next pass, also when its time to wait is zero."""
        if (session, placement_id) in self._waiting or (session, placement_id) in self._granted:
            error = InvalidInput("the placement id is in use on this stream", field="placement_id")
            self._refuse(session, placement_id, error)
            self._observer.ended(spec, error.reason, now_s, now_s, "")
            return
        size_bytes = _ENTRY_BYTES + len(spec.ticket) + sum(map(len, spec.excluded_workers))
        refusal = self._full(spec, size_bytes, now_s)
        if refusal is not None:
            self._refuse(session, placement_id, refusal)
            self._observer.ended(spec, refusal.reason, now_s, now_s, "")
            return
        self._numbers += 1
        predicted = self._limits.predicted_output_tokens
        item = Waiting(
            session=session,
            placement_id=placement_id,
            spec=spec,
            demand=demand_of(spec.prompt_tokens, spec.max_output_tokens, predicted),
            key=order_key(spec.priority, arrival_unix_us, self._order),
            number=self._numbers,
            deadline_s=now_s + spec.queue_ttl_s,
            size_bytes=size_bytes,
            queued_s=now_s,
        )
        self._waiting[session, placement_id] = item
        self._pool(spec.version_digest).order.add(item)
        share = self._tenants.setdefault(spec.tenant_id, _Share())
        share.count += 1
        share.size_bytes += size_bytes
        heapq.heappush(self._deadlines, (item.deadline_s, item.number, item))
        self._dirty[spec.version_digest] = None
        self._observer.entered(spec)

    def cancel(self, session: int, placement_id: int, now_s: float) -> None:
        """Withdraw a placement: queued, it is dropped; granted and not started, its room is given back."""
        item = self._waiting.get((session, placement_id))
        if item is not None:
            self._drop(item)
            self._observer.ended(item.spec, WITHDRAWN, item.queued_s, now_s, "")
            self._dirty[item.spec.version_digest] = None  # it may have held the others up
            return
        grant = self._granted.pop((session, placement_id), None)
        if grant is not None and self._fleet.give_back(grant):
            self._dirty[grant.version_digest] = None

    def withdraw_all(self, session: int, now_s: float) -> None:
        """A gateway went away: drop what it has queued. Grants it may have used lapse by themselves."""
        for key, item in list(self._waiting.items()):
            if key[0] == session:
                self._drop(item)
                self._observer.ended(item.spec, WITHDRAWN, item.queued_s, now_s, "")
                self._dirty[item.spec.version_digest] = None
        for key in [key for key in self._granted if key[0] == session]:
            del self._granted[key]

    # --- what the service drives ------------------------------------------------------------------

    def touch(self, digests: Iterable[str]) -> None:
        """The room of these versions changed: the next pass tries their queues."""
        for digest in digests:
            if digest in self._pools:
                self._dirty[digest] = None

    def run_pass(self, now_s: float) -> None:
        """Grant what fits, on the versions that changed since the last pass."""
        while self._dirty:
            digest = next(iter(self._dirty))
            del self._dirty[digest]
            self._pass(digest, now_s)

    def expire(self, now_s: float) -> None:
        """Refuse what waited for its whole time to live."""
        while self._forget and self._forget[0][0] <= now_s:
            _, key, grant = self._forget.popleft()
            if self._granted.get(key) is grant:
                del self._granted[key]
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, item = heapq.heappop(self._deadlines)
            if self._waiting.get((item.session, item.placement_id)) is item:
                error = self._timed_out(item, now_s)
                self._drop(item)
                self._observer.ended(item.spec, error.reason, item.queued_s, now_s, "")
                self._refuse(item.session, item.placement_id, error)
                self._dirty[item.spec.version_digest] = None

    def waiting_by_version(self) -> dict[str, list[Waiting]]:
        """Return what waits, by version, in the order in which it is tried."""
        return {digest: list(pool.order.in_order()) for digest, pool in self._pools.items()}

    def drain_s(self, digest: str, now_s: float) -> float | None:
        """Return how long what a version has queued takes to leave, None while no grants tell how fast."""
        pool = self._pools.get(digest)
        return None if pool is None else pool.rate.drain_s(len(pool.order), now_s)

    def next_deadline_s(self) -> float:
        """Return when ``expire`` may next have something to do; infinite when never."""
        while self._deadlines:
            deadline_s, _, item = self._deadlines[0]
            if self._waiting.get((item.session, item.placement_id)) is item:
                return deadline_s
            heapq.heappop(self._deadlines)
        return math.inf

    def take_outcomes(self) -> list[tuple[int, Outcome]]:
        """Return (session, outcome) of what ended since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry is in one index only or a share is miscounted."""
        queued = [item for pool in self._pools.values() for item in pool.order.in_order()]
        assert len(queued) == len(self._waiting) == sum(len(pool.order) for pool in self._pools.values())
        assert all(self._waiting[item.session, item.placement_id] is item for item in queued)
        assert not self._waiting.keys() & self._granted.keys(), "a placement waits and is granted"
        assert len(self._waiting) <= len(self._deadlines), "a placement has no deadline"
        for tenant, share in self._tenants.items():
            mine = [item for item in queued if item.spec.tenant_id == tenant]
            assert share.count == len(mine) > 0, "a tenant's share is miscounted"
            assert share.size_bytes == sum(item.size_bytes for item in mine)
        assert sum(share.count for share in self._tenants.values()) == len(queued)
        assert all(item.bypassed <= self._order.max_bypasses for item in queued), "bypassed too often"

    # --- the pass ---------------------------------------------------------------------------------

    def _pass(self, digest: str, now_s: float) -> None:
        pool = self._pools.get(digest)
        if pool is None:
            return
        blocked: list[Waiting] = []
        looked_past = 0
        room = self._room(digest)
        for item in pool.order.in_order():
            if not room.serving or looked_past >= self._order.lookahead:
                break
            found = self._try(item, digest, room)
            if isinstance(found, Chosen):
                taken = self._fleet.candidates(digest)[found.worker_id]
                self._grant(item, pool, found.worker_id, now_s)
                for passed in blocked:
                    # Room that it could not have had is not taken from it.
                    passed.bypassed += may_use(passed.query, taken)
                room = self._room(digest)
                if any(passed.bypassed >= self._order.max_bypasses for passed in blocked):
                    break
            elif found.never_fits:
                error = too_long(item.spec, self._fleet.candidates(digest).values())
                self._drop(item)
                self._observer.ended(item.spec, error.reason, item.queued_s, now_s, "")
                self._refuse(item.session, item.placement_id, error)
            else:
                looked_past += 1
                if found.waits_for_room:
                    blocked.append(item)
                    if item.bypassed >= self._order.max_bypasses:
                        break
        if not len(pool.order):
            self._pools.pop(digest, None)

    def _try(self, item: Waiting, digest: str, room: RoomSummary) -> Chosen | NoWorker:
        if not item.spec.excluded_workers and room.is_short_for(item.demand):
            return NO_ROOM
        return choose(item.query, self._fleet.candidates(digest).values(), self._profile, self._rng)

    def _room(self, digest: str) -> RoomSummary:
        return room_of(self._fleet.candidates(digest).values())

    def _grant(self, item: Waiting, pool: _Pool, worker_id: str, now_s: float) -> None:
        spec = item.spec
        grant = self._fleet.issue(
            worker_id, spec.version_digest, item.demand, route_revision=spec.route_revision, now_s=now_s
        )
        self._drop(item)
        self._observer.ended(spec, GRANTED, item.queued_s, now_s, worker_id)
        key = item.session, item.placement_id
        self._granted[key] = grant
        hold_s = self._fleet.limits.grant_ttl_s + self._fleet.limits.transit_margin_s
        self._forget.append((now_s + hold_s, key, grant))
        self._outcomes.append((item.session, Granted(item.placement_id, grant)))
        pool.rate.note(now_s)

    # --- inside -----------------------------------------------------------------------------------

    def _pool(self, digest: str) -> _Pool:
        pool = self._pools.get(digest)
        if pool is None:
            pool = self._pools[digest] = _Pool(self._new_order())
        return pool

    def _drop(self, item: Waiting) -> None:
        """Take the placement out of the queue. Its pool goes with the next pass over it."""
        del self._waiting[item.session, item.placement_id]
        self._pools[item.spec.version_digest].order.discard(item)
        self._observer.left(item.spec)
        share = self._tenants[item.spec.tenant_id]
        share.count -= 1
        share.size_bytes -= item.size_bytes
        if not share.count:
            del self._tenants[item.spec.tenant_id]
        if len(self._deadlines) > 64 + 2 * len(self._waiting):  # most are of placements that ended
            self._deadlines = [(found.deadline_s, found.number, found) for found in self._waiting.values()]
            heapq.heapify(self._deadlines)

    def _refuse(self, session: int, placement_id: int, error: FairwayError) -> None:
        self._outcomes.append((session, Refused(placement_id, error)))

    def _full(self, spec: PlaceSpec, size_bytes: int, now_s: float) -> QueueFull | None:
        """Why the placement may not wait, after a pass made what room it can."""
        refusal = self._over_limit(spec, size_bytes, now_s)
        if refusal is not None and self._dirty:
            self.run_pass(now_s)
            refusal = self._over_limit(spec, size_bytes, now_s)
        return refusal

    def _over_limit(self, spec: PlaceSpec, size_bytes: int, now_s: float) -> QueueFull | None:
        pool = self._pools.get(spec.version_digest)
        share = self._tenants.get(spec.tenant_id, _Share())
        queued = 0 if pool is None else len(pool.order)
        limits = self._limits
        if queued >= limits.max_per_pool or len(self._waiting) >= limits.max_total:
            what = f"{queued} placements for {spec.model}"
        elif share.count >= limits.max_per_tenant:
            what = f"{share.count} placements of the tenant"
        elif share.size_bytes + size_bytes > limits.max_bytes_per_tenant:
            what = f"{share.size_bytes} bytes of the tenant's placements"
        else:
            return None
        return queue_full(what, model=spec.model, retry_after_s=self._wait_s(spec.version_digest, now_s))

    def _timed_out(self, item: Waiting, now_s: float) -> FairwayError:
        digest = item.spec.version_digest
        found = choose(item.query, self._fleet.candidates(digest).values(), self._profile, self._rng)
        queued = len(self._pools[digest].order)
        return timed_out(item.spec, found, queued=queued, retry_after_s=self._wait_s(digest, now_s))

    def _wait_s(self, digest: str, now_s: float) -> float:
        pool = self._pools.get(digest)
        return MIN_WAIT_S if pool is None else pool.rate.wait_s(len(pool.order), now_s)
