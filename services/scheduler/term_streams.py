"""State shared by a term and its streams: an object for each stream, and the inbox of their commands.

The term fills a stream's object and wakes the stream, which empties it; both run in one event loop. The term
owns a command from the moment it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from services.core.errors import Conflict, FairwayError, OverQuota
from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotRefusal, SlotReturn
from services.core.fleet import (
    Granted,
    Outcome,
    PoolMember,
    PoolPressure,
    ReportSnapshot,
    TenantCounter,
)
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.ports.clock import Clock

log = structlog.get_logger()

_MIN_SLEEP_S: Final = 0.001
MAX_COUNTERS: Final = 4096  # most counters in one answer


@dataclass(slots=True, eq=False)
class _Stream:
    """Common part of both kinds of stream: the term wakes it, and ends it with an error."""

    number: int
    wake: Callable[[], None]
    error: FairwayError | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def end(self, error: FairwayError) -> None:
        """End the stream with the error, unless it has ended or is closed."""
        if self.error is None and not self.closed:
            self.error = error
            self.wake()


@dataclass(slots=True, eq=False)
class GatewaySession(_Stream):
    """The term's state of a gateway's stream. The term fills the fields to be sent, and the stream empties
    them; of all but ``outbox`` only the newest values are sent."""

    gateway_id: str
    # The gateway's zone; empty: unknown.
    zone: str = ""
    # Ends of its placements.
    outbox: list[Outcome] = field(default_factory=list)
    # Pressure of all pools; None: sent.
    pressures: tuple[PoolPressure, ...] | None = None
    # The worker list for fallback placement; None: sent.
    members: tuple[PoolMember, ...] | None = None
    # Time at which ``members`` was last set.
    listed_s: float = -math.inf
    # Leases by worker, version and tenant.
    leases: dict[tuple[str, str, str], SlotLease] = field(default_factory=dict)
    # Demands that no node of their tenants' groups can serve.
    slot_refusals: dict[SlotRefusal, None] = field(default_factory=dict)
    # Requests whose rows an operator asks about.
    questions: list[str] = field(default_factory=list)

    def take_leases(self) -> tuple[SlotLease, ...]:
        """Return and remove the leases for the next frame."""
        named = list(self.leases)[:MAX_COUNTERS]
        return tuple(self.leases.pop(key) for key in named)


@dataclass(slots=True, eq=False)
class WorkerSession(_Stream):
    """The term's state of a worker's stream. ``applied``: the last report that was applied. ``counters``:
    sent with its answer, at most those of the tenants in the worker's reports."""

    worker_id: str = ""
    applied: int = 0
    counters: dict[tuple[str, str, Priority], TenantCounter] = field(default_factory=dict)

    def take_counters(self) -> tuple[TenantCounter, ...]:
        """Return and remove the counters for the next answer, at most as many as a message may contain."""
        named = list(self.counters)[:MAX_COUNTERS]
        return tuple(self.counters.pop(key) for key in named)


@dataclass(frozen=True, slots=True)
class SubmitPlacements:
    """Placements to queue. ``places``: (placement id, spec, arrival by our clock in Unix microseconds)."""

    session: GatewaySession
    places: Sequence[tuple[int, PlaceSpec, int]]


@dataclass(frozen=True, slots=True)
class CancelPlacements:
    session: GatewaySession
    placement_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DemandSlots:
    """What a gateway wants of slots from now on, and what it returns."""

    session: GatewaySession
    demands: Sequence[SlotDemand]
    returned: Sequence[SlotReturn]


@dataclass(frozen=True, slots=True)
class GatewayDisconnected:
    """A gateway's stream ended. ``unsent``: placements whose grants were not sent to it."""

    session: GatewaySession
    unsent: Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    reporter: WorkerSession
    number: int
    snapshot: ReportSnapshot


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """A worker's stream ended."""

    reporter: WorkerSession


