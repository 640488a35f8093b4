"""An OpenAI server that answers every chat completion at once with the same 16 tokens.

python -m bench.admissions.null_backend PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final, cast

import uvloop

_BODY: Final = json.dumps(
    {
        "id": "chatcmpl-null",
        "object": "chat.completion",
        "created": 1,
        "model": "null",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "a " * 16}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 16, "completion_tokens": 16, "total_tokens": 32},
    }
).encode()
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
)
_LENGTH: Final = b"content-length:"


class NullAnswers(asyncio.Protocol):
    """Answers each complete request on a connection that stays open."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's has no base class of asyncio

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, found, rest = head.partition(_LENGTH)
            length = int(rest.split(b"\r\n")[0]) if found else 0
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            self._transport.write(_ANSWER)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(NullAnswers, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
