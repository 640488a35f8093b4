"""What one tenant's key may do to the others, and to its own limits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from fairway.cli.fleet.record import FleetRecord
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.runtime.clock import SystemClock
from tests.security.drills.canary import generation
from tests.security.drills.http import post, status_of
from tests.security.drills.judge import CROWD_GAP_S, Found
from tests.security.drills.target import Attack, Gateway, Target
from tests.support.stack import metadata

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
STARTS: Final = 20_000
# More than an engine makes before a client cancels.
LONG_TOKENS: Final = 900
PER_MINUTE: Final = 30
CONCURRENCY: Final = 5
now_s = SystemClock().monotonic_s


def channel(address: str) -> grpc.aio.Channel:
    """A channel that shares its connection with no other."""
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 200),
    )
    return grpc.aio.insecure_channel(address, options=options)


@dataclass(slots=True)
class Running:
    """What a tenant runs at once, as its clients see it, and how many were accepted above its limits.

    A span is from when a client sees the acceptance, which is after the gateway counts it, until that client
    cancels, which is before the gateway gives the slot back. What the server ends has no span: when it gave
    that slot back is not seen.
    """

    tenant: str
    limit: int
    per_minute: int = 0
    accepted: int = 0
    tokens: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    _began_s: float = field(default_factory=now_s)
    _last_s: float = field(default_factory=now_s)

    def accept(self) -> float:
        """Return when that was."""
        self.accepted += 1
        self._last_s = now_s()
        return self._last_s

    @property
    def peak(self) -> int:
        """The most spans that overlap."""
        changes = sorted(
            [(end_s, -1) for _, end_s in self.spans] + [(start_s, 1) for start_s, _ in self.spans]
        )
        return max(itertools.accumulate(change for _, change in changes), default=0)

    def report(self, found: Found) -> None:
        """Put what went beyond the limits, and what has to be settled, into ``found``."""
        over = max(0, self.peak - self.limit)
        if self.per_minute:
            allowed = self.per_minute * (1 + (self._last_s - self._began_s) / 60) + 1
            over += max(0, self.accepted - int(allowed))
        found.exceeded += over
        found.accept(self.tenant, self.accepted, self.tokens)
        found.did.append(f"{self.tenant}: {self.accepted} accepted, {self.peak} at once, limit {self.limit}")


async def hold(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    wanted: pb.Generation,
    key: str,
    running: Running,
    *,
    hold_s: float,
) -> None:
    """Run one generation, cancelled ``hold_s`` after its acceptance. What is refused is no failure."""
    call = stub.Generate(pb.GenerateRequest(generation=wanted), metadata=metadata(key), timeout=40)

    def leave(accepted_s: float) -> None:
        if not call.done():
            running.spans.append((accepted_s, now_s()))
            call.cancel()

    try:
        async for event in call:
            if event.HasField("accepted"):
                asyncio.get_running_loop().call_later(hold_s, leave, running.accept())
            elif event.HasField("finished"):
                running.tokens += event.finished.usage.output_tokens
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass


async def _storm_session(target: Target, gateway: Gateway, count: int, running: Running) -> int:
    """Send starts, each followed by its cancel; return how many were refused."""
    wanted, refused, done = generation(target.model, "def f", LONG_TOKENS), 0, asyncio.Event()

    async def requests() -> AsyncIterator[pb.SessionRequest]:
        for number in range(count):
            yield pb.SessionRequest(start=pb.SessionStart(stream_id=number, generation=wanted))
            yield pb.SessionRequest(cancel=pb.SessionCancel(stream_ids=[number]))
        await done.wait()

    async with channel(gateway.grpc) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        ended, accepted = 0, 0
        try:
            call = stub.Session(requests(), metadata=metadata(target.keys[running.tenant]), timeout=60)
            async for answer in call:
                accepted += len(answer.accepted)
                ended += len(answer.finished)
                refused += sum(each.HasField("error") for each in answer.finished)
                if ended >= count:
                    break
        except grpc.aio.AioRpcError:
            pass
        finally:
            done.set()
        running.accepted += accepted
    return refused


async def storm(target: Target) -> Found:
    """Starts and cancels of a tenant with a limit and of one without; two with limits try to run more."""
    found, free = Found(), Running("free", STARTS)
    storming, other = Running("storm", CONCURRENCY), Running("other", CONCURRENCY, PER_MINUTE)
    over = asyncio.Event()

    async def press(running: Running, gateway: Gateway, period_s: float) -> None:
        async with channel(gateway.grpc) as opened, asyncio.TaskGroup() as group:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            wanted = generation(target.model, "class A:", LONG_TOKENS)
            while not over.is_set():
                group.create_task(hold(stub, wanted, target.keys[running.tenant], running, hold_s=1.5))
                await asyncio.sleep(period_s)

    async with asyncio.TaskGroup() as group:
        for gateway in target.gateways:
            group.create_task(press(other, gateway, 0.2))
            group.create_task(press(storming, gateway, 0.5))
        await asyncio.sleep(1.0)
        sessions = [
            _storm_session(target, gateway, STARTS // 8, tenant)
            for gateway in target.gateways
            for tenant in (storming, free) * 2
        ]
        refused = await asyncio.gather(*sessions)
        await asyncio.sleep(2.0)
        over.set()
    found.did.append(f"{STARTS} starts and cancels, {sum(refused)} ended with an error")
    for running in (storming, other, free):
        running.report(found)
    return found


async def cold(target: Target) -> Found:
    """Kill both gateways and send more than the limit to both as soon as they answer."""
    found, children = Found(), FleetRecord.load(target.state / "fleet.json")
    assert children is not None
    for gateway in target.gateways:
        os.kill(children.children[gateway.name].pid, signal.SIGKILL)
    running, ends_s = Running("cold", CONCURRENCY), now_s() + 40.0
    wanted = generation(target.model, "class A:", LONG_TOKENS)

    async def press(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
        nonlocal ends_s
        while now_s() < ends_s:
            await hold(stub, wanted, target.keys["cold"], running, hold_s=1.5)
            if running.accepted:
                ends_s = min(ends_s, now_s() + 5.0)
            await asyncio.sleep(0.02)

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for gateway in target.gateways:
            opened = await stack.enter_async_context(channel(gateway.grpc))
            for _ in range(60):
                group.create_task(press(inference_pb2_grpc.InferenceServiceStub(opened)))
    running.report(found)
    return found


async def stalled_sessions(target: Target) -> Found:
    """800 streams that take one token each and then give no credit."""
    running, over = Running("session", 1 << 20), asyncio.Event()

    async def session(gateway: Gateway) -> None:
        wanted = generation(target.model, "class A:", LONG_TOKENS)

        async def requests() -> AsyncIterator[pb.SessionRequest]:
            for number in range(100):
                start = pb.SessionStart(stream_id=number, generation=wanted, initial_credit_tokens=1)
                yield pb.SessionRequest(start=start)
            await over.wait()

        async with channel(gateway.grpc) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            try:
                async for answer in stub.Session(
                    requests(), metadata=metadata(target.keys["session"]), timeout=25
                ):
                    running.accepted += len(answer.accepted)
                    if over.is_set():
                        break
            except grpc.aio.AioRpcError:
                pass

    async with asyncio.TaskGroup() as group:
        for gateway in target.gateways:
            for _ in range(4):
                group.create_task(session(gateway))
        await asyncio.sleep(20.0)
        over.set()
    found = Found()
    running.report(found)
    return found


async def unpaid_work(target: Target) -> Found:
    """CountTokens and completions that are refused, of a tenant that is far above its rate."""
    ends_s, counts = now_s() + 15.0, {"counted": 0, "refused": 0}
    text, key = "def push(self, item):\n    " * 2400, target.keys["poor"]
    found, running = Found(), Running("poor", 1 << 20, PER_MINUTE)

    async def grpc_loop(gateway: Gateway) -> None:
        async with channel(gateway.grpc) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            number = 0
            while now_s() < ends_s:
                number += 1
                request = pb.CountTokensRequest(model=target.model, prompt=f"{number} {text}")
                try:
                    await stub.CountTokens(request, metadata=metadata(key), timeout=10)
                    counts["counted"] += 1
                except grpc.aio.AioRpcError:
                    counts["refused"] += 1
                await hold(stub, generation(target.model, f"{number} {text}"), key, running, hold_s=0.0)

    async def http_loop(gateway: Gateway) -> None:
        number = 0
        while now_s() < ends_s:
            number += 1
            body = json.dumps({"model": target.model, "prompt": f"{number} {text}", "max_tokens": 1}).encode()
            status, _ = await status_of(gateway.http, post(COMPLETIONS, body, key))
            counts["refused"] += status != 200

    async with asyncio.TaskGroup() as group:
        for gateway in target.gateways:
            for _ in range(8):
                group.create_task(grpc_loop(gateway))
                group.create_task(http_loop(gateway))
    running.report(found)
    found.did.append(f"{counts}")
    return found


async def logit_bias(target: Target) -> Found:
    """A map of 7.8 MB, once and 25 times at once."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "x"}]}
    bias = dict.fromkeys(map(str, range(100_000, 700_000)), 1)
    request = post(CHAT, json.dumps({**body, "logit_bias": bias}).encode(), target.keys["drills"])
    found = Found()
    for count in (1, 25):
        works = [
            status_of(target.gateways[number % 2].http, request, timeout_s=60) for number in range(count)
        ]
        statuses = [status for status, _ in await asyncio.gather(*works)]
        found.did.append(f"{count} at once: {sorted(set(statuses))}")
        if 200 in statuses or 500 in statuses:
            found.wrong.append(f"a logit_bias of 7.8 MB was answered {statuses}")
    return found


