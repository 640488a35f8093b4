"""One accepted request: its choices, its slot and its terminal event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    OverQuota,
    RequestCancelled,
    StaleRoute,
    first_failure,
)
from services.core.generation import Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, RequestSink
from services.gateway.incidents import incident_of
from services.gateway.requests.choice import ChoiceRun
from services.gateway.requests.quotas import settled
from services.gateway.requests.shared_scores import SharedScores
from services.gateway.requests.stage_timer import StageTimer
from services.gateway.requests.terms import Admitted, RunTerms
from services.gateway.response_cache import CachedAnswer, CollectedAnswer
from services.gateway.service_types import Ports
from services.ports.limiter import Reservation

log = structlog.get_logger()

# A worker may observe that a version is withdrawn shortly before this gateway does.
MAX_ROUTES: Final = 16
_REROUTE_S: Final = 0.05


class Request:
    """Drives one request to exactly one terminal event on its sink.

    Its own task calls ``run``; its face calls ``cancel`` and ``credit``.
    """

    def __init__(self, terms: RunTerms, sink: RequestSink, ports: Ports) -> None:
        self.request_id = terms.received.request_id
        self.telemetry = ports.telemetry.begin(terms.received)
        self.timer = self.telemetry.timer()
        self.reservation: Reservation | None = None
        self._terms = terms
        self._sink = sink
        self._ports = ports
        self._runs: tuple[ChoiceRun, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._cancel_error: FairwayError | None = None
        self._started = False
        self._allowed = 0
        self._prompt_tokens = 0
        self._cached: CachedAnswer | None = None

    @property
    def buffered_tokens(self) -> int:
        """Output tokens that arrived and that the transport has not taken."""
        return sum(run.buffered_tokens for run in self._runs)

    def bind(self, task: asyncio.Task[None]) -> None:
        """Set the task that calls ``run``."""
        self._task = task

    def credit(self, choice: int, tokens: int) -> None:
        """The transport took tokens of a choice; unknown choices are ignored."""
        if choice < len(self._runs):
            self._runs[choice].credit(tokens)

    def allow(self, tokens: int) -> None:
        """The client takes ``tokens`` more of every choice, including choices that do not run yet."""
        self._allowed += tokens
        for run in self._runs:
            run.allow(tokens)

    def cancel(self, error: FairwayError | None = None) -> None:
        """End the request now; its sink receives ``error``, by default a cancellation."""
        if self._task is not None and not self._task.done() and self._cancel_error is None:
            self._cancel_error = error or RequestCancelled("the request was cancelled")
            # otherwise ``run`` raises the error: a task that never began cannot reach its sink
            if self._started:
                self._task.cancel()

    def withdraw(self) -> None:
        """The client requests the end of the request."""
        self.cancel()

    async def run(self, admit: Callable[[], Awaitable[Admitted]]) -> None:
        """Admit and run the request; its sink receives one terminal event at the end.

        Every resource of the request is free afterwards.
        """
        self._started = True
        structlog.contextvars.bind_contextvars(request_id=self.request_id)
        try:
            async with asyncio.timeout(self._terms.timeout_s):
                if self._cancel_error is not None:
                    raise self._cancel_error
                finished = await self._run(await admit())
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
            self._end_stages()
            self.telemetry.finished(finished)
            self._sink.on_finished(finished)

    async def _run(self, admitted: Admitted) -> Finished:
        """Return when every choice has ended and the slot is settled."""
        self.reservation = admitted.reservation
        self._prompt_tokens = len(admitted.spec.prompt.ids)
        self.telemetry.accepted(admitted.tenant.meta.name, admitted.spec)
        cache, collected = self._ports.responses if self._cacheable(admitted) else None, None
        tenant_id = admitted.reservation.tenant_id
        try:
            if cache is not None:
                self._cached = await cache.find(tenant_id, admitted.spec)
                if self._cached is None:
                    self._sink = collected = CollectedAnswer(self._sink)
            if self._cached is not None:
                results = self._repeat(admitted, self._cached)
            else:
                admitted, results = await self._run_choices(admitted)
        except OverQuota as error:  # of the scheduler
            error.request_rate = admitted.reservation.request_rate
            error.token_rate = admitted.reservation.token_rate
            raise
        finally:
            usage = self.usage
            await self._settle(admitted, usage)
        for result in results if admitted.spec.limits.max_tokens else ():
            self._ports.outputs.note(
                admitted.payer.tenant.meta.name, admitted.spec.version_digest, result.output_tokens
            )
        # Built after the settlement, so that the clock covers everything that the client waits for.
        finished = Finished(
            choices=results,
            usage=usage,
            clock=self._last_timer().finish(self._ports.clock.monotonic_s()),
            resumes=sum(run.losses for run in self._runs),
        )
        answer = collected.answer(finished) if collected is not None else None
        if cache is not None and answer is not None:
            keeping = cache.put(tenant_id, admitted.spec, answer)
            self._ports.supervisor.spawn(f"keep {self.request_id}", keeping)
        return finished

    def _cacheable(self, admitted: Admitted) -> bool:
        """Whether an equal request has an equal answer, and the client permits that it serves."""
        spec = admitted.spec
        return self._terms.cache and spec.sampling.temperature == 0 and spec.choices == 1

    def _repeat(self, admitted: Admitted, answer: CachedAnswer) -> tuple[ChoiceResult, ...]:
        """Send a cached answer."""
        self._sink.on_accepted(self._accepted(admitted))
        self._sink.on_tokens(0, 0, answer.ids, answer.text, answer.logprobs)
        return answer.finished.choices

    async def _run_choices(self, admitted: Admitted) -> tuple[Admitted, tuple[ChoiceResult, ...]]:
        """Return the request as it was served, and its results.

        A request whose version is withdrawn before it has output is resolved again, and accepted again.
        """
        for number in range(1, MAX_ROUTES + 1):
            spec = admitted.spec
            self._prompt_tokens = len(spec.prompt.ids)
            scores = SharedScores(spec.scored_tokens, min(len(admitted.produced(0).ids), spec.scored_tokens))
            self._runs = tuple(
                ChoiceRun(admitted, choice, self._sink, self.timer.fork(), scores)
                for choice in range(spec.choices)
            )
            for run in self._runs:
                run.allow(self._allowed)
            self._sink.on_accepted(self._accepted(admitted))
            if number == 1 and admitted.accepted is not None:
                admitted.accepted()
            try:
                return admitted, await self._all_choices()
            except StaleRoute:
                begun = any(run.begun for run in self._runs)
                if admitted.reroute is None or begun or number == MAX_ROUTES:
                    raise
            log.info("request.rerouted", request_id=self.request_id, version_digest=spec.version_digest)
            await self._ports.clock.sleep(_REROUTE_S)
            admitted = await admitted.reroute(admitted)
            self.telemetry.accepted(admitted.tenant.meta.name, admitted.spec)
        raise AssertionError("the last round returns or raises")

    def _accepted(self, admitted: Admitted) -> Accepted:
        spec = admitted.spec
        return Accepted(
            request_id=spec.request_id,
            model=spec.model,
            version_digest=spec.version_digest,
            route_revision=spec.route_revision,
            seed=spec.sampling.seed,
            prompt_tokens=self._prompt_tokens,
            cached=self._cached is not None,
            request_rate=admitted.reservation.request_rate,
            token_rate=admitted.reservation.token_rate,
            degradations=admitted.degradations,
            form=spec.form,
        )

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

    @property
    def usage(self) -> Usage:
        """The tokens used so far. A cached answer counts its prompt as cached; no device computed it."""
        if self._cached is not None:
            output = self._cached.finished.usage.output_tokens
            return Usage(self._prompt_tokens, output, cached_tokens=self._prompt_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            output_tokens=sum(run.output_tokens for run in self._runs),
            cached_tokens=max((run.cached_tokens for run in self._runs), default=0),
            device_s=sum(run.device_us for run in self._runs) / 1e6,
        )

    async def _settle(self, admitted: Admitted, usage: Usage) -> None:
        """Release the slot and report the usage."""
        self.reservation = None
        event = admitted.usage_report(usage)
        await settled(self._ports, admitted.reservation, event, self._terms.settlement)

    def _cancelled(self) -> FairwayError:
        """The cause of the task's cancellation: the face's error, otherwise the shutdown of the process."""
        return self._cancel_error or RequestCancelled("the request was cancelled")

    def _incident(self, error: BaseException) -> InternalError:
        return incident_of(error, self._ports.new_incident, "request.crashed", request_id=self.request_id)

    def _last_timer(self) -> StageTimer:
        """The stage clock of the choice that took longest, or the request's own before any choice."""
        return max((run.timer for run in self._runs), key=lambda timer: timer.entered_s, default=self.timer)

    def _end_stages(self) -> None:
        now_s = self._ports.clock.monotonic_s()
        for timer in (self.timer, *(run.timer for run in self._runs)):
            timer.leave(now_s)

    def _fail(self, error: FairwayError) -> None:
        error.metadata.setdefault("request_id", self.request_id)
        clock = self._last_timer().finish(self._ports.clock.monotonic_s())
        self._end_stages()
        self.telemetry.failed(error, clock, self.usage)
        self._sink.on_failed(error)
