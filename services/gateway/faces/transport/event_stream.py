"""A streamed answer: the events of one or several generations as server-sent events, in any dialect.

The status waits for the first output, at most until a stated time, so that a request that finds no place is a
503 that clients retry. What precedes the output goes with it: the time to the first event is the time to the
first token.

A write waits while the client does not read, and the next event is taken only after it. So the service merges
the events that accumulate meanwhile and withholds credit from the worker.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.generation import Principal
from services.gateway.catalog import Route
from services.gateway.events import Accepted, Event, Finished, Heartbeat, Received, Tokens, never
from services.gateway.faces.openai.errors import Header
from services.gateway.faces.openai.exchange import Reply, primary_failure, rate_headers
from services.gateway.policy.degrade import Degradation, header_value

# Prompts of one request that run at once; the others wait, and take no place in a queue.
PROMPTS_AT_ONCE: Final = 32
# The answer is that of an earlier request with the same idempotency key.
REPLAYED: Final = (b"idempotent-replayed", b"true")
# The answer is that of an equal earlier request of the tenant.
CACHE_HIT: Final = (b"x-fairway-cache", b"hit")


class GenerationStreams(Protocol):
    """Runs whole requests; raises the tree of ``core/errors.py``."""

    def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
        withdraws: Callable[[], bool] = never,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, ending with Finished; raise the error that ended it.

        Closing the generator cancels the request and frees all its resources. One with an idempotency key
        runs on for a grace period, unless the caller then ``withdraws`` it.
        """


class CountedStreams(GenerationStreams, Protocol):
    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of tokens of the prompt for its model."""


class AnswerFrames(ABC):
    """The answer of a request in a dialect, of its generations by number, as server-sent events."""

    # What is sent while nothing else is.
    keep_alive: bytes = b": keep-alive\n\n"

    @abstractmethod
    def on_accepted(self, number: int, accepted: Accepted) -> None:
        """The generation was accepted; once more, before any output, if its version was withdrawn."""

    def headers(self, accepted: Sequence[Accepted]) -> Iterable[Header]:
        """Return what the acceptances so far state in addition to the answer, which begins."""
        return answer_headers(accepted[-1])

    def opening(self) -> bytes:
        """Return what precedes all output; called once, after the acceptance and before the output."""
        return b""

    @abstractmethod
    def output(self, number: int, event: Tokens) -> bytes:
        """Take output. Return its events, which are empty while text is held back."""

    @abstractmethod
    async def ending(self, number: int, event: Finished) -> bytes:
        """Take the end, and return what follows the output."""


async def collect(source: AsyncGenerator[Event, None], frames: AnswerFrames) -> Accepted:
    """Return the acceptance once ``frames`` has the whole answer, of one generation."""
    accepted: Accepted | None = None
    async with aclosing(source) as events:
        async for event in events:
            if isinstance(event, Accepted):
                accepted = event
                frames.on_accepted(0, event)
            elif isinstance(event, Tokens):
                frames.output(0, event)
            elif isinstance(event, Finished):
                await frames.ending(0, event)
    assert accepted is not None, "a stream ended without an acceptance"
    return accepted


class EventStream:
    """Writes one answer. Its generations share the connection. Runs once."""

    def __init__(self, frames: AnswerFrames, reply: Reply, status_due: Callable[[], bool]) -> None:
        """``status_due`` returns whether the status goes out without output."""
        self._frames = frames
        self._reply = reply
        self._status_due = status_due
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(PROMPTS_AT_ONCE)
        self._accepted: list[Accepted] = []
        self._opening: bytes | None = None  # None until it was made, empty once it was written
        self._left = 0  # generations without their end

    async def run(self, sources: Sequence[AsyncGenerator[Event, None]]) -> None:
        """Return once the answer is complete. Raises the first error of a generation, the others ended."""
        self._left = len(sources)
        if self._left == 1:
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
                    await self._on_event(number, event)

    async def _on_event(self, number: int, event: Event) -> None:
        if isinstance(event, Accepted):
            self._accepted.append(event)
            self._frames.on_accepted(number, event)
            return
        if isinstance(event, Heartbeat) and not (
            self._reply.started or (self._accepted and self._status_due())
        ):
            return  # the status is still undecided
        if self._opening is None:  # made before the output, since events are counted
            self._opening = self._frames.opening()
        if isinstance(event, Tokens):
            if data := self._frames.output(number, event):
                await self._write(data)
        elif isinstance(event, Finished):
            data = await self._frames.ending(number, event)
            self._left -= 1
            await self._write(data, last=not self._left)
        else:
            await self._write(self._frames.keep_alive)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._reply.started:
            for header in self._frames.headers(self._accepted):
                self._reply.add_header(*header)
            await self._reply.start_events()
        if self._opening:
            data, self._opening = self._opening + data, b""
        await self._reply.write(data, last=last)


def answer_headers(accepted: Accepted) -> list[Header]:
    """Return what an acceptance states in addition to the answer."""
    cached = [CACHE_HIT] if accepted.cached else []
    return [*difference_headers(accepted), *cached, *version_headers(accepted), *rate_headers(accepted)]


def version_headers(accepted: Accepted) -> list[Header]:
    """Return the digest of the weights, that of the base of an adapter, whether the answer is exact, and why
    this size of an alias answers.
    """
    named = (
        (b"x-fairway-weights", accepted.weights_digest),
        (b"x-fairway-base", accepted.base_digest),
        (b"x-fairway-exact", "true" if accepted.exact else "false"),
        (b"x-fairway-size", accepted.size.text if accepted.size is not None else ""),
    )
    return [(name, value.encode("ascii", "replace")) for name, value in named if value]


def difference_headers(accepted: Accepted) -> list[Header]:
    """Return how an answer differs from that of the request if it ran now, as it is."""
    replayed = [REPLAYED] if accepted.replayed else []
    return [*replayed, *([degraded_header(accepted.degradations)] if accepted.degradations else [])]


def degraded_header(degradations: Sequence[Degradation]) -> Header:
    """Return the header with the differences between the answer and the request."""
    distinct = tuple(dict.fromkeys(degradations))
    return b"x-fairway-degraded", header_value(distinct).encode("ascii", "replace")


def original(accepted: Accepted, number: int) -> tuple[str, int]:
    """Return id and time of the accepted request, of which this was generation ``number``."""
    return accepted.request_id.removesuffix(f"-{number}"), accepted.received_unix_us // 1_000_000
