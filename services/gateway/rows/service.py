"""The entry point of every interface of fixed-cost models: no interface can skip the quotas or the checks.

A request runs in the caller's task, or with an idempotency key once for all. Requests with a key share the
records, bounds and clients of generations with a key. The answer is one entry at the end of the record. A run
that was lost left nothing behind: the next one computes all rows, under the same request id, by which it is
charged once. The run has the deadline of the client that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fairway.v1 import inference_pb2
from services.core.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    FairwayError,
    InvalidInput,
    NoWorkerAvailable,
    UnsupportedFeature,
)
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import Operation, Signature
from services.core.generation import Principal, TokenLogprobs
from services.gateway.catalog import Route
from services.gateway.events import Accepted, Finished, Received
from services.gateway.idempotency.ownership import RecordOwnership
from services.gateway.idempotency.record_reader import EarlierRun
from services.gateway.idempotency.service import IdempotentService, fingerprint, record_key
from services.gateway.requests.egress import answer_tokens
from services.gateway.requests.request import Admit, Request
from services.gateway.requests.terms import RunTerms
from services.gateway.rows.inputs import (
    PreparedRows,
    check_outputs,
    id_rows,
    output_tensors,
    picture_rows,
    tensor_rows,
    text_rows,
    token_ids_of,
)
from services.gateway.rows.results import (
    Vector,
    check_dimensions,
    check_probabilities,
    class_outputs,
    embedding_output,
    score_output,
    scores,
    vectors,
)
from services.gateway.rows.work import RowFilter, Rows, RowsAnswer, RowsJob, RowsParts, decode_answer
from services.gateway.service_types import RowsMessage
from services.gateway.text.text_model import TextModel
from services.rpc import bounds
from services.runtime.identity import KeyDirectory

# How many runs of other clients with less time than this one a client follows before it receives their error.
MAX_RUNS: Final = 4
ALL: Final = tuple(Operation)
_READY_RETRY_S: Final = 1.0


class Embeddings(Struct, frozen=True):
    answer: RowsAnswer
    vectors: list[Vector]


class Scores(Struct, frozen=True):
    answer: RowsAnswer
    scores: list[float]

    def best_first(self, top_n: int) -> list[int]:
        """Return the places of the ``top_n`` best, 0: of all; equal ones in the order of the request."""
        order = sorted(range(len(self.scores)), key=lambda index: -self.scores[index])
        return order[: top_n or None]


class Inferred(Struct, frozen=True):
    answer: RowsAnswer
    outputs: tuple[RawTensor, ...]


class RowsService:
    """Runs requests of fixed-cost models."""

    def __init__(self, service: IdempotentService, identity: KeyDirectory, parts: RowsParts) -> None:
        """``service``: of the same gateway; requests of both kinds share its bounds, drain and records."""
        self._service = service
        self._identity = identity
        self._parts = parts

    async def embed(
        self,
        principal: Principal,
        request: inference_pb2.EmbedRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Return the vector of each input. Cancelling the call cancels the request."""

        async def prepare(model: TextModel, signature: Signature, safe: RowFilter) -> PreparedRows:
            check_dimensions(request.dimensions, signature)
            if bool(request.inputs) == bool(request.token_ids):
                problem = "has both inputs and token_ids" if request.inputs else "has no inputs"
                raise InvalidInput(f"the request {problem}", field="inputs")
            cut_to = _cut_to(request)
            if request.inputs:
                inputs = await safe.texts(request.inputs, "inputs")
                return await self._read(safe, model, inputs, (), cut_to, "inputs")
            await safe.check_ids(model, [row.ids for row in request.token_ids], "token_ids")
            most = signature.max_tokens
            return id_rows(
                [row.ids for row in request.token_ids],
                vocab_size=signature.vocab_size,
                max_tokens=most,
                cut_to=None if cut_to is None else min(cut_to or most, most),
                field="token_ids",
            )

        def join(ends: Sequence[RowEnd], signature: Signature) -> tuple[RawTensor, ...]:
            return (embedding_output(ends, request.dimensions, signature),)

        terms = self._terms(principal, request, received, timeout_s)
        job = RowsJob(principal, request, terms, [Operation.EMBED], prepare, join)
        answer = await self._answer(job)
        return Embeddings(answer, vectors(answer.outputs[0]))

    async def score(
        self,
        principal: Principal,
        request: inference_pb2.ScoreRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return how well each pair matches. Cancelling the call cancels the request."""

        async def prepare(model: TextModel, signature: Signature, safe: RowFilter) -> PreparedRows:
            firsts, seconds = request.firsts, request.seconds
            if not firsts or not seconds or len(firsts) not in (1, len(seconds)):
                raise InvalidInput(
                    f"firsts has {len(firsts)} texts for {len(seconds)} second texts: send one, or as many",
                    field="firsts",
                )
            left = await safe.texts(firsts, "firsts")
            right = await safe.texts(seconds, "seconds")
            pairs = left if len(left) > 1 else [*left] * len(right)
            return await self._read(safe, model, pairs, right, _cut_to(request), "seconds")

        terms = self._terms(principal, request, received, timeout_s)
        return await self._scores(RowsJob(principal, request, terms, [Operation.SCORE], prepare, _scored))

    async def rerank(
        self,
        principal: Principal,
        request: inference_pb2.RerankRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return how well each document matches the query, in the order of the request."""

        async def prepare(model: TextModel, signature: Signature, safe: RowFilter) -> PreparedRows:
            queries = [*await safe.texts([request.query], "query")] * len(request.documents)
            documents = await safe.texts(request.documents, "documents")
            return await self._read(safe, model, queries, documents, _cut_to(request), "documents")

        terms = self._terms(principal, request, received, timeout_s)
        return await self._scores(RowsJob(principal, request, terms, [Operation.SCORE], prepare, _scored))

    async def infer(
        self,
        principal: Principal,
        request: inference_pb2.InferRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Inferred:
        """Return the outputs of all rows. Cancelling the call cancels the request."""

        classifies = bool(request.texts or request.images)

        async def prepare(model: TextModel, signature: Signature, safe: RowFilter) -> PreparedRows:
            check_outputs(request.outputs, signature)
            if not classifies:
                rows = tensor_rows(request.inputs, signature)
                await safe.check_ids(model, token_ids_of(rows), "inputs")
                return rows
            if request.inputs or (request.texts and request.images):
                raise InvalidInput("the rows are of two kinds: send inputs, texts or images", field="inputs")
            if request.images:
                check_probabilities(len(request.images), signature.classes, "images")
                texts, tenant_id = self._parts.catalog.texts, principal.tenant_id
                return await picture_rows(texts, model, tenant_id, signature, request.images)
            check_probabilities(len(request.texts), signature.classes, "texts")
            passed = await safe.texts(request.texts, "texts")
            return await self._read(safe, model, passed, (), _cut_to(request), "texts")

        def join(ends: Sequence[RowEnd], signature: Signature) -> tuple[RawTensor, ...]:
            outputs = output_tensors(ends, request.outputs, signature)
            if not classifies:
                return outputs
            (logits,) = output_tensors(ends, (), signature)
            return (*outputs, *class_outputs(logits, signature.classes))

        terms = self._terms(principal, request, received, timeout_s)
        operations = [Operation.CLASSIFY] if classifies else ALL
        job = RowsJob(principal, request, terms, operations, prepare, join)
        answer = await self._answer(job)
        return Inferred(answer, answer.outputs)

    async def describe(
        self, principal: Principal, request: inference_pb2.InferRequest
    ) -> tuple[Route, Signature]:
        """Return the route and the signature of a fixed-cost model; the request has no inputs.

        Raises ModelNotFound, NoWorkerAvailable, UnsupportedFeature for a model that generates text.
        """
        route = self._parts.validator.check_rows(principal, request).route
        model = (await self._parts.catalog.text_model(route.version_digest)).of_rows
        if model.signature is None:
            raise UnsupportedFeature(f"{route.model} generates text and has no tensors", field="model")
        return route, model.signature

    async def require_ready(self, principal: Principal, request: inference_pb2.InferRequest) -> None:
        """Return if a replica serves the model, or the next request starts one.

        Raises NoWorkerAvailable, and as ``describe``.
        """
        route, _ = await self.describe(principal, request)
        if not route.ready_replicas and self._parts.catalog.waking(route.model) is None:
            text = f"no replica of {route.model} is ready"
            raise NoWorkerAvailable(text, retry_after_s=_READY_RETRY_S, model=route.model)

    async def _scores(self, job: RowsJob) -> Scores:
        answer = await self._answer(job)
        return Scores(answer, scores(answer.outputs[0]))

    async def _read(
        self,
        safe: RowFilter,
        model: TextModel,
        firsts: Sequence[str],
        seconds: Sequence[str],
        cut_to: int | None,
        field: str,
    ) -> PreparedRows:
        texts = self._parts.catalog.texts
        return await text_rows(texts, model, safe.tenant_id, firsts, seconds, cut_to=cut_to, field=field)

    def _terms(
        self, principal: Principal, request: RowsMessage, received: Received, timeout_s: float | None
    ) -> RunTerms:
        """Return the terms of a request that the gateway is open for. Raises as ``GatewayService.submit``."""
        service = self._service
        service.check_open(principal.tenant_id, request.model, received)
        longest_s = service.max_timeout_s(principal, request)
        return RunTerms(received, min(service.limits.timeout_of(request, timeout_s), longest_s))

    async def _answer(self, job: RowsJob) -> RowsAnswer:
        """Return the answer of a request that the gateway is open for.

        Cancelling the call cancels the request, but leaves one with a key running for a while. A caller
        without permission to run it receives nothing of it.
        """
        if not job.message.idempotency_key:
            return await self._without_key(job)
        bounds.check(job.message)
        self._parts.validator.authorise(job.principal, job.message.model)
        deadline_s = job.terms.received.monotonic_s + job.terms.timeout_s
        for number in range(1, MAX_RUNS + 1):
            client = _Client()
            left_s = deadline_s - self._parts.ports.clock.monotonic_s()
            try:
                return await self._attached(job, client, left_s)
            except (DeadlineExceeded, DeadlineUnmeetable):
                late = self._parts.ports.clock.monotonic_s() >= deadline_s
                if client.runs or late or number == MAX_RUNS:
                    raise
        raise AssertionError("the last round returns or raises")

    async def _without_key(self, job: RowsJob) -> RowsAnswer:
        request = Request(job.terms, self._parts.ports)
        rows = Rows(job, self._parts, request)
        leave = self._service.enter(job.principal.tenant_id, request)
        try:
            end = await request.run(rows.admit)
        finally:
            leave()
        if isinstance(end, FairwayError):
            try:
                raise end
            finally:
                del end  # its traceback refers to this frame
        return rows.answer

    async def _attached(self, job: RowsJob, client: _Client, timeout_s: float) -> RowsAnswer:
        """Start, join or repeat the request of the key as ``client``."""
        secret, tenant_id = self._service.names_secret, self._identity.still_valid(job.principal).meta.name
        received = job.terms.received
        follower = self._service.records.attach(
            record_key(secret, tenant_id, job.message.idempotency_key, received),
            fingerprint(secret, tenant_id, job.message, received),
            client,
            partial(self._launch, job, client),
            timeout_s=timeout_s,
            client_window=None,
            delivered=None,
        )
        try:
            finished = await client.ended
        except asyncio.CancelledError:
            follower.cancel()
            raise
        answer = decode_answer(finished, replayed=not client.runs)
        if answer.replayed and (egress := self._parts.ports.egress(tenant_id, received)) is not None:
            egress.charge(answer_tokens(answer.outputs))
        return answer

    def _launch(
        self, job: RowsJob, client: _Client, ownership: RecordOwnership, earlier: EarlierRun | None
    ) -> tuple[Request, Admit]:
        """Return the request for this gateway, with the id of the earlier run."""
        client.runs = True
        received = job.terms.received
        if earlier is not None:
            received = replace(received, request_id=earlier.terms.request_id)
        terms = RunTerms(received, job.terms.timeout_s, settlement=ownership)
        request = Request(terms, self._parts.ports)
        return request, Rows(job, self._parts, request).admit


class _Client:
    """The sink of one client. ``runs``: its own call runs the request, here and now."""

    def __init__(self) -> None:
        self.runs = False
        self.ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def on_accepted(self, accepted: Accepted) -> None:
        """The answer has it all."""

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        raise AssertionError("rows have no tokens")

    def on_finished(self, finished: Finished) -> None:
        if not self.ended.done():
            self.ended.set_result(finished)

    def on_failed(self, error: FairwayError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def _scored(ends: Sequence[RowEnd], signature: Signature) -> tuple[RawTensor, ...]:
    return (score_output(ends, signature),)


def _cut_to(
    request: RowsMessage,
) -> int | None:
    """Return to how many tokens rows are cut, 0: to the most that the model takes; None: no row is cut."""
    return request.truncate_tokens if request.HasField("truncate_tokens") else None
