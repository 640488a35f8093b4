"""Flow queue: the waiting placements, one queue per model version, and the pass that grants them.

Ownership: from ``submit`` to its outcome the queue owns a placement, under (gateway session, placement id).
``submit`` ends in exactly one of a ``Granted``, a ``PlacementRefused``, or a withdrawal by its gateway,
which gets no outcome. A grant is stored until it was returned or has expired, so that a cancellation that
crosses it returns the room.

Only changed versions are processed: a pass tries a version's queue in order, skips a bounded number of
placements without room, and ends as soon as the remaining room is too small for any placement.
``policy/queue/fair_order`` selects the next placement, ``walk`` limits overtaking, and ``service_ledger``
counts the service of tenants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random
from typing import Final

from msgspec import structs

from services.core.errors import FairwayError, InvalidInput, QueueFull, ShareExceeded
from services.core.fleet import Granted, Outcome, PlacementRefused, ReportSnapshot, TenantCounter
from services.core.generation import Grant, PlaceSpec
from services.scheduler.fleet.view import FleetView
from services.scheduler.policy.output_quantile import OutputPolicy
from services.scheduler.policy.overload.drain_rate import MIN_WAIT_S, DrainRate
from services.scheduler.policy.placement.candidate import PlaceQuery
from services.scheduler.policy.placement.choose import NO_ROOM, Chosen, NoWorker, PlacementProfile, Rejections
from services.scheduler.policy.placement.kv_admission import demand_of
from services.scheduler.policy.placement.room import RoomSummary
from services.scheduler.policy.queue.fair_order import FairOrder
from services.scheduler.policy.queue.length import is_long, within_long_share
from services.scheduler.policy.queue.order import (
    MICROSECONDS,
    NO_DEADLINE_S,
    ArrivalOrder,
    OrderPolicy,
    QueueOrder,
    order_key,
)
from services.scheduler.queue.index import Deadlines, TenantShares
from services.scheduler.queue.pool import Pool, QueueLimits, size_bytes_of
from services.scheduler.queue.refusals import queue_full, share_full, timed_out, too_long
from services.scheduler.queue.service_ledger import LedgerPolicy, ServiceLedger
from services.scheduler.queue.waiting import (
    DecisionObserver,
    OpenGate,
    QueuedPlacement,
    QueueGate,
    Undecided,
)
from services.scheduler.queue.walk import QueueWalk
from services.scheduler.telemetry import GRANTED, WITHDRAWN, QueueObserver, Unobserved

_MAX_RECLAIMED: Final = 4096
_LOOKS_FOR_SLOTS: Final = 4
_NO_DEADLINE_US: Final = round(NO_DEADLINE_S * MICROSECONDS)


class FlowQueue:
    """Single writer: the task of the scheduler's service. Outcomes accumulate until ``take_outcomes``.

    ``gate`` decides which placements may wait. ``observer`` receives the end of each placement, ``decisions``
    each attempt. The writer calls all of them.
    """

    def __init__(
        self,
        fleet: FleetView,
        limits: QueueLimits,
        order: OrderPolicy,
        profile: PlacementProfile,
        rng: Random,
        *,
        observer: QueueObserver | None = None,
        gate: QueueGate | None = None,
        decisions: DecisionObserver | None = None,
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._order = order
        self._profile = profile
        self._rng = rng
        self._observer = observer if observer is not None else Unobserved()
        self._gate = gate if gate is not None else OpenGate()
        self._decisions = decisions if decisions is not None else Undecided()
        self._pools: dict[str, Pool] = {}
        self._waiting: dict[tuple[int, int], QueuedPlacement] = {}
        self._granted: dict[tuple[int, int], Grant] = {}
        self._forget: deque[tuple[float, tuple[int, int], Grant]] = deque()
        self._deadlines = Deadlines()
        self._tenants = TenantShares()
        self._dirty: dict[str, None] = {}
        self._outcomes: list[tuple[int, Outcome]] = []
        self._numbers = 0
        # Placements granted the slot of another tenant, newest last.
        self._reclaimed: dict[tuple[str, int], None] = {}
        # Offset of the arrival clock from the monotonic clock, as far as arrivals show it.
        self._ahead_us = -math.inf
        self._hold_s = fleet.limits.grant_ttl_s + fleet.limits.transit_margin_s
        outputs = OutputPolicy(
            quantile=limits.output_quantile,
            default_tokens=limits.predicted_output_tokens,
            min_samples=limits.output_samples,
        )
        self.ledger = ServiceLedger(LedgerPolicy(limits.weights, outputs, hold_s=self._hold_s))

    def __len__(self) -> int:
        return len(self._waiting)

    # --- calls from gateways ----------------------------------------------------------------------

    def submit(
        self,
        session: int,
        placement_id: int,
        spec: PlaceSpec,
        arrival_unix_us: int,
        now_s: float,
        *,
        zone: str = "",
    ) -> None:
        """Queue a placement. The next pass tries it, even when its queue time is zero. ``zone`` is its
        gateway's."""
        error: FairwayError | None
        if (session, placement_id) in self._waiting or (session, placement_id) in self._granted:
            error = InvalidInput("the placement id is in use on this stream", field="placement_id")
        else:
            self._ahead_us = max(self._ahead_us, arrival_unix_us - now_s * MICROSECONDS)
            self.ledger.submitted(spec)
            item = self._item(session, placement_id, spec, arrival_unix_us, now_s, zone=zone)
            error = self._full(item, now_s) or self._gate.admit(spec, item.predicted_tokens, now_s)
            if error is None:
                self._add(item, now_s)
                return
        self._refuse(session, placement_id, error)
        self._observer.ended(spec, error.reason, now_s, now_s, "")

    def cancel(self, session: int, placement_id: int, now_s: float) -> None:
        """Withdraw a placement: a queued one is dropped; the room of a granted one that has not started is
        returned."""
        item = self._waiting.get((session, placement_id))
        if item is not None:
            self._withdraw(item, now_s)
            return
        grant = self._granted.pop((session, placement_id), None)
        if grant is not None and self._fleet.give_back(grant):
            self.ledger.returned(grant)
            self._dirty[grant.version_digest] = None

    def withdraw_all(self, session: int, now_s: float) -> None:
        """Drop all queued placements of a disconnected gateway. Grants that it may have used expire by
        themselves."""
        for key, item in list(self._waiting.items()):
            if key[0] == session:
                self._withdraw(item, now_s)
        for key in [key for key in self._granted if key[0] == session]:
            del self._granted[key]

    def evict(self, item: QueuedPlacement, error: FairwayError, now_s: float) -> None:
        """Refuse a waiting placement. The next pass tries the placements behind it."""
        self._end(item, error, now_s)
        self._dirty[item.spec.version_digest] = None

    # --- calls from the service -------------------------------------------------------------------

    def touch(self, digests: Iterable[str]) -> None:
        """Mark versions whose room changed: the next pass tries their queues."""
        for digest in digests:
            if digest in self._pools:
                self._dirty[digest] = None

    def reported(self, snapshot: ReportSnapshot) -> tuple[TenantCounter, ...]:
        """Charge the service in a worker's report; return the counters that the worker is to store."""
        return self.ledger.report(snapshot)

    def run_pass(self, now_s: float) -> None:
        """Grant what fits, on the versions that changed since the last pass."""
        while self._dirty:
            digest = next(iter(self._dirty))
            del self._dirty[digest]
            self._pass(digest, now_s)

    def expire(self, now_s: float) -> None:
        """Refuse placements whose queue time has ended."""
        self.ledger.expire(now_s)
        while self._forget and self._forget[0][0] <= now_s:
            _, key, grant = self._forget.popleft()
            if self._granted.get(key) is grant:
                del self._granted[key]
        while (item := self._deadlines.pop_due(now_s, self._waiting)) is not None:
            self.evict(item, self._timed_out(item, now_s), now_s)

    def waiting_by_version(self) -> dict[str, list[QueuedPlacement]]:
        """Return the waiting placements by version, in approximate order of the pass."""
        return {digest: list(pool.order.items()) for digest, pool in self._pools.items()}

    def waiting_for(self, digest: str) -> Iterator[QueuedPlacement]:
        """Yield the waiting placements of a version. None may enter or leave meanwhile."""
        pool = self._pools.get(digest)
        if pool is not None:
            yield from pool.order.items()

    def drain_s(self, digest: str, now_s: float) -> float | None:
        """Return how long the version's queue takes to drain, None without recent grants."""
        pool = self._pools.get(digest)
        return None if pool is None else pool.rate.drain_s(len(pool.order), now_s)

    def next_deadline_s(self) -> float:
        """Return when ``expire`` next has work; infinite when it has none."""
        return self._deadlines.next_s(self._waiting)

    def take_outcomes(self) -> list[tuple[int, Outcome]]:
        """Return (session, outcome) of the placements that ended since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry is in one index only or a share is miscounted."""
        queued = [item for pool in self._pools.values() for item in pool.order.items()]
        assert len(queued) == len(self._waiting) == sum(len(pool.order) for pool in self._pools.values())
        assert all(self._waiting[item.session, item.placement_id] is item for item in queued)
        assert not self._waiting.keys() & self._granted.keys(), "a placement waits and is granted"
        assert len(self._waiting) <= len(self._deadlines), "a placement has no deadline"
        self._tenants.check_integrity(queued)
        assert all(item.bypassed <= self._order.max_bypasses for item in queued), "bypassed too often"
        for pool in self._pools.values():
            pool.check_integrity()
        self.ledger.check_integrity()

    # --- the pass ---------------------------------------------------------------------------------

    def _pass(self, digest: str, now_s: float) -> None:
        pool = self._pools.get(digest)
        if pool is None:
            return
        room = self._room(digest)
        if not room.serving:
            self._report_unserved(pool, digest, now_s)
        sharing = self._fleet.shared.any_in(digest)
        walk = QueueWalk(pool.earmarks, self._fleet.candidates(digest), self._order)
        for item in pool.order.in_order(self._unix_us(now_s)):
            if not room.serving or walk.skipped >= self._order.lookahead:
                break
            if pool.is_hopeless(room, sharing=sharing):
                break
            if not item.tried:
                item.tried = True
                pool.fresh -= 1
            value = item.counter = pool.order.value(item)
            query = walk.query(item, value)
            restricted = query is not item.query
            over_share = self.ledger.over_share(digest, item.priority, item.tenant)
            if over_share:
                query = structs.replace(query, over_share=True)
            found = self._try(item, query, digest, room)
            if found is NO_ROOM:
                item.short_attempts += 1
            if found is not NO_ROOM or item.short_attempts == 1:
                self._decisions.decided(item, found, over_share=over_share)
            if isinstance(found, Chosen):
                self._grant(item, pool, found, now_s)
                walk.granted(found.worker_id)
                room = self._room(digest)
            elif found.never_fits and not restricted:
                self._end(item, too_long(item.spec, self._fleet.candidates(digest).values()), now_s)
            else:
                walk.pass_by(item, found, value, restricted=restricted)
        if self._fleet.any_yields(digest):
            self._take_slots(pool, digest, walk, now_s)
        if not len(pool.order):
            self._pools.pop(digest, None)

    def _take_slots(self, pool: Pool, digest: str, walk: QueueWalk, now_s: float) -> None:
        """Where no slot is free, grant tenants below their share slots that other tenants hold.

        A placement is granted such a slot once: if its worker refuses, it waits for a free one.
        """
        most = self._order.lookahead * _LOOKS_FOR_SLOTS  # a tenant within its share costs almost nothing
        for item in islice(pool.order.in_order(self._unix_us(now_s)), most):
            spec = item.spec
            key = spec.request_id, spec.choice
            if key in self._reclaimed or not self.ledger.is_below_share(digest, item.tenant, item.weight):
                continue
            query = walk.query(item, pool.order.value(item))
            found = self._fleet.choose_yielding(digest, query, item.priority.rank, self._profile, self._rng)
            if isinstance(found, Chosen):
                self._reclaimed[key] = None
                if len(self._reclaimed) > _MAX_RECLAIMED:
                    del self._reclaimed[next(iter(self._reclaimed))]
                self._grant(item, pool, found, now_s)

    def _try(
        self, item: QueuedPlacement, query: PlaceQuery, digest: str, room: RoomSummary
    ) -> Chosen | NoWorker:
        if not query.excluded_workers and room.is_short_for(item.demand):
            shared_tokens = self._fleet.shareable_tokens(digest, query)
            if not shared_tokens or room.is_short_for(item.demand, shared_tokens=shared_tokens):
                return NO_ROOM
        if is_long(item.demand.prompt_tokens) and not self._within_long_share(item, digest):
            return self._long_share_taken(digest)
        return self._fleet.choose(digest, query, self._profile, self._rng)

    def _report_unserved(self, pool: Pool, digest: str, now_s: float) -> None:
        """Record why no worker serves the version, for the placements that would be tried first; none is
        tried."""
        for item in islice(pool.order.in_order(self._unix_us(now_s)), self._order.lookahead):
            query = PlaceQuery(item.demand, item.spec.excluded_workers)  # cached blocks do not matter
            found = self._fleet.choose(digest, query, self._profile, self._rng)
            self._decisions.decided(item, found)

    def _within_long_share(self, item: QueuedPlacement, digest: str) -> bool:
        held = self.ledger.long_tokens(digest, item.tenant)
        if not held:
            return True
        demand, pool_tokens = item.demand, self._room(digest).pool_tokens
        return within_long_share(
            demand.prompt_tokens, demand.reserved_tokens, held, pool_tokens, self._limits.length
        )

    def _long_share_taken(self, digest: str) -> NoWorker:
        """Return a refusal by every worker: the placement waits for its own tenant, and others do not wait
        for it."""
        count = len(self._fleet.candidates(digest))
        rejections = Rejections(((within_long_share.__name__, count),))
        return NoWorker(rejections, never_fits=False, waits_for_room=False)

    def _room(self, digest: str) -> RoomSummary:
        return self._fleet.room(digest)

    def _grant(self, item: QueuedPlacement, pool: Pool, chosen: Chosen, now_s: float) -> None:
        """Issue the grant, charge it in advance, and remove the placement from the queue."""
        spec, demand = item.spec, item.demand
        grant = self._fleet.issue(
            chosen, item.query, digest=spec.version_digest, route_revision=spec.route_revision, now_s=now_s
        )
        cost_tokens = self.ledger.cost(
            demand.prompt_tokens, item.predicted_tokens, chosen.offer.cached_tokens
        )
        if self._order.kind == "fair":
            self.ledger.granted(
                grant, spec, predicted_tokens=item.predicted_tokens, cost_tokens=cost_tokens, now_s=now_s
            )
        pool.order.granted(item, cost_tokens)
        self._drop(item, now_s)
        self._observer.ended(spec, GRANTED, item.queued_s, now_s, chosen.worker_id)
        key = item.session, item.placement_id
        self._granted[key] = grant
        self._forget.append((now_s + self._hold_s, key, grant))
        self._outcomes.append((item.session, Granted(item.placement_id, grant)))
        pool.rate.note(now_s)

    # --- inside -----------------------------------------------------------------------------------

    def _item(
        self, session: int, placement_id: int, spec: PlaceSpec, arrival_us: int, now_s: float, *, zone: str
    ) -> QueuedPlacement:
        self._numbers += 1
        predicted = self.ledger.outputs.predict(spec.tenant_id, spec.version_digest)
        demand = demand_of(spec.prompt_tokens, spec.max_output_tokens, predicted)
        left_s = spec.deadline_left_s
        due_us = self._unix_us(now_s + left_s) if left_s is not None else arrival_us + _NO_DEADLINE_US
        return QueuedPlacement(
            session=session,
            placement_id=placement_id,
            spec=spec,
            demand=demand,
            key=order_key(spec.priority, arrival_us, self._order),
            number=self._numbers,
            deadline_s=now_s + spec.queue_ttl_s,
            size_bytes=size_bytes_of(spec),
            query=PlaceQuery(
                demand, spec.excluded_workers, spec.prefix_hashes, zone, ttft_target_s=spec.ttft_target_s
            ),
            arrival_us=arrival_us,
            due_us=due_us,
            queued_s=now_s,
        )

    def _unix_us(self, now_s: float) -> int:
        """Return the present time by the clock of the arrivals, as far as arrivals show it."""
        return round(now_s * MICROSECONDS + self._ahead_us)

    def _add(self, item: QueuedPlacement, now_s: float) -> None:
        spec = item.spec
        self._waiting[item.session, item.placement_id] = item
        pool = self._pool(spec.version_digest)
        pool.order.add(item)
        pool.count(item, 1)
        self._tenants.add(item)
        self._deadlines.add(item)
        self._dirty[spec.version_digest] = None
        self._observer.entered(spec)
        self._gate.entered(item, now_s)

    def _pool(self, digest: str) -> Pool:
        pool = self._pools.get(digest)
        if pool is None or not len(pool.order):
            order: QueueOrder[QueuedPlacement] = ArrivalOrder()
            if self._order.kind == "fair":
                order = FairOrder(self._order, self.ledger.shares(digest))
            pool = self._pools[digest] = Pool(order, DrainRate() if pool is None else pool.rate)
        return pool

    def _withdraw(self, item: QueuedPlacement, now_s: float) -> None:
        self._drop(item, now_s)
        self._observer.ended(item.spec, WITHDRAWN, item.queued_s, now_s, "")
        self._dirty[item.spec.version_digest] = None  # it may have blocked others

    def _end(self, item: QueuedPlacement, error: FairwayError, now_s: float) -> None:
        self._drop(item, now_s)
        self._observer.ended(item.spec, error.reason, item.queued_s, now_s, "")
        self._refuse(item.session, item.placement_id, error)

    def _drop(self, item: QueuedPlacement, now_s: float) -> None:
        """Remove the placement from the queue. The next pass removes an empty pool."""
        del self._waiting[item.session, item.placement_id]
        pool = self._pools[item.spec.version_digest]
        pool.order.discard(item)
        pool.count(item, -1)
        pool.earmarks.release(item)
        self._observer.left(item.spec)
        self._gate.left(item, now_s)
        self._tenants.remove(item)
        self._deadlines.tidy(self._waiting)

    def _refuse(self, session: int, placement_id: int, error: FairwayError) -> None:
        self._outcomes.append((session, PlacementRefused(placement_id, error)))

    def _full(self, item: QueuedPlacement, now_s: float) -> QueueFull | ShareExceeded | None:
        """Return why the placement may not wait, after a pass has used the room there is."""
        refusal = self._over_limit(item.spec, item.size_bytes, now_s)
        if refusal is not None and self._dirty:
            self.run_pass(now_s)
            refusal = self._over_limit(item.spec, item.size_bytes, now_s)
        # For a limit of one tenant, only a placement of the same tenant is evicted.
        own = isinstance(refusal, ShareExceeded)
        if refusal is not None and (found := self._gate.displaced(item.spec, now_s, own=own)) is not None:
            victim, error = found
            self.evict(victim, refusal if own else error, now_s)
            refusal = self._over_limit(item.spec, item.size_bytes, now_s)
        return refusal

    def _over_limit(self, spec: PlaceSpec, size_bytes: int, now_s: float) -> QueueFull | ShareExceeded | None:
        """Return the refusal by the first exceeded limit. The tenant's own limits come first."""
        pool = self._pools.get(spec.version_digest)
        share = self._tenants.of(spec.tenant_id)
        queued = 0 if pool is None else len(pool.order)
        limits = self._limits
        if share.count >= limits.max_per_tenant:
            what, most = f"{share.count} placements", limits.max_per_tenant
        elif share.size_bytes + size_bytes > limits.max_bytes_per_tenant:
            what, most = f"{share.size_bytes} bytes of placements", limits.max_bytes_per_tenant
        elif self._is_crowded(spec.version_digest):
            what, most = f"{queued} placements for {spec.model}", 0
        else:
            return None
        later_s = self._wait_s(spec.version_digest, now_s)
        if most:
            return share_full(what, most, model=spec.model, retry_after_s=later_s)
        return queue_full(what, model=spec.model, retry_after_s=later_s)

    def _is_crowded(self, digest: str) -> bool:
        """Whether too many placements wait, for the version or in total."""
        pool = self._pools.get(digest)
        queued = 0 if pool is None else len(pool.order)
        return queued >= self._limits.max_per_pool or len(self._waiting) >= self._limits.max_total

    def _timed_out(self, item: QueuedPlacement, now_s: float) -> FairwayError:
        digest = item.spec.version_digest
        found = self._fleet.choose(digest, item.query, self._profile, self._rng)
        queued = len(self._pools[digest].order)
        return timed_out(item.spec, found, queued=queued, retry_after_s=self._wait_s(digest, now_s))

    def _wait_s(self, digest: str, now_s: float) -> float:
        pool = self._pools.get(digest)
        return MIN_WAIT_S if pool is None else pool.rate.wait_s(len(pool.order), now_s)
