"""A small HTTP client for tests of the rows' routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.integration.openai.face import Answer, read_answer
from tests.support.rows_gateway import API_KEY


async def ask(
    port: int, method: str, path: str, body: Any = None, *, key: str | None = API_KEY, **headers: str
) -> Answer:
    """Return the answer of one request on a connection of its own."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(data)}"]
    lines += [] if key is None else [f"authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return await asyncio.wait_for(read_answer(reader), 10)
    finally:
        writer.close()
