"""One generation as one answer of HTTP, whole or as server-sent events, for faces with an answer per request.

The status waits for the first output, as in the OpenAI face, at most until a stated time, and a write waits
while the client does not read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError
from services.core.generation import Principal
from services.gateway.events import Accepted, Event, Finished, Received, Tokens, never
from services.gateway.faces.openai.event_stream import CACHE_HIT, REPLAYED, degraded_header
from services.gateway.faces.openai.exchange import Reply, rate_headers


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


class AnswerFrames(Protocol):
    """The answer of one generation with one choice, in a dialect. Its methods return server-sent events."""

    @property
    def keep_alive(self) -> bytes:
        """What is sent while nothing else is."""

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


async def collect(source: AsyncGenerator[Event, None], frames: AnswerFrames) -> Accepted:
    """Return the acceptance once ``frames`` has the whole answer."""
    accepted: Accepted | None = None
    async with aclosing(source) as events:
        async for event in events:
            if isinstance(event, Accepted):
                accepted = event
                frames.on_accepted(event)
            elif isinstance(event, Tokens):
                frames.output(event)
            elif isinstance(event, Finished):
                await frames.ending(event)
    assert accepted is not None, "a stream ended without an acceptance"
    return accepted


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
        self._opening: bytes | None = None  # None until it was made, empty once it was written

    async def run(self, events: AsyncGenerator[Event, None]) -> None:
        async for event in events:
            if isinstance(event, Accepted):
                self._accepted = event
                self._frames.on_accepted(event)
            elif isinstance(event, Tokens):
                self._open()
                if data := self._frames.output(event):
                    await self._write(data)
            elif isinstance(event, Finished):
                self._open()
                await self._write(await self._frames.ending(event), last=True)
            elif self._reply.started or (self._accepted is not None and self._status_due()):
                self._open()
                await self._write(self._frames.keep_alive)

    def _open(self) -> None:
        """Make what precedes the output, before the output: events may be numbered."""
        if self._opening is None:
            self._opening = self._frames.opening()

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._reply.started:
            assert self._accepted is not None, "output before the acceptance"
            add_headers(self._reply, self._accepted)
            await self._reply.start_events()
        opening, self._opening = self._opening, b""
        await self._reply.write((opening or b"") + data, last=last)


def add_headers(reply: Reply, accepted: Accepted) -> None:
    """Add what the acceptance states in addition to the answer."""
    if accepted.replayed:
        reply.add_header(*REPLAYED)
    if accepted.degradations:
        reply.add_header(*degraded_header(accepted.degradations))
    if accepted.cached:
        reply.add_header(*CACHE_HIT)
    for header in rate_headers(accepted):
        reply.add_header(*header)
