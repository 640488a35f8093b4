"""One term of leadership: the task that owns the fleet view and the queue.

Streams put commands into an inbox and are woken when something is there for them; nobody else touches the
state. The task sleeps until a command or the next deadline comes, takes all commands there are, and makes one
pass over the versions that changed, so the grants of one pass reach a gateway as one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import structlog

from services.core.errors import Conflict, FairwayError, OverQuota
from services.core.fleet import Granted, Outcome, ReportSnapshot
from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.scheduler.fleet_view import FleetLimits, FleetView
from services.scheduler.flow_queue import FlowQueue, QueueLimits
from services.scheduler.policy.placement import PlacementProfile
from services.scheduler.policy.queue_order import OrderPolicy
from services.scheduler.telemetry import SchedulerTelemetry

log = structlog.get_logger()

_COMMANDS_PER_PASS: Final = 1024
_MIN_SLEEP_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class TermSettings:
    fleet: FleetLimits = field(default_factory=FleetLimits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    order: OrderPolicy = field(default_factory=OrderPolicy)
    profile: PlacementProfile = field(default_factory=PlacementProfile)
    max_gateways: int = 1024
    max_inbox: int = 65536


@dataclass(slots=True, eq=False)
class Session:
    """What the term knows of a gateway's stream. ``outbox`` is filled here and emptied by the stream."""

    number: int
    gateway_id: str
    wake: Callable[[], None]
    outbox: list[Outcome] = field(default_factory=list)
    error: FairwayError | None = None
    closed: bool = False

    def end(self, error: FairwayError) -> None:
        if self.error is None and not self.closed:
            self.error = error
            self.wake()


@dataclass(slots=True, eq=False)
class Reporter:
    """What the term knows of a worker's stream. ``applied`` is the last report that was taken over."""

    number: int
    wake: Callable[[], None]
    worker_id: str = ""
    applied: int = 0
    error: FairwayError | None = None
    closed: bool = False

    def end(self, error: FairwayError) -> None:
        if self.error is None and not self.closed:
            self.error = error
            self.wake()


@dataclass(frozen=True, slots=True)
class Submit:
    """``places``: (placement id, spec, arrival by our clock's measure in Unix microseconds)."""

    session: Session
    places: Sequence[tuple[int, PlaceSpec, int]]


@dataclass(frozen=True, slots=True)
class Cancel:
    session: Session
    placement_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Leave:
    """A gateway's stream ended. ``unsent``: placements whose grants it never saw."""

    session: Session
    unsent: Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    reporter: Reporter
    number: int
    snapshot: ReportSnapshot


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker's stream ended."""

    reporter: Reporter


Command = Submit | Cancel | Leave | Report | Silence


