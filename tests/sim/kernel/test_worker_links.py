"""The gateway's streams to workers: frames arrive in order, and every end is heard of once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from services.adapters.links.muxed_workers import MuxedWorkers
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowSpec
from services.core.generation import (
    AnyGrant,
    FinishReason,
    Grant,
    NotAdmittedReason,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.records import Priority
from services.ports.streams import StepFrame
from simulator.kernel.links.streams import SimStreams
from simulator.kernel.loop import VirtualTimeLoop
from simulator.kernel.network import Latency, Network
from simulator.kernel.process import Process
from tests.sim.kernel.small_fleet import DIGEST, start_spec
from tests.support.simulated import serve_sequences


class Counting:
    """A worker that counts: one token per second and sequence. Implements ``WorkerStreams``."""

    def __init__(self, process: Process, tokens: int = 5) -> None:
        self.process = process
        self.tokens = tokens
        self.streams: list[CountingStream] = []

    def open(self, wake: Callable[[], None]) -> CountingStream:
        self.streams.append(CountingStream(self, wake))
        return self.streams[-1]


class CountingStream:
    def __init__(self, worker: Counting, wake: Callable[[], None]) -> None:
        self._worker = worker
        self._wake = wake
        self._frame: StepFrame | None = None
        self.live: dict[int, int] = {}
        self.credits: dict[int, int] = {}
        self.closed = False

    def start(self, handle: int, spec: StartSpec) -> None:
        self._pending().accepted.append(handle)
        self.live[handle] = 0
        self._wake()
        self._worker.process.call_later(1.0, self._step, handle)

    def start_row(self, handle: int, spec: RowSpec) -> None:
        self.live[handle] = 0
        self._worker.process.call_later(1.0, self._end_row, handle, spec)

    def refuse(self, handle: int, reason: NotAdmittedReason) -> None:
        self._pending().not_admitted.append((handle, reason))
        self._wake()

    def credit(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        for handle, more in zip(handles, tokens, strict=True):
            self.credits[handle] = self.credits.get(handle, 0) + more

    def cancel(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.live.pop(handle, None)

    @property
    def only_accepted(self) -> bool:
        return False

    def take(self) -> StepFrame | None:
        frame, self._frame = self._frame, None
        return frame

    def close(self) -> None:
        self.closed = True
        self.live.clear()

    def _pending(self) -> StepFrame:
        if self._frame is None:
            self._frame = StepFrame()
        return self._frame

    def _end_row(self, handle: int, spec: RowSpec) -> None:
        if self.live.pop(handle, None) is not None:
            self._pending().rows.append((handle, RowEnd(outputs=spec.inputs, batch_rows=1)))
            self._wake()

    def _step(self, handle: int) -> None:
        if handle not in self.live:
            return
        offset = self.live[handle]
        frame = self._pending()
        if offset == self._worker.tokens:
            frame.finished.append((handle, SequenceEnd(FinishReason.STOP, output_tokens=offset)))
            del self.live[handle]
        else:
            frame.handles.append(handle)
            frame.offsets.append(offset)
            frame.counts.append(1)
            frame.ids.append(100 + offset)
            frame.texts.append("x")
            self.live[handle] += 1
            self._worker.process.call_later(1.0, self._step, handle)
        self._wake()


class Sink:
    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_accepted(self) -> None:
        self.received.append("accepted")

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self.received.append(reason)

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        raise AssertionError("nobody asked for scores")

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert list(ids) == list(range(100 + offset, 100 + offset + len(ids)))
        self.received += ids

    def on_finished(self, end: SequenceEnd) -> None:
        self.received.append(end.reason)

    def on_row_ended(self, end: RowEnd) -> None:
        self.received.append(end)

    def on_lost(self, message: str) -> None:
        self.received.append(message)


class Scene:
    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        rng = Random(1)
        self.network = Network(self.loop, rng, Latency(0.001, 0.002, 0.05, 0.5))
        self.gateway = Process("gateway", self.loop, rng)
        self.worker = Process("worker", self.loop, rng)
        self.host = Counting(self.worker)
        self.unsent: list[AnyGrant] = []

    def run(self, main: Coroutine[Any, Any, Any]) -> None:
        async def whole() -> None:
            serve_sequences(self.worker, self.network, "worker:1", self.host)
            self.client = self.gateway.run(
                MuxedWorkers,
                SimStreams(self.gateway, self.network),
                "gateway",
                self.gateway.clock,
                self.gateway.supervisor,
                unsent=self.unsent.append,
                idle_s=20.0,
            )
            await main

        try:
            self.loop.run_until_complete(whole())
        finally:
            self.loop.close()

    def start(self, number: int, address: str = "worker:1") -> tuple[Sink, Any]:
        grant = Grant("w1", address, 1, 1, number, 4, 2.0, DIGEST)
        sink = Sink()
        return sink, self.gateway.run(self.client.start, start_spec(grant, number), sink)

    def start_row(self, number: int, address: str = "worker:1") -> tuple[Sink, Any]:
        sink = Sink()
        spec = RowSpec(
            f"r{number}", 0, "t1", DIGEST, (RawTensor("x", "FP32", (1,), b"1234"),), Priority.BATCH
        )
        return sink, self.gateway.run(self.client.start_row, address, spec, sink)


@pytest.fixture
def scene() -> Scene:
    return Scene()


WHOLE = ["accepted", 100, 101, 102, 103, 104, FinishReason.STOP]


def test_sequences_share_a_stream_and_end_once(scene: Scene) -> None:
    async def main() -> None:
        sinks = []
        for number in range(20):
            sinks.append(scene.start(number)[0])
            await asyncio.sleep(0.3)
        await asyncio.sleep(15)
        assert [sink.received for sink in sinks] == [WHOLE] * 20
        assert scene.client.links == len(scene.host.streams) == 1
        await asyncio.sleep(25)
        assert scene.client.links == 0, "an idle stream ends"
        assert scene.host.streams[0].closed
        assert scene.network.connections("worker") == 0

    scene.run(main())


def test_credits_and_cancels_reach_the_worker(scene: Scene) -> None:
    async def main() -> None:
        sink, running = scene.start(1)
        scene.gateway.run(running.credit, 3)
        await asyncio.sleep(2.5)
        scene.gateway.run(running.credit, 4)
        scene.gateway.run(running.credit, 5)
        await asyncio.sleep(1)
        stream = scene.host.streams[0]
        assert stream.credits == {1: 12}
        heard = list(sink.received)
        scene.gateway.run(running.cancel)
        await asyncio.sleep(2)
        assert stream.live == {}
        assert sink.received == heard, "it hears nothing more"

    scene.run(main())


def test_a_worker_that_dies_is_lost_at_once_and_one_that_vanishes_after_its_silence(scene: Scene) -> None:
    async def main() -> None:
        sink, _ = scene.start(1)
        await asyncio.sleep(2.5)
        scene.worker.crash()
        await asyncio.sleep(1)
        assert sink.received[:2] == ["accepted", 100]
        assert "worker ended" in sink.received[-1]
        scene.worker = scene.worker.restart()
        scene.host = Counting(scene.worker)
        serve_sequences(scene.worker, scene.network, "worker:1", scene.host)
        sink, _ = scene.start(2)
        await asyncio.sleep(2.5)
        scene.network.half_open("worker", "gateway")
        began_s = scene.loop.now_s
        while not isinstance(sink.received[-1], str) or len(sink.received) < 2:
            await asyncio.sleep(0.1)
        assert "sent nothing for 5 s" in sink.received[-1]
        assert 4.0 < scene.loop.now_s - began_s < 8.0

    scene.run(main())


def test_a_quiet_worker_is_not_lost(scene: Scene) -> None:
    async def main() -> None:
        sink, _ = scene.start(1)
        await asyncio.sleep(0.9)
        scene.host.streams[0].live.clear()  # its answer never comes; the heartbeats do
        await asyncio.sleep(30)
        assert sink.received == ["accepted"]
        assert scene.client.links == 1

    scene.run(main())


def test_a_worker_that_beats_and_hears_no_start_is_lost(scene: Scene) -> None:
    async def main() -> None:
        scene.host.tokens = 60
        first, _ = scene.start(1)
        await asyncio.sleep(2)
        scene.network.half_open("gateway", "worker")
        await asyncio.sleep(8)
        assert scene.client.links == 1, "nothing was asked"
        second, _ = scene.start(2)
        began_s = scene.loop.now_s
        while not second.received:
            await asyncio.sleep(0.1)
        assert 4.0 < scene.loop.now_s - began_s < 7.0
        assert "answered no start" in second.received[-1] == first.received[-1]
        third, _ = scene.start(3)
        await asyncio.sleep(2)
        assert third.received[0] == "accepted", "another stream is whole"

    scene.run(main())


def test_a_gateway_that_stood_still_blames_no_worker(scene: Scene) -> None:
    async def main() -> None:
        scene.host.tokens = 30
        sink, _ = scene.start(1)
        await asyncio.sleep(2)
        late, _ = scene.start(2)
        await asyncio.sleep(0)
        scene.gateway.pause()
        await asyncio.sleep(15)
        scene.gateway.resume()
        await asyncio.sleep(30)
        assert sink.received[-1] == FinishReason.STOP
        assert len(sink.received) == len(late.received) == 32

    scene.run(main())


def test_a_gateway_that_lags_gets_all_once_it_reads(scene: Scene) -> None:
    """More frames wait than may be on their way at once."""

    async def main() -> None:
        sinks = []
        for number in range(300):
            sinks.append(scene.start(number)[0])
            await asyncio.sleep(0.01)
        scene.gateway.pause()
        await asyncio.sleep(2)
        scene.gateway.resume()
        await asyncio.sleep(15)
        assert all(sink.received == WHOLE for sink in sinks)

    scene.run(main())


def test_a_start_that_never_left_gives_its_grant_back(scene: Scene) -> None:
    async def main() -> None:
        sink, _ = scene.start(7, "nowhere:1")
        await asyncio.sleep(1)
        assert "nobody listens" in sink.received[-1]
        assert [grant.sequence for grant in scene.unsent if isinstance(grant, Grant)] == [7]
        scene.network.cut("gateway", "worker")
        sink, _ = scene.start(8)
        await asyncio.sleep(6)
        assert len(sink.received) == 1
        assert len(scene.unsent) == 2

    scene.run(main())


def test_a_gateway_that_dies_ends_its_sequences(scene: Scene) -> None:
    async def main() -> None:
        scene.start(1)
        await asyncio.sleep(1.5)
        assert scene.host.streams[0].live
        scene.gateway.crash()
        await asyncio.sleep(1)
        assert scene.host.streams[0].closed

    scene.run(main())


def test_rows_share_the_stream_with_sequences_and_end_once(scene: Scene) -> None:
    async def main() -> None:
        sequence, _ = scene.start(1)
        kept, _ = scene.start_row(2)
        unsent, row = scene.start_row(3)
        scene.gateway.run(row.cancel)
        await asyncio.sleep(0.5)
        dropped, row = scene.start_row(4)
        await asyncio.sleep(0.5)
        scene.gateway.run(row.cancel)
        await asyncio.sleep(8)
        (end,) = kept.received
        assert (end.outputs[0].data, end.batch_rows, end.error, end.lost) == (b"1234", 1, None, False)
        assert unsent.received == dropped.received == []
        assert sequence.received == WHOLE
        assert scene.client.links == 1

    scene.run(main())


def test_a_row_is_lost_with_its_worker(scene: Scene) -> None:
    async def main() -> None:
        sink, _ = scene.start_row(1)
        await asyncio.sleep(0.3)
        scene.worker.crash()
        await asyncio.sleep(10)
        (message,) = sink.received
        assert isinstance(message, str)
        unreached, _ = scene.start_row(2, "nobody:1")
        await asyncio.sleep(10)
        assert len(unreached.received) == 1

    scene.run(main())
