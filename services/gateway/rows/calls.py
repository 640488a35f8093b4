"""What an interface calls for requests of fixed-cost models."""

from __future__ import annotations

from typing import Protocol

from fairway.v1 import inference_pb2
from services.core.fixed_cost.signature import Signature
from services.core.generation import Principal
from services.gateway.catalog import Route
from services.gateway.events import Received
from services.gateway.rows.service import Embeddings, Inferred, Scores


class RowsCalls(Protocol):
    """See ``RowsService``."""

    async def embed(
        self,
        principal: Principal,
        request: inference_pb2.EmbedRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Embeddings: ...

    async def score(
        self,
        principal: Principal,
        request: inference_pb2.ScoreRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Scores: ...

    async def rerank(
        self,
        principal: Principal,
        request: inference_pb2.RerankRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Scores: ...

    async def infer(
        self,
        principal: Principal,
        request: inference_pb2.InferRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Inferred: ...

    async def describe(
        self, principal: Principal, request: inference_pb2.InferRequest
    ) -> tuple[Route, Signature]: ...
