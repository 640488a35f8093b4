"""One request of a fixed-cost model, from its admission to its settlement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from msgspec import Struct

from services.core.arms import ArmKey, SliKey
from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    OverQuota,
    PoisonedInput,
    RequestCancelled,
    StaleRoute,
    UnsupportedFeature,
)
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowsRequest
from services.core.fixed_cost.signature import Signature
from services.core.fixed_cost.tensors import Operation
from services.core.generation import NO_USAGE, Principal, StageClock, Usage
from services.core.limits import Price, RateState
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import Finished, Received
from services.gateway.idempotency.record_codec import AcceptedTerms
from services.gateway.policy.claims import Payer, admission_limits, claims_of
from services.gateway.requests.admission import class_of
from services.gateway.requests.quotas import HeldQuota, RequestQuotas, check_timeout, settled
from services.gateway.requests.stage_timer import Stage
from services.gateway.requests.terms import Settlement, usage_of
from services.gateway.requests.validate import Checked, Validator, session_key_of
from services.gateway.rows.inputs import PreparedRows
from services.gateway.service_types import Ports, RowsMessage
from services.gateway.slis.recorder import subject_of
from services.gateway.text.text_model import TextModel
from services.ports.limiter import Reservation
from services.ports.rows import RowRunner
from services.rpc.convert.times import seconds_of

log = structlog.get_logger()

# A worker may observe that a version is withdrawn shortly before this gateway does.
MAX_ROUTES: Final = 8
_REROUTE_S: Final = 0.05
_SHAPED_ROWS: Final = 64  # of a request, whose widths are recorded
# Returns the rows of the request for a version, within the tenant's quotas.
Prepare = Callable[[TextModel, Signature], Awaitable[PreparedRows]]
# Returns the outputs of the request from the ends of its rows, none of them an error.
Join = Callable[[Sequence[RowEnd], Signature], tuple[RawTensor, ...]]


@dataclass(frozen=True, slots=True)
class RowsParts:
    """What all requests of a gateway act through."""

    validator: Validator
    catalog: ModelCatalog
    quotas: RequestQuotas
    ports: Ports
    runner: RowRunner
    prefills: RowRunner  # of decoders that embed


class RowsWork(Struct, frozen=True):
    """What one call of the interface does with its request."""

    operations: Sequence[Operation]  # of the models that it takes
    prepare: Prepare
    join: Join


class RowsJob(Struct, frozen=True):
    """One request as its interface received it."""

    principal: Principal
    message: RowsMessage
    received: Received
    timeout_s: float
    work: RowsWork


class RowsAnswer(Struct, frozen=True):
    """The outputs of all rows, each with the rows as its first extent."""

    request_id: str
    model: str
    version_digest: str
    outputs: tuple[RawTensor, ...]
    tokens: tuple[int, ...]  # of each row
    usage: Usage
    clock: StageClock
    replayed: bool = False  # of an earlier request with the same idempotency key
    # The tenant's rates after this request, where they apply.
    request_rate: RateState | None = None
    token_rate: RateState | None = None


class _Ready(Struct, frozen=True):
    """Rows that passed every check, for one version."""

    route: Route
    signature: Signature
    rows: PreparedRows


class RowsRun:
    """Drives one request to its answer or its error; the caller's task runs it."""

    def __init__(self, job: RowsJob, parts: RowsParts, settlement: Settlement | None = None) -> None:
        self.reservation: Reservation | None = None
        self.usage = NO_USAGE
        self.buffered_tokens = 0
        self._job = job
        self._parts = parts
        self._ports = parts.ports
        self._settlement = settlement
        self._telemetry = parts.ports.telemetry.begin(job.received)
        self._timer = self._telemetry.timer()
        self._scope: asyncio.Timeout | None = None
        self._cancel_error: FairwayError | None = None

    def cancel(self, error: FairwayError | None = None) -> None:
        """End the request now; its caller receives ``error``, by default a cancellation."""
        scope = self._scope
        if self._cancel_error is None and not (scope is not None and scope.expired()):
            self._cancel_error = error or RequestCancelled("the request was cancelled")
            if scope is not None:
                scope.reschedule(asyncio.get_running_loop().time())

    def credit(self, choice: int, tokens: int) -> None:
        """The answer comes whole: nothing is credited."""

    async def run(self) -> RowsAnswer:
        """Return the answer with the slot settled. Raises the error of the first row that has one."""
        try:
            return await self._within_deadline()
        except FairwayError as error:
            self._failed(error)
            raise
        except asyncio.CancelledError:
            self._failed(RequestCancelled("the client disconnected"))
            raise
        except BaseException:  # the interface reports it with an incident id
            self._failed(InternalError("internal error"))
            raise

    async def _within_deadline(self) -> RowsAnswer:
        try:
            async with asyncio.timeout(self._job.timeout_s) as self._scope:
                if self._cancel_error is not None:
                    raise self._cancel_error
                return await self._admitted()
        except TimeoutError:
            raise self._cancel_error or DeadlineExceeded(
                "the deadline passed before every row was computed"
            ) from None

    async def _admitted(self) -> RowsAnswer:
        job, parts = self._job, self._parts
        message, tenant_id = job.message, job.principal.tenant_id
        if parts.catalog.has(message.model):
            self._telemetry.addressed(tenant_id, message.model, class_of(message))
        checked = parts.validator.check_rows(job.principal, message)
        route = checked.route
        self._telemetry.routed(tenant_id, route, checked.priority, session_key_of(job.principal, message))
        payer = parts.quotas.payer(job.principal, message.user)
        parts.quotas.require_recorded(payer)
        check_timeout(seconds_of(message.timeout), payer.bounds.timeout_s)
        self._enter(Stage.ADMIT)
        due = admission_limits(payer, anew=True)
        quota = await parts.quotas.reserve(tenant_id, job.received.request_id, due)
        try:
            ready = await self._prepared(checked)
            price = parts.catalog.price(route.model, checked.priority)
            if claims := claims_of(payer, price, ready.rows.total_tokens):
                self._enter(Stage.ADMIT)
                await quota.claim(claims, price)
            await self._record(ready)
        except BaseException as error:
            await quota.undo(error)
            raise
        self._accepted(checked, payer, ready)
        return await self._settled(checked, payer, quota, price, ready)

    async def _prepared(self, checked: Checked) -> _Ready:
        """Return the rows for the version of a route."""
        self._enter(Stage.VALIDATE)
        route, job = checked.route, self._job
        model = (await self._parts.catalog.text_model(route.version_digest)).of_rows
        signature = model.signature
        operation = signature.operation if signature is not None else "generate"
        if signature is None or operation not in job.work.operations:
            raise UnsupportedFeature(
                f"the operation of {route.model} is {operation}; this call takes models of the operation "
                f"{' or '.join(job.work.operations)}",
                field="model",
                operation=operation,
            )
        rows = await job.work.prepare(model, signature)
        if self._ports.poisons is not None:
            self._ports.poisons.check_rows(route.model, route.version_digest, rows.rows)
        return _Ready(route, signature, rows)

    async def _settled(
        self, checked: Checked, payer: Payer, quota: HeldQuota, price: Price, ready: _Ready
    ) -> RowsAnswer:
        """Return the answer once the slot is released; the next request of the client finds it free."""
        self.reservation = reservation = quota.reservation
        ends: tuple[RowEnd, ...] = ()
        try:
            ready, ends = await self._ran(checked, payer, ready)
        except OverQuota as error:
            error.request_rate, error.token_rate = reservation.request_rate, reservation.token_rate
            raise
        finally:
            self.reservation, self.usage = None, _usage_of(ends, ready.rows)
            route, request_id = ready.route, self._job.received.request_id
            event = usage_of(
                payer,
                request_id,
                route.model,
                route.version_digest,
                price,
                self.usage,
                self._ports.clock.unix_s(),
            )
            await settled(self._ports, reservation, event, self._settlement)
        for index, end in enumerate(ends):
            if end.error is not None:
                await self._condemn(ready, ends)
                end.error.metadata.setdefault("row", str(index))
                raise end.error
        return self._answer(ready, ends, reservation)

    async def _ran(self, checked: Checked, payer: Payer, ready: _Ready) -> tuple[_Ready, tuple[RowEnd, ...]]:
        """Return the ends of all rows. A request whose version is withdrawn is resolved again."""
        for number in range(1, MAX_ROUTES + 1):
            self._enter(Stage.ENGINE_WAIT)
            began_s = self._ports.clock.monotonic_s()
            try:
                runner = self._parts.prefills if ready.signature.by_prefill else self._parts.runner
                ends = await runner.run(self._request(checked, payer, ready))
            except StaleRoute:
                if number == MAX_ROUTES:
                    raise
            else:
                assert len(ends) == len(ready.rows.rows), "a row has no end"
                # The longest wait for a batch, then the batches themselves.
                now_s = self._ports.clock.monotonic_s()
                waited_s = max((end.wait_s for end in ends), default=0.0)
                self._timer.enter(Stage.PREFILL, min(now_s, began_s + waited_s))
                self._enter(Stage.SEND)
                return ready, ends
            log.info("request.rerouted", request_id=self._job.received.request_id)
            await self._ports.clock.sleep(_REROUTE_S)
            checked = self._parts.validator.check_rows(self._job.principal, self._job.message)
            ready = await self._prepared(checked)
            await self._record(ready)
            self._accepted(checked, payer, ready)
        raise AssertionError("the last round returns or raises")

    async def _record(self, ready: _Ready) -> None:
        """Record the acceptance of a request with a key, before any row runs."""
        if self._settlement is None:
            return
        terms = AcceptedTerms(
            request_id=self._job.received.request_id,
            model=ready.route.model,
            version_digest=ready.route.version_digest,
            route_revision=ready.route.route_revision,
            seed=0,
            prompt_tokens=ready.rows.total_tokens,
            max_output_tokens=0,
            received_unix_us=self._job.received.unix_us,
        )
        await self._settlement.accept(terms)

    def _request(self, checked: Checked, payer: Payer, ready: _Ready) -> RowsRequest:
        received = self._job.received
        return RowsRequest(
            request_id=received.request_id,
            tenant_id=payer.tenant.meta.name,
            model=ready.route.model,
            version_digest=ready.route.version_digest,
            rows=ready.rows.rows,
            priority=checked.priority,
            route_revision=ready.route.route_revision,
            tenant_weight=payer.tenant.weight,
            deadline_s=received.monotonic_s + self._job.timeout_s,
            traceparent=self._timer.traceparent,
            target_s=self._ports.ttft_target_s(ready.route.model, checked.priority) or 0.0,
            received_s=received.monotonic_s,
        )

    def _accepted(self, checked: Checked, payer: Payer, ready: _Ready) -> None:
        """Count the request for the version that it runs on."""
        route = ready.route
        arm, zone = ArmKey(route.model, route.version_digest), self._ports.telemetry.slis.zone
        key = SliKey(arm, payer.tenant.meta.name, checked.priority, zone)
        session_key = session_key_of(self._job.principal, self._job.message)
        widths = (ready.rows.tiles or ready.rows.tokens)[:_SHAPED_ROWS]
        shapes = tuple(RequestShape(tokens, 0, SamplingKind.ROW) for tokens in widths)
        self._telemetry.accepted_as(subject_of(key, session_key, route.step, ready.rows.total_tokens, shapes))

    async def _condemn(self, ready: _Ready, ends: Sequence[RowEnd]) -> None:
        """Return once the fleet refuses the rows that were found to end the process that computes them."""
        poisons, route = self._ports.poisons, ready.route
        if poisons is None:
            return
        writes = [
            poisons.condemn_row(
                self._job.received.request_id,
                route.model,
                route.version_digest,
                row,
                int(end.error.metadata.get("deaths", "1")),  # a worker of an earlier release sends none
            )
            for row, end in zip(ready.rows.rows, ends, strict=False)
            if isinstance(end.error, PoisonedInput)
        ]
        if writes:
            await asyncio.gather(*writes)

    def _answer(self, ready: _Ready, ends: tuple[RowEnd, ...], reservation: Reservation) -> RowsAnswer:
        outputs = self._job.work.join(ends, ready.signature)
        now_s = self._ports.clock.monotonic_s()
        # The whole answer arrives at once: its time is the time to the first output.
        self._telemetry.pace().tokens(1, now_s)
        clock = self._timer.finish(now_s)
        self._telemetry.finished(Finished((), self.usage, clock))
        self._timer.leave(now_s)
        self._ports.telemetry.rows_ended(ready.route.model, len(ends))
        return RowsAnswer(
            request_id=self._job.received.request_id,
            model=ready.route.model,
            version_digest=ready.route.version_digest,
            outputs=outputs,
            tokens=ready.rows.tokens,
            usage=self.usage,
            clock=clock,
            request_rate=reservation.request_rate,
            token_rate=reservation.token_rate,
        )

    def _failed(self, error: FairwayError) -> None:
        error.metadata.setdefault("request_id", self._job.received.request_id)
        now_s = self._ports.clock.monotonic_s()
        clock = self._timer.finish(now_s)
        self._timer.leave(now_s)
        self._telemetry.failed(error, clock, self.usage)

    def _enter(self, stage: Stage) -> None:
        self._timer.enter(stage, self._ports.clock.monotonic_s())


def _usage_of(ends: Sequence[RowEnd], rows: PreparedRows) -> Usage:
    """Return what is charged: the tokens of the rows that were computed, and the device time of all."""
    tokens = sum(count for count, end in zip(rows.tokens, ends, strict=False) if end.error is None)
    return Usage(tokens, 0, device_s=sum(end.device_s for end in ends))
