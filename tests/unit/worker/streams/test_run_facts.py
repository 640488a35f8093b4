"""A sequence's end has the steps that it was in with their work, and what it waited for."""

from __future__ import annotations

from dataclasses import replace

from services.core.generation import StepSums
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader

A, B = ord("a"), ord("b")


def test_steps_before_and_after_the_first_token_are_apart(bench: Bench) -> None:
    reader = Reader(bench)
    bench.stepped({}, prefill_tokens=500, step_s=0.5)  # of nobody that lives here
    reader.stream.start(1, bench.spec(prompt=16))
    bench.stepped({}, prefill_tokens=100, step_s=0.03)
    bench.stepped({1: A}, prefill_tokens=16, step_s=0.02)
    bench.stepped({1: B}, prefill_tokens=7, step_s=0.01)
    bench.stepped({1: B}, step_s=0.01, finished={1: "length"})
    reader.read()
    run = reader.ends[1].run
    assert run.before == StepSums(2, 50_000, 116, 0, 1)
    assert run.after == StepSums(2, 20_000, 7, 2, 2)
    assert (run.blocked_us, run.returning_us, run.preemptions) == (0, 0, 0)


def test_a_sequence_without_a_token_has_only_steps_before(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec(prompt=16, time_left_s=1.0))
    bench.stepped({}, prefill_tokens=8, step_s=0.02)
    bench.clock.now_s += 2.0
    bench.table.sweep(bench.clock.now_s)
    reader.read()
    run = reader.ends[1].run
    assert (run.before.steps, run.after) == (1, StepSums())
    assert run.prefill_us == 0


def test_the_wait_for_a_reader_and_the_wait_for_a_slot_are_apart(bench: Bench) -> None:
    bench.restart(replace(bench.table.limits, kv_blocks_total=1000))
    reader = Reader(bench)
    slots = bench.table.limits.max_sequences
    reader.stream.start(1, bench.spec(tenant="a", credit=1))
    first = bench.table.sequences()
    (sequence,) = first
    bench.stepped({sequence.number: A}, prefill_tokens=16)
    for handle in range(2, slots + 2):
        reader.stream.start(handle, bench.spec(tenant="a"))
    bench.clock.now_s += 3.0
    reader.stream.credit([1], [50])
    bench.clock.now_s += 0.5
    reader.stream.cancel([2])  # its slot is free
    bench.stepped({sequence.number: B}, finished={sequence.number: "length"})
    reader.read()
    run = reader.ends[1].run
    assert (run.blocked_us, run.returning_us, run.preemptions) == (3_000_000, 500_000, 0)


def test_a_slot_that_others_took_is_counted(bench: Bench) -> None:
    bench.restart(replace(bench.table.limits, kv_blocks_total=1000))
    reader = Reader(bench)
    slots = bench.table.limits.max_sequences
    for handle in range(1, slots + 1):
        reader.stream.start(handle, bench.spec(tenant="whale"))
    numbers = {one.handle: one.number for one in bench.table.sequences()}
    bench.stepped(dict.fromkeys(numbers.values(), A), prefill_tokens=16)
    reader.stream.start(slots + 1, bench.spec(tenant="canary"))
    bench.clock.now_s += 0.25
    victim = slots  # the newest
    bench.stepped({numbers[victim]: B}, finished={numbers[victim]: "length"})
    reader.read()
    run = reader.ends[victim].run
    assert (run.preemptions, run.returning_us) == (1, 250_000)
