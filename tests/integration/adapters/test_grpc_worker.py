"""How the gateway's client meets workers that break, hang or fall idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links import muxed_workers
from services.adapters.links.muxed_workers import MuxedWorkers
from services.core.generation import (
    AnyGrant,
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.support.waiting import until

Requests: TypeAlias = "asyncio.Queue[worker_pb2.ExecuteRequest]"
Behaviour = Callable[[Requests, Any], Awaitable[None]]


class Scripted(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that does what a test says."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = wait
        self.streams = 0
        self.metadata: list[dict[str, str | bytes]] = []

    async def GetWorker(self, request: Any, context: Any) -> worker_pb2.GetWorkerResponse:
        raise NotImplementedError

    async def DrainWorker(self, request: Any, context: Any) -> worker_pb2.DrainWorkerResponse:
        raise NotImplementedError

    async def ReadSteps(self, request: Any, context: Any) -> worker_pb2.ReadStepsResponse:
        raise NotImplementedError

    async def Execute(  # type: ignore[override]  # the stubs know generators only
        self, request_iterator: Any, context: Any
    ) -> None:
        self.streams += 1
        self.metadata.append(dict(context.invocation_metadata()))
        requests: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()

        async def read() -> None:
            async for request in request_iterator:
                requests.put_nowait(request)

        reader = asyncio.ensure_future(read())
        try:
            await self.behaviour(requests, context)
        finally:
            reader.cancel()


async def wait(requests: Requests, context: Any) -> None:
    await asyncio.sleep(60)


class Sink:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.message = ""

    def on_accepted(self) -> None:
        self.events.append("accepted")

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self.events.append(reason.value)

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        raise AssertionError("nobody asked for scores")

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self.events.append("tokens")

    def on_finished(self, end: SequenceEnd) -> None:
        self.events.append("finished")

    def on_lost(self, message: str) -> None:
        self.events.append("lost")
        self.message = message


class Rig:
    def __init__(
        self,
        worker: Scripted,
        client: MuxedWorkers,
        server: grpc.aio.Server,
        address: str,
        unsent: list[AnyGrant],
    ) -> None:
        self.worker, self.client, self.server, self.address = worker, client, server, address
        self.unsent = unsent

    def spec(self, prompt_tokens: int = 3) -> StartSpec:
        generation = GenerationSpec(
            "r1", "m", "sha256:x", 1, Prompt([1] * prompt_tokens), Sampling(1), OutputLimits(50)
        )
        grant = Grant("w1", self.address, 5, 3, 1, 1, 5.0, "sha256:x")
        return StartSpec(generation, 0, "t1", grant, 100)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    worker = Scripted()
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    await server.start()
    unsent: list[AnyGrant] = []
    # A stall of this machine excuses the worker only above 2 s: the silence is longer than that and a beat.
    client = MuxedWorkers(
        GrpcStreams("secret"), "g1", clock, supervisor, unsent=unsent.append, silence_s=2.6, idle_s=1.5
    )
    yield Rig(worker, client, server, address, unsent)
    await client.close()
    await server.stop(0)
    await supervisor.close()
    assert supervisor.healthy, supervisor.failures


async def test_one_stream_carries_all_and_says_who_asks(rig: Rig) -> None:
    seen: list[worker_pb2.ExecuteRequest] = []

    async def note(requests: Requests, context: Any) -> None:
        while True:
            seen.append(await requests.get())

    rig.worker.behaviour = note
    for _ in range(5):
        rig.client.start(rig.spec(), Sink())
    await until(lambda: sum(len(request.starts) for request in seen) == 5)
    assert rig.worker.streams == 1
    assert rig.worker.metadata[0]["authorization"] == "Bearer secret"
    assert seen[0].hello.gateway_id == "g1"
    assert [len(request.starts) for request in seen if request.starts] == [5], (
        "one message for what came together"
    )
    assert sorted(start.handle for request in seen for start in request.starts) == [1, 2, 3, 4, 5]


async def test_large_starts_are_split_and_credit_never_overtakes_its_start(rig: Rig) -> None:
    seen: list[worker_pb2.ExecuteRequest] = []

    async def note(requests: Requests, context: Any) -> None:
        while True:
            seen.append(await requests.get())

    rig.worker.behaviour = note
    for _ in range(3):
        rig.client.start(rig.spec(prompt_tokens=400_000), Sink()).credit(7)
    await until(lambda: sum(len(request.starts) for request in seen) == 3)
    assert max(len(request.starts) for request in seen) == 2
    started: set[int] = set()
    for request in seen:
        started |= {start.handle for start in request.starts}
        assert set(request.credit.handles) <= started
    assert sum(len(request.credit.handles) for request in seen) == 3


async def test_a_stream_that_breaks_loses_all_and_the_next_start_opens_another(rig: Rig) -> None:
    async def abort(requests: Requests, context: Any) -> None:
        await requests.get()
        await requests.get()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")

    rig.worker.behaviour = abort
    sinks = [Sink(), Sink()]
    for sink in sinks:
        rig.client.start(rig.spec(), sink)
    await until(lambda: all(sink.events for sink in sinks))
    assert [sink.events for sink in sinks] == [["lost"], ["lost"]]
    assert "RESOURCE_EXHAUSTED" in sinks[0].message
    await until(lambda: rig.client.links == 0)
    rig.worker.behaviour = wait
    rig.client.start(rig.spec(), Sink())
    await until(lambda: rig.worker.streams == 2)


async def test_a_worker_that_ends_its_stream_is_lost(rig: Rig) -> None:
    async def leave(requests: Requests, context: Any) -> None:
        await requests.get()

    rig.worker.behaviour = leave
    sink = Sink()
    rig.client.start(rig.spec(), sink)
    await until(lambda: sink.events)
    assert sink.events == ["lost"]


async def test_silence_is_loss_and_heartbeats_are_not_silence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muxed_workers, "ANSWER_S", 60.0)  # The silence ends later than a start may wait.
    beats = 0

    async def beat_then_hang(requests: Requests, context: Any) -> None:
        nonlocal beats
        for _ in range(8):
            await asyncio.sleep(0.5)
            beats += 1
            await context.write(worker_pb2.ExecuteResponse(heartbeat=worker_pb2.ExecuteResponse.Heartbeat()))
        await asyncio.sleep(60)

    rig.worker.behaviour = beat_then_hang
    sink = Sink()
    rig.client.start(rig.spec(), sink)
    await until(lambda: beats == 8)
    assert sink.events == [], "it was alive for longer than the silence"
    await until(lambda: sink.events)
    assert sink.events == ["lost"]
    assert "sent nothing" in sink.message


async def test_an_idle_stream_is_closed(rig: Rig) -> None:
    async def refuse(requests: Requests, context: Any) -> None:
        request = worker_pb2.ExecuteRequest()
        while not request.starts:
            request = await requests.get()
        refusal = worker_pb2.NotAdmitted(handle=1, reason=worker_pb2.NOT_ADMITTED_REASON_NO_ROOM)
        await context.write(worker_pb2.ExecuteResponse(not_admitted=[refusal]))
        while True:
            await asyncio.sleep(0.2)
            await context.write(worker_pb2.ExecuteResponse(heartbeat=worker_pb2.ExecuteResponse.Heartbeat()))

    rig.worker.behaviour = refuse
    sink = Sink()
    rig.client.start(rig.spec(), sink)
    await until(lambda: sink.events)
    assert rig.client.links == 1
    await until(lambda: rig.client.links == 0)
    assert sink.events == ["no_room"]


async def test_a_frame_that_does_not_add_up_ends_the_stream(rig: Rig) -> None:
    async def lie(requests: Requests, context: Any) -> None:
        await requests.get()
        tokens = common_pb2.TokenFrame(handles=[1], offsets=[0], counts=[2], ids=[7], texts=["x"])
        await context.write(worker_pb2.ExecuteResponse(tokens=tokens))
        await asyncio.sleep(60)

    rig.worker.behaviour = lie
    sink = Sink()
    rig.client.start(rig.spec(), sink)
    await until(lambda: sink.events)
    assert sink.events == ["lost"]


async def test_a_start_that_was_cancelled_before_it_left_gives_its_grant_back(rig: Rig) -> None:
    received: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()

    async def collect(requests: Requests, context: Any) -> None:
        while True:
            received.put_nowait(await requests.get())

    rig.worker.behaviour = collect
    spec = rig.spec()
    rig.client.start(spec, Sink()).cancel()  # within one step of the loop: nothing was written yet
    assert rig.unsent == [spec.grant]
    kept = rig.client.start(rig.spec(), Sink())
    async with asyncio.timeout(20):
        while not (message := await received.get()).starts:
            continue
    assert len(message.starts) == 1
    kept.cancel()
    assert len(rig.unsent) == 1, "the worker may have seen this one"


async def test_starts_that_a_lost_worker_never_saw_give_their_grants_back(rig: Rig) -> None:
    await rig.server.stop(0)
    sink, spec = Sink(), rig.spec()
    rig.client.start(spec, sink)
    await until(lambda: sink.events)
    assert sink.events == ["lost"]
    assert len(rig.unsent) <= 1
