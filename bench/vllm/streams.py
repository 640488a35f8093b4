"""Streams of completions from one process of this machine, with as little work as shows when tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from bench.vllm.served import Server

AT_ONCE: Final = 32
WORDS: Final = (
    "def",
    "return",
    "self",
    "class",
    "import",
    "value",
    "index",
    "for",
    "in",
    "range",
    "if",
    "None",
)
PROMPT_WORDS: Final = (32, 200)
OUTPUT_TOKENS: Final = (32, 128)


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: str | list[int]  # text or token ids
    tokens: int


@dataclass(frozen=True, slots=True)
class Streamed:
    ttft_s: float
    text: str
    took_s: float  # time until the last byte


def drawn(rng: Random, count: int) -> list[Asked]:
    """Return requests that begin alike for nobody: no prefix is cached."""
    return [
        Asked(
            " ".join(
                f"{rng.choice(WORDS)}_{rng.randrange(1000)}" for _ in range(rng.randint(*PROMPT_WORDS) // 4)
            ),
            rng.randint(*OUTPUT_TOKENS),
        )
        for _ in range(count)
    ]


async def stream(server: Server, asked: Asked) -> Streamed:
    """Return one stream. Raises RuntimeError unless it has all its tokens."""
    body = json.dumps(
        {
            "model": server.model,
            "prompt": asked.prompt,
            "max_tokens": asked.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{server.headers}"
    began_s = time.perf_counter()
    writer.write(
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    ttft_s, parts = 0.0, []
    async for line in reader:
        if line.startswith(b"data: "):
            ttft_s = ttft_s or time.perf_counter() - began_s
            parts.append(line[6:])
    took_s = time.perf_counter() - began_s
    writer.close()
    events = [json.loads(part) for part in parts if part.strip() != b"[DONE]"]
    produced = next((each["usage"]["completion_tokens"] for each in events if each.get("usage")), 0)
    if produced != asked.tokens:
        raise RuntimeError(f"{produced} of {asked.tokens} tokens: {parts[-2:]}")
    text = "".join(choice["text"] for each in events for choice in each["choices"])
    return Streamed(ttft_s, text, took_s)


async def together(server: Server, requests: Sequence[Asked]) -> tuple[float, list[Streamed]]:
    """Return tokens per second of requests that arrive at once, and their streams."""
    began_s = time.perf_counter()
    streams = await asyncio.gather(*(stream(server, asked) for asked in requests))
    took_s = time.perf_counter() - began_s
    return sum(asked.tokens for asked in requests) / took_s, streams
