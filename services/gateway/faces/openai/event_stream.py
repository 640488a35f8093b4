"""A streamed answer: the events of one or several generations as server-sent events.

The order is OpenAI's: a role frame per chat choice, content, a finish frame per choice, usage if requested,
``[DONE]``. An error in the middle is raised, and the exchange's owner ends the stream with its frame
(``Reply.error``).

The status waits for the first output, at most until a stated time, so that a request that finds no place is a
503 that clients retry. Role frames go with the first output: the time to the first frame is the time to the
first token.

A write waits while the client does not read, and the next event is taken only after it. So the service merges
the events that accumulate meanwhile and withholds credit from the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

from fairway.task_group import TaskGroup
from services.gateway.events import Accepted, Event, Finished, Tokens
from services.gateway.faces.openai.answers import AnswerHead, Frames, finish_reasons, served_tier
from services.gateway.faces.openai.event_ids import AnswerPosition
from services.gateway.faces.openai.exchange import Reply, primary_failure, rate_headers
from services.gateway.faces.openai.requests import ApiRequest
from services.gateway.policy.degrade import Degradation, header_value

# Prompts of one request that run at once; the others wait, and take no place in a queue.
PROMPTS_AT_ONCE: Final = 32
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
# The answer is that of an earlier request with the same idempotency key.
REPLAYED: Final = (b"idempotent-replayed", b"true")
# The answer is that of an equal earlier request of the tenant.
CACHE_HIT: Final = (b"x-fairway-cache", b"hit")


def degraded_header(degradations: Sequence[Degradation]) -> tuple[bytes, bytes]:
    """Return the header with the differences between the answer and the request."""
    distinct = tuple(dict.fromkeys(degradations))
    return b"x-fairway-degraded", header_value(distinct).encode("ascii", "replace")


class EventStream:
    """Writes one answer. ``relay`` runs once per generation; they share the connection."""

    def __init__(
        self,
        request: ApiRequest,
        reply: Reply,
        position: AnswerPosition | None,
        *,
        request_id: str,
        created_unix_s: int,
        status_due: Callable[[], bool],
    ) -> None:
        """``position`` states what the client has of the answer. With it, every event has an id.

        ``status_due`` returns whether the status goes out without output.
        """
        self._status_due = status_due
        self._position = position
        self._request = request
        self._reply = reply
        self._request_id = request_id
        self._created_unix_s = created_unix_s
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(PROMPTS_AT_ONCE)
        self._frames: Frames | None = None
        self._begun: dict[int, None] = {}  # the generations whose role frames were made
        self._accepted: list[Accepted] = []
        self._finished: list[Finished] = []

    async def run(self, sources: Sequence[AsyncGenerator[Event, None]]) -> None:
        """Return once the answer is complete. Raises the first error of a generation, the others ended."""
        if len(sources) == 1:
            await self._relay(0, sources[0])
            return
        try:
            async with TaskGroup() as group:
                for number, source in enumerate(sources):
                    group.create_task(self._relay(number, source))
        except BaseExceptionGroup as failures:
            raise primary_failure(failures) from None

    async def _relay(self, number: int, source: AsyncGenerator[Event, None]) -> None:
        async with self._places, aclosing(source) as events:
            async for event in events:
                async with self._turn:
                    await self._write(number, event)

    async def _write(self, number: int, event: Event) -> None:
        if isinstance(event, Accepted):
            self._on_accepted(number, event)
            return
        if self._frames is None:  # a heartbeat during admission: the status is still undecided
            return
        if isinstance(event, Tokens):
            await self._on_tokens(number, event, self._frames)
        elif isinstance(event, Finished):
            await self._on_finished(number, event, self._frames)
        elif self._reply.started or self._status_due():
            await self._open()
            await self._reply.write(KEEP_ALIVE)

    def _on_accepted(self, number: int, event: Accepted) -> None:
        if self._frames is None:
            request_id, created_unix_s = self._request_id, self._created_unix_s
            if event.received_unix_us:
                request_id, created_unix_s = original(event, number)
            if event.replayed:
                self._reply.add_header(*REPLAYED)
            if event.degradations:
                self._reply.add_header(*degraded_header(event.degradations))
            answer = AnswerHead(
                request_id,
                created_unix_s,
                event.model,
                event.version_digest,
                event.degradations,
                served_tier(self._request),
            )
            self._frames = Frames(self._request, answer)
        position, first = self._position, number * self._request.choices
        if position is not None:
            position.on_accepted(number, event.request_id)
        for choice in range(self._request.choices):
            had = (0, 0) if position is None else position.tokens(number, choice)
            self._frames.start(
                first + choice,
                event.prompt_tokens,
                split=event.form is not None,
                tokens=had[0],
                token_chars=had[1],
            )
        self._accepted.append(event)

    async def _on_tokens(self, number: int, event: Tokens, frames: Frames) -> None:
        data = frames.tokens(number * self._request.choices + event.choice, event)
        roles = self._roles(number, frames) if data else []
        if self._position is not None:
            self._position.on_tokens(number, event)
        if data:
            await self._open()
            await self._reply.write(b"".join((*roles, self._with_id(data))))

    def _roles(self, number: int, frames: Frames) -> list[bytes]:
        """Return the role frames of a generation, once, without those that its client has."""
        if number in self._begun or self._request.dialect != "chat":
            return []
        self._begun[number] = None
        choices, position, found = range(self._request.choices), self._position, []
        for choice in choices[position.roles(number) if position is not None else 0 :]:
            if position is not None:
                position.on_role(number)
            found.append(self._with_id(frames.role(number * len(choices) + choice)))
        return found

    async def _open(self) -> None:
        """Begin the answer, unless it has begun. The caller holds the lock."""
        if self._reply.started:
            return
        if all(accepted.cached for accepted in self._accepted):
            self._reply.add_header(*CACHE_HIT)
        for header in rate_headers(self._accepted[-1]):
            self._reply.add_header(*header)
        await self._reply.start_events()

    async def _on_finished(self, number: int, event: Finished, frames: Frames) -> None:
        self._finished.append(event)
        first, position = number * self._request.choices, self._position
        parts = self._roles(number, frames)
        reasons = finish_reasons(event)
        for result in event.choices[position.ends(number) if position is not None else 0 :]:
            if position is not None:
                position.on_end(number)
            frame = frames.finish(first + result.choice, reasons[result.choice], result.parts)
            parts.append(self._with_id(frame))
        last = len(self._finished) == len(self._request.generations)
        if last:
            clocks = frames.stage_clock([each.clock for each in self._finished])
            tail = filter(None, (clocks, frames.usage(self._finished), DONE))
            for frame in list(tail)[position.tail if position is not None else 0 :]:
                if position is not None:
                    position.on_tail()
                parts.append(self._with_id(frame))
        await self._open()
        await self._reply.write(b"".join(parts), last=last)

    def _with_id(self, frame: bytes) -> bytes:
        """Return the frame with the id of the position behind it, if the answer has positions."""
        if self._position is None:
            return frame
        return b"id: " + self._position.event_id() + b"\n" + frame


def original(accepted: Accepted, number: int) -> tuple[str, int]:
    """Return id and time of the accepted request, of which this was generation ``number``."""
    return accepted.request_id.removesuffix(f"-{number}"), accepted.received_unix_us // 1_000_000
