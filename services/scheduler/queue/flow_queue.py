"""Flow queue: the waiting placements, one queue per model version, and the pass that grants them.

Ownership: from ``submit`` to its outcome the queue owns a placement, under (gateway session, placement id).
``submit`` ends in exactly one of a ``Granted``, a ``PlacementRefused``, or a withdrawal by its gateway,
which gets no outcome. A grant is stored until it was returned or has expired, so that a cancellation that
crosses it returns the room.

Only changed versions are processed: a pass tries a version's queue in order, skips a bounded number of
placements without room, and ends as soon as the remaining room is too small for any placement.
``policy/queue/fair_order`` selects the next placement, ``rules`` restrict it, ``GrantPass`` applies both,
``index`` holds what waits, and ``service_ledger`` counts the service of tenants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Final

from services.core.errors import FairwayError, InvalidInput, IsolationUnavailable, QueueFull, ShareExceeded
from services.core.fleet import Granted, Outcome, PlacementRefused, ReportSnapshot, TenantCounter
from services.core.generation import Grant, PlaceSpec
from services.core.output_quantile import OutputPolicy
from services.core.records import Priority
from services.scheduler.fleet.view import FleetView
from services.scheduler.policy.placement.candidate import (
    PlaceQuery,
    RoomSummary,
    demand_of,
    within_kv_budget,
)
from services.scheduler.policy.placement.choose import NO_ROOM, Chosen, NoWorker, PlacementProfile
from services.scheduler.policy.queue.fair_order import (
    MICROSECONDS,
    NO_DEADLINE_S,
    OrderPolicy,
)
from services.scheduler.policy.queue.length import LengthPolicy
from services.scheduler.queue.index import Pool, QueueIndex, QueueLimits, size_bytes_of
from services.scheduler.queue.refusals import beyond_kv_budget, full_of, timed_out, too_long
from services.scheduler.queue.rules import PRODUCTION, PassContext, QueueDiscipline, QueueRule
from services.scheduler.queue.service_ledger import LedgerPolicy, ServiceLedger
from services.scheduler.queue.waiting import (
    GRANTED,
    UNSETTLED,
    WITHDRAWN,
    DecisionObserver,
    OpenGate,
    QueuedPlacement,
    QueueGate,
    QueueObserver,
    Undecided,
    Unobserved,
)

_NO_DEADLINE_US: Final = round(NO_DEADLINE_S * MICROSECONDS)
Tried = tuple[QueuedPlacement, Chosen | FairwayError]

_MAX_RECLAIMED: Final = 4096
_LOOKS_FOR_SLOTS: Final = 4


class GrantPass:
    """Finds what fits. It changes no queue: the caller grants or refuses what ``run`` yields."""

    def __init__(
        self,
        fleet: FleetView,
        ledger: ServiceLedger,
        discipline: QueueDiscipline,
        order: OrderPolicy,
        length: LengthPolicy,
        profile: PlacementProfile,
        rng: Random,
        decisions: DecisionObserver,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._discipline = discipline
        self._order = order
        self._length = length
        self._profile = profile
        self._rng = rng
        self._decisions = decisions
        # Placements granted the slot of another tenant, newest last.
        self._reclaimed: dict[tuple[str, int], None] = {}

    def run_together(self, pools: Mapping[str, Pool], now_us: int) -> Iterator[Tried]:
        """As ``run``, over the queues of versions that share engines.

        The queue whose next placement has the highest class is tried, and of these the one that arrived
        first, so that no version takes all the room of what they share.
        """
        passes = {digest: self.run(pool, digest, now_us) for digest, pool in pools.items()}
        while passes:
            digest = next(iter(passes))
            if len(passes) > 1:
                digest = min(passes, key=lambda each: _turn(pools[each], now_us))
            tried = next(passes[digest], None)
            if tried is None:
                del passes[digest]
            else:
                yield tried

    def run(self, pool: Pool, digest: str, now_us: int) -> Iterator[Tried]:
        """Yield each placement that has room, and each that no worker can ever hold. The caller removes it
        from the pool before it continues."""
        fleet = self._fleet
        room, yields = fleet.room(digest), fleet.any_yields(digest)
        if not room.serving:
            self._report_unserved(pool, digest, now_us)
        elif not yields and pool.is_hopeless(room, sharing=fleet.any_shared(digest)):
            return  # the usual case of a full pool
        rules = self._rules(pool, digest, room)
        if room.serving:
            yield from self._in_order(pool, digest, rules, now_us)
        if yields:
            yield from self._in_slots_of_others(pool, digest, rules, now_us)

    def choose(self, digest: str, query: PlaceQuery) -> Chosen | NoWorker:
        """Return the best worker, whatever waits before the query."""
        return self._fleet.choose(digest, query, self._profile, self._rng)

    def _rules(self, pool: Pool, digest: str, room: RoomSummary) -> Sequence[QueueRule]:
        context = PassContext(
            digest,
            self._fleet.candidates(digest),
            room.pool_tokens,
            pool.earmarks,
            self._ledger,
            self._order,
            self._length,
        )
        return [rule(context) for rule in self._discipline.rules]

    def _in_order(self, pool: Pool, digest: str, rules: Sequence[QueueRule], now_us: int) -> Iterator[Tried]:
        fleet, skipped = self._fleet, 0
        room, sharing = fleet.room(digest), fleet.any_shared(digest)
        for item in pool.order.in_order(now_us):
            if not room.serving or skipped >= self._order.lookahead:
                return
            if pool.is_hopeless(room, sharing=sharing):
                return
            if not item.tried:
                item.tried = True
                pool.fresh -= 1
            item.counter = pool.order.value(item)
            query = _restricted(item, rules)
            found = query if isinstance(query, NoWorker) else self._try(item, query, digest, room)
            self._report(item, query, found)
            if isinstance(found, Chosen):
                yield item, found
                for rule in rules:
                    rule.granted(found.worker_id)
                room = fleet.room(digest)
                continue
            restricted = (
                isinstance(query, PlaceQuery) and query.excluded_workers is not item.query.excluded_workers
            )
            if found.never_fits and not restricted:
                yield item, too_long(item.spec, fleet.candidates(digest).values())
                continue
            skipped += 1
            if (
                found.waits_for_room or restricted
            ) and not item.over_budget:  # others could take the room that it waits for
                for rule in rules:
                    rule.skipped(item)

    def _in_slots_of_others(
        self, pool: Pool, digest: str, rules: Sequence[QueueRule], now_us: int
    ) -> Iterator[Tried]:
        """Where no slot is free, yield placements for slots that other tenants hold.

        A placement gets such a slot once: if its worker refuses, it waits for a free one.
        """
        most = self._order.lookahead * _LOOKS_FOR_SLOTS  # most tenants cost one lookup
        for item in islice(pool.order.in_order(now_us), most):
            key = item.spec.request_id, item.spec.choice
            if key in self._reclaimed or not any(rule.may_take_slot(item) for rule in rules):
                continue
            item.counter = pool.order.value(item)
            query = _restricted(item, rules)
            if isinstance(query, NoWorker):
                continue
            rank = item.priority.rank
            found = self._fleet.choose_yielding(digest, query, rank, self._profile, self._rng)
            if isinstance(found, Chosen):
                self._reclaimed[key] = None
                if len(self._reclaimed) > _MAX_RECLAIMED:
                    del self._reclaimed[next(iter(self._reclaimed))]
                yield item, found

    def _try(
        self, item: QueuedPlacement, query: PlaceQuery, digest: str, room: RoomSummary
    ) -> Chosen | NoWorker:
        if not query.excluded_workers and room.is_short_for(item.demand):
            shared_tokens = self._fleet.shareable_tokens(query)
            if not shared_tokens or room.is_short_for(item.demand, shared_tokens=shared_tokens):
                return NO_ROOM
        return self.choose(digest, query)

    def _report(self, item: QueuedPlacement, query: PlaceQuery | NoWorker, found: Chosen | NoWorker) -> None:
        if found is NO_ROOM:
            item.short_attempts += 1
        if found is not NO_ROOM or item.short_attempts == 1:
            over_share = isinstance(query, PlaceQuery) and query.over_share
            self._decisions.decided(item, found, over_share=over_share)

    def _report_unserved(self, pool: Pool, digest: str, now_us: int) -> None:
        """Record why no worker serves the version, for the placements that would be tried first."""
        for item in islice(pool.order.in_order(now_us), self._order.lookahead):
            query = PlaceQuery(  # cached blocks do not matter
                item.demand, item.spec.excluded_workers, node_group=item.spec.node_group
            )
            self._decisions.decided(item, self.choose(digest, query))


def _turn(pool: Pool, now_us: int) -> tuple[int, int]:
    """Return the sort key of a queue among those that it takes turns with, which is its next placement's."""
    first = next(pool.order.in_order(now_us), None)
    return (0, 0) if first is None else (-first.priority.rank, first.arrival_us)


