"""The scheduler: leads while it holds the election, and gives gateways and workers their streams.

Soft state: what it knows comes from the reports and submissions of the current term. While it does not
lead, every stream fails with NoLeader, so that clients look for the leader again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, Protocol

import structlog

from services.core.errors import FairwayError, NoLeader, PermissionDenied
from services.core.fleet import PlacementFrame, Refused, ReportSnapshot
from services.core.generation import PlaceSpec
from services.core.paging import page_of
from services.core.queues import PoolQueue
from services.ports.clock import Clock
from services.runtime.race import first_of
from services.runtime.secrets import check_ticket
from services.scheduler.queue_report import Now, pools_of
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Cancel, Report, Reporter, Session, Submit, Term, TermSettings

log = structlog.get_logger()

_STALLED_S: Final = 2.0
_MAX_AGE_US: Final = 3600 * 1_000_000  # no arrival counts as older than this


class Leading(Protocol):
    """What the service needs of an election. ``runtime.leadership.Election`` implements it."""

    @property
    def epoch(self) -> int | None: ...

    async def wait_leading(self) -> int: ...

    async def wait_lost(self, epoch: int) -> None: ...


class SchedulerService:
    """Implements ``ports.placement_stream.PlacementStreams`` for gateways; ``open_report`` is for workers."""

    def __init__(
        self,
        ticket_key: bytes,
        settings: TermSettings,
        clock: Clock,
        rng: Random,
        *,
        telemetry: SchedulerTelemetry | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._ticket_key = ticket_key
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._term: Term | None = None

    @property
    def term(self) -> Term | None:
        """The current term, None while not leading."""
        return self._term

    def problem(self) -> str:
        """Return what keeps it from serving: empty while what is asked of it is decided in time."""
        stalled_s = 0.0 if self._term is None else self._term.stalled_s()
        return f"no decision for {stalled_s:.1f} s" if stalled_s > _STALLED_S else ""

    async def run(self, election: Leading) -> None:
        """Lead whenever the election is won, until cancelled."""
        while True:
            epoch = await election.wait_leading()
            term = self._term = Term(epoch, self._settings, self._clock, self._rng, telemetry=self._telemetry)
            if self._telemetry is not None:
                self._telemetry.term_started(term)
            log.info("scheduler.term_started", epoch=epoch)
            try:
                await first_of(term.run(_still(election, epoch)), election.wait_lost(epoch))
            finally:
                self._term = None
                if self._telemetry is not None:
                    self._telemetry.term_ended()
                term.end(NoLeader("this scheduler leads no longer", retry_after_s=1.0))
                log.info("scheduler.term_ended", epoch=epoch)

    def open(self, gateway_id: str, wake: Callable[[], None]) -> GatewayStream:
        """Return a gateway's stream. Raises NoLeader while not leading."""
        term = self._leading()
        return GatewayStream(self, term, term.open_session(gateway_id, wake))

    def open_report(self, wake: Callable[[], None]) -> ReportStream:
        """Return a worker's stream. Raises NoLeader while not leading."""
        term = self._leading()
        return ReportStream(term, term.open_reporter(wake))

    def pools(self, *, size: int, token: str, tenant: str) -> tuple[int, tuple[PoolQueue, ...], str]:
        """Return the epoch and a page of the pools, as of now. Raises NoLeader while not leading."""
        term = self._leading()
        now = Now(self._clock.monotonic_s(), self._clock.unix_s())
        found = pools_of(term.queue, term.fleet, now, tenant=tenant)
        page, following = page_of(found, lambda pool: pool.version_digest, size=size, token=token)
        return term.epoch, page, following

    def admitted(self, spec: PlaceSpec) -> None:
        """Return if the ticket of the placement is genuine and its own. Raises PermissionDenied."""
        ticket = check_ticket(self._ticket_key, spec.ticket, self._clock.unix_s())
        if ticket.tenant_id != spec.tenant_id or ticket.request_id != spec.request_id:
            raise PermissionDenied("the placement ticket is another request's")

    def arrival_unix_us(self, spec: PlaceSpec) -> int:
        """Return the arrival as far as it is plausible, so that a gateway's clock gains it nothing much."""
        now_us = round(self._clock.unix_s() * 1_000_000)
        return min(now_us, max(spec.arrival_unix_us, now_us - _MAX_AGE_US))

    def _leading(self) -> Term:
        if self._term is None:
            raise NoLeader("this scheduler does not lead", retry_after_s=1.0)
        return self._term


class GatewayStream:
    """Implements ``ports.placement_stream.PlacementStream``."""

    def __init__(self, service: SchedulerService, term: Term, session: Session) -> None:
        self._service = service
        self._term = term
        self._session = session

    @property
    def epoch(self) -> int:
        return self._term.epoch

    def submit(self, places: Sequence[tuple[int, PlaceSpec]]) -> None:
        admitted: list[tuple[int, PlaceSpec, int]] = []
        for placement_id, spec in places:
            try:
                self._service.admitted(spec)
            except PermissionDenied as error:
                self.refuse(placement_id, error)
            else:
                admitted.append((placement_id, spec, self._service.arrival_unix_us(spec)))
        if admitted:
            self._send(Submit(self._session, admitted))

    def cancel(self, placement_ids: Sequence[int]) -> None:
        if placement_ids:
            self._send(Cancel(self._session, tuple(placement_ids)))

    def take(self) -> PlacementFrame | None:
        if self._session.error is not None:
            raise self._session.error
        outcomes, self._session.outbox = self._session.outbox, []
        return PlacementFrame(self._term.epoch, tuple(outcomes)) if outcomes else None

    def close(self) -> None:
        self._term.close_session(self._session)

    def _send(self, command: Submit | Cancel) -> None:
        if self._session.error is not None:
            raise self._session.error
        self._term.send(command)

    def refuse(self, placement_id: int, error: FairwayError) -> None:
        """Answer a placement that cannot be asked for."""
        self._session.outbox.append(Refused(placement_id, error))
        self._session.wake()


class ReportStream:
    """One worker's stream."""

    def __init__(self, term: Term, reporter: Reporter) -> None:
        self._term = term
        self._reporter = reporter
        self._answered = 0

    @property
    def epoch(self) -> int:
        return self._term.epoch

    def report(self, number: int, snapshot: ReportSnapshot) -> None:
        """Hand a report over; ``number`` counts those of this stream."""
        if self._reporter.error is not None:
            raise self._reporter.error
        self._term.send(Report(self._reporter, number, snapshot))

    def take(self) -> int | None:
        """Return the newest report that was taken over since the last call, None when none was.

        Raises the error that ended the stream: NoLeader, or Conflict when the worker has a newer one.
        """
        if self._reporter.error is not None:
            raise self._reporter.error
        if self._reporter.applied == self._answered:
            return None
        self._answered = self._reporter.applied
        return self._answered

    def close(self) -> None:
        """Place nothing more on the worker until it reports again. Idempotent."""
        self._term.close_reporter(self._reporter)


def _still(election: Leading, epoch: int) -> Callable[[], bool]:
    return lambda: election.epoch == epoch