Command = (
    SubmitPlacements | CancelPlacements | DemandSlots | GatewayDisconnected | Report | WorkerDisconnected
)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits on the streams of a term."""

    gateways: int
    workers: int
    commands: int  # commands that wait in the inbox


class TermStreams:
    """The connected streams, and the inbox of their commands. Only the term's task takes from it."""

    def __init__(
        self, epoch: int, limits: StreamLimits, clock: Clock, greet: Callable[[GatewaySession], None]
    ) -> None:
        """``greet`` sends a new session what it starts with."""
        self._epoch = epoch
        self._limits = limits
        self._clock = clock
        self._greet = greet
        self._inbox: deque[Command] = deque()
        self._arrived = asyncio.Event()
        self._numbers = 0
        self.sessions: dict[int, GatewaySession] = {}
        self._reporters: dict[int, WorkerSession] = {}
        self.served_s = self._arrived_s = clock.monotonic_s()  # served_s: the end of the owner's last turn

    def __len__(self) -> int:
        """Return how many commands wait."""
        return len(self._inbox)

    def stalled_s(self) -> float:
        """Return how long commands have waited for a turn of the owner; 0 while none wait."""
        if not self._inbox:
            return 0.0
        return self._clock.monotonic_s() - max(self.served_s, self._arrived_s)

    def open_session(self, gateway_id: str, wake: Callable[[], None], *, zone: str = "") -> GatewaySession:
        """Return a new session; an earlier one of the same gateway is ended. Raises OverQuota."""
        for old in [found for found in self.sessions.values() if found.gateway_id == gateway_id]:
            old.end(Conflict("this gateway opened another stream", gateway_id=gateway_id))
            self._leave(old)
        if len(self.sessions) >= self._limits.gateways:
            raise OverQuota(f"{len(self.sessions)} gateways are connected, which is the limit")
        self._numbers += 1
        session = GatewaySession(self._numbers, wake, gateway_id, zone)
        self.sessions[session.number] = session
        self._greet(session)
        log.info("scheduler.gateway_connected", gateway_id=gateway_id, epoch=self._epoch)
        return session

    def close_session(self, session: GatewaySession) -> None:
        """Withdraw the placements of the session. Idempotent."""
        if not session.closed:
            session.closed = True
            self._leave(session)

    def open_reporter(self, wake: Callable[[], None]) -> WorkerSession:
        """Return a worker's stream. Later streams have larger numbers. Raises OverQuota."""
        if len(self._reporters) >= self._limits.workers:
            raise OverQuota(f"{len(self._reporters)} workers are connected, which is the limit")
        self._numbers += 1
        reporter = WorkerSession(self._numbers, wake)
        self._reporters[reporter.number] = reporter
        return reporter

    def session_of(self, gateway_id: str) -> GatewaySession | None:
        """Return a gateway's open stream."""
        return next((found for found in self.sessions.values() if found.gateway_id == gateway_id), None)

    def reporter(self, number: int) -> WorkerSession | None:
        """Return an open worker's stream."""
        return self._reporters.get(number)

    def close_reporter(self, reporter: WorkerSession) -> None:
        """Stop placements on its worker. Idempotent."""
        if not reporter.closed:
            reporter.closed = True
            self._reporters.pop(reporter.number, None)
            self._put(WorkerDisconnected(reporter))

    def send(self, command: SubmitPlacements | CancelPlacements | DemandSlots | Report) -> None:
        """Queue a command. Raises OverQuota when the inbox is full."""
        if len(self._inbox) >= self._limits.commands:
            raise OverQuota("the scheduler is behind with its work", retry_after_s=1.0)
        self._put(command)

    def take(self, most: int) -> Iterator[Command]:
        """Yield the commands that wait now, oldest first, at most so many."""
        for _ in range(min(len(self._inbox), most)):
            yield self._inbox.popleft()

    async def wait_command(self, until_s: float) -> None:
        """Return when a command waits, or at the time ``until_s``."""
        if self._inbox:
            await self._clock.sleep(0)  # let the streams run
            return
        self._arrived.clear()
        if until_s == math.inf:
            await self._arrived.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(_MIN_SLEEP_S, until_s - self._clock.monotonic_s())):
                await self._arrived.wait()

    def end(self, error: FairwayError) -> None:
        """End every stream with this error; the term is over."""
        for session in list(self.sessions.values()):
            session.end(error)
        for reporter in list(self._reporters.values()):
            reporter.end(error)

    def _put(self, command: Command) -> None:
        if not self._inbox:
            self._arrived_s = self._clock.monotonic_s()
        self._inbox.append(command)
        self._arrived.set()

    def _leave(self, session: GatewaySession) -> None:
        if self.sessions.pop(session.number, None) is not None:
            unsent = [found.placement_id for found in session.outbox if isinstance(found, Granted)]
            session.outbox.clear()
            self._put(GatewayDisconnected(session, unsent))
            log.info("scheduler.gateway_disconnected", gateway_id=session.gateway_id, epoch=self._epoch)
