"""The entry point of every interface of fixed-cost models: no interface can skip the quotas or the checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import Operation, Signature
from services.core.generation import Principal
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import Received
from services.gateway.requests.terms import RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.rows.inputs import PreparedRows, id_rows
from services.gateway.rows.keyed import RowsRuns
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
from services.gateway.rows.tensors import check_outputs, output_tensors, tensor_rows
from services.gateway.rows.texts import picture_rows, text_rows
from services.gateway.rows.work import RowsAnswer, RowsJob
from services.gateway.service import GatewayService
from services.gateway.service_types import RowsMessage
from services.gateway.text.text_model import TextModel

ALL: Final = tuple(Operation)


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

    def __init__(
        self, service: GatewayService, *, validator: Validator, catalog: ModelCatalog, runs: RowsRuns
    ) -> None:
        """``service``: of the same gateway; requests of both kinds share its bounds and its drain."""
        self._service = service
        self._validator = validator
        self._catalog = catalog
        self._runs = runs

    async def embed(
        self,
        principal: Principal,
        request: inference_pb2.EmbedRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Return the vector of each input. Cancelling the call cancels the request."""

        async def prepare(model: TextModel, signature: Signature) -> PreparedRows:
            check_dimensions(request.dimensions, signature)
            if bool(request.inputs) == bool(request.token_ids):
                problem = "has both inputs and token_ids" if request.inputs else "has no inputs"
                raise InvalidInput(f"the request {problem}", field="inputs")
            cut_to = _cut_to(request)
            if request.inputs:
                return await self._texts(principal, model, request.inputs, (), cut_to, "inputs")
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
        answer = await self._runs.answer(job)
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

        async def prepare(model: TextModel, signature: Signature) -> PreparedRows:
            firsts, seconds = request.firsts, request.seconds
            if not firsts or not seconds or len(firsts) not in (1, len(seconds)):
                raise InvalidInput(
                    f"firsts has {len(firsts)} texts for {len(seconds)} second texts: send one, or as many",
                    field="firsts",
                )
            pairs = firsts if len(firsts) > 1 else [*firsts] * len(seconds)
            return await self._texts(principal, model, pairs, seconds, _cut_to(request), "seconds")

        terms = self._terms(principal, request, received, timeout_s)
        job = RowsJob(principal, request, terms, [Operation.SCORE], prepare, _scored)
        answer = await self._runs.answer(job)
        return Scores(answer, scores(answer.outputs[0]))

    async def rerank(
        self,
        principal: Principal,
        request: inference_pb2.RerankRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return how well each document matches the query, in the order of the request."""

        async def prepare(model: TextModel, signature: Signature) -> PreparedRows:
            queries = [request.query] * len(request.documents)
            cut_to = _cut_to(request)
            return await self._texts(principal, model, queries, request.documents, cut_to, "documents")

        terms = self._terms(principal, request, received, timeout_s)
        job = RowsJob(principal, request, terms, [Operation.SCORE], prepare, _scored)
        answer = await self._runs.answer(job)
        return Scores(answer, scores(answer.outputs[0]))

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

        async def prepare(model: TextModel, signature: Signature) -> PreparedRows:
            check_outputs(request.outputs, signature)
            if not classifies:
                return tensor_rows(request.inputs, signature)
            if request.inputs or (request.texts and request.images):
                raise InvalidInput("the rows are of two kinds: send inputs, texts or images", field="inputs")
            if request.images:
                check_probabilities(len(request.images), signature.classes, "images")
                texts, tenant_id = self._catalog.texts, principal.tenant_id
                return await picture_rows(texts, model, tenant_id, signature, request.images)
            check_probabilities(len(request.texts), signature.classes, "texts")
            return await self._texts(principal, model, request.texts, (), _cut_to(request), "texts")

        def join(ends: Sequence[RowEnd], signature: Signature) -> tuple[RawTensor, ...]:
            outputs = output_tensors(ends, request.outputs, signature)
            if not classifies:
                return outputs
            (logits,) = output_tensors(ends, (), signature)
            return (*outputs, *class_outputs(logits, signature.classes))

        terms = self._terms(principal, request, received, timeout_s)
        job = RowsJob(principal, request, terms, [Operation.CLASSIFY] if classifies else ALL, prepare, join)
        answer = await self._runs.answer(job)
        return Inferred(answer, answer.outputs)

    async def describe(
        self, principal: Principal, request: inference_pb2.InferRequest
    ) -> tuple[Route, Signature]:
        """Return the route and the signature of a fixed-cost model; the request has no inputs.

        Raises ModelNotFound, NoWorkerAvailable, UnsupportedFeature for a model that generates text.
        """
        route = self._validator.check_rows(principal, request).route
        model = (await self._catalog.text_model(route.version_digest)).of_rows
        if model.signature is None:
            raise UnsupportedFeature(f"{route.model} generates text and has no tensors", field="model")
        return route, model.signature

    async def _texts(
        self,
        principal: Principal,
        model: TextModel,
        firsts: Sequence[str],
        seconds: Sequence[str],
        cut_to: int | None,
        field: str,
    ) -> PreparedRows:
        texts = self._catalog.texts
        return await text_rows(texts, model, principal.tenant_id, firsts, seconds, cut_to=cut_to, field=field)

    def _terms(
        self, principal: Principal, request: RowsMessage, received: Received, timeout_s: float | None
    ) -> RunTerms:
        """Return the terms of a request that the gateway is open for. Raises as ``GatewayService.submit``."""
        service = self._service
        service.check_open(principal.tenant_id, request.model, received)
        longest_s = service.max_timeout_s(principal, request)
        return RunTerms(received, min(service.limits.timeout_of(request, timeout_s), longest_s))


def _scored(ends: Sequence[RowEnd], signature: Signature) -> tuple[RawTensor, ...]:
    return (score_output(ends, signature),)


def _cut_to(
    request: RowsMessage,
) -> int | None:
    """Return to how many tokens rows are cut, 0: to the most that the model takes; None: no row is cut."""
    return request.truncate_tokens if request.HasField("truncate_tokens") else None
