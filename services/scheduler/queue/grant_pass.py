"""One pass over a version's queue: tries the placements in order, under the rules of the discipline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Final

from services.core.errors import FairwayError
from services.scheduler.fleet.view import FleetView
from services.scheduler.policy.placement.candidate import PlaceQuery
from services.scheduler.policy.placement.choose import NO_ROOM, Chosen, NoWorker, PlacementProfile
from services.scheduler.policy.placement.kv_admission import RoomSummary
from services.scheduler.policy.queue.length import LengthPolicy
from services.scheduler.policy.queue.order import OrderPolicy
from services.scheduler.queue.pool import Pool
from services.scheduler.queue.refusals import too_long
from services.scheduler.queue.rules import PassContext, QueueDiscipline, QueueRule
from services.scheduler.queue.service_ledger import ServiceLedger
from services.scheduler.queue.waiting import DecisionObserver, QueuedPlacement

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
            if found.waits_for_room or restricted:  # others could take the room that it waits for
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
            query = PlaceQuery(item.demand, item.spec.excluded_workers)  # cached blocks do not matter
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