def _extremes(model: str) -> dict[str, str]:
    """Bodies of completions that are to be refused, by what is wrong with each."""

    def body(**more: object) -> str:
        return json.dumps({"model": model, "prompt": "def f", "max_tokens": 4, **more})

    def raw(text: str) -> str:
        return body()[:-1] + ", " + text + "}"

    return {
        "n of 10**9": body(n=10**9),
        "n of -1": body(n=-1),
        "a list of 10**6 prompts": body(prompt=["a"] * 10**6),
        "an empty list of prompts": body(prompt=[]),
        "max_tokens of 10**30": body(max_tokens=10**30),
        "max_tokens of -1": body(max_tokens=-1),
        "min_tokens above the room": body(max_tokens=None, min_tokens=10**6),
        "a penalty of NaN": body(presence_penalty=float("nan")),
        "a penalty of Infinity": body(frequency_penalty=float("inf")),
        "a penalty of 1e999": raw('"presence_penalty": 1e999'),
        "a penalty of 100": body(presence_penalty=100),
        "a temperature of NaN": body(temperature=float("nan")),
        "a temperature of -1": body(temperature=-1),
        "a top_p of 2": body(top_p=2),
        "a token outside the vocabulary": body(logit_bias={"4096": 1}),
        "a negative token": body(logit_bias={"-1": 1}),
        "a bias of NaN": body(logit_bias={"5": float("nan")}),
        "a prompt token outside the vocabulary": body(prompt=[5, 4096]),
        "logprobs of 10**9": body(logprobs=10**9),
        "10**5 stop strings": body(stop=["a"] * 10**5),
        "deep nesting": raw('"x": ' + "[" * 200_000 + "]" * 200_000),
        "a duplicate key": raw('"max_tokens": 5'),
        "a prompt that fits no context": body(prompt="a b " * 10**6),
        "a client's chat template": body(chat_template="{{ 1 }}"),
        "no JSON": "\x00\xff",
    }


