"""What becomes of the sequences of an engine that says nothing."""

from __future__ import annotations

from services.core.generation import FinishReason, NotAdmittedReason
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.policy.engine_failures import ABANDON_S, ABANDON_STEPS, STALL_S
from tests.unit.worker.bench import IDLE_BEAT, Bench
from tests.unit.worker.reader import Reader

A, B = 0x61, 0x62
WHO = WorkerIdentity("w1", "a:1", "z")


def test_a_silent_engine_gets_no_new_work_until_it_speaks(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec())
    bench.clock.now_s += STALL_S + 0.1
    bench.host.sweep(bench.clock.now_s)
    assert not take_snapshot(bench.host, WHO, whole=True).pools[0].ready
    changes = bench.changes
    reader.stream.start(2, bench.spec())
    reader.read()
    assert reader.accepted == [1]
    assert reader.refused == {2: NotAdmittedReason.NOT_READY}
    bench.table.on_heartbeat(IDLE_BEAT)
    assert bench.changes > changes, "nobody was told that it takes work again"
    assert take_snapshot(bench.host, WHO, whole=True).pools[0].ready
    reader.stream.start(3, bench.spec())
    reader.read()
    assert reader.accepted == [1, 3]


def test_an_engine_silent_for_long_gives_its_sequences_back(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A})
    reader.read()
    bench.clock.now_s += ABANDON_S + 0.1
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert reader.ends[1].reason is FinishReason.ENGINE_LOST
    assert bench.table.kv.blocks == 0
    assert bench.commands(wire.Cancel)[-1].handles == [1]
    bench.stepped({1: B})  # the step that it was stopped in
    assert reader.read() == []
    reader.stream.start(2, bench.spec())
    reader.read()
    assert reader.accepted == [1, 2]


def test_a_process_that_stood_still_itself_blames_no_engine(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec())
    bench.clock.now_s += 10 * ABANDON_S
    bench.host.reset_silence()
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert reader.ends == {}
    assert take_snapshot(bench.host, WHO, whole=True).pools[0].ready


def test_an_engine_with_long_steps_has_more_time(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A}, step_s=2.0)
    bench.clock.now_s += ABANDON_S + 0.1
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert reader.ends == {}
    bench.clock.now_s += ABANDON_STEPS * 2.0
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert reader.ends[1].reason is FinishReason.ENGINE_LOST
