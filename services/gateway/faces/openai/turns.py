"""Paces the start of requests: a few per iteration of the event loop, round-robin over their sources."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from services.gateway.faces.openai.exchange import Receive, Scope, Send
from services.runtime.connections import source_of

BEGUN_PER_TURN: Final = 16


class Turns:
    """An ASGI application that starts at most 16 requests per iteration of the event loop.

    Otherwise thousands of requests that are readable at once would start in one iteration, for a second or
    more, during which no stream progresses. Waiting requests start round-robin, one of each source, so that a
    source with few requests does not wait for one with many. The number of connections bounds the waiting
    requests.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._begun = 0  # in this iteration
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        if self._begun < BEGUN_PER_TURN:
            if not self._begun:
                loop.call_soon(self._next_turn, loop)
            self._begun += 1
        else:
            turn = loop.create_future()
            self._waiting.setdefault(source_of(scope.get("client")), deque()).append(turn)
            await turn
        await self._app(scope, receive, send)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < BEGUN_PER_TURN:
            source = next(iter(self._waiting))
            turns = self._waiting.pop(source)
            turn = turns.popleft()
            if turns:
                self._waiting[source] = turns  # behind the other sources
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next_turn, loop)
