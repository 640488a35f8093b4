"""A gateway killed or frozen under load: who comes back with the key loses and doubles nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import grpc
import psutil
import pytest

from fairway.cli.state import StateDir
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import FairwayError, StoreUnavailable
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.support.stack import Stack, at_rest, kill, metadata
from tests.support.waiting import until

STREAMS = 8
TOKENS = 160
DISTURB_AT = 20
LEASE_S = 1


@dataclass
class Heard:
    """What one call received."""

    accepted: pb.Accepted | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None
    error: FairwayError | None = None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    """An installation with two gateways, one worker, and leases that lapse quickly."""
    state = tmp_path_factory.mktemp("fairway") / "state"
    settings = {"FAIRWAY_IDEMPOTENCY_LEASE_S": str(LEASE_S)}
    with Stack.started(state, workers=1, replicas=1, gateways=2, settings=settings) as running:
        yield running


def generation(stack: Stack, number: int, key: str) -> pb.Generation:
    found = pb.Generation(
        model=stack.model,
        prompt=f"class Stack{number}:\n    def push_{number}(self, item):\n",
        max_output_tokens=TOKENS,
        ignore_eos=True,
        idempotency_key=key,
    )
    found.sampling.temperature = 0.7
    return found


async def hear(
    stack: Stack, gateway: int, number: int, key: str, seen: Callable[[int, int], None] = lambda _n, _c: None
) -> Heard:
    heard = Heard()
    async with stub(stack, gateway) as inference:
        call = inference.Generate(
            pb.GenerateRequest(generation=generation(stack, number, key)),
            metadata=metadata(stack.api_key),
            timeout=120,
        )
        try:
            async for event in call:
                if event.HasField("accepted"):
                    heard.accepted = event.accepted
                elif event.HasField("chunk"):
                    assert event.chunk.offset == len(heard.ids), "tokens repeated or lost"
                    heard.ids += event.chunk.ids
                    heard.text += event.chunk.text
                    seen(number, len(heard.ids))
                elif event.HasField("finished"):
                    heard.finished = event.finished
        except grpc.aio.AioRpcError as error:
            heard.error = from_rpc_error(error)
    return heard


@contextlib.asynccontextmanager
async def stub(stack: Stack, gateway: int) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    async with grpc.aio.insecure_channel(stack.endpoints["gateways"][gateway]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def until_heard(counts: dict[int, int]) -> None:
    await until(lambda: len(counts) >= STREAMS and min(counts.values()) >= DISTURB_AT, timeout_s=60)


async def insist(stack: Stack, gateway: int, number: int, key: str) -> Heard:
    """Come again, with the same key, as long as the server says that it helps."""
    while True:
        heard = await hear(stack, gateway, number, key)
        if heard.error is None or heard.error.retry_after_s is None:
            return heard
        await asyncio.sleep(heard.error.retry_after_s)


async def all_settled(stack: Stack) -> None:
    """Return once no request of the tenant holds a slot."""
    limiter = RedisLimiter(StateDir.at(stack.state).redis_url, SystemClock(), timeout_s=5.0)
    try:
        async with asyncio.timeout(60):
            while await limiter.concurrency("default"):
                await asyncio.sleep(0.1)
    except StoreUnavailable:
        raise AssertionError("Redis does not answer") from None
    finally:
        await limiter.close()


def one_result(heard: list[Heard]) -> None:
    """Every call that heard the whole of a key heard the same; ``heard`` are all calls with that key."""
    whole = [each for each in heard if each.finished is not None]
    first = whole[0]
    assert first.accepted is not None
    assert first.finished is not None
    for each in heard:
        if each.accepted is None:
            continue
        assert (each.accepted.request_id, each.accepted.seed, each.accepted.version_digest) == (
            first.accepted.request_id,
            first.accepted.seed,
            first.accepted.version_digest,
        )
    for each in whole:
        assert (each.ids, each.text, each.finished) == (first.ids, first.text, first.finished)
    assert len(first.ids) == TOKENS == first.finished.usage.output_tokens


def prefixes(before: list[Heard], after: list[Heard]) -> int:
    """Return how many outputs go on exactly as they began: all, but for near ties in another batch."""
    return sum(new.ids[: len(old.ids)] == old.ids for old, new in zip(before, after, strict=True))


async def test_a_gateway_killed_under_load_loses_and_doubles_nothing(pair: Stack) -> None:
    await pair.wait_workers(lambda state: at_rest(state, 1), 60)
    counts = dict[int, int]()
    calls = [
        asyncio.create_task(hear(pair, 0, number, f"kill-{number}", counts.__setitem__))
        for number in range(STREAMS)
    ]
    await until_heard(counts)
    kill(gateway_pid(pair, 0))
    cut = await asyncio.gather(*calls)
    assert all(each.finished is None and each.error is not None for each in cut), "the kill tested nothing"
    results = await asyncio.gather(*(insist(pair, 1, n, f"kill-{n}") for n in range(STREAMS)))
    again = await asyncio.gather(*(insist(pair, 1, n, f"kill-{n}") for n in range(STREAMS)))
    for number in range(STREAMS):
        assert results[number].error is None
        one_result([cut[number], results[number], again[number]])
        accepted = results[number].accepted
        assert accepted is not None
        assert accepted.replayed
    same = prefixes(cut, results)
    print(f"killed: {same} of {STREAMS} go on exactly as they began")
    assert same >= STREAMS - 1
    await all_settled(pair)
    await pair.wait_workers(lambda state: at_rest(state, 1), 60)


async def test_a_gateway_frozen_beyond_its_lease_has_no_say_when_it_wakes(pair: Stack) -> None:
    await pair.wait_workers(lambda state: at_rest(state, 1), 60)
    async with asyncio.timeout(90):
        while (await hear(pair, 0, 0, "warm")).error is not None:  # the one before was killed
            await asyncio.sleep(0.2)
    counts = dict[int, int]()
    calls = [
        asyncio.create_task(hear(pair, 0, number, f"freeze-{number}", counts.__setitem__))
        for number in range(STREAMS)
    ]
    await until_heard(counts)
    pid = gateway_pid(pair, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        results = await asyncio.gather(*(insist(pair, 1, n, f"freeze-{n}") for n in range(STREAMS)))
    finally:
        os.kill(pid, signal.SIGCONT)
    woken = await asyncio.gather(*calls)
    for number in range(STREAMS):
        assert results[number].error is None
        one_result([results[number], woken[number]])
        assert results[number].finished is not None
        assert results[number].finished.resumes >= 1  # type: ignore[union-attr]
    whole = sum(each.finished is not None for each in woken)
    print(f"frozen: {whole} of {STREAMS} clients of the frozen gateway heard the whole of the other's result")
    assert whole >= STREAMS - 1
    await all_settled(pair)
    await pair.wait_workers(lambda state: at_rest(state, 1), 60)


def gateway_pid(stack: Stack, number: int) -> int:
    """Return the process that listens where gateway ``number`` does."""
    port = int(stack.endpoints["gateways"][number].rpartition(":")[2])
    for pid in stack.pids("services", "gateway"):
        for connection in psutil.Process(pid).net_connections():
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return pid
    raise AssertionError(f"no gateway listens on {port}")
