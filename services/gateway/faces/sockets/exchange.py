"""One request of a WebSocket as an exchange of ASGI, so that the routes of HTTP answer it unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from services.gateway.faces.openai.errors import Header
from services.gateway.faces.openai.exchange import Receive, Scope, Send
from services.gateway.faces.sockets.messages import (
    answer_message,
    end_message,
    event_messages,
    started_message,
)

Route = Callable[[Scope, Receive, Send], Awaitable[None]]
FACE: Final = "websocket"


class SocketExchange:
    """Runs once. ``put`` sends a message and returns when the connection accepts more."""

    def __init__(
        self,
        name: str,
        body: bytes,
        put: Callable[[bytes], Awaitable[None]],
        *,
        over: Callable[[], None],
        cut: Callable[[], None],
        accepted: Callable[[], int],
    ) -> None:
        """``over`` is called before the last message: the client may use its id again when it has that.

        ``cut`` aborts the connection: the client does not read. ``accepted``: the bytes that it has accepted.
        """
        self._name = name
        self._over = over
        self._body: bytes | None = body
        self._put = put
        self._cut = cut
        self._accepted = accepted
        self._left = asyncio.Event()
        self._withdrawn = False
        self._is_stream = False
        self._ended = False
        self._status = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []

    async def run(self, route: Route, socket: Scope, path: str, headers: list[Header]) -> None:
        """Answer the request by the route; return once its last message is sent.

        ``headers`` include the credentials. ``socket``: the scope of the connection.
        """
        offered: Mapping[str, Any] = {
            "cut": self._cut,
            "accepted": self._accepted,
            "withdrawn": lambda: self._withdrawn,
            "face": FACE,
        }
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "client": socket.get("client"),
            "extensions": {"fairway.connection": offered},
        }
        await route(scope, self._receive, self._send)
        if not self._ended:
            self._over()
            await self._put(end_message(self._name, complete=False))

    def leave(self, *, withdraw: bool) -> None:
        """End the request as a client does that disconnects.

        ``withdraw``: one with an idempotency key ends too, unless others follow it.
        """
        self._withdrawn = self._withdrawn or withdraw
        self._left.set()

    async def _receive(self) -> Mapping[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            self._is_stream = dict(self._headers)[b"content-type"].startswith(b"text/event-stream")
            if self._is_stream:
                await self._put(started_message(self._name, self._headers))
            return
        body: bytes = message["body"]
        last = not message["more_body"]
        self._ended = last
        if last:
            self._over()
        if self._is_stream:
            for event in event_messages(self._name, body):
                await self._put(event)
            if last:
                await self._put(end_message(self._name, complete=True))
            return
        self._parts.append(body)
        if last:
            await self._put(answer_message(self._name, self._status, self._headers, b"".join(self._parts)))
