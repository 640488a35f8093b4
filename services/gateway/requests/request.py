"""The run of every request: admitted, run on a route, settled, and ended by one terminal event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import structlog

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    OverQuota,
    RequestCancelled,
    StaleRoute,
)
from services.core.generation import NO_USAGE, StageClock, Usage
from services.core.usage import RequestUsage
from services.gateway.events import Finished, RequestSink
from services.gateway.incidents import failure_of
from services.gateway.requests.choice import ChoiceRun
from services.gateway.requests.quotas import settled
from services.gateway.requests.stage_timer import StageTimer
from services.gateway.requests.terms import Charge, RunTerms
from services.gateway.service_types import Ports
from services.ports.limiter import Reservation

log = structlog.get_logger()

# A worker may observe that a version is withdrawn shortly before this gateway does.
MAX_ROUTES: Final = 16
_REROUTE_S: Final = 0.05


class RequestWork(Protocol):
    """What an admitted request computes: sequences, a stored answer, or rows of a fixed-cost model."""

    @property
    def reservation(self) -> Reservation: ...

    @property
    def choices(self) -> Sequence[ChoiceRun]:
        """The sequences that it runs, which take the transport's credit."""

    @property
    def replaceable(self) -> bool:
        """Whether another version may run it: it has no output."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""

    async def run(self) -> None:
        """Return once everything is computed by the version of its route. Raises StaleRoute, withdrawn."""

    async def reroute(self) -> None:
        """Take the version that its model name resolves to now."""

    def report(self) -> RequestUsage:
        """Return the event of the usage ledger."""

    async def finished(self, usage: Usage) -> Finished:
        """Return the result once ``usage`` is settled. Raises the error that ends the request instead."""


Admit = Callable[[], Awaitable[RequestWork]]


class Request:
    """One request, from its receipt to its one end. Its face calls ``cancel`` and ``credit``."""

    def __init__(self, terms: RunTerms, ports: Ports) -> None:
        self.terms = terms
        self.request_id = terms.received.request_id
        self.telemetry = ports.telemetry.begin(terms.received)
        self.timer = self.telemetry.timer()
        self.reservation: Reservation | None = None
        self.allowed = 0  # tokens of every choice that the client takes beyond its first window
        self._ports = ports
        self._work: RequestWork | None = None
        self._charge: Charge | None = None  # what the settlement takes over
        self._scope: asyncio.Timeout | None = None
        self._cancel_error: FairwayError | None = None
        self._ended = False

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return self._work.usage if self._work is not None else NO_USAGE

    @property
    def buffered_tokens(self) -> int:
        """Output tokens that arrived and that the transport has not taken."""
        return sum(run.buffered_tokens for run in self._choices)

    def credit(self, choice: int, tokens: int) -> None:
        """The transport took tokens of a choice; unknown choices are ignored."""
        if choice < len(self._choices):
            self._choices[choice].credit(tokens)

    def allow(self, tokens: int) -> None:
        """The client takes ``tokens`` more of every choice, including choices that do not run yet."""
        self.allowed += tokens
        for run in self._choices:
            run.allow(tokens)

    def cancel(self, error: FairwayError | None = None) -> None:
        """End the request now with ``error``, by default a cancellation; one not begun never runs."""
        scope = self._scope
        if self._ended or self._cancel_error is not None or (scope is not None and scope.expired()):
            return
        self._cancel_error = error or RequestCancelled("the request was cancelled")
        if scope is not None:
            scope.reschedule(asyncio.get_running_loop().time())

    def withdraw(self) -> None:
        """The client requests the end of the request."""
        self.cancel()

    async def deliver(self, admit: Admit, sink: RequestSink) -> None:
        """Run the request; ``sink`` receives one terminal event at the end, also if the task is cancelled."""
        structlog.contextvars.bind_contextvars(request_id=self.request_id)
        try:
            end = await self.run(admit)
        except asyncio.CancelledError:
            assert self._cancel_error is not None, "a run keeps the error of its cancellation"
            await self._end(self._cancel_error, sink)
            raise
        await self._end(end, sink)

    async def run(self, admit: Admit) -> Finished | FairwayError:
        """Return the result, or the error that ended the request.

        Every resource of it is free then, or is left to the settlement of ``deliver``. Only a cancellation
        of the calling task is raised.
        """
        try:
            async with asyncio.timeout(self.terms.timeout_s) as self._scope:
                if self._cancel_error is not None:
                    raise self._cancel_error
                finished = await self._run(await admit())
        except asyncio.CancelledError:
            self._cancel_error = self._failed(
                self._cancel_error or RequestCancelled("the request was cancelled")
            )
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic in a native library is no Exception
            return self._failed(self._failure(error))
        finally:
            self._ended = True
        self._end_stages()
        self.telemetry.finished(finished)
        return finished

    def clock(self) -> StageClock:
        """Return the stages until now, of the choice that took longest."""
        return self._last_timer().finish(self._ports.clock.monotonic_s())

    async def _run(self, work: RequestWork) -> Finished:
        """Return the result, with the slot settled."""
        self._work, self.reservation = work, work.reservation
        try:
            await self._on_a_route(work)
        except OverQuota as error:  # The scheduler's refusal lacks the tenant's rates.
            error.request_rate = work.reservation.request_rate
            error.token_rate = work.reservation.token_rate
            raise
        finally:
            self.reservation, event = None, work.report()
            if self.terms.settlement is not None:
                self._charge = work.reservation, event
            else:
                await settled(self._ports, work.reservation, event)
        return await work.finished(event.usage)

    async def _end(self, end: Finished | FairwayError, sink: RequestSink) -> None:
        if self.terms.settlement is not None:
            end = await self.terms.settlement.finish(end, self._charge)
        if isinstance(end, Finished):
            sink.on_finished(end)
        else:
            sink.on_failed(end)

    async def _on_a_route(self, work: RequestWork) -> None:
        """Run the work. One whose version is withdrawn before it has output is resolved again."""
        for number in range(1, MAX_ROUTES + 1):
            try:
                await work.run()
            except StaleRoute:
                if number == MAX_ROUTES or not work.replaceable:
                    raise
            else:
                return
            log.info("request.rerouted", request_id=self.request_id)
            await self._ports.clock.sleep(_REROUTE_S)
            await work.reroute()

    def _failure(self, error: BaseException) -> FairwayError:
        """Return what the client receives for an error of the run."""
        if isinstance(error, TimeoutError):
            late = "the deadline passed before the output was complete"
            return self._cancel_error or DeadlineExceeded(late)
        return failure_of(error, self._ports.new_incident, "request.crashed", request_id=self.request_id)

    def _failed(self, error: FairwayError) -> FairwayError:
        """Count the request as failed."""
        error.metadata.setdefault("request_id", self.request_id)
        clock = self.clock()
        self._end_stages()
        self.telemetry.failed(error, clock, self.usage)
        return error

    @property
    def _choices(self) -> Sequence[ChoiceRun]:
        return self._work.choices if self._work is not None else ()

    def _last_timer(self) -> StageTimer:
        """The stage clock of the choice that took longest, or the request's own without choices."""
        return max(
            (run.timer for run in self._choices), key=lambda timer: timer.entered_s, default=self.timer
        )

    def _end_stages(self) -> None:
        now_s = self._ports.clock.monotonic_s()
        for timer in (self.timer, *(run.timer for run in self._choices)):
            timer.leave(now_s)
