"""Slots of the batch: readers without credit hold none, tenants share them, nobody is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.generation import FinishReason, NotAdmittedReason, SequenceEnd
from services.core.records import Priority
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.streams.live_sequence import SlotState, WorkerSequence
from services.worker.streams.sequence_slots import PARKED_PER_SLOT
from tests.unit.worker.bench import Bench

A = 0x61
SLOTS = 8  # of the bench
WHO = WorkerIdentity("w1", "a:1", "z")


class Reader:
    """One gateway's stream, as far as these tests look at it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.stream = bench.host.open(lambda: None)
        self.refused: dict[int, NotAdmittedReason] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.handles = 0

    def start(
        self, tenant: str, *, credit: int = 1000, blocks: int = 1, priority: Priority = Priority.STANDARD
    ) -> int:
        """Start a sequence and return its handle."""
        self.handles += 1
        spec = self.bench.spec(prompt=4, blocks=blocks, credit=credit, tenant=tenant)
        spec = replace(spec, generation=replace(spec.generation, priority=priority))
        self.stream.start(self.handles, spec)
        self.read()
        return self.handles

    def read(self) -> None:
        while (frame := self.stream.take()) is not None:
            self.refused.update(frame.not_admitted)
            self.ends.update(frame.finished)


def live(bench: Bench) -> dict[str, list[WorkerSequence]]:
    """Return the running sequences by tenant."""
    found: dict[str, list[WorkerSequence]] = {}
    for sequence in bench.table.sequences():
        if sequence.slot is SlotState.RUNNING:
            found.setdefault(sequence.spec.tenant_id, []).append(sequence)
    return found


def slot_of(bench: Bench, handle: int) -> SlotState:
    return next(each.slot for each in bench.table.sequences() if each.handle == handle)


def run(bench: Bench, reader: Reader) -> None:
    """Have the engine make a token of each sequence that it may."""
    numbers = [each.number for each in bench.table.sequences() if each.slot is SlotState.RUNNING]
    bench.stepped(dict.fromkeys(numbers, A))
    reader.read()


def roomy(bench: Bench) -> Reader:
    """Return a reader of a worker whose KV is never short."""
    bench.restart(replace(bench.table.limits, kv_blocks_total=1000))
    return Reader(bench)


def test_stalled_readers_hold_no_slot_and_no_kv(bench: Bench) -> None:
    reader = roomy(bench)
    for _ in range(3 * SLOTS):
        reader.start("flood", credit=1)
        run(bench, reader)
    assert not reader.refused
    assert bench.table.kv.blocks == 0
    pool = take_snapshot(bench.host, WHO, whole=False).pools[0]
    assert (pool.running, pool.waiting, pool.kv_blocks_reserved) == (0, 0, 0)
    canary = reader.start("canary")
    assert canary not in reader.refused


def test_credit_brings_a_sequence_back_before_a_new_one_of_its_tenant(bench: Bench) -> None:
    reader = roomy(bench)
    first = reader.start("t", credit=1)
    run(bench, reader)
    for _ in range(SLOTS):
        reader.start("t")
    assert not reader.refused
    reader.stream.credit([first], [5])
    sequence = next(each for each in bench.table.sequences() if each.handle == first)
    assert slot_of(bench, first) is SlotState.RETURNING
    assert bench.commands(wire.Credit) == []  # the engine is asked for it once it has a slot
    assert take_snapshot(bench.host, WHO, whole=False).pools[0].waiting == SLOTS + 1
    last = next(each.handle for each in bench.table.sequences() if each.handle != first)
    reader.stream.cancel([last])
    assert slot_of(bench, first) is SlotState.RUNNING
    assert bench.commands(wire.Credit) == [wire.Credit([sequence.number], [6])]
    assert reader.start("t") in reader.refused


def test_a_sequence_returns_when_its_kv_is_free(bench: Bench) -> None:
    reader = Reader(bench)  # 10 blocks
    first = reader.start("t", credit=1, blocks=6)
    run(bench, reader)
    other = reader.start("u", blocks=8)
    assert not reader.refused, "what a stalled reader reserved is free"
    reader.stream.credit([first], [5])
    assert bench.commands(wire.Credit) == []
    reader.stream.cancel([other])
    assert len(bench.commands(wire.Credit)) == 1
    bench.host.check_integrity()


def test_a_tenant_without_a_slot_gets_one_of_the_tenant_with_most(bench: Bench) -> None:
    reader = roomy(bench)
    for _ in range(SLOTS):
        reader.start("whale")
    pool = take_snapshot(bench.host, WHO, whole=False).pools[0]
    assert pool.yields_to_rank == 0, "those that have no token yet yield nothing"
    assert reader.start("canary") in reader.refused
    run(bench, reader)
    pool = take_snapshot(bench.host, WHO, whole=False).pools[0]
    assert pool.yields_to_rank == Priority.STANDARD.rank
    assert reader.start("whale") in reader.refused
    reader.refused.clear()
    for _ in range(SLOTS):
        reader.start("canary")
        run(bench, reader)
    assert {tenant: len(found) for tenant, found in live(bench).items()} == {"whale": 4, "canary": 4}
    assert len(reader.refused) == 4, "equal shares are left alone"
    assert len(bench.commands(wire.Park)) == 4
    mine = next(each.handle for each in live(bench)["canary"])
    reader.stream.cancel([mine])
    assert {tenant: len(found) for tenant, found in live(bench).items()} == {"whale": 5, "canary": 3}


