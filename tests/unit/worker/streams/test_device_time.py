"""Device time on a worker: what each sequence reports, once, and how the device's intervals add up."""

from __future__ import annotations

import pytest

from services.core.generation import FinishReason
from services.worker import engine_protocol as wire
from services.worker.streams.charges import (
    IDLE_INTERVAL_S,
    INTERVAL_S,
    DeviceKind,
    DeviceTime,
    Tally,
    UsageAccounting,
)
from tests.support.clocks import HandClock
from tests.support.kept_usage import KeptUsage
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader

A, B = 0x61, 0x62


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


def uncharged_ms(bench: Bench) -> float:
    return round(bench.table.charges.uncharged_s * 1e3, 3)


def test_a_sequence_that_finished_reports_what_the_engine_charged(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=16, tenant="acme"))
    bench.stepped({1: A}, prefill_tokens=16, step_s=0.02, device_us={1: 20_000})
    bench.stepped({1: B}, step_s=0.01)
    bench.clock.now_s = 200.0
    bench.stepped({1: B}, step_s=0.01, finished={1: "length"}, device_us={1: 40_000}, settled=[1])
    reader.read()
    assert reader.ends[1].device_us == 40_000
    (use,) = bench.usage.sequences
    assert (use.request_id, use.choice, use.tenant, use.model) == ("r1", 0, "acme", "m")
    assert (use.worker_id, use.device_type, use.cost_per_hour) == ("w1", "h100", 3.6)
    assert use.device_s == pytest.approx(0.04)
    assert use.ended_unix_s == 200.0
    assert (use.usage.prompt_tokens, use.usage.output_tokens, use.usage.cached_tokens) == (16, 3, 0)
    assert use.usage.device_s == use.device_s
    assert uncharged_ms(bench) == 0.0


def test_output_of_an_earlier_run_is_not_counted_again(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=16, produced=(A, A, A)))
    bench.stepped({1: B}, prefill_tokens=19, finished={1: "length"}, device_us={1: 10_000}, settled=[1])
    (use,) = bench.usage.sequences
    assert (use.usage.prompt_tokens, use.usage.output_tokens) == (16, 1)


def test_a_cancelled_sequence_pays_for_the_step_under_way(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A}, prefill_tokens=16, device_us={1: 10_000})
    reader.stream.cancel([1])
    assert not bench.usage.sequences
    assert bench.table.charges.unsettled == 1
    bench.clock.now_s += 2.0
    bench.stepped({1: B}, device_us={1: 20_000}, settled=[1])
    (use,) = bench.usage.sequences
    assert use.device_s == pytest.approx(0.02)
    assert use.ended_unix_s == bench.clock.now_s - 2.0
    assert bench.table.charges.unsettled == 0


def test_a_stop_string_ends_with_what_is_known_and_reports_the_rest(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(stop=("b",)))
    bench.stepped({1: A}, prefill_tokens=16, device_us={1: 10_000})
    bench.stepped({1: B})
    reader.read()
    assert reader.ends[1].reason is FinishReason.STOP
    assert reader.ends[1].device_us == 10_000
    bench.stepped({}, step_s=0.0, device_us={1: 20_000}, settled=[1])
    assert bench.usage.sequences[0].device_s == pytest.approx(0.02)


def test_a_sequence_cancelled_in_its_prefill_reports_what_was_computed(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=30, blocks=2))
    bench.stepped({}, prefill_tokens=12, device_us={1: 10_000})
    reader.stream.cancel([1])
    bench.stepped({}, settled=[1], device_us={1: 10_000}, step_s=0.0)
    assert bench.usage.sequences[0].usage.prompt_tokens == 12
    assert bench.usage.sequences[0].usage.output_tokens == 0


def test_a_sequence_whose_end_was_lost_never_ran_here(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(stop=("ab",), produced=(A, B)))
    reader.read()
    assert reader.ends[1].reason is FinishReason.STOP
    (use,) = bench.usage.sequences
    assert use.device_s == 0.0


def test_steps_that_an_ended_engine_did_not_charge_are_shared(bench: Bench, reader: Reader) -> None:
    for handle in (1, 2, 3):
        reader.stream.start(handle, bench.spec())
    shares = dict.fromkeys((1, 2, 3), 10_000)
    bench.stepped({1: A, 2: A, 3: A}, prefill_tokens=48, step_s=0.03, device_us=shares)
    bench.stepped({1: A, 2: A, 3: A}, step_s=0.03)
    reader.stream.cancel([3])
    bench.restart()
    reader.read()
    assert {handle: end.device_us for handle, end in reader.ends.items()} == {1: 20_000, 2: 20_000}
    assert [use.device_s for use in bench.usage.sequences] == pytest.approx([0.02] * 3)
    assert bench.host.device is not None
    assert bench.host.device.attributed_s == pytest.approx(0.06)


