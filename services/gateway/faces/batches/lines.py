"""Lines of batches as requests of the HTTP API: read, validated, admitted and answered by the same code."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from fairway.v1 import common_pb2
from services.core.errors import FairwayError, InternalError, InvalidInput
from services.core.generation import Principal, StageClock
from services.gateway.batches.lines import LineAnswer
from services.gateway.events import BATCH_FACE, Received
from services.gateway.faces.openai.completions import Completions, complete_all, whole_body
from services.gateway.faces.openai.errors import error_body, named, status_of
from services.gateway.faces.openai.exchange import BodyReader
from services.gateway.faces.openai.requests import chat_request, completion_request
from services.gateway.faces.openai.rows import (
    ROW_NAMES,
    EmbeddingsCall,
    embeddings_answer,
    embeddings_request,
)
from services.gateway.rows.service import RowsService
from services.ports.clock import Clock
from services.runtime.process.tenant_turns import LoopTurns

log = structlog.get_logger()
_GENERATIONS = {"/v1/chat/completions": chat_request, "/v1/completions": completion_request}


class LineIds(Protocol):
    def request_id(self) -> str: ...

    def incident_id(self) -> str: ...


class HttpLines:
    """``LineCalls`` over the services of the HTTP API. A line's own class and key are replaced."""

    def __init__(
        self, service: Completions, rows: RowsService, bodies: BodyReader, clock: Clock, ids: LineIds
    ) -> None:
        self._service = service
        self._rows = rows
        self._bodies = bodies
        self._answers = LoopTurns(1)
        self._clock = clock
        self._ids = ids

    async def run(self, principal: Principal, endpoint: str, body: bytes, key: str) -> LineAnswer:
        received = Received(
            self._clock.monotonic_s(),
            int(self._clock.unix_s() * 1e6),
            self._ids.request_id(),
            face=BATCH_FACE,
            internal=True,
        )
        try:
            if endpoint in _GENERATIONS:
                return await self._generated(principal, endpoint, body, key, received)
            return await self._embedded(principal, body, key, received)
        except (FairwayError, asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:  # a panic in a native library is no Exception
            incident = self._ids.incident_id()
            log.exception("batch.line_crashed", incident=incident)
            raise InternalError("internal error", incident=incident) from None

    def refusal(self, error: FairwayError) -> LineAnswer:
        return LineAnswer(status_of(error), error_body(error), "")

    async def _generated(
        self, principal: Principal, endpoint: str, body: bytes, key: str, received: Received
    ) -> LineAnswer:
        request = await self._bodies.parse(_GENERATIONS[endpoint], body)
        if request.stream:
            raise InvalidInput("a line of a batch is not streamed", field="stream")
        for generation in request.generations:
            generation.idempotency_key, generation.priority = key, common_pb2.PRIORITY_BATCH
        call = complete_all(self._service, principal, request, received)
        completions = await named(request.names.items(), call)
        steps = whole_body(request, completions, received, int(self._clock.unix_s()))
        data = await self._answers.run(principal.tenant_id, steps)
        uses = [each.finished.usage for each in completions]
        work = sum(use.prompt_tokens + use.output_tokens for use in uses)
        return LineAnswer(200, data, received.request_id, _waited_s(completions[0].finished.clock), work)

    async def _embedded(self, principal: Principal, body: bytes, key: str, received: Received) -> LineAnswer:
        request: EmbeddingsCall = await self._bodies.parse(embeddings_request, body)
        message = request.message
        message.idempotency_key, message.priority = key, common_pb2.PRIORITY_BATCH
        found = await named(ROW_NAMES, self._rows.embed(principal, message, received=received))
        data = embeddings_answer(request, found)
        waited_s = _waited_s(found.answer.clock)
        return LineAnswer(200, data, received.request_id, waited_s, len(found.vectors))


def _waited_s(clock: StageClock) -> float:
    return (clock.queue_us + clock.engine_wait_us) / 1e6
