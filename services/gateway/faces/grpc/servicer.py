"""InferenceService over gRPC: thin handlers over the gateway's service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc

from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2, inference_pb2_grpc
from services.core.errors import first_failure
from services.gateway.events import Received
from services.gateway.faces.grpc.messages import (
    complete_response,
    embed_response,
    generate_response,
    infer_response,
    moderate_response,
    rerank_response,
    score_response,
    served_model,
)
from services.gateway.faces.grpc.session import MuxedSession
from services.gateway.rows.service import RowsService
from services.gateway.safety.moderation import Moderations
from services.gateway.service import GatewayService
from services.rpc.bounded_writes import BoundedWrites
from services.rpc.interceptors.arrival import many_requests
from services.runtime.identity import principal
from services.runtime.process.tenant_turns import LoopTurns

Context = grpc.aio.ServicerContext[Any, Any]

WRITE_TIMEOUT_S: Final = 30.0


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        service: GatewayService,
        rows: RowsService,
        received: Callable[[], Received],
        *,
        heartbeat_s: float,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        """A client that reads nothing for ``write_timeout_s``, up to twice that, is disconnected."""
        self._service = service
        self._rows = rows
        self._received = received
        self._heartbeat_s = heartbeat_s
        self._write_timeout_s = write_timeout_s
        self._answers = LoopTurns(1)
        self._moderations = Moderations(service)

    async def Generate(  # type: ignore[override]  # the stubs support generators only
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        # A coroutine that writes: when the client disconnects it is cancelled at an await, and aclosing frees
        # the request at once.
        events = self._service.stream(
            principal(),
            request.generation,
            received=self._received(),
            timeout_s=context.time_remaining(),
        )
        with BoundedWrites(context, self._write_timeout_s) as writes:
            async with aclosing(events):
                async for event in events:
                    await writes.write(generate_response(event))

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        completion = await self._service.complete(
            principal(),
            request.generation,
            received=self._received(),
            timeout_s=context.time_remaining(),
        )
        return await self._answers.run(principal().tenant_id, complete_response(completion))

    async def Session(  # type: ignore[override]  # the stubs support generators only
        self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: Context
    ) -> None:
        many_requests()
        session = MuxedSession(self._service, principal(), self._received)
        try:
            with BoundedWrites(context, self._write_timeout_s) as writes:
                await writes.open()
                async with TaskGroup() as group:
                    group.create_task(self._read(session, request_iterator, context))
                    await self._write(session, writes)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            session.close()

    async def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: Context
    ) -> inference_pb2.CountTokensResponse:
        route, tokens = await self._service.count_tokens(principal(), request)
        return inference_pb2.CountTokensResponse(
            model=route.model, version_digest=route.version_digest, prompt_tokens=tokens
        )

    async def Moderate(
        self, request: inference_pb2.ModerateRequest, context: Context
    ) -> inference_pb2.ModerateResponse:
        found = await self._moderations.moderate(
            principal(), request, received=self._received(), timeout_s=context.time_remaining()
        )
        return moderate_response(found)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        models = await self._service.list_models(principal())
        return inference_pb2.ListModelsResponse(models=map(served_model, models))

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        found = await self._rows.embed(
            principal(), request, received=self._received(), timeout_s=context.time_remaining()
        )
        return embed_response(found)

    async def Rerank(
        self, request: inference_pb2.RerankRequest, context: Context
    ) -> inference_pb2.RerankResponse:
        found = await self._rows.rerank(
            principal(), request, received=self._received(), timeout_s=context.time_remaining()
        )
        return rerank_response(found, request.top_n)

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        found = await self._rows.score(
            principal(), request, received=self._received(), timeout_s=context.time_remaining()
        )
        return score_response(found)

    async def Infer(
        self, request: inference_pb2.InferRequest, context: Context
    ) -> inference_pb2.InferResponse:
        found = await self._rows.infer(
            principal(), request, received=self._received(), timeout_s=context.time_remaining()
        )
        return infer_response(found)

    async def _read(
        self, session: MuxedSession, requests: AsyncIterator[inference_pb2.SessionRequest], context: Context
    ) -> None:
        """Apply the client's messages. An invalid message ends the session through its writer."""
        try:
            async for message in requests:
                session.handle(message, context.time_remaining())
                await session.readable()
        except Exception as error:
            session.fail(error)
        else:
            session.end_requests()

    async def _write(self, session: MuxedSession, writes: BoundedWrites) -> None:
        """Write until the client closed its side and every generation ended.

        Only this task writes or ends the RPC: the session's error is raised between two writes.
        """
        while not session.ended:
            message = await session.next_message(self._heartbeat_s)
            if message.ByteSize():
                await writes.write(message)
                session.sent(message)