def test_steps_that_nobody_is_left_to_pay_for_are_not_attributed(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A}, finished={1: "length"}, prefill_tokens=16, device_us={1: 9_000}, settled=[1])
    bench.restart()
    assert bench.host.device is not None
    assert bench.host.device.busy_s == pytest.approx(0.01)
    assert bench.host.device.attributed_s == pytest.approx(0.009)


def test_an_abandoned_sequence_is_settled_by_the_engine_that_goes_on(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A}, prefill_tokens=16, device_us={1: 10_000})
    bench.clock.now_s += 100.0
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert reader.ends[1].reason is FinishReason.ENGINE_LOST
    assert bench.commands(wire.Cancel)
    bench.stepped({1: A}, step_s=100.0, device_us={1: 100_010_000}, settled=[1])
    assert bench.usage.sequences[0].device_s == pytest.approx(100.01)


def test_a_step_without_work_is_busy_and_not_attributed(bench: Bench) -> None:
    bench.stepped({}, step_s=0.02)
    assert bench.host.device is not None
    assert (bench.host.device.busy_s, bench.host.device.attributed_s) == (0.02, 0.0)
    assert uncharged_ms(bench) == 0.0


def test_ended_sequences_that_no_engine_settles_are_bounded(bench: Bench, reader: Reader) -> None:
    bench.table.charges = UsageAccounting(bench.host.tally, bench.host.device, max_unsettled=3)
    for handle in range(1, 6):
        reader.stream.start(handle, bench.spec(blocks=1))
        reader.stream.cancel([handle])
    assert bench.table.charges.unsettled == 3
    assert [use.request_id for use in bench.usage.sequences] == ["r1", "r2"]


def test_without_a_device_charges_are_kept_all_the_same() -> None:
    accounting = UsageAccounting(Tally())
    accounting.note_step(wire.Stepped(1, 0.5, [], [], {}, 4, 0, 0, 0), {})
    assert accounting.uncharged_s == 0.5


# --- intervals -------------------------------------------------------------------------------------------


def test_intervals_follow_each_other_and_are_longer_at_rest() -> None:
    clock, usage = HandClock(0.0), KeptUsage()
    device = DeviceTime(DeviceKind("w1", "h100", 3.6), usage, clock)
    for second in range(1, 201):
        clock.now_s = float(second)
        if second <= 25:
            device.busy_s += 0.75
            device.attributed_s += 0.5
        device.sweep(clock.now_s)
    clock.now_s = 205.0
    device.close()
    bounds = [(each.began_unix_s, each.ended_unix_s) for each in usage.intervals]
    assert bounds == [(0, 10), (10, 20), (20, 30), (30, 90), (90, 150), (150, 205)]
    assert [each.busy_s for each in usage.intervals] == [7.5, 7.5, 3.75, 0.0, 0.0, 0.0]
    assert sum(each.attributed_s for each in usage.intervals) == 12.5
    assert bounds[3][1] - bounds[3][0] == IDLE_INTERVAL_S > INTERVAL_S
    assert device.idle_s == pytest.approx(205.0 - 25 * 0.75)


def test_a_correction_larger_than_the_interval_moves_to_the_next() -> None:
    clock, usage = HandClock(0.0), KeptUsage()
    device = DeviceTime(DeviceKind("w1"), usage, clock)
    for second, busy_s, attributed_s in ((10.0, 5.0, 5.0), (20.0, 1.0, -0.5), (30.0, 2.0, 2.0)):
        device.busy_s += busy_s
        device.attributed_s += attributed_s
        clock.now_s = second
        device.sweep(second)
    assert [each.attributed_s for each in usage.intervals] == [5.0, 0.0, 1.5]


def test_idle_time_never_falls_when_a_long_step_ends() -> None:
    clock = HandClock(0.0)
    device = DeviceTime(DeviceKind("w1"), KeptUsage(), clock)
    clock.now_s = 3.0
    assert device.idle_s == 3.0
    clock.now_s = 4.0
    device.busy_s += 4.0
    assert device.idle_s == 3.0
    clock.now_s = 9.0
    assert device.idle_s == 5.0
