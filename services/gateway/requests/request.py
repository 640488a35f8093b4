"""One accepted request: its choices, its slot and its terminal event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    RequestCancelled,
    first_failure,
)
from services.core.generation import GenerationSpec, Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, Received, RequestSink
from services.gateway.policy.degrade import Degradation
from services.gateway.requests.choice import ChoiceRun, Produced, RunContext
from services.gateway.requests.stage_timer import StageTimer
from services.gateway.telemetry import GatewayTelemetry
from services.ports.clock import Clock
from services.ports.limiter import Reservation
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed the validator and the quotas, with what its run needs.

    ``produced`` is the output of an earlier run, by choice. ``degradations``: its changes by degraded
    service.
    """

    spec: GenerationSpec
    reservation: Reservation
    context: RunContext
    produced: tuple[Produced, ...] = ()
    degradations: tuple[Degradation, ...] = ()

    def produced_by(self, choice: int) -> Produced:
        """Return what an earlier run produced for a choice."""
        return self.produced[choice] if choice < len(self.produced) else Produced()


Settle = Callable[[Reservation, Usage], Awaitable[None]]


class Request:
    """Drives one request to exactly one terminal event on its sink.

    Its own task admits and runs it within ``until_end``; its face calls ``cancel`` and ``credit``.
    """

    def __init__(
        self,
        received: Received,
        sink: RequestSink,
        *,
        settle: Settle,
        clock: Clock,
        supervisor: Supervisor,
        new_incident: Callable[[], str],
        telemetry: GatewayTelemetry | None = None,
    ) -> None:
        self.request_id = received.request_id
        if telemetry is None:
            telemetry = GatewayTelemetry(clock=clock)
        self.telemetry = telemetry.begin(received)
        self.reservation: Reservation | None = None
        self._sink = sink
        self._settle_with = settle
        self._clock = clock
        self._supervisor = supervisor
        self._new_incident = new_incident
        self.timer = self.telemetry.timer()
        self._runs: tuple[ChoiceRun, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._cancel_error: FairwayError | None = None
        self._started = False
        self._allowed_early = 0
        self._prompt_tokens = 0
        self._finished: Finished | None = None

    @property
    def buffered_tokens(self) -> int:
        """Output tokens that arrived and that the transport has not taken."""
        return sum(run.buffered_tokens for run in self._runs)

    def bind(self, task: asyncio.Task[None]) -> None:
        """Set the task that admits and runs the request."""
        self._task = task

    def credit(self, choice: int, tokens: int) -> None:
        """The transport took tokens of a choice; unknown choices are ignored."""
        if choice < len(self._runs):
            self._runs[choice].credit(tokens)

    def allow(self, tokens: int) -> None:
        """The client takes ``tokens`` more of every choice, including choices that do not run yet."""
        if not self._runs:
            self._allowed_early += tokens
        for run in self._runs:
            run.allow(tokens)

    def cancel(self, error: FairwayError | None = None) -> None:
        """End the request now; its sink receives ``error``, by default a cancellation."""
        if self._task is not None and not self._task.done() and self._cancel_error is None:
            self._cancel_error = error or RequestCancelled("the request was cancelled")
            # otherwise ``check_cancelled`` raises the error: a task that never began cannot reach its sink
            if self._started:
                self._task.cancel()

    def withdraw(self) -> None:
        """The client requests the end of the request."""
        self.cancel()

    @asynccontextmanager
    async def until_end(self, timeout_s: float | None) -> AsyncIterator[None]:
        """The context of the request's task: its sink receives one terminal event when the body ends.

        The body calls ``check_cancelled``, admits the request and calls ``run``. Every resource of the
        request is free afterwards.
        """
        self._started = True
        structlog.contextvars.bind_contextvars(request_id=self.request_id)
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except InternalError as error:
            self._fail(self._incident(error))
        except FairwayError as error:
            self._fail(error)
        except TimeoutError:
            self._fail(DeadlineExceeded("the deadline passed before the output was complete"))
        except asyncio.CancelledError:
            self._fail(self._cancelled())
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic in a native library is no Exception
            self._fail(self._incident(error))
        else:
            assert self._finished is not None, "the body did not run the request"
            self._end_stages()
            self.telemetry.finished(self._finished)
            self._sink.on_finished(self._finished)

    def check_cancelled(self) -> None:
        """Return if no caller cancelled the request before its task began; otherwise raise the error."""
        if self._cancel_error is not None:
            raise self._cancel_error

    async def run(self, admitted: Admitted) -> None:
        """Return when every choice has ended and the slot is settled."""
        self.reservation = admitted.reservation
        self._prompt_tokens = len(admitted.spec.prompt.ids)
        self.telemetry.accepted(admitted.context.tenant_id, admitted.spec.model)
        try:
            results = await self._run_choices(admitted)
        finally:
            await self._settle(admitted)
        # Built after the settlement, so that the clock covers everything that the client waits for.
        self._finished = Finished(
            choices=results,
            usage=self._usage(admitted.spec),
            clock=self._last_timer().finish(self._clock.monotonic_s()),
            resumes=sum(run.losses for run in self._runs),
        )

    async def _run_choices(self, admitted: Admitted) -> tuple[ChoiceResult, ...]:
        spec = admitted.spec
        self._runs = tuple(
            ChoiceRun(
                spec, choice, admitted.context, self._sink, self.timer.fork(), admitted.produced_by(choice)
            )
            for choice in range(spec.choices)
        )
        if self._allowed_early:
            self.allow(self._allowed_early)
        self._sink.on_accepted(
            Accepted(
                request_id=spec.request_id,
                model=spec.model,
                version_digest=spec.version_digest,
                route_revision=spec.route_revision,
                seed=spec.sampling.seed,
                prompt_tokens=len(spec.prompt.ids),
                degradations=admitted.degradations,
            )
        )
        return await self._all_choices()

    async def _all_choices(self) -> tuple[ChoiceResult, ...]:
        """Run the choices concurrently; the first failure ends the others and is raised itself."""
        if len(self._runs) == 1:
            return (await self._runs[0].run(),)
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(run.run()) for run in self._runs]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        return tuple(task.result() for task in tasks)

    def _usage(self, spec: GenerationSpec) -> Usage:
        return Usage(
            prompt_tokens=len(spec.prompt.ids),
            output_tokens=sum(run.output_tokens for run in self._runs),
            cached_tokens=max((run.cached_tokens for run in self._runs), default=0),
        )

    async def _settle(self, admitted: Admitted) -> None:
        """Release the slot before the terminal event, so that the client's next request finds it free.

        A store that does not answer must not delay a finished output: the reservation expires by itself.
        """
        self.reservation = None
        settling = self._try_settle(admitted.reservation, self._usage(admitted.spec))
        await asyncio.shield(self._supervisor.spawn(f"settle {self.request_id}", settling))

    async def _try_settle(self, reservation: Reservation, usage: Usage) -> None:
        try:
            await self._settle_with(reservation, usage)
        except FairwayError as error:
            log.warning("request.settle_failed", request_id=self.request_id, reason=error.reason)

    def _cancelled(self) -> FairwayError:
        """The cause of the task's cancellation: the face's error, otherwise the shutdown of the process."""
        return self._cancel_error or RequestCancelled("the request was cancelled")

    def _incident(self, error: BaseException) -> InternalError:
        """Return the client's error for a bug: an incident id that is in the log, without the bug's text."""
        incident = self._new_incident()
        log.error("request.crashed", request_id=self.request_id, incident=incident, exc_info=error)
        return InternalError("internal error; quote the incident id to the operator", incident=incident)

    def _last_timer(self) -> StageTimer:
        """The stage clock of the choice that took longest, or the request's own before any choice."""
        return max((run.timer for run in self._runs), key=lambda timer: timer.entered_s, default=self.timer)

    def _end_stages(self) -> None:
        now_s = self._clock.monotonic_s()
        for timer in (self.timer, *(run.timer for run in self._runs)):
            timer.leave(now_s)

    def _fail(self, error: FairwayError) -> None:
        error.metadata.setdefault("request_id", self.request_id)
        clock = self._last_timer().finish(self._clock.monotonic_s())
        self._end_stages()
        output_tokens = sum(run.output_tokens for run in self._runs)
        cached_tokens = max((run.cached_tokens for run in self._runs), default=0)
        self.telemetry.failed(error, clock, (self._prompt_tokens, cached_tokens, output_tokens))
        self._sink.on_failed(error)