async def extremes(target: Target) -> Found:
    found, key = Found(), target.keys["drills"]
    for name, body in _extremes(target.model).items():
        began_s = now_s()
        for gateway in target.gateways:
            status, answer = await status_of(gateway.http, post(COMPLETIONS, body.encode(), key))
            if not 400 <= status < 500:
                found.wrong.append(f"{name} was answered {status}: {answer[-150:]!r}")
        if now_s() - began_s > 10.0:
            found.wrong.append(f"{name} took {now_s() - began_s:.1f} s")
    changes: dict[str, Callable[[pb.Generation], object]] = {
        "choices of 10**9": lambda it: setattr(it, "choices", 10**9),
        "a penalty of NaN": lambda it: setattr(it.sampling, "presence_penalty", float("nan")),
        "a penalty of Infinity": lambda it: setattr(it.sampling, "frequency_penalty", float("inf")),
        "min_output_tokens above the room": lambda it: setattr(it, "min_output_tokens", 10**6),
        "a prompt token outside the vocabulary": lambda it: it.token_ids.ids.extend((5, 4096)),
    }
    async with channel(target.gateways[0].grpc) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        for name, change in changes.items():
            wanted = generation(target.model, "def f", 4)
            change(wanted)
            try:
                await stub.Complete(pb.CompleteRequest(generation=wanted), metadata=metadata(key), timeout=10)
                found.wrong.append(f"{name} was accepted over gRPC")
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    found.wrong.append(f"{name} was answered {error.code().name} over gRPC")
    found.did.append(f"{len(_extremes(''))} bodies over HTTP, {len(changes)} over gRPC")
    return found


TENANTS: Final = (
    Attack(
        "logit-bias",
        "a logit_bias of 7.8 MB, once and 25 at once",
        "refused, canaries go on",
        logit_bias,
        150,
    ),
    Attack(
        "extremes", "values that size buffers, NaN, nesting, foreign tokens", "refused as 4xx", extremes, 150
    ),
    Attack(
        "unpaid-work", "CountTokens and completions of 60 kB above the rate", "canaries go on", unpaid_work
    ),
    Attack(
        "stalled-sessions", "800 Session streams with a credit of one", "canaries go on", stalled_sessions
    ),
    Attack(
        "storm",
        "20,000 starts and cancels",
        "limits exact for all, every settlement there",
        storm,
        120,
        max_gap_s=CROWD_GAP_S,
    ),
)
COLD: Final = Attack(
    "cold-gateways",
    "both gateways killed, requests as soon as they answer",
    "the limit of 5 is exact",
    cold,
    limit_s=90,
    kills=("gateway",),
    pauses=True,
)
