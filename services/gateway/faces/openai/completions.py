"""Answers of generations, streamed and whole: every prompt of a request is a generation of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.generation import Principal
from services.gateway.events import Accepted, Finished, Received, Tokens, never
from services.gateway.faces.openai.answers import (
    AnswerHead,
    Frames,
    Steps,
    finish_reasons,
    served_tier,
    whole_answer,
)
from services.gateway.faces.openai.errors import Header
from services.gateway.faces.openai.exchange import Reply, primary_failure, rate_headers
from services.gateway.faces.openai.requests import ApiRequest
from services.gateway.faces.transport.event_ids import AnswerPosition
from services.gateway.faces.transport.event_stream import (
    CACHE_HIT,
    PROMPTS_AT_ONCE,
    AnswerFrames,
    difference_headers,
    original,
    version_headers,
)
from services.gateway.requests.streaming import Completion

DONE: Final = b"data: [DONE]\n\n"


class CompletionFrames(AnswerFrames):
    """A streamed answer, each prompt a generation of it, behind what its client has.

    The order is OpenAI's: a role frame per chat choice, content, a finish frame per choice, usage if
    requested, ``[DONE]``. Role frames go with the first content. An error is no frame of it: the exchange's
    owner ends the stream with its own (``Reply.error``).
    """

    def __init__(
        self, request: ApiRequest, reply: Reply, position: AnswerPosition, received: Received, now_unix_s: int
    ) -> None:
        self._request = request
        self._reply = reply
        self._position = position
        self._request_id, self._created_unix_s = received.request_id, now_unix_s
        self._frames: Frames | None = None
        self._begun: dict[int, None] = {}  # the generations with content or an end
        self._finished: list[Finished] = []

    def on_accepted(self, number: int, accepted: Accepted) -> None:
        if self._frames is None:
            request_id, created_unix_s = self._request_id, self._created_unix_s
            if accepted.received_unix_us:
                request_id, created_unix_s = original(accepted, number)
            for header in difference_headers(accepted):  # An answer that becomes an error has them as well.
                self._reply.add_header(*header)
            answer = AnswerHead(
                request_id,
                created_unix_s,
                accepted.model,
                accepted.version_digest,
                accepted.degradations,
                served_tier(self._request),
            )
            self._frames = Frames(self._request, answer)
        self._position.on_accepted(number, accepted.request_id)
        for choice in range(self._request.choices):
            tokens, token_chars = self._position.tokens(number, choice)
            self._frames.start(
                number * self._request.choices + choice,
                accepted.prompt_tokens,
                split=accepted.form is not None,
                tokens=tokens,
                token_chars=token_chars,
            )

    def headers(self, accepted: Sequence[Accepted]) -> Iterable[Header]:
        cached = [CACHE_HIT] if all(each.cached for each in accepted) else []
        return [*cached, *version_headers(accepted[-1]), *rate_headers(accepted[-1])]

    def output(self, number: int, event: Tokens) -> bytes:
        frames, position = self._frames, self._position
        assert frames is not None, "output before the acceptance"
        data = frames.tokens(number * self._request.choices + event.choice, event)
        before = b"" if not data or number in self._begun else b"".join(self._roles(number, frames))
        position.on_tokens(number, event)
        return before + position.id_line() + data if data else b""

    async def ending(self, number: int, event: Finished) -> bytes:
        self._finished.append(event)
        frames, first = self._frames, number * self._request.choices
        assert frames is not None, "an end before the acceptance"
        parts = [] if number in self._begun else self._roles(number, frames)
        reasons = finish_reasons(event)
        for result in event.choices[self._position.ends(number) :]:
            self._position.on_end(number)
            frame = frames.finish(first + result.choice, reasons[result.choice], result.parts)
            parts.append(self._with_id(frame))
        if len(self._finished) == len(self._request.generations):
            clocks = frames.stage_clock([each.clock for each in self._finished])
            tail = filter(None, (clocks, frames.usage(self._finished), DONE))
            for frame in list(tail)[self._position.tail :]:
                self._position.on_tail()
                parts.append(self._with_id(frame))
        return b"".join(parts)

    def _roles(self, number: int, frames: Frames) -> list[bytes]:
        """Return the role frames of a generation, which begins, without those that its client has."""
        self._begun[number] = None
        if self._request.dialect != "chat":
            return []
        choices, found = range(self._request.choices), []
        for choice in choices[self._position.roles(number) :]:
            self._position.on_role(number)
            found.append(self._with_id(frames.role(number * len(choices) + choice)))
        return found

    def _with_id(self, frame: bytes) -> bytes:
        """Return the frame with the id of the position behind it, if the answer has ids."""
        return self._position.id_line() + frame


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
