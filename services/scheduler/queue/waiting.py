"""A waiting placement, the interfaces that observe it, and the workers earmarked for placements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from services.core.errors import FairwayError
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.scheduler.policy.placement.candidate import Candidate, Demand, PlaceQuery, may_use
from services.scheduler.policy.placement.choose import Chosen, NoWorker

GRANTED: Final = "GRANTED"
WITHDRAWN: Final = "WITHDRAWN"
MAX_EARMARKED: Final = 8  # workers of a pool; further placements share them


@dataclass(slots=True, eq=False)
class QueuedPlacement:
    """A queued placement."""

    session: int
    placement_id: int
    spec: PlaceSpec
    demand: Demand
    number: int  # grows with submission; unique
    deadline_s: float
    size_bytes: int
    query: PlaceQuery
    arrival_us: int  # orders among its tenant's, with ``due_us``
    due_us: int
    queued_s: float = 0.0
    bypassed: int = 0  # placements behind it that were granted on a worker that it may use
    earmark: str | None = None  # the worker on which nothing behind it starts before it
    tried: bool = False  # a pass has tried it
    short_attempts: int = 0  # attempts that found too little room on all workers
    over_budget: bool = False  # its tenant had no KV budget left on some worker at the last attempt
    counter: float = 0.0  # the tenant's counter at the last attempt, before the grant is charged

    @property
    def tenant(self) -> str:
        return self.spec.tenant_id

    @property
    def weight(self) -> float:
        return self.spec.tenant_weight

    @property
    def priority(self) -> Priority:
        return self.spec.priority

    @property
    def predicted_tokens(self) -> int:
        return self.demand.reserved_tokens - self.demand.prompt_tokens


class QueueObserver(Protocol):
    """Receives the changes of placements. Called by the queue's single writer; must not block or raise."""

    def entered(self, spec: PlaceSpec) -> None:
        """The placement waits from now on."""

    def left(self, spec: PlaceSpec) -> None:
        """The placement has left the queue, for any reason."""

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None:
        """The placement ended with GRANTED, WITHDRAWN or the reason of its refusal. ``queued_s``: when it
        entered."""


class Unobserved:
    """Ignores every event."""

    def entered(self, spec: PlaceSpec) -> None: ...

    def left(self, spec: PlaceSpec) -> None: ...

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None: ...


class CompositeObserver:
    """Two observers; the first one is called first."""

    def __init__(self, first: QueueObserver, second: QueueObserver) -> None:
        self._first = first
        self._second = second

    def entered(self, spec: PlaceSpec) -> None:
        self._first.entered(spec)
        self._second.entered(spec)

    def left(self, spec: PlaceSpec) -> None:
        self._first.left(spec)
        self._second.left(spec)

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None:
        self._first.ended(spec, outcome, queued_s, now_s, worker_id)
        self._second.ended(spec, outcome, queued_s, now_s, worker_id)


class Unsettled(Enum):
    """A gate's answer: a refusal is possible, and a pass may prevent it."""

    UNSETTLED = auto()


UNSETTLED: Final = Unsettled.UNSETTLED


class QueueGate(Protocol):
    """Decides which placements may wait, and observes the queue. Called by the queue's single writer; must
    not block or raise.

    To make room for others, it returns victims for ``FlowQueue.evict``, never from within these calls.
    """

    def admit(
        self, spec: PlaceSpec, predicted_tokens: int, now_s: float, *, settled: bool = True
    ) -> FairwayError | Unsettled | None:
        """Return why the placement may not wait, None when it may.

        ``settled``: a pass has used the room there is. Otherwise UNSETTLED is returned in place of a refusal:
        the queue runs a pass and calls again.
        """

    def displaced(
        self, spec: PlaceSpec, now_s: float, *, own: bool = False
    ) -> tuple[QueuedPlacement, FairwayError] | None:
        """Return the placement that leaves a full queue for this one, and the error; None when this one
        leaves.

        ``own``: only placements of the same tenant.
        """

    def wait_s(self, digest: str, priority: Priority, now_s: float) -> float | None:
        """Return the predicted wait behind a class and the higher ones, None before it is known."""

    def entered(self, item: QueuedPlacement, now_s: float) -> None:
        """The placement waits from now on."""

    def left(self, item: QueuedPlacement, now_s: float) -> None:
        """The placement has left the queue, for any reason."""


class OpenGate:
    """Admits every placement."""

    def admit(
        self, spec: PlaceSpec, predicted_tokens: int, now_s: float, *, settled: bool = True
    ) -> FairwayError | Unsettled | None:
        return None

    def displaced(
        self, spec: PlaceSpec, now_s: float, *, own: bool = False
    ) -> tuple[QueuedPlacement, FairwayError] | None:
        return None

    def wait_s(self, digest: str, priority: Priority, now_s: float) -> float | None:
        return None

    def entered(self, item: QueuedPlacement, now_s: float) -> None: ...

    def left(self, item: QueuedPlacement, now_s: float) -> None: ...


class DecisionObserver(Protocol):
    """Receives the attempts to place a placement, to explain it later.

    It receives only the first of a placement's ``short_attempts``, because there may be many."""

    def decided(self, item: QueuedPlacement, found: Chosen | NoWorker, *, over_share: bool = False) -> None:
        """``over_share``: only workers without a backlog were eligible, because the tenant holds more than
        its share (``HeldShares``)."""


class Undecided:
    """Ignores every decision."""

    def decided(
        self, item: QueuedPlacement, found: Chosen | NoWorker, *, over_share: bool = False
    ) -> None: ...


class Earmarks:
    """Workers of one pool reserved for placements that were bypassed too often. Single writer."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[int, QueuedPlacement]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[QueuedPlacement]:
        for holders in self._holders.values():
            yield from holders.values()

    def give(self, item: QueuedPlacement, candidates: Mapping[str, Candidate]) -> None:
        """Earmark a serving worker that the placement may use: with the most room, and for few others; none
        when there is none. The present worker is kept while it still serves."""
        if item.earmark is not None:
            candidate = candidates.get(item.earmark)
            if candidate is not None and candidate.serving and may_use(item.query, candidate):
                return
            self.release(item)
        usable = [
            candidate
            for candidate in candidates.values()
            if candidate.serving and may_use(item.query, candidate)
        ]
        most = max(1, min(MAX_EARMARKED, len(usable) // 2))
        if len(self._holders) >= most:
            shared = [candidate for candidate in usable if candidate.worker_id in self._holders]
            usable = shared or usable
        if usable:
            best = max(usable, key=self._preference)
            item.earmark = best.worker_id
            self._holders.setdefault(best.worker_id, {})[item.number] = item

    def release(self, item: QueuedPlacement) -> None:
        """Remove the placement's earmark. Idempotent."""
        if item.earmark is not None:
            holders = self._holders[item.earmark]
            del holders[item.number]
            if not holders:
                del self._holders[item.earmark]
            item.earmark = None

    def _preference(self, candidate: Candidate) -> tuple[int, int, str]:
        return (
            -len(self._holders.get(candidate.worker_id, ())),
            candidate.kv_tokens_room,
            candidate.worker_id,
        )
