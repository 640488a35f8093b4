"""A request as a generator of its events, or as one whole answer.

Events are buffered, and merged while the reader lags.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from fairway.formats.answers import AssistantAnswer, OutputPart, answer_of
from services.core.errors import FairwayError
from services.core.generation import TokenLogprobs
from services.gateway.events import Accepted, Event, Finished, Handle, Heartbeat, Tokens

# Log-probabilities of tokens in one event, so that none holds the event loop for long.
MAX_MERGED_LOGPROBS: Final = 256
_FEW_LOGPROBS: Final = 32


class BufferedStream:
    """The sink of one request and the generator over it.

    Bounded by the request's credit windows: only tokens that the reader took earn credit.
    """

    def __init__(self, heartbeat_s: float, *, withdraws: Callable[[], bool]) -> None:
        """``withdraws``: whether a reader that closes the generator wants the end of the request."""
        self._withdraws = withdraws
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
                        if self._pending[event.choice] is event:
                            del self._pending[event.choice]
                        yield event
                        request.credit(event.choice, len(event.ids))
                        if len(event.logprobs) > _FEW_LOGPROBS:  # writing these took time
                            self._waiter = loop.create_future()
                            loop.call_soon(self._wake)
                            await self._waiter
                    else:
                        yield event
                        if isinstance(event, Finished):
                            return
                if self._failure is not None:
                    raise self._failure  # no local: its traceback refers to this frame
                self._waiter = loop.create_future()
                await self._waiter
        finally:
            self._closed, self._failure = True, None
            beat.cancel()
            if self._withdraws():
                request.withdraw()
            else:
                request.cancel()

    def on_accepted(self, accepted: Accepted) -> None:
        """Wake the reader one turn of the loop later: the placement is sent before the client's headers."""
        self._silent = False
        self._events.append(accepted)
        asyncio.get_running_loop().call_soon(self._wake)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        waiting = self._pending.get(choice)
        if waiting is None or len(waiting.logprobs) >= MAX_MERGED_LOGPROBS:
            self._pending[choice] = tokens = Tokens(choice, offset, ids, text, logprobs)
            self._push(tokens)
        else:
            waiting.ids = [*waiting.ids, *ids]
            waiting.text += text
            waiting.logprobs = (*waiting.logprobs, *logprobs)

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


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: per choice its text, token ids and log probabilities.

    ``answers``: the texts by their meaning; empty where the request wants no parts.
    """

    accepted: Accepted
    texts: list[str]
    ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    finished: Finished
    answers: Sequence[AssistantAnswer] = ()


async def complete(stream: AsyncGenerator[Event, None], *, parts: bool) -> Completion:
    """Return the whole answer of a stream, and close the stream. ``parts``: its events have parts."""
    # By choice, created on arrival: the number of choices is not validated yet.
    texts: defaultdict[int, list[str]] = defaultdict(list)
    ids: defaultdict[int, list[int]] = defaultdict(list)
    logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
    pieces: defaultdict[int, list[OutputPart]] = defaultdict(list)
    accepted: Accepted | None = None
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Tokens):
                texts[event.choice].append(event.text)
                ids[event.choice].extend(event.ids)
                logprobs[event.choice].extend(event.logprobs)
                pieces[event.choice].extend(event.parts)
            elif isinstance(event, Accepted):
                accepted = event
            elif isinstance(event, Finished):
                assert accepted is not None
                choices = range(len(event.choices))
                for result in event.choices:
                    pieces[result.choice].extend(result.parts)
                return Completion(
                    accepted,
                    ["".join(texts[choice]) for choice in choices],
                    [ids[choice] for choice in choices],
                    [logprobs[choice] for choice in choices],
                    event,
                    [answer_of(pieces[choice]) for choice in choices] if parts else (),
                )
    raise AssertionError("a stream ended without a terminal event")
