"""The worker's flight recorder: what it returns, its bounds, and its cost."""

import time
import tracemalloc
from random import Random

import pytest

from services.core.fixed_cost.rows import RowSpec
from services.core.records import Priority
from services.runtime.telemetry.metrics import Metrics
from services.worker.engine_protocol import Stepped
from services.worker.policy.step_pace import StepPace
from services.worker.step_recorder import (
    MAX_MOMENTS,
    MAX_SEQUENCES,
    PAGE_MEMBERS,
    PAGE_SCANNED,
    SEQUENCE_BYTES,
    RecordedSequence,
    StepRecorder,
)
from services.worker.streams.live_row import LiveRow
from services.worker.streams.outbox import Outbox
from tests.support.clocks import HandClock
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader


def stepped(
    handles: list[int], prefilled: dict[int, int] | None = None, *, step_s: float = 0.01, **fields: object
) -> Stepped:
    values: dict[str, object] = {
        "step": 1,
        "step_s": step_s,
        "handles": handles,
        "tokens": [7] * len(handles),
        "finished": {},
        "prefill_tokens": sum((prefilled or {}).values()),
        "kv_blocks_used": 3,
        "running": 2,
        "waiting": 1,
        "prefilled": prefilled or {},
        **fields,
    }
    return Stepped(**values)  # type: ignore[arg-type]


class OldClock(HandClock):
    """Its Unix time is far from its monotonic one."""

    def unix_s(self) -> float:
        return self.now_s + 1e9


class Recorded:
    """A small recorder with one engine."""

    def __init__(self, **bounds: int) -> None:
        self.clock = OldClock(100.0)
        self.metrics = Metrics()
        self.recorder = StepRecorder(self.clock, self.metrics, **bounds)
        self.engine = self.recorder.engine("sha256:a", "chat", kv_blocks_total=64)

    def step(self, handles: list[int], prefilled: dict[int, int] | None = None, **fields: object) -> None:
        self.clock.now_s += 0.01
        self.engine.stepped(stepped(handles, prefilled, **fields))  # type: ignore[arg-type]

    def name(self, number: int, request_id: str, engine: int = 1) -> None:
        entry = RecordedSequence(number, engine, request_id, tenant="acme", accepted_s=self.clock.now_s)
        self.recorder.add_sequence(entry)


def test_a_request_is_read_with_the_other_members_of_its_steps() -> None:
    found = Recorded()
    found.name(1, "r1")
    found.name(2, "r2")
    found.step([2])
    found.step([2], {1: 512})
    found.step([1, 1, 2], preempted=[2])  # speculation: two tokens of one sequence
    page = found.recorder.read("r1")
    assert [step.number for step in page.steps] == [2, 3]
    first, second = page.steps
    assert dict(zip(first.members, first.prefilled, strict=True)) == {1: 512, 2: 0}
    assert dict(zip(first.members, first.sampled, strict=True)) == {1: 0, 2: 1}
    assert dict(zip(second.members, second.sampled, strict=True)) == {1: 2, 2: 1}
    assert first.start_unix_us == 1_000_000_100_010_000
    assert (first.prefill_tokens, first.kv_blocks_used, first.running, first.waiting) == (512, 3, 2, 1)
    names = {one.number: (one.request_id, [each.kind for each in one.moments]) for one in page.sequences}
    assert names == {1: ("r1", []), 2: ("r2", ["PREEMPTED"])}
    assert [engine.model for engine in page.engines] == ["chat"]
    assert not page.next_step
    assert not found.recorder.read("r9").steps


def test_a_step_without_members_is_not_recorded() -> None:
    found = Recorded()
    found.step([])
    assert not found.recorder.held_steps


@pytest.mark.parametrize("seed", range(20))
def test_the_ring_holds_the_newest_steps_whole(seed: int) -> None:
    """Against a list of everything, with both rings far too small."""
    rng, found, written = (
        Random(seed),
        Recorded(max_steps=16, max_words=64, max_sequences=8),
        list[set[int]](),
    )
    ends_s = list[float]()
    other = found.recorder.engine("sha256:b", "embed")
    for number in range(200):
        handles = [rng.randrange(1, 50) for _ in range(rng.randrange(0, 12))]
        prefilled = {rng.randrange(50, 90): rng.randrange(1, 99) for _ in range(rng.randrange(0, 6))}
        engine = rng.choice((found.engine, other))
        found.clock.now_s += 0.01
        found.name(number + 1, f"r{number % 11}")
        if handles or prefilled:
            engine.stepped(stepped(handles, prefilled))
            written.append({*handles, *prefilled})
            ends_s.append(found.clock.now_s)
        found.recorder.check_integrity()
        steps = found.recorder.read().steps
        assert len(steps) == found.recorder.held_steps
        assert [step.number for step in steps] == list(range(len(written) - len(steps) + 1, len(written) + 1))
        assert [{*step.members} for step in steps] == written[len(written) - len(steps) :]
        lost_s = ends_s[: len(ends_s) - len(steps)] or [100.0]
        assert found.recorder.read().since_unix_us == round((lost_s[-1] + 1e9) * 1e6)
    assert found.recorder.held_steps < 17
    counts = _counts(found.metrics, "fairway_worker_recorded_steps")
    assert counts == {"recorded": len(written), "overwritten": len(written) - found.recorder.held_steps}