class Term:
    """Everything one leader decides with. A new epoch starts with a new one."""

    def __init__(
        self,
        epoch: int,
        settings: TermSettings,
        clock: Clock,
        rng: Random,
        *,
        telemetry: SchedulerTelemetry | None = None,
    ) -> None:
        self.epoch = epoch
        self.settings = settings
        self.fleet = FleetView(epoch, settings.fleet)
        self._decision = None if telemetry is None else telemetry.decision
        self.queue = FlowQueue(
            self.fleet, settings.queue, settings.order, settings.profile, rng, observer=telemetry
        )
        self._clock = clock
        self._inbox: deque[Command] = deque()
        self._arrived = asyncio.Event()
        self._sessions: dict[int, Session] = {}
        self._reporters: dict[int, Reporter] = {}
        self._numbers = 0
        self._stepped_s = self._arrived_s = clock.monotonic_s()

    # --- how it stands ----------------------------------------------------------------------------

    @property
    def workers_by_state(self) -> dict[str, int]:
        return self.fleet.workers_by_state

    @property
    def grants_outstanding(self) -> int:
        return self.fleet.outstanding

    @property
    def gateways(self) -> int:
        return len(self._sessions)

    @property
    def inbox(self) -> int:
        return len(self._inbox)

    def view_age_s(self) -> float:
        """Return since when the connected worker that was longest not heard was last heard."""
        return self.fleet.view_age_s(self._clock.monotonic_s())

    def stalled_s(self) -> float:
        """Return for how long commands have waited without a turn of the owner; 0 while none wait."""
        if not self._inbox:
            return 0.0
        return self._clock.monotonic_s() - max(self._stepped_s, self._arrived_s)

    # --- for the streams --------------------------------------------------------------------------

    def open_session(self, gateway_id: str, wake: Callable[[], None]) -> Session:
        """Return a new session; one that the gateway had before is ended. Raises OverQuota."""
        for old in [found for found in self._sessions.values() if found.gateway_id == gateway_id]:
            old.end(Conflict("this gateway opened another stream", gateway_id=gateway_id))
            self._leave(old)
        if len(self._sessions) >= self.settings.max_gateways:
            raise OverQuota(f"{len(self._sessions)} gateways are connected; no more are taken")
        self._numbers += 1
        session = Session(self._numbers, gateway_id, wake)
        self._sessions[session.number] = session
        log.info("scheduler.gateway_connected", gateway_id=gateway_id, epoch=self.epoch)
        return session

    def close_session(self, session: Session) -> None:
        """Withdraw what the session has. Idempotent."""
        if not session.closed:
            session.closed = True
            self._leave(session)

    def open_reporter(self, wake: Callable[[], None]) -> Reporter:
        """Return a worker's stream. The numbers of streams grow with their opening."""
        if len(self._reporters) >= 2 * self.settings.fleet.max_workers:
            raise OverQuota(f"{len(self._reporters)} workers are connected; no more are taken")
        self._numbers += 1
        reporter = Reporter(self._numbers, wake)
        self._reporters[reporter.number] = reporter
        return reporter

    def close_reporter(self, reporter: Reporter) -> None:
        """Place nothing more on its worker. Idempotent."""
        if not reporter.closed:
            reporter.closed = True
            self._reporters.pop(reporter.number, None)
            self._put(Silence(reporter))

    def send(self, command: Submit | Cancel | Report) -> None:
        """Hand a command over. Raises OverQuota when the inbox is full."""
        if len(self._inbox) >= self.settings.max_inbox:
            raise OverQuota("the scheduler is behind with its work", retry_after_s=1.0)
        self._put(command)

    def end(self, error: FairwayError) -> None:
        """End every stream with this error; the term is over."""
        for session in list(self._sessions.values()):
            session.end(error)
        for reporter in list(self._reporters.values()):
            reporter.end(error)

    # --- the owner --------------------------------------------------------------------------------

    async def run(self, leads: Callable[[], bool]) -> None:
        """Own the state until cancelled or until ``leads`` says no, which is asked before every pass."""
        while True:
            await self._wait()
            if not leads():
                return
            began_s = self._clock.monotonic_s()
            self.step()
            self._stepped_s = now_s = self._clock.monotonic_s()
            if self._decision is not None:
                self._decision.observe(now_s - began_s)

    def step(self) -> None:
        """Take commands, expire, grant, deliver: one turn of the owner."""
        now_s = self._clock.monotonic_s()
        for _ in range(min(len(self._inbox), _COMMANDS_PER_PASS)):
            self._apply(self._inbox.popleft(), now_s)
        self.queue.touch(self.fleet.expire(now_s))
        self.queue.run_pass(now_s)
        self.queue.expire(now_s)
        self.queue.run_pass(now_s)  # what timed out may have held others up
        self._deliver(now_s)

    def check_integrity(self) -> None:
        self.fleet.check_integrity()
        self.queue.check_integrity()

    # --- inside -----------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Return when there is a command or something is due."""
        if self._inbox:
            await self._clock.sleep(0)  # the streams get their turn
            return
        self._arrived.clear()
        due_s = min(self.fleet.next_deadline_s(), self.queue.next_deadline_s())
        if due_s == math.inf:
            await self._arrived.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(_MIN_SLEEP_S, due_s - self._clock.monotonic_s())):
                await self._arrived.wait()

    def _put(self, command: Command) -> None:
        if not self._inbox:
            self._arrived_s = self._clock.monotonic_s()
        self._inbox.append(command)
        self._arrived.set()

    def _leave(self, session: Session) -> None:
        if self._sessions.pop(session.number, None) is not None:
            unsent = [found.placement_id for found in session.outbox if isinstance(found, Granted)]
            session.outbox.clear()
            self._put(Leave(session, unsent))
            log.info("scheduler.gateway_disconnected", gateway_id=session.gateway_id, epoch=self.epoch)

    def _apply(self, command: Command, now_s: float) -> None:
        match command:
            case Submit(session, places):
                if session.number in self._sessions:
                    for placement_id, spec, arrival_unix_us in places:
                        self.queue.submit(session.number, placement_id, spec, arrival_unix_us, now_s)
            case Cancel(session, placement_ids):
                for placement_id in placement_ids:
                    self.queue.cancel(session.number, placement_id, now_s)
            case Leave(session, unsent):
                for placement_id in unsent:
                    self.queue.cancel(session.number, placement_id, now_s)
                self.queue.withdraw_all(session.number, now_s)
            case Report(reporter, number, snapshot):
                self._report(reporter, number, snapshot, now_s)
            case Silence(reporter):
                self.queue.touch(self.fleet.close_stream(reporter.number))
                if reporter.worker_id:
                    log.info("scheduler.worker_disconnected", worker_id=reporter.worker_id, epoch=self.epoch)

    def _report(self, reporter: Reporter, number: int, snapshot: ReportSnapshot, now_s: float) -> None:
        if reporter.closed or reporter.error is not None:
            return
        try:
            changed = self.fleet.apply(reporter.number, snapshot, now_s)
        except FairwayError as error:
            reporter.end(error)
            return
        if not reporter.worker_id:
            reporter.worker_id = snapshot.worker_id
            log.info(
                "scheduler.worker_connected",
                worker_id=snapshot.worker_id,
                incarnation=snapshot.incarnation,
                epoch=self.epoch,
                live=len(snapshot.live),
            )
        self.queue.touch(changed)
        reporter.applied = number
        reporter.wake()

    def _deliver(self, now_s: float) -> None:
        for number, outcome in self.queue.take_outcomes():
            session = self._sessions.get(number)
            if session is None:
                if isinstance(outcome, Granted):  # its stream ended meanwhile: nobody saw the grant
                    self.queue.cancel(number, outcome.placement_id, now_s)
                continue
            if not session.outbox:
                session.wake()
            session.outbox.append(outcome)
