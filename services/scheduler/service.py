"""Scheduler service: leads while it holds the election, and opens the streams of gateways and workers.

Its state is soft: it comes from the reports and submissions of the current term. While it does not lead,
every stream fails with NoLeader, so that clients find the leader again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

import structlog

from services.core.decisions import FleetWorker, PlacementDecision, PoolQueue, WorkerPool
from services.core.errors import FairwayError, NoLeader, PermissionDenied
from services.core.fixed_cost.explained import RowsExplanation
from services.core.fixed_cost.slots import SlotDemand, SlotReturn
from services.core.fleet import PlacementFrame, PlacementRefused, PoolSnapshot, ReportSnapshot
from services.core.generation import PlaceSpec
from services.core.paging import page_of
from services.ports.clock import Clock
from services.ports.streams import ReportAnswer
from services.runtime.fleet_state.leadership import Leadership
from services.runtime.secrets import check_ticket
from services.runtime.supervisor import first_of
from services.scheduler.explain.decision_log import DecisionLog, RowQuestions
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import NO_SUMS, WorkerState
from services.scheduler.health.worker_health import WorkerStanding
from services.scheduler.overload.loads import loads_of
from services.scheduler.queue.report import Now, counters_of, pools_of
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term, TermSettings
from services.scheduler.term_streams import (
    CancelPlacements,
    DemandSlots,
    GatewaySession,
    Report,
    SubmitPlacements,
    WorkerSession,
)

log = structlog.get_logger()

_STALLED_S: Final = 2.0
_MAX_AGE_US: Final = 3600 * 1_000_000  # the maximum age of an arrival


class SchedulerService:
    """Opens the streams of gateways and workers."""

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
        self._decisions = decisions = DecisionLog(clock, settings.profile)
        if telemetry is not None:
            telemetry.export_decisions(lambda: (decisions.entries, decisions.forgotten))
        self.questions = RowQuestions()

    @property
    def term(self) -> Term | None:
        """The current term, None while not leading."""
        return self._term

    def problem(self) -> str:
        """Return the health problem: empty while commands are processed in time."""
        stalled_s = 0.0 if self._term is None else self._term.streams.stalled_s()
        return f"no decision for {stalled_s:.1f} s" if stalled_s > _STALLED_S else ""

    async def run(self, election: Leadership) -> None:
        """Lead whenever the election is won, until cancelled."""
        while True:
            epoch = await election.wait_leading()
            term = self._term = self.new_term(epoch)
            if self._telemetry is not None:
                self._telemetry.term_started(term)
            log.info("scheduler.term_started", epoch=epoch)
            try:
                await first_of(term.run(_still(election, epoch)), election.wait_lost(epoch))
            finally:
                self._term = None
                if self._telemetry is not None:
                    self._telemetry.term_ended()
                term.streams.end(NoLeader("this scheduler is no longer the leader", retry_after_s=1.0))
                log.info("scheduler.term_ended", epoch=epoch)

    def new_term(self, epoch: int) -> Term:
        """Return the state of a new term under this epoch."""
        return Term(
            epoch,
            self._settings,
            self._clock,
            self._rng,
            telemetry=self._telemetry,
            decisions=self._decisions,
        )

    def open(self, gateway_id: str, wake: Callable[[], None], *, zone: str = "") -> GatewayPlacementStream:
        """Return a gateway's stream. Raises NoLeader while not leading."""
        term = self._leading()
        return GatewayPlacementStream(self, term, term.streams.open_session(gateway_id, wake, zone=zone))

    def open_report(self, wake: Callable[[], None]) -> WorkerReportStream:
        """Return a worker's stream. Raises NoLeader while not leading."""
        term = self._leading()
        return WorkerReportStream(term, term.streams.open_reporter(wake))

    def loads(self, *, size: int, token: str) -> tuple[int, tuple[PoolQueue, ...], str]:
        """Return as ``pools``, with the load of each alone. It costs nothing for each queued placement."""
        term = self._leading()
        found = list(loads_of(term.fleet, term.overload, term.slots, self._clock.monotonic_s()))
        page, following = page_of(found, lambda pool: pool.version_digest, size=size, token=token)
        return term.epoch, tuple(page), following

    def pools(self, *, size: int, token: str, tenant: str) -> tuple[int, tuple[PoolQueue, ...], str]:
        """Return the epoch and a page of the pools, as of now. Raises NoLeader while not leading."""
        term = self._leading()
        now = Now(self._clock.monotonic_s(), self._clock.unix_s())
        found = pools_of(term.queue, term.fleet, now, tenant=tenant)
        page, following = page_of(found, lambda pool: pool.version_digest, size=size, token=token)
        shown = tuple(
            replace(
                pool,
                pressure_ratio=term.overload.pressure(pool.version_digest).pressure_ratio,
                counters=counters_of(term.queue, pool.version_digest, tenant=tenant),
            )
            for pool in page
        )
        return term.epoch, shown, following

    def explain(self, request_id: str) -> tuple[int, tuple[PlacementDecision, ...], float]:
        """Return the epoch, the stored decisions of the request, and the time after which every decision is
        stored. Raises NoLeader."""
        term = self._leading()
        return term.epoch, self._decisions.explain(request_id), self._decisions.since_unix_s

    async def explain_rows(self, request_id: str) -> tuple[RowsExplanation, ...]:
        """Return what the connected gateways remember of a request of a fixed-cost model. Raises NoLeader."""
        return await self.questions.ask(request_id, self._leading().streams.sessions.values())

    def workers(self, *, size: int, token: str) -> tuple[int, tuple[FleetWorker, ...], str]:
        """Return the epoch and a page of the workers, as of now. Raises NoLeader while not leading."""
        term = self._leading()
        health, prefixes = term.health.worker_health(), term.applied.prefixes_by_worker
        found = workers_of(term.fleet, health, prefixes, self._clock.monotonic_s())
        page, following = page_of(found, lambda worker: worker.worker_id, size=size, token=token)
        return term.epoch, page, following

    def admitted(self, spec: PlaceSpec) -> None:
        """Return if the ticket is authentic, belongs to the placement, and reserved its tokens.

        Raises PermissionDenied, and TicketExpired where the gateway's clock is far behind. A choice that is
        placed again has the same tokens, so no number of placements uses more than was reserved.
        """
        ticket = check_ticket(self._ticket_key, spec.ticket, self._clock.unix_s())
        if ticket.tenant_id != spec.tenant_id or ticket.request_id != spec.request_id:
            raise PermissionDenied("the placement ticket belongs to another request")
        tokens = spec.prompt_tokens + spec.max_output_tokens
        if tokens > ticket.reserved_tokens or spec.choice >= ticket.choices:
            raise PermissionDenied(
                f"choice {spec.choice} needs {tokens} tokens; the placement ticket is for {ticket.choices} "
                f"choices of {ticket.reserved_tokens}",
                tokens=tokens,
                max_tokens=ticket.reserved_tokens,
                choice=spec.choice,
                choices=ticket.choices,
            )

    def arrival_unix_us(self, spec: PlaceSpec) -> int:
        """Return the arrival within a plausible range, so that a gateway's clock gains little priority."""
        now_us = round(self._clock.unix_s() * 1_000_000)
        return min(now_us, max(spec.arrival_unix_us, now_us - _MAX_AGE_US))

    def _leading(self) -> Term:
        if self._term is None:
            raise NoLeader("this scheduler is not the leader", retry_after_s=1.0)
        return self._term


