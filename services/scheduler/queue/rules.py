"""The rules of a pass: which workers the next placement may use, in addition to those that have room.

``PRODUCTION`` lists them in the order in which a pass applies them. ``FairOrder`` determines which placement
is next; a rule only restricts it. docs/decisions/0039-queue-rules.md has the measured effect of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from services.core.records import Priority
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, may_use, within_kv_budget
from services.scheduler.policy.placement.choose import NoWorker, Rejections
from services.scheduler.policy.queue.fair_order import FairOrder, OrderPolicy
from services.scheduler.policy.queue.fairness import FairShares
from services.scheduler.policy.queue.length import LengthPolicy, is_long, within_long_share
from services.scheduler.queue.service_ledger import ServiceLedger
from services.scheduler.queue.waiting import Earmarks, QueuedPlacement


@dataclass(slots=True)
class PassContext:
    """One pass over the queue of one version."""

    digest: str
    candidates: Mapping[str, Candidate]  # live: a grant changes its worker
    pool_tokens: int  # KV of all workers that serve the version
    earmarks: Earmarks
    ledger: ServiceLedger
    order: OrderPolicy
    length: LengthPolicy


class QueueRule:
    """One rule in one pass. By default it restricts nothing."""

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def restrict(self, item: QueuedPlacement, query: PlaceQuery) -> PlaceQuery | NoWorker:
        """Return what the placement may use of ``query``, or why it waits."""
        return query

    def skipped(self, item: QueuedPlacement) -> None:
        """The placement waits for room, and those behind it are tried."""

    def granted(self, worker_id: str) -> None:
        """A placement got room on this worker."""

    def may_take_slot(self, item: QueuedPlacement) -> bool:
        """Return whether the placement may get a slot that another tenant holds."""
        return False


class BypassLimit(QueueRule):
    """After ``max_bypasses`` grants on workers that a skipped placement may use, it gets an earmark on one:
    nothing behind it starts there until it has started."""

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._skipped: list[QueuedPlacement] = []
        self._closed: dict[str, None] = {}

    def restrict(self, item: QueuedPlacement, query: PlaceQuery) -> PlaceQuery | NoWorker:
        return _without(query, self._closed) if self._closed else query

    def skipped(self, item: QueuedPlacement) -> None:
        self._skipped.append(item)
        if item.bypassed >= self.context.order.max_bypasses:
            self._protect(item)

    def granted(self, worker_id: str) -> None:
        if not self._skipped:
            return  # the usual case: the changed candidate need not be built again
        most, candidate = self.context.order.max_bypasses, self.context.candidates[worker_id]
        for item in self._skipped:
            if item.earmark is None and may_use(item.query, candidate):
                item.bypassed = min(item.bypassed + 1, most)
                if item.bypassed >= most:
                    self._protect(item)

    def _protect(self, item: QueuedPlacement) -> None:
        self.context.earmarks.give(item, self.context.candidates)
        if item.earmark is not None:
            self._closed[item.earmark] = None


class BypassWindow(QueueRule):
    """A tenant gets nothing on the workers that a skipped placement may use, while it is ahead of that
    placement's tenant by more than the window. So the service of two tenants stays within the bound of
    ``fairness``, however the sizes of their requests differ."""

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._window = context.order.window_tokens(len(context.candidates))
        # The first of a class that waits for room, with the counter of its tenant at that time.
        self._first: dict[Priority, tuple[float, QueuedPlacement]] = {}
        self._usable: dict[Priority, tuple[str, ...]] = {}

    def restrict(self, item: QueuedPlacement, query: PlaceQuery) -> PlaceQuery | NoWorker:
        first = self._first.get(item.priority)
        if first is None or item.counter <= first[0] + self._window:
            return query
        return _without(query, self._usable_by(first[1]))

    def skipped(self, item: QueuedPlacement) -> None:
        self._first.setdefault(item.priority, (item.counter, item))

    def _usable_by(self, item: QueuedPlacement) -> tuple[str, ...]:
        found = self._usable.get(item.priority)
        if found is None:
            candidates = self.context.candidates.items()
            found = tuple(name for name, candidate in candidates if may_use(item.query, candidate))
            self._usable[item.priority] = found
        return found


class LongPromptShare(QueueRule):
    """The long prompts of one tenant hold at most a share of the pool's KV (``length``). A placement above it
    waits for its own tenant, and others do not wait for it."""

    def restrict(self, item: QueuedPlacement, query: PlaceQuery) -> PlaceQuery | NoWorker:
        demand, context = item.demand, self.context
        if not is_long(demand.prompt_tokens):
            return query
        held = context.ledger.long_tokens(context.digest, item.tenant)
        if within_long_share(
            demand.prompt_tokens, demand.reserved_tokens, held, context.pool_tokens, context.length
        ):
            return query
        rejections = Rejections(((within_long_share.__name__, len(context.candidates)),))
        return NoWorker(rejections, never_fits=False, waits_for_room=False)


class HeldShare(QueueRule):
    """A tenant that holds more than its share gets only workers without a prefill backlog, and one below its
    share may get a slot of another tenant (``HeldShares``)."""

    def restrict(self, item: QueuedPlacement, query: PlaceQuery) -> PlaceQuery | NoWorker:
        if self.context.ledger.over_share(self.context.digest, item.priority, item.tenant):
            return replace(query, over_share=True)
        return query

    def may_take_slot(self, item: QueuedPlacement) -> bool:
        return self.context.ledger.is_below_share(self.context.digest, item.tenant, item.weight)


class KvBudget(QueueRule):
    """A tenant's grants hold at most its share of a worker's KV. A placement above it waits for its own
    tenant, is given no earmark, and others do not wait for it. The engine enforces what it exceeds later."""

    def restrict(self, item: QueuedPlacement, query: PlaceQuery) -> PlaceQuery | NoWorker:
        if not item.spec.kv_share:
            return query
        candidates = self.context.candidates
        held = self.context.ledger.budget_tokens(self.context.digest, item.tenant)
        full = [
            name
            for name, candidate in candidates.items()
            if not within_kv_budget(item.spec.kv_share, item.demand, held.get(name, 0), candidate)
        ]
        item.over_budget = bool(full)
        if len(full) == len(candidates):
            rejections = Rejections(((within_kv_budget.__name__, len(full)),))
            return NoWorker(rejections, never_fits=False, waits_for_room=False)
        return _without(query, full) if full else query


@dataclass(frozen=True, slots=True)
class QueueDiscipline:
    """How a queue is served: ``order`` makes the order of a pool, ``rules`` apply in each pass."""

    order: Callable[[OrderPolicy, dict[Priority, FairShares]], FairOrder[QueuedPlacement]]
    rules: tuple[type[QueueRule], ...]


PRODUCTION = QueueDiscipline(FairOrder, (BypassLimit, BypassWindow, LongPromptShare, HeldShare, KvBudget))


def _without(query: PlaceQuery, workers: Iterable[str]) -> PlaceQuery:
    excluded = dict.fromkeys((*query.excluded_workers, *workers))
    return replace(query, excluded_workers=tuple(excluded))
