"""Whole answers of generations: every prompt of a request is a generation of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.generation import Principal
from services.gateway.events import Received, never
from services.gateway.faces.openai.answers import Steps, whole_answer
from services.gateway.faces.openai.event_stream import PROMPTS_AT_ONCE, original
from services.gateway.faces.openai.exchange import primary_failure
from services.gateway.faces.openai.requests import ApiRequest
from services.gateway.requests.streaming import Completion


class Completions(Protocol):
    """Whole generations: validates, admits, places and runs; raises the tree of ``core/errors.py``."""

    async def complete(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
        withdraws: Callable[[], bool] = never,
    ) -> Completion:
        """Return the whole answer. Cancelling the call cancels the request.

        One with an idempotency key runs on for a grace period, unless the caller then ``withdraws`` it.
        """


async def complete_all(
    service: Completions,
    caller: Principal,
    request: ApiRequest,
    received: Received,
    timeout_s: float | None = None,
    *,
    withdraws: Callable[[], bool] = never,
) -> list[Completion]:
    """Return one answer per generation, ``PROMPTS_AT_ONCE`` at a time; the first failure ends the others."""
    places = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def complete(generation: inference_pb2.Generation, part: Received) -> Completion:
        async with places:
            return await service.complete(
                caller, generation, received=part, timeout_s=timeout_s, withdraws=withdraws
            )

    try:
        async with TaskGroup() as group:
            tasks = [
                group.create_task(complete(generation, part))
                for generation, part in zip(
                    request.generations, numbered_parts(received, request), strict=True
                )
            ]
    except BaseExceptionGroup as failures:
        raise primary_failure(failures) from None
    return [task.result() for task in tasks]


def numbered_parts(received: Received, request: ApiRequest) -> Sequence[Received]:
    """Return the receipt of each generation: each is a separate request with an id of its own."""
    if len(request.generations) == 1:
        return [received]
    # With an idempotency key each generation has a record; the hash of the whole is part of its fingerprint.
    whole = hashlib.sha256()
    for generation in request.generations:
        whole.update(hashlib.sha256(generation.SerializeToString(deterministic=True)).digest())
    return [
        replace(received, request_id=f"{received.request_id}-{number}", part=number, whole=whole.hexdigest())
        for number in range(len(request.generations))
    ]


def whole_body(
    request: ApiRequest, completions: Sequence[Completion], received: Received, now_unix_s: int
) -> Steps[bytes]:
    """Return the JSON of a whole answer, in steps. A repeated request has the id and time of the first."""
    request_id, created_unix_s = received.request_id, now_unix_s
    first = completions[0].accepted
    if first.received_unix_us:
        request_id, created_unix_s = original(first, 0)
    return (yield from whole_answer(request, completions, created_unix_s, request_id))