@pytest.mark.parametrize("bounds", [{"max_steps": 4}, {"max_words": 4}])
def test_a_recorder_reaches_back_to_the_end_of_the_last_step_that_is_lost(bounds: dict[str, int]) -> None:
    """Small steps fill the ring of heads first: the newest head takes the place of the one that is lost."""
    found = Recorded(**bounds)
    for number in range(1, 11):
        found.step([1])
        lost_s = 0.01 * max(0, number - 4)
        assert found.recorder.read().since_unix_us == round((100.0 + lost_s + 1e9) * 1e6)
        assert found.recorder.held_steps == min(number, 4)
        found.recorder.check_integrity()


def _counts(metrics: Metrics, name: str) -> dict[str, float]:
    (family,) = (one for one in metrics.collect() if one.name == name)
    return {sample.labels["which"]: sample.value for sample in family.samples}


def test_pages_follow_each_other_without_a_gap() -> None:
    found = Recorded()
    found.name(1, "r1")
    for _ in range(PAGE_SCANNED + 10):
        found.step([1, 2, 3])
    first = found.recorder.read("r1")
    assert first.next_step == PAGE_SCANNED + 1
    second = found.recorder.read("r1", first.next_step)
    assert len(first.steps) + len(second.steps) == PAGE_SCANNED + 10
    assert not second.next_step
    wide = Recorded()
    for _ in range(40):
        wide.step(list(range(1, 513)))
    page = wide.recorder.read()
    assert sum(step.size for step in page.steps) == PAGE_MEMBERS
    assert page.next_step == len(page.steps) + 1


def test_handles_beyond_32_bits_are_recorded_by_their_low_bits() -> None:
    found = Recorded()
    found.step([2**32 + 5], {2**33 + 6: 9})
    (step,) = found.recorder.read().steps
    assert set(step.members) == {5, 6}


def test_a_sequence_that_is_forgotten_has_no_name() -> None:
    found = Recorded(max_sequences=2)
    for number in (1, 2, 3):
        found.name(number, f"r{number}")
    found.step([1, 3])
    names = {one.number: one.request_id for one in found.recorder.read().sequences}
    assert names == {1: "", 3: "r3"}
    assert not found.recorder.read("r1").steps


def test_moments_of_a_sequence_are_bounded() -> None:
    found = Recorded()
    found.name(1, "r1")
    for _ in range(MAX_MOMENTS + 5):
        found.step([1], preempted=[1])
    (sequence,) = found.recorder.read("r1").sequences
    assert len(sequence.moments) == MAX_MOMENTS


def test_rows_of_a_batch_are_recorded_by_request() -> None:
    found = Recorded()
    rows = found.recorder.engine("sha256:e", "embed", rows=True)
    outbox = Outbox(lambda: None)

    def row(request_id: str, place: int) -> LiveRow:
        spec = RowSpec(request_id, place, "acme", "sha256:e", (), Priority.STANDARD)
        return LiveRow(spec, outbox, place, place, 100.0, float("inf"), length=10)

    found.clock.now_s = 100.5
    rows.ran([row("r1", 0), row("r1", 1), row("r2", 0)], began_s=100.4, predicted_s=0.08, waiting=4)
    page = found.recorder.read("r1")
    (step,) = page.steps
    names = {one.number: one.request_id for one in page.sequences}
    assert {names[each]: count for each, count in zip(step.members, step.sampled, strict=True)} == {
        "r1": 2,
        "r2": 1,
    }
    assert (step.prefill_tokens, step.waiting, step.running) == (0, 4, 3)
    assert (step.took_us, step.predicted_us) == (100_000, 80_000)
    assert page.engines[0].rows


