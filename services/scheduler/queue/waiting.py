"""A placement in the queue, what may look at it, and who waits for which worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from services.core.errors import FairwayError
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, may_use
from services.scheduler.policy.placement.choose import Chosen, NoWorker
from services.scheduler.policy.placement.kv_admission import Demand

MAX_EARMARKED: Final = 8  # workers of a pool; more that wait for one share them


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued placement. ``key`` and ``number`` order it by arrival, ``due_us`` and ``arrival_us`` among its
    tenant's. ``bypassed`` counts those granted before it although they were behind it, on a worker that it
    may use; ``earmark`` is the worker on which nothing behind it starts until it has. ``tried``: a pass
    looked at it. ``short_looks`` came to no worker, as all have too little room; ``counter`` is that of its
    tenant at the last look, before what is granted is charged."""

    session: int
    placement_id: int
    spec: PlaceSpec
    demand: Demand
    key: int
    number: int
    deadline_s: float
    size_bytes: int
    query: PlaceQuery
    arrival_us: int
    due_us: int
    queued_s: float = 0.0
    bypassed: int = 0
    earmark: str | None = None
    tried: bool = False
    short_looks: int = 0
    counter: float = 0.0

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


class QueueGate(Protocol):
    """Decides who may wait, and hears who does. Called by the queue's single writer; must not block or raise.

    To make room for others, it names victims to ``FlowQueue.evict``, never from within these calls.
    """

    def admit(self, spec: PlaceSpec, predicted_tokens: int, now_s: float) -> FairwayError | None:
        """Return why the placement may not wait, None when it may."""

    def displaced(
        self, spec: PlaceSpec, now_s: float, *, own: bool = False
    ) -> tuple[Waiting, FairwayError] | None:
        """Return who leaves a full queue for the placement, and why; None when the placement itself does.

        ``own``: only what its own tenant has waiting.
        """

    def entered(self, item: Waiting, now_s: float) -> None:
        """It waits from now on."""

    def left(self, item: Waiting, now_s: float) -> None:
        """It waits no more, however it ended."""


class OpenGate:
    """Everybody may wait."""

    def admit(self, spec: PlaceSpec, predicted_tokens: int, now_s: float) -> FairwayError | None:
        return None

    def displaced(
        self, spec: PlaceSpec, now_s: float, *, own: bool = False
    ) -> tuple[Waiting, FairwayError] | None:
        return None

    def entered(self, item: Waiting, now_s: float) -> None: ...

    def left(self, item: Waiting, now_s: float) -> None: ...


class DecisionObserver(Protocol):
    """Hears the looks at the fleet for a placement, for telling later why it went where it went: but for
    ``short_looks`` after the first, which are many where many wait for room."""

    def decided(self, item: Waiting, found: Chosen | NoWorker, *, gives_way: bool = False) -> None:
        """``gives_way``: what was looked for was a worker without a backlog, as for tenants with more than
        their share (``held_share``)."""


class Undecided:
    """Nobody listens."""

    def decided(self, item: Waiting, found: Chosen | NoWorker, *, gives_way: bool = False) -> None: ...


class Earmarks:
    """Workers of one pool that wait for placements which were passed too often. Single writer."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[int, Waiting]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[Waiting]:
        for holders in self._holders.values():
            yield from holders.values()

    def give(self, item: Waiting, candidates: Mapping[str, Candidate]) -> None:
        """Give it a worker that serves and that it may use: with the most room, earmarked by few; none when
        there is none. It keeps the one that it has while that still serves."""
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

    def release(self, item: Waiting) -> None:
        """Its worker waits for it no longer. Idempotent."""
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