def _restricted(item: QueuedPlacement, rules: Sequence[QueueRule]) -> PlaceQuery | NoWorker:
    query = item.query
    for rule in rules:
        found = rule.restrict(item, query)
        if isinstance(found, NoWorker):
            return found
        query = found
    return query


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
        discipline: QueueDiscipline = PRODUCTION,
        observer: QueueObserver | None = None,
        gate: QueueGate | None = None,
        decisions: DecisionObserver | None = None,
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._order = order
        self._observer = observer if observer is not None else Unobserved()
        self._gate = gate if gate is not None else OpenGate()
        self._granted: dict[tuple[int, int], Grant] = {}
        self._forget: deque[tuple[float, tuple[int, int], Grant]] = deque()
        self._dirty: dict[str, None] = {}
        self._outcomes: list[tuple[int, Outcome]] = []
        self._numbers = 0
        # Offset of the arrival clock from the monotonic clock, as far as arrivals show it.
        self._ahead_us = -math.inf
        self._hold_s = fleet.limits.grant_ttl_s + fleet.limits.transit_margin_s
        outputs = OutputPolicy(
            quantile=limits.output_quantile,
            default_tokens=limits.predicted_output_tokens,
            min_samples=limits.output_samples,
        )
        self.ledger = ServiceLedger(LedgerPolicy(limits.weights, outputs, hold_s=self._hold_s))
        self.waiting = QueueIndex(limits, order, discipline, self.ledger, self._gate.wait_s)
        self._pass = GrantPass(
            fleet,
            self.ledger,
            discipline,
            order,
            limits.length,
            profile,
            rng,
            decisions if decisions is not None else Undecided(),
        )

    def __len__(self) -> int:
        return len(self.waiting)

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
        if (session, placement_id) in self.waiting or (session, placement_id) in self._granted:
            error = InvalidInput("the placement id is in use on this stream", field="placement_id")
        else:
            self._ahead_us = max(self._ahead_us, arrival_unix_us - now_s * MICROSECONDS)
            self.ledger.submitted(spec)
            item = self._item(session, placement_id, spec, arrival_unix_us, now_s, zone=zone)
            error = (
                self._isolated(spec, now_s)
                or self._beyond_budget(item)
                or self._full(item, now_s)
                or self._barred(item, now_s)
            )
            if error is None:
                self._add(item, now_s)
                return
        self._refuse(session, placement_id, error)
        self._observer.ended(spec, error.reason, now_s, now_s, "")

    def cancel(self, session: int, placement_id: int, now_s: float) -> None:
        """Withdraw a placement: a queued one is dropped; the room of a granted one that has not started is
        returned."""
        item = self.waiting.get((session, placement_id))
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
        for item in self.waiting.of_session(session):
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
            if self.waiting.pool(digest) is not None:
                self._dirty[digest] = None

    def reported(self, snapshot: ReportSnapshot) -> tuple[TenantCounter, ...]:
        """Charge the service in a worker's report; return the counters that the worker is to store."""
        return self.ledger.report(snapshot)

    def run_pass(self, now_s: float) -> None:
        """Grant what fits, on the versions that changed since the last pass.

        Versions that share an engine take turns.
        """
        while self._dirty:
            pools: dict[str, Pool] = {}
            for digest in self._fleet.sharing(next(iter(self._dirty))):
                self._dirty.pop(digest, None)
                if (pool := self.waiting.pool(digest)) is not None:
                    pools[digest] = pool
            for item, found in self._pass.run_together(pools, self._unix_us(now_s)):
                if isinstance(found, Chosen):
                    self._grant(item, pools[item.spec.version_digest], found, now_s)
                else:
                    self._end(item, found, now_s)
            for digest in pools:
                self.waiting.drop_empty(digest)

    def expire(self, now_s: float) -> None:
        """Refuse placements whose queue time has ended."""
        self.ledger.expire(now_s)
        while self._forget and self._forget[0][0] <= now_s:
            _, key, grant = self._forget.popleft()
            if self._granted.get(key) is grant:
                del self._granted[key]
        while (item := self.waiting.pop_due(now_s)) is not None:
            self.evict(item, self._timed_out(item, now_s), now_s)

    def take_outcomes(self) -> list[tuple[int, Outcome]]:
        """Return (session, outcome) of the placements that ended since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry is in one index only or a share is miscounted."""
        self.waiting.check_integrity()
        assert not any(key in self.waiting for key in self._granted), "a placement waits and is granted"
        self.ledger.check_integrity()

    # --- inside -----------------------------------------------------------------------------------

    def _grant(self, item: QueuedPlacement, pool: Pool, chosen: Chosen, now_s: float) -> None:
        """Issue the grant, charge it in advance, and remove the placement from the queue."""
        spec, demand = item.spec, item.demand
        grant = self._fleet.issue(
            chosen, item.query, digest=spec.version_digest, route_revision=spec.route_revision, now_s=now_s
        )
        cost_tokens = self.ledger.cost(
            demand.prompt_tokens, item.predicted_tokens, chosen.offer.cached_tokens
        )
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
            number=self._numbers,
            deadline_s=now_s + spec.queue_ttl_s,
            size_bytes=size_bytes_of(spec),
            query=PlaceQuery(
                demand,
                spec.excluded_workers,
                spec.prefix_hashes,
                zone,
                ttft_target_s=spec.ttft_target_s,
                node_group=spec.node_group,
                is_batch=spec.priority is Priority.BATCH,
            ),
            arrival_us=arrival_us,
            due_us=due_us,
            queued_s=now_s,
        )

    def _unix_us(self, now_s: float) -> int:
        """Return the present time by the clock of the arrivals, as far as arrivals show it."""
        return round(now_s * MICROSECONDS + self._ahead_us)

    def _add(self, item: QueuedPlacement, now_s: float) -> None:
        self.waiting.add(item)
        self._dirty[item.spec.version_digest] = None
        self._observer.entered(item.spec)
        self._gate.entered(item, now_s)

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
        self.waiting.remove(item)
        self._observer.left(item.spec)
        self._gate.left(item, now_s)

    def _refuse(self, session: int, placement_id: int, error: FairwayError) -> None:
        self._outcomes.append((session, PlacementRefused(placement_id, error)))

    def _full(self, item: QueuedPlacement, now_s: float) -> QueueFull | ShareExceeded | None:
        """Return why the placement may not wait, after a pass has used the room there is."""
        refusal = self.waiting.over_limit(item.spec, item.size_bytes, now_s)
        if refusal is not None and self._dirty:
            self.run_pass(now_s)
            refusal = self.waiting.over_limit(item.spec, item.size_bytes, now_s)
        # A limit of one tenant evicts only placements of that tenant.
        own = isinstance(refusal, ShareExceeded)
        if refusal is not None and (found := self._gate.displaced(item.spec, now_s, own=own)) is not None:
            victim, error = found
            self.evict(victim, refusal if own else error, now_s)
            refusal = self.waiting.over_limit(item.spec, item.size_bytes, now_s)
        return refusal

    def _isolated(self, spec: PlaceSpec, now_s: float) -> FairwayError | None:
        """Return why no node may run the placement."""
        if spec.isolation_waits or not self._fleet.lacks_group(spec.version_digest, spec.node_group, now_s):
            return None
        return IsolationUnavailable.of(spec.model, spec.node_group)

    def _beyond_budget(self, item: QueuedPlacement) -> FairwayError | None:
        """Return why the placement alone exceeds its tenant's KV budget on every worker."""
        share, candidates = item.spec.kv_share, self._fleet.candidates(item.spec.version_digest)
        if not share or not candidates:
            return None
        largest = max(candidates.values(), key=lambda one: one.kv_tokens_total)
        if within_kv_budget(share, item.demand, 0, largest):
            return None
        return beyond_kv_budget(item.spec, item.demand, int(share * largest.kv_tokens_total))

    def _barred(self, item: QueuedPlacement, now_s: float) -> FairwayError | None:
        """Return why the gate refuses the placement, after a pass has used the room there is."""
        spec, tokens = item.spec, item.predicted_tokens
        found = self._gate.admit(spec, tokens, now_s, settled=not self._dirty)
        if found is UNSETTLED:
            self.run_pass(now_s)
            found = self._gate.admit(spec, tokens, now_s)
        assert found is not UNSETTLED
        return found

    def _timed_out(self, item: QueuedPlacement, now_s: float) -> FairwayError:
        digest, group = item.spec.version_digest, item.spec.node_group
        if group and not self._fleet.reports_group(digest, group):
            return IsolationUnavailable.of(item.spec.model, group)
        found, pool = self._pass.choose(digest, item.query), self.waiting.pool(digest)
        queued = 0 if pool is None else len(pool.order)
        full = full_of(item.query, self._fleet.candidates(digest).values())
        later_s = self.waiting.later_s(item.spec, now_s)
        return timed_out(item.spec, found, f"{full}, {queued} placements are queued", retry_after_s=later_s)