class GatewayPlacementStream:
    """A gateway's stream, independent of gRPC. Owned by one caller in the scheduler's event loop.

    The caller chooses the placement ids. All pending outcomes are merged into one frame per ``take``, so that
    a slow reader gets fewer and larger frames; the gateway's pending placements bound the size of a frame.
    """

    def __init__(self, service: SchedulerService, term: Term, session: GatewaySession) -> None:
        self._service = service
        self._term = term
        self._session = session

    @property
    def epoch(self) -> int:
        return self._term.epoch

    def submit(self, places: Sequence[tuple[int, PlaceSpec]]) -> None:
        """Queue placements. Each ends in one outcome of a later frame, unless it is cancelled before."""
        admitted: list[tuple[int, PlaceSpec, int]] = []
        for placement_id, spec in places:
            try:
                self._service.admitted(spec)
            except FairwayError as error:
                self.refuse(placement_id, error)
            else:
                admitted.append((placement_id, spec, self._service.arrival_unix_us(spec)))
        if admitted:
            self._send(SubmitPlacements(self._session, admitted))

    def cancel(self, placement_ids: Sequence[int]) -> None:
        """Withdraw placements: queued ones are dropped, grants are returned, unknown ids are ignored.

        An outcome that crosses the call may still arrive.
        """
        if placement_ids:
            self._send(CancelPlacements(self._session, tuple(placement_ids)))

    def demand(self, demands: Sequence[SlotDemand], returned: Sequence[SlotReturn]) -> None:
        """Replace the demands of these versions and tenants, and free what these leases no longer allow.

        Later frames have the leases: they follow the demands until these are 0 or the stream ends.
        """
        self._send(DemandSlots(self._session, tuple(demands), tuple(returned)))

    def explained(self, request_id: str, found: RowsExplanation | None) -> None:
        """Answer a question of an earlier frame: how the gateway ran the request; None: it has no record."""
        self._service.questions.answered(self._session, request_id, found)

    def take(self) -> PlacementFrame | None:
        """Return and clear the pending outcomes; None when there are none. Raises the error that ended the
        stream: NoLeader when the scheduler no longer leads, Conflict when the gateway opened another stream.
        """
        if self._session.error is not None:
            raise self._session.error
        session = self._session
        outcomes, session.outbox = session.outbox, []
        pressures, session.pressures = session.pressures, None
        members, session.members = session.members, None
        leases, questions = session.take_leases(), tuple(session.questions)
        session.questions.clear()
        refusals, session.slot_refusals = tuple(session.slot_refusals), {}
        if not (outcomes or leases or questions or refusals) and pressures is None and members is None:
            return None
        return PlacementFrame(
            self._term.epoch, tuple(outcomes), pressures, members, leases, questions, refusals
        )

    def close(self) -> None:
        """Withdraw queued placements and return the grants that were not taken. Idempotent."""
        self._term.streams.close_session(self._session)

    def _send(self, command: SubmitPlacements | CancelPlacements | DemandSlots) -> None:
        if self._session.error is not None:
            raise self._session.error
        self._term.streams.send(command)

    def refuse(self, placement_id: int, error: FairwayError) -> None:
        """Refuse a placement that is not submitted; a later frame has the error."""
        self._session.outbox.append(PlacementRefused(placement_id, error))
        self._session.wake()


