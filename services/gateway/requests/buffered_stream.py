"""A request as an async generator: events are buffered, and merged while the reader lags."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from services.core.errors import FairwayError
from services.core.generation import TokenLogprobs
from services.gateway.events import Accepted, Event, Finished, Handle, Heartbeat, Tokens


class BufferedStream:
    """The sink of one request and the generator over it.

    Bounded by the request's credit windows: only tokens that the reader took earn credit.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._events: deque[Event] = deque()
        self._pending: dict[int, Tokens] = {}
        self._failure: FairwayError | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._silent = True

    async def events(self, start: Callable[[], Handle]) -> AsyncGenerator[Event, None]:
        """Start the request and yield its events. Raises the error that ended it; closing cancels it."""
        request = start()
        loop = asyncio.get_running_loop()
        beat = loop.call_later(self._heartbeat_s, self._beat, loop)
        try:
            while True:
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, Tokens):
                        event = self._pending.pop(event.choice)
                    yield event
                    if isinstance(event, Tokens):
                        request.credit(event.choice, len(event.ids))
                    elif isinstance(event, Finished):
                        return
                if self._failure is not None:
                    raise self._failure
                self._waiter = loop.create_future()
                await self._waiter
        finally:
            self._closed = True
            beat.cancel()
            request.cancel()

    def on_accepted(self, accepted: Accepted) -> None:
        self._push(accepted)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        waiting = self._pending.get(choice)
        if waiting is None:
            self._pending[choice] = tokens = Tokens(choice, offset, ids, text, logprobs)
            self._push(tokens)
        else:
            self._pending[choice] = Tokens(
                choice,
                waiting.offset,
                [*waiting.ids, *ids],
                waiting.text + text,
                (*waiting.logprobs, *logprobs),
            )

    def on_finished(self, finished: Finished) -> None:
        self._push(finished)

    def on_failed(self, error: FairwayError) -> None:
        self._failure = error
        self._wake()

    def _push(self, event: Event) -> None:
        self._silent = False
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Emit a heartbeat after every interval without an event. One timer per stream, none per token."""
        if self._closed:
            return
        if self._silent and not self._events:
            self._events.append(Heartbeat())
            self._wake()
        self._silent = True
        loop.call_later(self._heartbeat_s, self._beat, loop)
