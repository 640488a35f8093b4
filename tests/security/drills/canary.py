"""Canaries: streams of a tenant that attacks nobody, on every face of every gateway, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.runtime.clock import SystemClock
from tests.security.drills.http import post, server_events
from tests.security.drills.judge import Counted
from tests.security.drills.target import Gateway
from tests.support.stack import metadata

TENANT: Final = "canary"
TOKENS: Final = 12
PROMPTS: Final = tuple(f"class Queue{number}:\n    def push(self, item):\n" for number in range(4))
_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.05
# A channel serves so many streams: users who come anew must be served as well.
_STREAMS_PER_CHANNEL: Final = 4
now_s = SystemClock().monotonic_s


class CanaryFailed(Exception):
    """A canary's request did not end with exactly its tokens."""


def generation(model: str, prompt: str, tokens: int = TOKENS) -> pb.Generation:
    """A greedy generation."""
    found = pb.Generation(model=model, prompt=prompt, max_output_tokens=tokens, ignore_eos=True)
    found.sampling.temperature = 0.0
    found.sampling.seed = 1
    return found


@dataclass(slots=True)
class Canary:
    """One stream after another on one face. Gap and failures count since they were last taken."""

    name: str
    finished: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    worst_gap_s: float = 0.0
    _last_s: float | None = None

    def begin(self) -> None:
        self._last_s = now_s()

    def event(self) -> None:
        """Note an event: the first one's gap began when the request was sent."""
        at_s = now_s()
        if self._last_s is not None:
            self.worst_gap_s = max(self.worst_gap_s, at_s - self._last_s)
        self._last_s = at_s

    def end(self) -> None:
        self._last_s = None

    def take(self) -> tuple[float, list[str]]:
        """Return the worst gap, one that is still open included, and the failures, and count anew."""
        open_s = 0.0 if self._last_s is None else now_s() - self._last_s
        gap_s, failures = max(self.worst_gap_s, open_s), self.failures
        self.worst_gap_s, self.failures = 0.0, []
        return gap_s, failures


async def grpc_stream(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, wanted: pb.Generation, key: str, canary: Canary
) -> tuple[tuple[int, ...], str]:
    """Return ids and text of one generation. Raises CanaryFailed, AioRpcError."""
    ids: list[int] = []
    text, finished = "", False
    call = stub.Generate(pb.GenerateRequest(generation=wanted), metadata=metadata(key), timeout=_TIMEOUT_S)
    try:
        async for event in call:
            canary.event()
            if event.HasField("chunk"):
                ids.extend(event.chunk.ids)
                text += event.chunk.text
            finished = finished or event.HasField("finished")
    finally:
        call.cancel()
    if not finished:
        raise CanaryFailed("the stream ended without a terminal event")
    return tuple(ids), text


async def http_stream(address: str, wanted: pb.Generation, key: str, canary: Canary) -> str:
    """Return the text of one generation over Server-Sent Events. Raises CanaryFailed, OSError."""
    body = {
        "model": wanted.model,
        "prompt": wanted.prompt,
        "max_tokens": wanted.max_output_tokens,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
    }
    text, done = "", False
    async with (
        asyncio.timeout(_TIMEOUT_S),
        contextlib.aclosing(
            server_events(address, post("/v1/completions", json.dumps(body).encode(), key))
        ) as events,
    ):
        async for event in events:
            canary.event()
            if event == "[DONE]":
                done = True
                break
            parsed = json.loads(event)
            if "error" in parsed:
                raise CanaryFailed(f"an error came: {str(parsed['error'])[:200]}")
            text += "".join(choice["text"] for choice in parsed["choices"])
    if not done:
        raise CanaryFailed("the stream ended without [DONE]")
    return text


@dataclass(slots=True)
class Canaries:
    """Two for each gateway. ``sees`` counts what this tenant was given, for the settlements."""

    gateways: Sequence[Gateway]
    model: str
    key: str
    canaries: list[Canary] = field(default_factory=list)
    _expected: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _busy: int = 0
    _extra: Counted = field(default_factory=Counted)

    @property
    def sees(self) -> Counted:
        finished = sum(canary.finished for canary in self.canaries)
        return self._extra + Counted(finished, sum(canary.tokens for canary in self.canaries))

    @property
    def finished(self) -> int:
        return sum(canary.finished for canary in self.canaries)

    async def learn(self) -> None:
        """Take the reference of every prompt. Raises when one does not finish."""
        async with grpc.aio.insecure_channel(self.gateways[0].grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for prompt in PROMPTS:
                ids, text = await grpc_stream(stub, generation(self.model, prompt), self.key, Canary(""))
                assert len(ids) == TOKENS, f"{len(ids)} tokens"
                self._expected[prompt] = (ids, text)
                self._extra += Counted(1, TOKENS)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._open.set()
        tasks = []
        for gateway in self.gateways:
            for run, face in ((self._run_grpc, "grpc"), (self._run_http, "http")):
                canary = Canary(f"{gateway.name}/{face}")
                self.canaries.append(canary)
                tasks.append(asyncio.create_task(run(gateway, canary)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """None runs inside: what ran has ended."""
        self._open.clear()
        while self._busy:
            await asyncio.sleep(0.02)
        try:
            yield
        finally:
            self._open.set()

    async def serve(self, timeout_s: float) -> bool:
        """Whether every canary finishes a stream from now on within the time."""
        before = [canary.finished for canary in self.canaries]
        deadline_s = now_s() + timeout_s
        while any(canary.finished <= had for canary, had in zip(self.canaries, before, strict=True)):
            if now_s() > deadline_s:
                return False
            await asyncio.sleep(0.1)
        return True

    def take(self) -> tuple[float, str, list[str]]:
        """Return the worst gap with its canary, and the failures, since the last call."""
        taken = [(canary.name, *canary.take()) for canary in self.canaries]
        name, gap_s, _ = max(taken, key=lambda each: each[1])
        return gap_s, name, [f"{each}: {why}" for each, _, failures in taken for why in failures]

    async def _run_grpc(self, gateway: Gateway, canary: Canary) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        prompts = itertools.cycle(PROMPTS)
        while True:
            async with grpc.aio.insecure_channel(gateway.grpc, options=options) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                for prompt in itertools.islice(prompts, _STREAMS_PER_CHANNEL):
                    await self._one(canary, prompt, stub)

    async def _run_http(self, gateway: Gateway, canary: Canary) -> None:
        for prompt in itertools.cycle(PROMPTS):
            await self._one(canary, prompt, gateway.http)

    async def _one(
        self, canary: Canary, prompt: str, way: str | inference_pb2_grpc.InferenceServiceAsyncStub
    ) -> None:
        await self._open.wait()
        wanted, (ids, text) = generation(self.model, prompt), self._expected[prompt]
        self._busy += 1
        canary.begin()
        try:
            if isinstance(way, str):
                got: object = await http_stream(way, wanted, self.key, canary)
                expected: object = text
            else:
                got, expected = await grpc_stream(way, wanted, self.key, canary), (ids, text)
            if got != expected:
                raise CanaryFailed("its tokens differ from the reference")
            canary.finished += 1
            canary.tokens += TOKENS
        except grpc.aio.AioRpcError as error:
            canary.event()
            canary.failures.append(f"{error.code().name} {error.details()}"[:200])
        except (CanaryFailed, OSError, TimeoutError, EOFError, ValueError, KeyError) as error:
            canary.event()
            canary.failures.append(f"{type(error).__name__} {error}"[:200])
        finally:
            canary.end()
            self._busy -= 1
        await asyncio.sleep(0.5 if canary.failures else _PAUSE_S)