def test_a_step_is_predicted_from_those_before_it() -> None:
    pace, rng = StepPace(), Random(1)
    assert not pace.predicted_s(0, 1, 10)
    for _ in range(2000):
        work = rng.choice((0, 0, 256)), rng.randrange(1, 64), rng.randrange(64, 9000)
        pace.observe(*work, 2e-3 + 20e-6 * work[0] + 30e-6 * work[1] + 1e-7 * work[2])
    assert pace.predicted_s(256, 10, 1000) == pytest.approx(2e-3 + 5.12e-3 + 0.3e-3 + 0.1e-3, rel=0.02)
    pace.observe(0, 1, 1, 0.0)


def test_a_sequence_of_the_table_is_recorded_from_its_start_to_its_end(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec(credit=2))
    reader.stream.start(2, bench.spec(tenant="t2"))
    bench.clock.now_s += 0.25
    bench.stepped({1: 0x61, 2: 0x61})
    bench.clock.now_s += 0.25
    bench.stepped({1: 0x61, 2: 0x61})  # the credit of the first is used
    bench.clock.now_s += 1.0
    reader.stream.credit([1], [100])
    bench.clock.now_s += 0.25
    bench.stepped({1: 0x61}, finished={1: "stop"})
    page = bench.recorder.read("r1")
    assert [len(step.members) for step in page.steps] == [2, 2, 1]
    first = next(one for one in page.sequences if one.request_id == "r1")
    moments = [(one.kind, one.unix_us) for one in first.moments]
    assert moments == [("PARKED", 100_500_000), ("RESUMED", 101_500_000)]
    times_us = first.accepted_unix_us, first.first_token_unix_us, first.ended_unix_us
    assert times_us == (100_000_000, 100_250_000, 101_750_000)
    assert (first.reason, first.prompt_tokens, first.tenant) == ("stop", 16, "t1")
    other = next(one for one in page.sequences if one.request_id == "r2")
    assert (other.tenant, other.reason, other.ended_unix_us) == ("t2", "", 0)
    bench.recorder.check_integrity()


def test_a_sequence_that_yields_its_slot_has_that_moment(bench: Bench) -> None:
    reader = Reader(bench)
    for handle in range(1, 9):
        reader.stream.start(handle, bench.spec(blocks=1, prompt=8))
    bench.stepped(dict.fromkeys(range(1, 9), 0x61))
    reader.stream.start(9, bench.spec(blocks=1, prompt=8, tenant="t2"))
    kinds = {
        one.request_id: [moment.kind for moment in one.moments] for one in bench.recorder.read().sequences
    }
    assert sorted(kinds.values()).count(["YIELDED"]) == 1


def test_a_full_recorder_takes_what_is_stated() -> None:
    """An eighth of the sequences, twice over: each with the longest ids and all its moments."""
    count, clock = MAX_SEQUENCES // 8, OldClock(100.0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        recorder = StepRecorder(clock, max_steps=64, max_words=4096, max_sequences=count)
        engine = recorder.engine("sha256:a", "chat")
        for number in range(1000, 1000 + 2 * count):
            names = f"{number:064}", number % 3, f"{number:>64}"
            times_s = clock.now_s + 0.1, clock.now_s + 0.2, clock.now_s + 0.3
            counts = number + 1, number + 2, number + 3
            recorder.add_sequence(RecordedSequence(number, 1, *names, *times_s, "length", *counts))
            engine.stepped(stepped([number], preempted=[number] * (MAX_MOMENTS + 1)))
        found = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    recorder.check_integrity()
    assert recorder.held_steps == 64
    assert 0.9 * SEQUENCE_BYTES < found <= SEQUENCE_BYTES
    assert StepRecorder(clock).size_bytes == 62 * 1024 * 1024, "docs/operations/observability.md states it"


def cost_ns(batch: int, steps: int = 2000) -> float:
    """Return what a step of ``batch`` sequences costs, as the fastest of five rounds."""
    found = Recorded()
    event = stepped(list(range(1, batch + 1)), {batch + 1: 64}, attended_tokens=batch * 500)
    rounds = list[float]()
    for _ in range(5):
        began_ns = time.thread_time_ns()
        for _ in range(steps):
            found.engine.stepped(event)
        rounds.append((time.thread_time_ns() - began_ns) / steps)
    return min(rounds)


@pytest.mark.parametrize(("batch", "step_s"), [(1, 0.002), (64, 0.005), (256, 0.010)])
def test_a_step_costs_less_than_a_hundredth_of_its_time(batch: int, step_s: float) -> None:
    """Of a step as a GPU runs it; the time is that of the agent, in which the engine computes on."""
    found_ns = cost_ns(batch)
    print(f"{batch} sequences: {found_ns:.0f} ns, {found_ns / step_s / 1e7:.3f} % of {step_s * 1e3:.0f} ms")
    assert found_ns < step_s * 1e9 / 100
