"""Admission, reservations, credits and ends of one table, against an engine that is a list of commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.errors import InvalidInput
from services.core.fleet import ReportSnapshot
from services.core.generation import FinishReason, NotAdmittedReason, StartSpec
from services.core.poison.suspicion import LossCause, StepRole
from services.core.rollouts.routes import Withdrawal
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.streams.outbox import MAX_FRAME_TOKENS
from tests.unit.worker.bench import IDLE_BEAT, Bench
from tests.unit.worker.reader import Reader

A, B, C = 0x61, 0x62, 0x63
EOS = 300
WHO = WorkerIdentity("w1", "a:1", "z")


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


# --- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grant", "reason"),
    [
        ({"incarnation": 4}, NotAdmittedReason.STALE_INCARNATION),
        ({"epoch": 2}, NotAdmittedReason.STALE_EPOCH),
        ({"sequence": 1}, NotAdmittedReason.GRANT_REPLAYED),
        ({"version_digest": "sha256:other"}, NotAdmittedReason.NOT_READY),
    ],
)
def test_a_grant_that_does_not_count_is_refused_with_its_reason(
    bench: Bench, reader: Reader, grant: dict[str, Any], reason: NotAdmittedReason
) -> None:
    reader.stream.start(1, bench.spec())
    reader.stream.start(2, bench.spec(**grant))
    reader.read()
    assert reader.accepted == [1]
    assert reader.refused == {2: reason}
    assert len(bench.commands(wire.Submit)) == 1


def test_a_grant_for_one_version_does_not_start_another(bench: Bench, reader: Reader) -> None:
    spec = bench.spec()
    reader.stream.start(1, replace(spec, generation=replace(spec.generation, version_digest="sha256:other")))
    reader.read()
    assert reader.refused == {1: NotAdmittedReason.NOT_READY}


def test_room_is_total_less_reserved_at_the_larger_of_grant_and_use(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(blocks=4, prompt=16))
    reader.stream.start(2, bench.spec(blocks=1, prompt=65))  # its prompt takes five
    assert bench.table.kv.blocks == 9
    reader.stream.start(3, bench.spec(blocks=2))
    reader.stream.start(4, bench.spec(blocks=1))
    reader.stream.start(5, bench.spec(blocks=0, prompt=1))
    reader.read()
    assert reader.accepted == [1, 2, 4]
    assert reader.refused == {3: NotAdmittedReason.NO_ROOM, 5: NotAdmittedReason.NO_ROOM}


def test_a_pool_that_shrinks_admits_nobody_beyond_its_end_and_what_runs_stays(
    bench: Bench, reader: Reader
) -> None:
    reader.stream.start(1, bench.spec(blocks=6))
    changes = bench.changes
    bench.table.resize(7)
    assert bench.changes == changes + 1, "the scheduler hears of it"
    reader.stream.start(2, bench.spec(blocks=2))
    bench.table.resize(5)
    assert (bench.table.kv.blocks, bench.table.limits.kv_blocks_total) == (6, 5)
    bench.stepped({1: A})
    bench.table.resize(12)
    reader.stream.start(3, bench.spec(blocks=6))
    reader.read()
    assert (reader.accepted, reader.refused) == ([1, 3], {2: NotAdmittedReason.NO_ROOM})
    bench.table.check_integrity()


def test_the_number_of_sequences_is_bounded(bench: Bench, reader: Reader) -> None:
    for handle in range(9):
        reader.stream.start(handle, bench.spec(blocks=1, prompt=1))
    reader.read()
    assert reader.refused == {8: NotAdmittedReason.NO_ROOM}


def test_a_withdrawn_route_starts_nothing_and_what_has_output_goes_on(bench: Bench, reader: Reader) -> None:
    def at(revision: int, **fields: Any) -> StartSpec:
        spec = bench.spec(**fields)
        return replace(spec, generation=replace(spec.generation, route_revision=revision))

    reader.stream.start(1, at(6))
    first = bench.table.versions.first
    bench.host.withdrawals = {first: Withdrawal(first, 7), "sha256:other": Withdrawal("sha256:other", 99)}
    reader.stream.start(2, at(6))
    reader.stream.start(3, at(7))
    reader.stream.start(4, at(6, produced=(A,)))
    reader.ids[4] = [A]  # of the earlier run
    reader.stream.start(5, replace(at(6), begun=True))
    reader.read()
    assert reader.withdrawn == [Withdrawal(first, 7)]
    assert (reader.accepted, reader.refused) == ([1, 3, 4, 5], {2: NotAdmittedReason.STALE_ROUTE})


def test_draining_and_closed_versions_take_nothing(bench: Bench, reader: Reader) -> None:
    bench.host.close_version(bench.table.versions.first, True)
    reader.stream.start(1, bench.spec())
    bench.host.close_version(bench.table.versions.first, False)
    bench.host.draining = True
    reader.stream.start(2, bench.spec())
    bench.host.draining = False
    reader.stream.start(3, bench.spec())
    reader.read()
    assert reader.refused == {1: NotAdmittedReason.DRAINING, 2: NotAdmittedReason.DRAINING}
    assert reader.accepted == [3]


def test_an_engine_that_cannot_be_told_is_not_ready_and_nothing_is_reserved(
    bench: Bench, reader: Reader
) -> None:
    bench.connected = False
    reader.stream.start(1, bench.spec())
    reader.read()
    assert reader.refused == {1: NotAdmittedReason.NOT_READY}
    assert (bench.table.kv.blocks, len(bench.table)) == (0, 0)
    bench.host.check_integrity()


def test_a_handle_in_use_is_refused(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    with pytest.raises(InvalidInput):
        reader.stream.start(1, bench.spec())


def test_use_beyond_the_grant_is_reserved(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(blocks=1, prompt=15))
    for step in range(1, 20):
        bench.stepped({1: A})
        assert bench.table.kv.blocks == max(1, -(-(15 + step) // 16))


# --- tokens ----------------------------------------------------------------------------------------


def test_tokens_of_a_step_travel_in_one_frame_per_gateway(bench: Bench, reader: Reader) -> None:
    other = Reader(bench)
    reader.stream.start(1, bench.spec())
    other.stream.start(1, bench.spec())
    reader.stream.start(2, bench.spec())
    reader.read()
    other.read()
    bench.stepped({1: A, 2: B, 3: C}, prefill_tokens=48)
    assert reader.wakes == other.wakes == 1
    (frame,) = reader.read()
    assert (frame.handles, frame.offsets, frame.counts, frame.ids) == ([1, 2], [0, 0], [1, 1], [A, C])
    assert (other.read()[0].texts, other.ids) == (["b"], {1: [B]})


def test_a_writer_that_lags_gets_merged_entries(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    reader.stream.start(2, bench.spec())
    bench.stepped({1: A, 2: 0xC3})
    bench.stepped({1: B, 2: 0xA9})
    bench.stepped({1: C})
    (frame,) = reader.read()
    assert (frame.accepted, frame.handles, frame.counts) == ([1, 2], [1, 2], [3, 2])
    assert (frame.ids, frame.texts) == ([A, B, C, 0xC3, 0xA9], ["abc", "é"])


def test_a_frame_is_bounded_and_a_last_word_waits_for_its_tokens(bench: Bench, reader: Reader) -> None:
    bench.restart(replace(bench.table.limits, kv_blocks_total=10_000))
    for handle in (1, 2):
        reader.stream.start(handle, bench.spec(credit=1 << 20, max_tokens=1 << 20))
    for _ in range(MAX_FRAME_TOKENS):
        bench.table.on_stepped(wire.Stepped(1, 0.0, [1, 2], [A, A], {}, 0, 0, 2, 0))
    bench.stepped({1: A, 2: A}, finished={1: "length", 2: "length"})
    frames = reader.read()
    assert [len(frame.ids) for frame in frames] == [MAX_FRAME_TOKENS + 1] * 2
    assert [[handle for handle, _ in frame.finished] for frame in frames] == [[1], [2]]


def test_a_stop_token_is_reported_without_text(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A})
    bench.stepped({1: B}, finished={1: "stop"})
    reader.read()
    assert (reader.ids[1], reader.text[1]) == ([A, B], "a")
    assert reader.ends[1].reason is FinishReason.STOP
    assert reader.ends[1].output_tokens == 2


def test_an_invalid_rest_is_replaced_at_the_end(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A})
    bench.stepped({1: 0xF0}, finished={1: "length"})
    reader.read()
    assert reader.text[1] == "a\ufffd"


def test_a_stop_string_cancels_the_engine_and_cuts_the_text(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(stop=("bc",)))
    bench.stepped({1: A})
    bench.stepped({1: B})
    reader.read()
    assert reader.text[1] == "a"
    bench.stepped({1: C})
    bench.stepped({1: A})  # the engine had not heard yet
    reader.read()
    assert (reader.text[1], reader.ids[1]) == ("a", [A, B, C])
    assert (reader.ends[1].reason, reader.ends[1].stop) == (FinishReason.STOP, "bc")
    assert bench.commands(wire.Cancel) == [wire.Cancel([1])]
    assert bench.table.kv.blocks == 0


def test_a_held_back_beginning_comes_out_at_the_end(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(stop=("bcd",)))
    bench.stepped({1: B})
    bench.stepped({1: C}, finished={1: "length"})
    reader.read()
    assert (reader.text[1], reader.ends[1].reason) == ("bc", FinishReason.LENGTH)


def test_logprobs_carry_the_tokens_texts(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(logprobs=2))
    for _ in range(2):
        bench.stepped({1: A}, logprobs={1: wire.SampledLogprobs(-0.5, [A, EOS], [-0.5, -1.5])})
    (frame,) = reader.read()
    assert list(frame.logprobs) == [0]
    first, second = frame.logprobs[0]
    assert first == second
    assert (first.token, first.top_tokens, first.top_logprobs) == ("a", ("a", "<eos>"), (-0.5, -1.5))


def test_a_step_may_make_several_tokens_of_a_sequence(bench: Bench, reader: Reader) -> None:
    for handle in (1, 2):
        reader.stream.start(handle, bench.spec())
    bench.stepped({1: A, 2: B})
    bench.ran([(1, B), (1, C), (2, C), (1, A)], finished={1: "length"})
    reader.read()
    assert (reader.text, reader.ids) == ({1: "abca", 2: "bc"}, {1: [A, B, C, A], 2: [B, C]})
    assert (reader.ends[1].reason, reader.ends[1].output_tokens) == (FinishReason.LENGTH, 4)


def test_of_several_tokens_the_stop_token_alone_has_no_text(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A})
    bench.ran([(1, B), (1, EOS)], finished={1: "stop"})
    reader.read()
    assert (reader.text[1], reader.ids[1]) == ("ab", [A, B, EOS])
    assert reader.ends[1].reason == FinishReason.STOP


def test_a_stop_string_ends_a_run_where_it_is_complete(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(stop=("bc",)))
    bench.ran([(1, A), (1, B), (1, C), (1, A)])
    reader.read()
    assert (reader.text[1], reader.ids[1]) == ("a", [A, B, C])
    assert reader.ends[1].reason == FinishReason.STOP
    assert bench.commands(wire.Cancel) == [wire.Cancel([1])]


def test_logprobs_of_several_tokens_come_in_their_order(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(logprobs=0))
    entries = [wire.SampledLogprobs(-value, [], []) for value in (0.5, 1.5, 2.5)]
    bench.ran([(1, A), (1, B), (1, C)], logprobs={1: entries}, finished={1: "length"})
    (frame,) = reader.read()
    assert [(entry.token, entry.sampled) for entry in frame.logprobs[0]] == [
        ("a", -0.5),
        ("b", -1.5),
        ("c", -2.5),
    ]


def test_a_resume_goes_on_where_it_was(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(produced=(A, B), delivered_chars=1, credit=5))
    (submit,) = bench.commands(wire.Submit)
    assert (list(submit.produced_ids), submit.credit_limit) == ([A, B], 7)
    frame = reader.take()
    assert (frame.handles, frame.offsets, frame.counts, frame.texts) == ([1], [2], [0], ["b"])
    bench.stepped({1: C})
    frame = reader.take()
    assert (frame.offsets, frame.ids, frame.texts) == ([2], [C], ["c"])


def test_what_an_earlier_run_produced_is_prefill_here_and_not_output(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=20, produced=(A, B)))
    bench.stepped({1: C}, finished={1: "length"})
    (use,) = take_snapshot(bench.host, WHO, whole=True).tenants
    assert (use.prefill, use.output) == (22, 1)


def test_a_resume_of_what_had_stopped_ends_without_the_engine(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(produced=(A, B), stop=("b",)))
    frame = reader.take()
    assert (frame.accepted, frame.texts) == ([1], ["a"])
    ((handle, end),) = frame.finished
    assert (handle, end.reason, end.stop, end.output_tokens) == (1, FinishReason.STOP, "b", 2)
    assert bench.sent == []
    bench.host.check_integrity()


# --- credits, deadlines, ends ----------------------------------------------------------------------


def test_credit_is_an_absolute_limit_for_the_engine(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(credit=2))
    reader.stream.start(2, bench.spec(credit=3))
    reader.stream.credit([1, 2, 99], [5, 1, 7])
    assert bench.commands(wire.Credit) == [wire.Credit([1, 2], [7, 4])]


def test_a_reader_that_stays_away_is_cancelled_with_its_own_reason(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(credit=1))
    reader.stream.start(2, bench.spec(credit=1))
    bench.stepped({1: A, 2: A})
    bench.host.sweep(100.0)
    bench.clock.now_s = 129.0
    bench.table.on_heartbeat(IDLE_BEAT)  # the engine is well, it waits for credit
    bench.host.sweep(129.9)
    assert len(bench.table) == 2
    reader.stream.credit([2], [1])
    bench.clock.now_s = 130.0
    bench.stepped({2: A})
    bench.host.sweep(130.0)
    reader.read()
    assert {handle: end.reason for handle, end in reader.ends.items()} == {1: FinishReason.SLOW_READER}
    assert bench.commands(wire.Cancel) == [wire.Cancel([1])]
    bench.clock.now_s = 159.0
    bench.table.on_heartbeat(IDLE_BEAT)
    bench.host.sweep(159.9)
    assert len(bench.table) == 1
    bench.host.sweep(160.0)
    assert len(bench.table) == 0


def test_a_deadline_ends_it(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(time_left_s=2.0, stop=("bb",)))
    bench.stepped({1: B})
    bench.host.sweep(101.9)
    bench.host.sweep(102.0)
    reader.read()
    assert (reader.ends[1].reason, reader.text[1]) == (FinishReason.DEADLINE, "b")
    assert bench.commands(wire.Cancel) == [wire.Cancel([1])]


def test_a_cancel_is_silent_and_frees_at_once(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A})
    reader.stream.cancel([1, 42])
    assert bench.commands(wire.Cancel) == [wire.Cancel([1])]
    assert bench.table.kv.blocks == 0
    bench.stepped({1: B})
    assert reader.stream.take() is None
    reader.stream.start(1, bench.spec())  # the handle is free
    bench.stepped({2: C})
    reader.read()
    assert (reader.accepted, reader.ids) == ([1], {1: [C]})


def test_a_cancel_that_crosses_the_last_word_silences_it(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A}, finished={1: "length"})
    reader.stream.cancel([1])
    reader.read()
    assert (reader.accepted, reader.ids, reader.ends) == ([], {}, {})


def test_a_stream_that_ends_cancels_everything_of_its_own(bench: Bench, reader: Reader) -> None:
    other = Reader(bench)
    reader.stream.start(1, bench.spec())
    other.stream.start(1, bench.spec())
    reader.stream.start(2, bench.spec())
    reader.stream.close()
    reader.stream.close()
    assert bench.commands(wire.Cancel) == [wire.Cancel([1, 3])]
    assert len(bench.table) == 1


def test_a_dead_engine_ends_everything_and_keeps_what_was_held_back(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(stop=("bc",)))
    reader.stream.start(2, bench.spec())
    bench.stepped({1: B, 2: 0xF0})
    bench.host.remove(bench.table)
    reader.read()
    assert {end.reason for end in reader.ends.values()} == {FinishReason.ENGINE_LOST}
    assert (reader.ids, reader.text) == ({1: [B], 2: [0xF0]}, {1: "", 2: ""})
    bench.table.check_integrity()
    assert bench.table.kv.blocks == 0
    reader.stream.start(3, bench.spec())
    reader.read()
    assert reader.refused == {3: NotAdmittedReason.NOT_READY}


def test_preempted_and_failed_sequences_say_so(bench: Bench, reader: Reader) -> None:
    for handle in (1, 2, 3):
        reader.stream.start(handle, bench.spec())
    bench.stepped({2: A}, prefill_tokens=32, finished={1: "preempted"})
    bench.stepped({}, finished={2: "error", 3: "error"}, errors={2: "nan", 3: "prompt too long"})
    reader.read()
    assert reader.ends[1].reason is FinishReason.PREEMPTED
    assert reader.ends[2] == replace(
        reader.ends[2], reason=FinishReason.ERROR, error_reason="INTERNAL", error_message="nan"
    )
    assert (reader.ends[3].error_reason, reader.ends[3].error_message) == ("INVALID_INPUT", "prompt too long")


def test_a_sequence_without_finite_logits_may_go_on_elsewhere(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.stepped({1: A}, prefill_tokens=16)
    bench.stepped({}, finished={1: "not_finite"}, errors={1: "the logits are not finite"})
    reader.read()
    assert (reader.ends[1].reason, reader.ends[1].error_reason) == (FinishReason.ENGINE_LOST, "NOT_FINITE")
    assert reader.ids[1] == [A]


def test_the_stage_clock_splits_waiting_from_prefill(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.clock.now_s += 1.0
    bench.stepped({}, prefill_tokens=8)  # a chunk of a step that took 10 ms
    bench.clock.now_s += 0.5
    bench.stepped({1: A}, prefill_tokens=8, finished={1: "length"})
    reader.read()
    assert reader.ends[1].engine_wait_us == 990_000
    assert reader.ends[1].prefill_us == 510_000


def test_a_step_prefills_in_order_of_submission(bench: Bench, reader: Reader) -> None:
    for handle in (1, 2, 3):
        reader.stream.start(handle, bench.spec())
    bench.clock.now_s += 1.0
    bench.stepped({}, prefill_tokens=20)  # all of the first, the beginning of the second
    bench.clock.now_s += 1.0
    bench.stepped({1: A, 2: A, 3: A}, prefill_tokens=28, finished=dict.fromkeys((1, 2, 3), "length"))
    reader.read()
    assert [reader.ends[handle].engine_wait_us for handle in (1, 2, 3)] == [990_000, 990_000, 1_990_000]


def test_a_report_has_levels_and_takes_deltas(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=20, tenant="x"))
    reader.stream.start(2, bench.spec(prompt=30, tenant="y"))
    reader.stream.start(3, bench.spec(epoch=2))
    bench.stepped({1: A})
    bench.stepped({1: A})

    def take() -> ReportSnapshot:
        return take_snapshot(bench.host, WHO, whole=True)

    first, second = take(), take()
    (pool,) = first.pools
    assert (pool.running, pool.waiting, pool.queued_prefill_tokens, pool.kv_blocks_reserved) == (1, 1, 30, 4)
    assert (first.incarnation, first.epoch, first.grants_seen) == (5, 3, (1, 2))
    assert [(use.tenant, use.prefill, use.output) for use in first.tenants] == [("x", 20, 2)]
    assert [(live.request_id, live.kv_blocks) for live in first.live] == [("r1", 2), ("r2", 2)]
    assert second.pools == first.pools
    assert (second.grants_seen, second.tenants) == ((), ())
    bench.stepped({1: A, 2: A}, finished={1: "length"})
    assert [(use.tenant, use.prefill, use.output) for use in take().tenants] == [("x", 0, 1), ("y", 30, 1)]


# --- all of it, in any order -----------------------------------------------------------------------


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_order_of_events_leaks_nothing(bench_factory: Callable[[], Bench], data: st.DataObject) -> None:
    bench = bench_factory()
    reader = Reader(bench)
    handle = 0
    charged = 0
    for _ in range(data.draw(st.integers(0, 25))):
        numbers = [sequence.number for sequence in bench.table.sequences()]
        handles = [sequence.handle for sequence in bench.table.sequences()]
        match data.draw(st.sampled_from(("start", "step", "cancel", "credit", "sweep", "read", "report"))):
            case "start":
                handle += 1
                stop = data.draw(st.sampled_from(((), ("ab",))))
                prompt = data.draw(st.integers(1, 60))
                spec = bench.spec(prompt=prompt, blocks=data.draw(st.integers(0, 5)), credit=3, stop=stop)
                reader.stream.start(handle, spec)
            case "step" if numbers:
                chosen = data.draw(st.lists(st.sampled_from(numbers), unique=True))
                tokens = {number: data.draw(st.sampled_from((A, B, 0xC3, EOS))) for number in chosen}
                ends = data.draw(st.lists(st.sampled_from(chosen), unique=True)) if chosen else []
                reasons: st.SearchStrategy[wire.FinishReason] = st.sampled_from(
                    ("stop", "length", "preempted", "error", "not_finite")
                )
                bench.stepped(
                    tokens, finished={n: data.draw(reasons) for n in ends}, prefill_tokens=len(chosen)
                )
            case "cancel" if handles:
                reader.stream.cancel(data.draw(st.lists(st.sampled_from(handles), unique=True)))
            case "credit" if handles:
                reader.stream.credit(handles, [1] * len(handles))
            case "sweep":
                bench.clock.now_s += data.draw(st.sampled_from((1.0, 31.0)))
                bench.host.sweep(bench.clock.now_s)
            case "read":
                reader.read()
            case "report":
                snapshot = take_snapshot(bench.host, WHO, whole=False)
                charged += sum(use.output for use in snapshot.tenants)
        bench.host.check_integrity()
        assert bench.table.kv.blocks >= 0
    reader.stream.close()
    assert (bench.table.kv.blocks, len(bench.table), bench.table.prefills.queued_tokens) == (0, 0, 0)
    snapshot = take_snapshot(bench.host, WHO, whole=False)
    assert charged + sum(use.output for use in snapshot.tenants) == bench.tokens, "each token is charged once"


def test_a_lost_engine_ends_each_sequence_with_its_part_in_the_step(bench: Bench) -> None:
    reader = Reader(bench)
    for handle in (1, 2, 3):
        reader.stream.start(handle, bench.spec())
    bench.host.remove(bench.table, LossCause.FAULT, (1, 3))
    reader.read()
    assert {end.reason for end in reader.ends.values()} == {FinishReason.ENGINE_LOST}
    assert {end.loss_cause for end in reader.ends.values()} == {LossCause.FAULT}
    roles = {handle: end.step_role for handle, end in reader.ends.items()}
    assert roles == {1: StepRole.SHARED, 2: StepRole.BYSTANDER, 3: StepRole.SHARED}


def test_an_engine_that_hangs_in_a_step_names_who_it_computes(bench: Bench) -> None:
    reader = Reader(bench)
    for handle in (1, 2):
        reader.stream.start(handle, bench.spec())
    bench.members = (2,)
    bench.clock.now_s += 60.0
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert {end.loss_cause for end in reader.ends.values()} == {LossCause.OUTSIDE}
    roles = {handle: end.step_role for handle, end in reader.ends.items()}
    assert roles == {1: StepRole.BYSTANDER, 2: StepRole.ALONE}


def test_a_suspect_is_submitted_as_one(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, replace(bench.spec(), apart_tokens=2))
    assert [command.apart_tokens for command in bench.commands(wire.Submit)] == [2]
