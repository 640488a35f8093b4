"""What every client of workers does, over a wire and over the simulated network: order, no message after
the end, none lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
import structlog
from tokenizers import Tokenizer, decoders, models

from fairway.v1 import worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.muxed_workers import MuxedWorkers
from services.core.generation import (
    FinishReason,
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
from services.ports.clock import Clock
from services.ports.streams import StreamClient
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker import engine_protocol as wire
from services.worker.detokenizer import ByteLevelVocabulary, byte_of_char
from services.worker.servicer import WorkerServicer
from services.worker.step_recorder import StepRecorder
from services.worker.streams.charges import UsageAccounting
from services.worker.streams.host import SequenceHost
from services.worker.streams.kv import PoolLimits
from services.worker.streams.sequences import SequenceTable, ServedVersion
from simulator.kernel.links.streams import SimStreams
from tests.support.simulated import Check, World, checks_of, serve_sequences, simulate
from tests.support.waiting import until

DIGEST = "sha256:" + "c" * 64


@dataclass
class Rig:
    """A worker whose engine is driven by hand, and a client of it."""

    host: SequenceHost
    table: SequenceTable
    client: MuxedWorkers
    address: str
    frames: list[int]
    sent: list[wire.Command] = field(default_factory=list)
    server: grpc.aio.Server | None = None
    streams: Streams | None = None
    _sequence: int = 0

    def spec(self, **changes: Any) -> StartSpec:
        self._sequence += 1
        values: dict[str, Any] = {
            "worker_id": "w1",
            "address": self.address,
            "incarnation": 5,
            "epoch": 3,
            "sequence": self._sequence,
            "kv_blocks": 1,
            "ttl_s": 5.0,
            "version_digest": DIGEST,
        }
        credit = changes.pop("credit", 100)
        logprobs = changes.pop("logprobs", None)
        generation = GenerationSpec(
            "r1", "m", DIGEST, 1, Prompt((1, 2, 3)), Sampling(2**64 - 1, logprobs=logprobs), OutputLimits(50)
        )
        grant = Grant(**{**values, **changes})
        return StartSpec(generation, 0, "t1", grant, credit)

    def step(self, tokens: dict[int, int], **rest: Any) -> None:
        values: dict[str, Any] = {
            "finished": {},
            "prefill_tokens": 0,
            "kv_blocks_used": 0,
            "running": 1,
            "waiting": 0,
        }
        self.table.on_stepped(
            wire.Stepped(
                step=1, step_s=0.0, handles=list(tokens), tokens=list(tokens.values()), **(values | rest)
            )
        )


class Streams:
    """Streams over either transport, whose credentials the test replaces."""

    credentials: object = None

    def __init__(self, transport: StreamClient) -> None:
        self.transport = transport
        self.opened = 0

    async def open(self, address: str, method: Any, *, timeout_s: float) -> Any:
        self.opened += 1
        return await self.transport.open(address, method, timeout_s=timeout_s)


class Sink:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.scores: list[float] = []
        self.end: SequenceEnd | None = None
        self.refusal: NotAdmittedReason | None = None

    def on_accepted(self) -> None:
        self.heard.append("accepted")

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self.heard.append("not_admitted")
        self.refusal = reason

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        assert offset == len(self.ids) == len(self.scores)
        self.heard.append("scores")
        self.scores += scores

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert offset == len(self.ids)
        self.heard.append("tokens")
        self.ids += ids
        self.text += text
        self.logprobs += logprobs

    def on_finished(self, end: SequenceEnd) -> None:
        self.heard.append("finished")
        self.end = end

    @property
    def finished(self) -> SequenceEnd:
        assert self.end is not None
        return self.end

    def on_lost(self, message: str) -> None:
        assert message
        self.heard.append("lost")


def new_host(clock: Clock, sent: list[wire.Command]) -> tuple[SequenceHost, SequenceTable]:
    char_of = {byte: char for char, byte in byte_of_char().items()}
    tokenizer = Tokenizer(models.BPE(vocab={char_of[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()

    def send(command: wire.Command) -> bool:
        sent.append(command)
        return True

    host = SequenceHost(changed=lambda: None)
    host.grants.registered(5)
    table = SequenceTable(
        ServedVersion(DIGEST),
        limits=PoolLimits(kv_blocks_total=64, block_size=16, max_model_len=1000, max_sequences=64),
        vocabulary=ByteLevelVocabulary(tokenizer),
        send=send,
        clock=clock,
        charges=UsageAccounting(host.tally),
        recorder=StepRecorder(clock).engine(DIGEST, "m"),
        changed=host.note_change,
    )
    host.add(table)
    return host, table


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    sent: list[wire.Command] = []
    host, table = new_host(clock, sent)
    frames: list[int] = []
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    agent = cast(Any, SimpleNamespace())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(host, agent, clock), server)
    await server.start()
    streams = Streams(GrpcStreams("token"))
    client = MuxedWorkers(streams, "g1", clock, supervisor, after_frame=lambda: frames.append(1))
    yield Rig(host, table, client, address, frames, sent, server, streams)
    await client.close()
    await server.stop(0)
    await supervisor.close()
    assert supervisor.healthy
    await all_is_free(host, table)


@asynccontextmanager
async def simulated(world: World) -> AsyncIterator[Rig]:
    worker = world.process("worker")
    sent: list[wire.Command] = []
    host, table = new_host(worker.clock, sent)
    serve_sequences(worker, world.network, "worker:1", host)
    frames: list[int] = []
    gateway = world.process("gateway")
    streams = Streams(SimStreams(gateway, world.network))
    client = MuxedWorkers(
        streams,
        "g1",
        gateway.clock,
        gateway.supervisor,
        after_frame=lambda: frames.append(1),
    )
    yield Rig(host, table, client, "worker:1", frames, sent, streams=streams)
    await client.close()
    await all_is_free(host, table)


async def all_is_free(host: SequenceHost, table: SequenceTable) -> None:
    """The end of a stream frees everything."""
    await until(lambda: table.kv.blocks == 0)
    host.check_integrity()


async def test_a_sequence_hears_accepted_tokens_and_finished(rig: Rig) -> None:
    sink = Sink()
    rig.client.start(rig.spec(logprobs=1), sink)
    assert sink.heard == [], "nothing is said from within start"
    await until(lambda: sink.heard)
    rig.step({1: 0x61}, logprobs={1: [wire.SampledLogprobs(-0.5, [0xC3, 0x62], [-0.25, -1])]})
    await until(lambda: sink.ids)
    rig.step({1: 0x62}, finished={1: "length"}, logprobs={1: [wire.SampledLogprobs(-1.0, [], [])]})
    await until(lambda: sink.end)
    assert sink.heard == ["accepted", "tokens", "tokens", "finished"]
    assert (sink.ids, sink.text) == ([0x61, 0x62], "ab")
    assert sink.logprobs == [
        TokenLogprobs(-0.5, (0xC3, 0x62), (-0.25, -1.0), ("\ufffd", "b"), "a", "a", 0, b"", (b"\xc3", b"")),
        TokenLogprobs(-1.0, (), (), (), "b", "b"),
    ]
    assert sink.finished.reason is FinishReason.LENGTH
    assert sink.finished.output_tokens == 2


async def test_scores_come_before_their_tokens_to_who_asked(rig: Rig) -> None:
    asks, other = Sink(), Sink()
    rig.client.start(replace(rig.spec(), probe=True), asks)
    rig.client.start(rig.spec(), other)
    await until(lambda: asks.heard and other.heard)
    rig.step({1: 0x61, 2: 0x62}, probe_scores=[0.25, 0.25])
    await until(lambda: asks.ids and other.ids)
    rig.step({1: 0x61, 2: 0x62}, probe_scores=[0.75, 0.75], finished={1: "length", 2: "length"})
    await until(lambda: asks.end and other.end)
    assert asks.heard == ["accepted", "scores", "tokens", "scores", "tokens", "finished"]
    assert (asks.scores, other.scores) == ([0.25, 0.75], [])


async def test_after_its_credentials_were_replaced_a_stream_runs_what_it_has_alone(rig: Rig) -> None:
    assert rig.streams is not None
    first, second = Sink(), Sink()
    rig.client.start(rig.spec(), first)
    await until(lambda: first.heard)
    rig.streams.credentials = "renewed"
    rig.client.start(rig.spec(), second)
    await until(lambda: second.heard)
    assert rig.streams.opened == 2
    rig.step({1: 0x61, 2: 0x62}, finished={1: "length"})
    await until(lambda: first.end and second.ids)
    rig.step({2: 0x62}, finished={2: "length"})
    await until(lambda: second.end)
    assert second.heard == ["accepted", "tokens", "tokens", "finished"]


async def test_the_start_arrives_as_it_was_meant(rig: Rig) -> None:
    rig.client.start(rig.spec(credit=17), Sink())
    await until(lambda: rig.sent)
    (submit,) = rig.sent
    assert isinstance(submit, wire.Submit)
    assert (list(submit.prompt.ids), submit.credit_limit, submit.limits.max_tokens) == ([1, 2, 3], 17, 50)
    assert submit.sampling.seed == 2**64 - 1
    assert submit.sampling.logprobs is None


async def test_a_refusal_says_why_and_is_the_last_word(rig: Rig) -> None:
    sink = Sink()
    running = rig.client.start(rig.spec(incarnation=4), sink)
    await until(lambda: sink.heard)
    running.credit(3)
    running.cancel()
    assert (sink.heard, sink.refusal) == (["not_admitted"], NotAdmittedReason.STALE_INCARNATION)


async def test_credit_adds_up(rig: Rig) -> None:
    sink = Sink()
    running = rig.client.start(rig.spec(credit=2), sink)
    await until(lambda: sink.heard)
    running.credit(3)
    running.credit(4)

    def limits() -> list[int]:
        return [command.limits[0] for command in rig.sent if isinstance(command, wire.Credit)]

    await until(lambda: limits()[-1:] == [9])


async def test_after_a_cancel_the_sink_hears_nothing_and_the_kv_is_free(rig: Rig) -> None:
    sink = Sink()
    running = rig.client.start(rig.spec(), sink)
    await until(lambda: sink.heard)
    rig.step({1: 0x61})
    running.cancel()
    running.cancel()
    heard = list(sink.heard)
    await until(lambda: rig.table.kv.blocks == 0)
    assert any(isinstance(command, wire.Cancel) and command.handles == [1] for command in rig.sent)
    rig.step({1: 0x62})
    await asyncio.sleep(0.05)
    assert sink.heard == heard


async def test_a_start_that_is_cancelled_at_once_leaves_nothing(rig: Rig) -> None:
    sink = Sink()
    rig.client.start(rig.spec(), sink).cancel()
    other = Sink()
    rig.client.start(rig.spec(), other)
    await until(lambda: other.heard)
    assert sink.heard == []
    assert len(rig.table) == 1


async def test_a_worker_that_is_not_there_is_lost_and_never_from_within_start(rig: Rig) -> None:
    sink = Sink()
    running = rig.client.start(rig.spec(address="127.0.0.1:1"), sink)
    assert sink.heard == []
    await until(lambda: sink.heard)
    running.cancel()
    assert sink.heard == ["lost"]


async def test_a_stream_logs_under_no_request_that_happened_to_open_it(rig: Rig) -> None:
    heard_under: list[dict[str, Any]] = []

    class Listener(Sink):
        def on_accepted(self) -> None:
            heard_under.append(structlog.contextvars.get_contextvars())

    with structlog.contextvars.bound_contextvars(request_id="req_1"):
        rig.client.start(rig.spec(), Listener())
    await until(lambda: heard_under)
    assert "request_id" not in heard_under[0]


async def test_closing_tells_every_sink_and_frees_the_worker(rig: Rig) -> None:
    sinks = [Sink() for _ in range(3)]
    for sink in sinks:
        rig.client.start(rig.spec(), sink)
    await until(lambda: all(sink.heard for sink in sinks))
    await rig.client.close()
    assert [sink.heard for sink in sinks] == [["accepted", "lost"]] * 3
    await until(lambda: rig.table.kv.blocks == 0)


async def test_after_frame_comes_once_after_all_sinks_of_a_step(rig: Rig) -> None:
    sinks = [Sink() for _ in range(8)]
    for sink in sinks:
        rig.client.start(rig.spec(), sink)
    await until(lambda: all(sink.heard for sink in sinks))
    before = len(rig.frames)
    rig.step({number: 0x60 + number for number in range(1, 9)})
    await until(lambda: len(rig.frames) > before)
    assert [sink.ids for sink in sinks] == [[0x60 + number] for number in range(1, 9)]
    assert [sink.text for sink in sinks] == list("abcdefgh")
    assert len(rig.frames) == before + 1


async def test_an_engine_that_dies_is_told_to_every_sink(rig: Rig) -> None:
    sink = Sink()
    rig.client.start(rig.spec(), sink)
    await until(lambda: sink.heard)
    rig.host.remove(rig.table)
    await until(lambda: sink.end)
    assert sink.finished.reason is FinishReason.ENGINE_LOST


@pytest.mark.parametrize("check", checks_of(globals()))
def test_over_the_simulated_network(check: Check) -> None:
    simulate(check, simulated)