def test_no_class_yields_to_a_lower_one(bench: Bench) -> None:
    reader = roomy(bench)
    for _ in range(SLOTS):
        reader.start("paid", priority=Priority.INTERACTIVE)
    run(bench, reader)
    assert reader.start("canary") in reader.refused
    assert take_snapshot(bench.host, WHO, whole=False).pools[0].yields_to_rank == Priority.INTERACTIVE.rank


def test_tokens_on_their_way_from_a_sequence_that_yielded_are_delivered(bench: Bench) -> None:
    reader = roomy(bench)
    for _ in range(SLOTS):
        reader.start("whale")
    run(bench, reader)
    reader.start("canary")
    yielded = next(each for each in bench.table.sequences() if each.slot is SlotState.RETURNING)
    for _ in range(30):  # beyond what it had reserved
        bench.stepped({yielded.number: A})
    assert yielded.output_tokens == 31
    bench.stepped({yielded.number: A}, finished={yielded.number: "stop"})
    reader.read()
    assert reader.ends[yielded.handle].reason is FinishReason.STOP


def test_credit_that_ends_while_a_sequence_waits_to_return_parks_it(bench: Bench) -> None:
    """The engine makes one token more after ``Park``: it may be the last that the reader gave credit for."""
    reader = roomy(bench)
    for _ in range(SLOTS):
        reader.start("whale", credit=2)
    run(bench, reader)
    canary = reader.start("canary")
    yielded = next(each for each in bench.table.sequences() if each.slot is SlotState.RETURNING)
    bench.stepped({yielded.number: A})
    reader.stream.cancel([canary])
    assert yielded.slot is SlotState.PARKED, "it would hold a slot and compute nothing"
    assert yielded.blocked_since_s is not None
    bench.host.check_integrity()


def test_too_many_without_a_slot_end_the_longest_of_the_tenant_with_most(bench: Bench) -> None:
    reader = roomy(bench)
    quiet = reader.start("quiet", credit=1)
    run(bench, reader)
    first = reader.start("flood", credit=1)
    run(bench, reader)
    for _ in range(SLOTS * PARKED_PER_SLOT):
        reader.start("flood", credit=1)
        run(bench, reader)
    assert bench.table.slots.parked == SLOTS * PARKED_PER_SLOT
    assert quiet not in reader.ends
    assert reader.ends[first].reason is FinishReason.SLOW_READER
    assert len(reader.ends) == 2


operations = st.lists(
    st.tuples(
        st.sampled_from(("start", "start", "step", "late", "credit", "cancel", "finish")),
        st.integers(0, 30),
        st.sampled_from((0, 1, 2, 50)),
    ),
    max_size=60,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(operations=operations, blocks=st.integers(2, 20))
def test_whatever_happens_everybody_ends(
    bench_factory: Callable[[], Bench], operations: list[tuple[str, int, int]], blocks: int
) -> None:
    """Books hold after each operation, and with credit every sequence gets a slot in the end."""
    bench = bench_factory()
    bench.restart(replace(bench.table.limits, kv_blocks_total=blocks, max_sequences=3))
    reader = Reader(bench)
    for kind, number, credit in operations:
        handles = {each.handle: each for each in bench.table.sequences()}
        chosen = handles[sorted(handles)[number % len(handles)]] if handles else None
        if kind == "start":
            rank = (Priority.STANDARD, Priority.BATCH)[number % 2]
            reader.start(f"t{number % 3}", credit=credit, blocks=number % 4, priority=rank)
        elif kind == "step":
            run(bench, reader)
        elif chosen is not None and kind == "late":  # a token that was under way when it yielded
            if chosen.slot is SlotState.RETURNING and chosen.first_token_s is not None:
                bench.stepped({chosen.number: A})
        elif chosen is not None and kind == "credit":
            reader.stream.credit([chosen.handle], [credit])
        elif chosen is not None and kind == "cancel":
            reader.stream.cancel([chosen.handle])
        elif chosen is not None:
            bench.stepped({}, finished={chosen.number: "stop"})
        bench.host.check_integrity()
    for _ in range(200):
        if not len(bench.table):
            return
        for each in list(bench.table.sequences()):
            reader.stream.credit([each.handle], [1])
        running = [each.number for each in bench.table.sequences() if each.slot is SlotState.RUNNING]
        assert running, "they wait for nobody"
        bench.stepped(dict.fromkeys(running, A), finished=dict.fromkeys(running[:1], "stop"))
    raise AssertionError("somebody never had a slot")