class WorkerReportStream:
    """A worker's stream. Implements ``ports.report_stream.ReportStream``."""

    def __init__(self, term: Term, reporter: WorkerSession) -> None:
        self._term = term
        self._reporter = reporter
        self._answered = 0

    @property
    def epoch(self) -> int:
        return self._term.epoch

    def report(self, number: int, snapshot: ReportSnapshot) -> None:
        """Pass a report on; ``number`` counts the reports of this stream."""
        if self._reporter.error is not None:
            raise self._reporter.error
        self._term.streams.send(Report(self._reporter, number, snapshot))

    def take(self) -> ReportAnswer | None:
        if self._reporter.error is not None:
            raise self._reporter.error
        reporter = self._reporter
        if reporter.applied == self._answered:
            return None
        self._answered = reporter.applied
        return ReportAnswer(self._term.epoch, self._answered, reporter.take_counters())

    def close(self) -> None:
        """Stop placements on the worker until it reports again. Idempotent."""
        self._term.streams.close_reporter(self._reporter)


def _still(election: Leadership, epoch: int) -> Callable[[], bool]:
    return lambda: election.epoch == epoch


def workers_of(
    fleet: FleetView, standings: Iterable[WorkerStanding], prefix_blocks: Mapping[str, int], now_s: float
) -> list[FleetWorker]:
    """Return every worker that has reported, sorted by name."""
    found = {(standing.worker_id, standing.digest): standing for standing in standings}
    return [
        FleetWorker(
            worker_id=worker.worker_id,
            address=worker.address,
            incarnation=worker.incarnation,
            zone=worker.zone,
            device_type=worker.device_type,
            cost_per_hour=worker.cost_per_hour,
            state=worker.state,
            silent_s=max(0.0, now_s - worker.report_s),
            prefix_blocks=prefix_blocks.get(worker.worker_id, 0),
            pools=tuple(
                _pool(fleet, worker, pool, found.get((worker.worker_id, digest)))
                for digest, pool in sorted(worker.pools.items())
            ),
            node_group=worker.node_group,
        )
        for worker in sorted(fleet.states, key=lambda state: state.worker_id)
    ]


def _pool(
    fleet: FleetView, worker: WorkerState, pool: PoolSnapshot, standing: WorkerStanding | None
) -> WorkerPool:
    candidate = fleet.candidates(pool.digest)[worker.worker_id]
    model = candidate.step_model
    return WorkerPool(
        version_digest=pool.digest,
        kv_tokens_total=candidate.kv_tokens_total,
        kv_tokens_room=candidate.kv_tokens_room,
        slots=candidate.slots,
        running=pool.running,
        waiting=pool.waiting,
        granted=worker.sums.get(pool.digest, NO_SUMS).grants,
        queued_prefill_tokens=candidate.queued_prefill_tokens,
        ready=pool.ready,
        measured_step_s=pool.step_seconds / pool.steps if pool.steps else None,
        predicted_step_s=max(0.0, model.seconds(1, 0, candidate.running, candidate.attended_tokens)),
        slowness_ratio=candidate.slowness_ratio,
        health="" if standing is None else standing.state,
        health_reason="" if standing is None else standing.why,
    )
