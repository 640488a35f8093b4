"""The work of a request of a fixed-cost model: its rows, and the answer that a record keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct

from services.core.arms import ArmKey, SliKey
from services.core.errors import (
    IntegrityError,
    PoisonedInput,
    UnsupportedFeature,
)
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowsRequest
from services.core.fixed_cost.signature import Operation, Signature
from services.core.generation import NO_RUN, Principal, RunFacts, StageClock, Usage
from services.core.limits import Price, RateState
from services.core.usage import RequestUsage
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import Finished
from services.gateway.idempotency.record_codec import AcceptedTerms
from services.gateway.policy.claims import Payer, admission_limits, claims_of
from services.gateway.requests.admission import class_of
from services.gateway.requests.egress import answer_tokens
from services.gateway.requests.quotas import RequestQuotas, check_timeout
from services.gateway.requests.request import Request
from services.gateway.requests.stage_timer import Stage
from services.gateway.requests.terms import RunTerms, usage_of
from services.gateway.requests.validate import Checked, Validator, session_key_of
from services.gateway.rows.inputs import PreparedRows
from services.gateway.safety.inputs import ids_refused
from services.gateway.safety.requests import Asker, RequestSafety
from services.gateway.service_types import Ports, RowsMessage
from services.gateway.slis import subject_of
from services.gateway.text.text_model import TextModel
from services.ports.limiter import Reservation
from services.ports.rows import RowRunner
from services.rpc.convert.inference import seconds_of

_SHAPED_ROWS: Final = 64  # most rows of a request whose widths are recorded
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
    prefills: RowRunner  # runner of the rows of decoders that embed


@dataclass(frozen=True, slots=True)
class RowFilter:
    """What the texts of a request pass through before they become rows."""

    validator: Validator
    tenant_id: str
    # None: they have no safety pack.
    safety: RequestSafety | None
    # Whether the request is prepared for the first time under this pack.
    anew: bool

    async def texts(self, texts: Sequence[str], field: str) -> Sequence[str]:
        """Return the texts as the model may read them. Raises ContentFiltered."""
        if self.safety is None or not texts:
            return texts
        return await self.safety.inputs(texts, lambda at: f"{field}[{at}]", anew=self.anew)

    async def check_ids(self, model: TextModel, rows: Sequence[Sequence[int]], field: str) -> None:
        """Return if the text of token ids passes as it is. Raises ContentFiltered, InvalidInput."""
        if self.safety is None:
            return
        decode = partial(self.validator.decoded, self.tenant_id, model.version_digest)
        texts = [await decode(ids) for ids in rows]
        passed = await self.texts(texts, field)
        for at, (text, before) in enumerate(zip(passed, texts, strict=True)):
            if text != before:
                raise ids_refused(f"{field}[{at}]")


# Returns the rows of the request for a version, within the tenant's quotas.
Prepare = Callable[[TextModel, Signature, RowFilter], Awaitable[PreparedRows]]


class RowsJob(Struct, frozen=True):
    """One request as its interface received it, and what that does with it."""

    principal: Principal
    message: RowsMessage
    terms: RunTerms
    operations: Sequence[Operation]  # operations of the models that it takes
    prepare: Prepare
    join: Join


class RowsAnswer(Struct, frozen=True):
    """The outputs of all rows, each with the rows as its first extent."""

    request_id: str
    model: str
    version_digest: str
    outputs: tuple[RawTensor, ...]
    tokens: tuple[int, ...]  # number of tokens of each row
    usage: Usage
    clock: StageClock
    replayed: bool = False  # whether an earlier request with the same idempotency key computed it
    # The tenant's rates after this request, where they apply.
    request_rate: RateState | None = None
    token_rate: RateState | None = None


class _Ready(Struct, frozen=True):
    """Rows that passed every check, for one version."""

    route: Route
    signature: Signature
    rows: PreparedRows


class Rows:
    """The rows of one request, all of them computed by one version."""

    choices: Final = ()
    replaceable: Final = True  # a forward pass has no effect but its outputs

    reservation: Reservation
    answer: RowsAnswer
    _checked: Checked
    _payer: Payer
    _price: Price
    _ready: _Ready

    def __init__(self, job: RowsJob, parts: RowsParts, request: Request) -> None:
        self._job = job
        self._parts = parts
        self._ports = parts.ports
        self._request = request
        self._ends: tuple[RowEnd, ...] = ()
        self._safety: RequestSafety | None = None
        self._filters_anew = False

    @property
    def usage(self) -> Usage:
        """What is charged: the tokens of the rows that were computed, and the device time of all."""
        counted = zip(self._ready.rows.tokens, self._ends, strict=False)
        tokens = sum(count for count, end in counted if end.error is None)
        return Usage(tokens, 0, device_s=sum(end.device_s for end in self._ends))

    async def admit(self) -> Rows:
        """Return itself, admitted. What it raises leaves nothing held."""
        job, parts, telemetry = self._job, self._parts, self._request.telemetry
        message, tenant_id = job.message, job.principal.tenant_id
        if parts.catalog.has(message.model):
            telemetry.addressed(tenant_id, message.model, class_of(message))
        checked = self._checked = parts.validator.check_rows(job.principal, message)
        route, session_key = checked.route, session_key_of(job.principal, message)
        telemetry.routed(tenant_id, route, checked.priority, session_key)
        payer = self._payer = parts.quotas.payer(job.principal, message.user)
        parts.quotas.require_recorded(payer)
        check_timeout(seconds_of(message.timeout), payer.bounds.timeout_s)
        self._enter(Stage.ADMIT)
        due = admission_limits(payer, anew=True)
        quota = await parts.quotas.reserve(tenant_id, self._request.request_id, due)
        try:
            await self._open_safety()
            await self._prepare()
            price = self._price = parts.catalog.price(route.model, checked.priority)
            if claims := claims_of(payer, price, self._ready.rows.total_tokens):
                self._enter(Stage.ADMIT)
                await quota.claim(claims, price)
            await self._record()
        except BaseException as error:
            self._end_safety()
            await quota.undo(error)
            raise
        self._end_safety(self._ready.rows.total_tokens)
        self.reservation = quota.reservation
        return self

    async def run(self) -> None:
        self._count()
        self._enter(Stage.ENGINE_WAIT)
        began_s, ready = self._ports.clock.monotonic_s(), self._ready
        runner = self._parts.prefills if ready.signature.by_prefill else self._parts.runner
        ends = await runner.run(self._rows_request())
        assert len(ends) == len(ready.rows.rows), "a row has no end"
        self._ends = ends
        # The longest wait for a batch, then the batches themselves.
        now_s = self._ports.clock.monotonic_s()
        waited_s = max((end.wait_s for end in ends), default=0.0)
        self._request.timer.enter(Stage.PREFILL, min(now_s, began_s + waited_s))
        self._request.telemetry.ran(_facts(ends, ready.rows))
        self._enter(Stage.SEND)

    async def reroute(self) -> None:
        self._checked = self._parts.validator.check_rows(self._job.principal, self._job.message)
        await self._open_safety()
        await self._prepare()
        self._end_safety(self._ready.rows.total_tokens)
        await self._record()

    async def _open_safety(self) -> None:
        """Read the rules of the request for the version of its route."""
        desk, packs, job, request = self._ports.safety, self._ports.packs, self._job, self._request
        if packs is None:
            return
        digest, session_key = self._checked.route.version_digest, session_key_of(job.principal, job.message)
        model = self._parts.catalog.model_of(digest)
        terms = await packs.terms(model, digest, self._payer.tenant, session_key)
        had, self._safety = self._safety, None
        if terms is None:
            return
        assert desk is not None, "packs without what judges by them"
        asker = Asker(
            request.request_id,
            job.principal,
            self._payer,
            self._checked.priority,
            session_key,
            request.terms.received.monotonic_s + request.terms.timeout_s,
            request.timer.traceparent,
        )
        self._safety = desk.open(terms, asker)
        self._filters_anew = had is None or had.terms.pins != terms.pins

    def _end_safety(self, tokens: int = 0) -> None:
        """Count the request for its pack, and charge its verdicts: rows have no output that is judged."""
        if self._safety is not None:
            self._safety.end(Usage(tokens, 0))

    def report(self) -> RequestUsage:
        route, unix_s = self._ready.route, self._ports.clock.unix_s()
        return usage_of(
            self._payer,
            self._request.request_id,
            route.model,
            route.version_digest,
            self._price,
            self.usage,
            unix_s,
        )

    async def finished(self, usage: Usage) -> Finished:
        """Return the end, with the outputs for a record. Raises the error of the first row that has one."""
        ready, ends = self._ready, self._ends
        for index, end in enumerate(ends):
            if end.error is not None:
                await self._condemn()
                end.error.metadata.setdefault("row", str(index))
                raise end.error
        outputs = self._job.join(ends, ready.signature)
        egress = self._ports.egress(self._payer.tenant.meta.name, self._request.terms.received)
        if egress is not None:
            await egress.answer(answer_tokens(outputs))
        # The whole answer arrives at once: its time is the time to the first output.
        self._request.telemetry.pace().tokens(1, self._ports.clock.monotonic_s())
        self._ports.telemetry.rows_ended(ready.route.model, len(ends))
        self.answer = answer = RowsAnswer(
            request_id=self._request.request_id,
            model=ready.route.model,
            version_digest=ready.route.version_digest,
            outputs=outputs,
            tokens=ready.rows.tokens,
            usage=usage,
            clock=self._request.clock(),
            request_rate=self.reservation.request_rate,
            token_rate=self.reservation.token_rate,
        )
        kept = encode_answer(answer) if self._request.terms.settlement is not None else b""
        return Finished((), usage, answer.clock, answer=kept)

    async def _prepare(self) -> None:
        """Read the rows for the version of the route."""
        self._enter(Stage.VALIDATE)
        route, job = self._checked.route, self._job
        model = (await self._parts.catalog.text_model(route.version_digest)).of_rows
        signature = model.signature
        operation = signature.operation if signature is not None else "generate"
        if signature is None or operation not in job.operations:
            raise UnsupportedFeature(
                f"the operation of {route.model} is {operation}; this call takes models of the operation "
                f"{' or '.join(job.operations)}",
                field="model",
                operation=operation,
            )
        tenant_id = self._payer.tenant.meta.name
        texts = RowFilter(self._parts.validator, tenant_id, self._safety, self._filters_anew)
        rows = await job.prepare(model, signature, texts)
        if self._ports.poisons is not None:
            self._ports.poisons.check_rows(route.model, route.version_digest, rows.rows)
        self._ready = _Ready(route, signature, rows)

    async def _record(self) -> None:
        """Record the acceptance of a request with a key, before any row runs."""
        settlement, received = self._request.terms.settlement, self._request.terms.received
        if settlement is None:
            return
        terms = AcceptedTerms(
            request_id=received.request_id,
            model=self._ready.route.model,
            version_digest=self._ready.route.version_digest,
            route_revision=self._ready.route.route_revision,
            seed=0,
            prompt_tokens=self._ready.rows.total_tokens,
            max_output_tokens=0,
            received_unix_us=received.unix_us,
        )
        await settlement.accept(terms)

    def _rows_request(self) -> RowsRequest:
        terms, route = self._request.terms, self._ready.route
        priority = self._checked.priority
        return RowsRequest(
            request_id=terms.received.request_id,
            tenant_id=self._payer.tenant.meta.name,
            model=route.model,
            version_digest=route.version_digest,
            rows=self._ready.rows.rows,
            priority=priority,
            route_revision=route.route_revision,
            tenant_weight=self._payer.tenant.weight,
            node_group=self._payer.tenant.node_group,
            isolation_waits=self._ports.waits_for_node(self._payer.tenant, route.model),
            kv_share=self._payer.tenant.kv_share,
            deadline_s=terms.received.monotonic_s + terms.timeout_s,
            traceparent=self._request.timer.traceparent,
            target_s=self._ports.ttft_target_s(route.model, priority) or 0.0,
            received_s=terms.received.monotonic_s,
        )

    def _count(self) -> None:
        """Count the request for the version that it runs on."""
        route, rows = self._ready.route, self._ready.rows
        arm, zone = ArmKey(route.model, route.version_digest), self._ports.telemetry.slis.zone
        key = SliKey(arm, self._payer.tenant.meta.name, self._checked.priority, zone)
        session_key = session_key_of(self._job.principal, self._job.message)
        widths = (rows.tiles or rows.tokens)[:_SHAPED_ROWS]
        shapes = tuple(RequestShape(tokens, 0, SamplingKind.ROW) for tokens in widths)
        subject = subject_of(key, session_key, route.step, rows.total_tokens, shapes)
        self._request.telemetry.accepted_as(subject)

    async def _condemn(self) -> None:
        """Return once the fleet refuses the rows that were found to end the process that computes them."""
        poisons, route = self._ports.poisons, self._ready.route
        if poisons is None:
            return
        writes = [
            poisons.condemn_row(
                self._request.request_id,
                route.model,
                route.version_digest,
                row,
                int(end.error.metadata.get("deaths", "1")),  # a worker of an earlier release sends none
            )
            for row, end in zip(self._ready.rows.rows, self._ends, strict=False)
            if isinstance(end.error, PoisonedInput)
        ]
        if writes:
            await asyncio.gather(*writes)

    def _enter(self, stage: Stage) -> None:
        self._request.timer.enter(stage, self._ports.clock.monotonic_s())


def _facts(ends: Sequence[RowEnd], rows: PreparedRows) -> RunFacts:
    """Return how the rows fared: the batch is that of the row that waited and ran longest."""
    if not ends:
        return NO_RUN
    last = max(ends, key=lambda end: end.stay_s)
    window = next((end.window for end in ends if end.window is not None), None)
    return RunFacts(
        worker_id=last.worker_id,
        prefill_us=round(max(0.0, last.stay_s - last.wait_s) * 1e6),
        batch_wait_us=round(max(end.wait_s for end in ends) * 1e6),
        batch_rows=last.batch_rows,
        batch_width=0 if window is None else window.width,
        row_tokens=max(rows.tiles or rows.tokens, default=0),
    )


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    """The answer in the record. New fields are added at the end, with a default."""

    request_id: str
    model: str
    version_digest: str
    outputs: tuple[RawTensor, ...]
    tokens: tuple[int, ...]


_decoder: Final = msgspec.msgpack.Decoder(_Answer)


def encode_answer(answer: RowsAnswer) -> bytes:
    """Return what a record keeps of an answer."""
    return msgspec.msgpack.encode(
        _Answer(answer.request_id, answer.model, answer.version_digest, answer.outputs, answer.tokens)
    )


def decode_answer(finished: Finished, *, replayed: bool) -> RowsAnswer:
    """Return the answer of a record. Raises IntegrityError for anything that is not one."""
    try:
        found = _decoder.decode(finished.answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError("the record of this idempotency key cannot be read; use another key") from error
    return RowsAnswer(
        request_id=found.request_id,
        model=found.model,
        version_digest=found.version_digest,
        outputs=found.outputs,
        tokens=found.tokens,
        usage=finished.usage,
        clock=finished.clock,
        replayed=replayed,
    )
