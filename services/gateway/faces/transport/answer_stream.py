"""One generation as one answer of HTTP, whole or as server-sent events, for faces with an answer per request.

As in the OpenAI face, the status waits for the first output, at most until a stated time, and a write waits
while the client does not read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError
from services.core.generation import Principal
from services.gateway.events import Accepted, Event, Finished, Received, Tokens
from services.gateway.faces.openai.event_stream import CACHE_HIT, REPLAYED, degraded_header
from services.gateway.faces.openai.exchange import Reply
from services.gateway.faces.openai.rate_headers import rate_headers


class GenerationStreams(Protocol):
    """Runs whole requests; raises the tree of ``core/errors.py``."""

    def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, ending with Finished; raise the error that ended it.

        Closing the generator cancels the request and frees all its resources.
        """


class AnswerFrames(Protocol):
    """The answer of one generation with one choice, in a dialect. Its methods return server-sent events."""

    # Sent while nothing else is.
    keep_alive: bytes

    def on_accepted(self, accepted: Accepted) -> None:
        """The request was accepted; once more, before any output, if its version was withdrawn."""

    def opening(self) -> bytes:
        """Return what precedes the output; called once, after the acceptance."""

    def output(self, event: Tokens) -> bytes:
        """Take output. Return its events, which are empty while text is held back."""

    async def ending(self, event: Finished) -> bytes:
        """Take the end, and return what follows the output."""

    def failed(self, error: FairwayError) -> bytes:
        """Return the end of a stream that has begun."""


async def collect(source: AsyncGenerator[Event, None], frames: AnswerFrames, reply: Reply) -> None:
    """Return once ``frames`` has the whole answer. The events' headers are added to the reply."""
    async with aclosing(source) as events:
        async for event in events:
            if isinstance(event, Accepted):
                accepted = event
                frames.on_accepted(event)
            elif isinstance(event, Tokens):
                frames.output(event)
            elif isinstance(event, Finished):
                await frames.ending(event)
                _add_headers(reply, accepted)


async def relay(
    source: AsyncGenerator[Event, None], frames: AnswerFrames, reply: Reply, status_due: Callable[[], bool]
) -> None:
    """Write the answer as a stream. Raises an error only before the stream has begun.

    ``status_due``: whether the status goes out without output.
    """
    try:
        async with aclosing(source) as events:
            await _Relay(frames, reply, status_due).run(events)
    except FairwayError as error:
        if not reply.started or reply.complete:
            raise
        await reply.write(frames.failed(error), last=True)


class _Relay:
    def __init__(self, frames: AnswerFrames, reply: Reply, status_due: Callable[[], bool]) -> None:
        self._frames = frames
        self._reply = reply
        self._status_due = status_due
        self._accepted: Accepted | None = None

    async def run(self, events: AsyncGenerator[Event, None]) -> None:
        async for event in events:
            if isinstance(event, Accepted):
                self._accepted = event
                self._frames.on_accepted(event)
            elif isinstance(event, Tokens):
                if data := self._frames.output(event):
                    await self._write(data)
            elif isinstance(event, Finished):
                await self._write(await self._frames.ending(event), last=True)
            elif self._reply.started or (self._accepted is not None and self._status_due()):
                await self._write(self._frames.keep_alive)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._reply.started:
            assert self._accepted is not None, "output before the acceptance"
            _add_headers(self._reply, self._accepted)
            await self._reply.start_events()
            data = self._frames.opening() + data
        await self._reply.write(data, last=last)


def _add_headers(reply: Reply, accepted: Accepted) -> None:
    if accepted.replayed:
        reply.add_header(*REPLAYED)
    if accepted.degradations:
        reply.add_header(*degraded_header(accepted.degradations))
    if accepted.cached:
        reply.add_header(*CACHE_HIT)
    for header in rate_headers(accepted):
        reply.add_header(*header)
