"""What happened in a run: its trace, and every grant and start as scheduler and worker observed it.

The scheduler's side is its queue's observer, called as the grant is given; the worker's side stands between
the gateway's stream and the worker's host. Both only look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from services.core.fleet import SequenceUsage
from services.core.generation import PlaceSpec, StartSpec
from services.core.records import Priority
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Metrics
from services.scheduler.fleet.view import FleetView
from services.scheduler.queue.waiting import GRANTED, WITHDRAWN
from services.scheduler.telemetry import LedTerm, SchedulerTelemetry
from services.scheduler.term import Term
from simulator.engine.poison import Poison


class EventTrace:
    """Two runs with the same digest recorded the same events at the same times."""

    def __init__(self, now_s: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self._now_s = now_s
        self._show = show
        self._digest = blake2b(digest_size=16)
        self.events = 0

    def note(self, subject: str, event: str, detail: str = "") -> None:
        """Add an event: who, what and with what."""
        now_s = self._now_s()
        self.events += 1
        self._digest.update(f"{now_s!r}\0{subject}\0{event}\0{detail}\n".encode())
        if self._show is not None:
            self._show(f"{now_s:12.6f}  {subject:14} {event:20} {detail}")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens and rows that a worker computed for a tenant: ``cached`` of those of prompts came from the
    cache."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    rows: int = 0


class GrantListener:
    """Called inside the process where it happens; must not block, raise or change anything."""

    def term_began(self, term: Term) -> None:
        """A scheduler leads from now on; nothing waits at it."""

    def entered(self, spec: PlaceSpec) -> None:
        """A placement waits at the leader from now on."""

    def left(self, spec: PlaceSpec) -> None:
        """It waits no more, however it ended."""

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        """The term has just given a grant on the worker."""

    def refused(self, term: Term, spec: PlaceSpec, reason: str) -> None:
        """The term has just refused the placement."""

    def started(self, worker_id: str, spec: StartSpec) -> None:
        """The worker has just admitted a sequence."""

    def produced(self, worker_id: str, tenant: str, priority: Priority, work: ComputedTokens) -> None:
        """The worker has just charged a tenant for what it computed."""

    def ended(self, worker_id: str, usage: SequenceUsage) -> None:
        """The worker has just sent the last message of a sequence."""

    def engine_ended(self, worker_id: str, poison: Poison) -> None:
        """An input has just ended an engine of the worker."""


class GrantWatch:
    """Hands what is reported to its listeners, in the order of arrival.

    ``was_ejected``: whether the worker of the reported grant was barred when it was chosen. A worker
    that is tried again is barred from the grant on until the trial has ended.
    """

    def __init__(self) -> None:
        self.listeners: list[GrantListener] = []
        self.was_ejected = False

    def telemetry(self, clock: Clock) -> SchedulerTelemetry:
        """Return the scheduler's placement callbacks."""
        return _WatchedTelemetry(self, clock)

    def report(self, event: Callable[[GrantListener], None]) -> None:
        """Call each listener with what happened."""
        for listener in self.listeners:
            event(listener)


class _WatchedTelemetry(SchedulerTelemetry):
    """Production's telemetry of a process without a scraper; it also feeds the watch."""

    def __init__(self, watch: GrantWatch, clock: Clock) -> None:
        super().__init__(Metrics(), clock)
        self._watch = watch
        self._term: Term | None = None

    def term_started(self, term: LedTerm) -> None:
        assert isinstance(term, Term)
        self._term = term
        self._listen(term.fleet)
        super().term_started(term)
        self._watch.report(lambda listener: listener.term_began(term))

    def _listen(self, fleet: FleetView) -> None:
        inner = fleet.ends_trial

        def ends_trial(worker_id: str, digest: str, now_s: float) -> bool:
            self._watch.was_ejected = fleet.candidates(digest)[worker_id].ejected
            return inner(worker_id, digest, now_s)

        fleet.ends_trial = ends_trial

    def entered(self, spec: PlaceSpec) -> None:
        self._watch.report(lambda listener: listener.entered(spec))

    def left(self, spec: PlaceSpec) -> None:
        self._watch.report(lambda listener: listener.left(spec))

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None:
        if (term := self._term) is not None:
            if outcome == GRANTED:
                self._watch.report(lambda listener: listener.granted(term, spec, worker_id))
            elif outcome != WITHDRAWN:
                self._watch.report(lambda listener: listener.refused(term, spec, outcome))
