"""What operators are told of a request's placements, and that remembering it is bounded."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.core.decisions import PLACED_ALONE, QUEUED, RUNNING_BEFORE
from services.core.fleet import ReportedSequence, SequenceUsage
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.rpc.convert.scheduler import decision_to_proto
from services.scheduler.explain.decision_log import MAX_EXPLAINED, MAX_FOUND, MAX_RANKED, DecisionLog
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, demand_of
from services.scheduler.policy.placement.choose import NO_ROOM, Chosen, PlacementProfile, choose
from services.scheduler.queue.waiting import QueuedPlacement
from tests.support.clocks import HandClock
from tests.support.place_specs import PLACE_SPEC

PROFILE = PlacementProfile()
SPEC = replace(PLACE_SPEC, request_id="r1", max_output_tokens=8)
CANDIDATE = Candidate("w1", 1600, 1600, 16, 4, 0)


def waiting(spec: PlaceSpec, *, bypassed: int = 0) -> QueuedPlacement:
    demand = demand_of(spec.prompt_tokens, spec.max_output_tokens, 8)
    query = PlaceQuery(demand, spec.excluded_workers, prefix_hashes=(1, 2))
    return QueuedPlacement(
        session=1,
        placement_id=1,
        spec=spec,
        demand=demand,
        number=1,
        deadline_s=0.0,
        size_bytes=1,
        query=query,
        arrival_us=0,
        due_us=0,
        bypassed=bypassed,
    )


@pytest.fixture
def log() -> DecisionLog:
    found = DecisionLog(HandClock(100.0), PROFILE)
    found.term_started(7)
    return found


def clock_of(log: DecisionLog) -> HandClock:
    assert isinstance(log._clock, HandClock)
    return log._clock


def test_a_grant_is_told_with_who_could_have_had_it(log: DecisionLog) -> None:
    item = waiting(SPEC, bypassed=3)
    none = choose(item.query, [structs.replace(CANDIDATE, kv_tokens_room=0)], PROFILE, Random(1))
    others = [
        CANDIDATE,
        structs.replace(CANDIDATE, worker_id="w2", kv_tokens_room=100),
        structs.replace(CANDIDATE, worker_id="w3", draining=True),
        structs.replace(CANDIDATE, worker_id="w4", slots=0),
    ]
    found = choose(item.query, others, PROFILE, Random(1), cached_tokens={"w1": 32})
    assert isinstance(found, Chosen)
    log.entered(SPEC)
    log.decided(item, none)
    item.counter = 12.5
    log.decided(item, found)
    clock_of(log).now_s = 102.0
    log.ended(SPEC, "GRANTED", 100.0, 102.0, found.worker_id)
    clock_of(log).now_s = 500.0
    (told,) = log.explain("r1")
    assert (told.outcome, told.worker_id, told.wait_s, told.epoch) == ("GRANTED", "w1", 2.0, 7)
    assert (told.looks, told.bypassed, told.counter_tokens) == (2, 3, 12.5)
    assert (told.prompt_tokens, told.reserved_tokens, told.queued_unix_s) == (40, 48, 100.0)
    assert [one.worker_id for one in told.ranked] == ["w1", "w2"]
    best = told.ranked[0]
    assert best.in_draw
    assert best.cached_tokens == 32
    weighed = {scorer.__name__: weight for scorer, weight in PROFILE.scorers}
    assert sum(weighed[name] * value for name, value in best.parts) == pytest.approx(best.score)
    assert {one.filter: (one.workers, one.named) for one in told.rejections} == {
        "not_draining": (1, ("w3",)),
        "has_sequence_slot": (1, ("w4",)),
    }
    log.check_integrity()


def test_what_waits_is_told_as_it_stands(log: DecisionLog) -> None:
    log.entered(SPEC)
    clock_of(log).now_s += 3.0
    (told,) = log.explain("r1")
    assert (told.outcome, told.wait_s, told.ranked) == (QUEUED, 3.0, ())


def test_a_refusal_at_the_door_is_told(log: DecisionLog) -> None:
    log.ended(SPEC, "QUEUE_FULL", 100.0, 100.0, "")
    assert [(told.outcome, told.wait_s) for told in log.explain("r1")] == [("QUEUE_FULL", 0.0)]
    log.check_integrity()


def test_placements_again_are_a_list_over_terms(log: DecisionLog) -> None:
    for epoch, worker in ((7, "w1"), (9, "w2")):
        log.term_started(epoch)
        log.entered(SPEC)
        log.ended(SPEC, "GRANTED", 100.0, 100.0, worker)
    log.entered(replace(SPEC, choice=1, excluded_workers=("w1",)))
    told = log.explain("r1")
    found = [(one.epoch, one.choice, one.worker_id) for one in told]
    assert found == [(7, 0, "w1"), (9, 0, "w2"), (9, 1, "")]
    assert told[2].excluded_workers == ("w1",)


def test_what_waited_when_a_term_ended_waits_no_more(log: DecisionLog) -> None:
    gone = replace(SPEC, request_id="r2")
    for spec in (SPEC, gone):
        log.entered(spec)
    clock_of(log).now_s += 2.0
    log.term_started(9)
    clock_of(log).now_s += 5.0
    log.entered(SPEC)
    told = log.explain("r1")
    assert [(one.epoch, one.outcome, one.wait_s) for one in told] == [(7, "NO_LEADER", 2.0), (9, QUEUED, 0.0)]
    log.term_started(11)
    assert [(one.outcome, one.wait_s) for one in log.explain("r2")] == [("NO_LEADER", 2.0)]


def test_what_ran_before_the_leader_is_told(log: DecisionLog) -> None:
    log.entered(SPEC)
    log.ended(SPEC, "GRANTED", 100.0, 100.0, "w1")
    live = [ReportedSequence(name, 0, "acme", "d", 3) for name in ("r1", "r2")]
    log.found_running("w1", live)
    assert [one.outcome for one in log.explain("r1")] == ["GRANTED"], "it is known how it came there"
    (told,) = log.explain("r2")
    assert (told.outcome, told.worker_id, told.epoch) == (RUNNING_BEFORE, "w1", 7)


def test_what_a_gateway_placed_alone_is_told_as_that(log: DecisionLog) -> None:
    """It may have waited here until its gateway heard no leader."""
    log.entered(SPEC)
    log.term_started(9)
    live = ReportedSequence("r1", 0, "acme", "d", 3, placed_alone=True)
    for _ in range(2):
        log.found_running("w1", [live, replace(live, choice=1, placed_alone=False)])
    told = [(one.choice, one.outcome, one.worker_id, one.epoch) for one in log.explain("r1")]
    assert told == [
        (0, "NO_LEADER", "", 7),
        (0, PLACED_ALONE, "w1", 9),
        (1, RUNNING_BEFORE, "w1", 9),
    ], "a stream that opens again tells it a second time"
    log.check_integrity()


def test_what_a_gateway_placed_alone_and_ended_before_a_leader_came_is_told(log: DecisionLog) -> None:
    last = SequenceUsage("r1", 2, "acme", "d", 40, 8, ended=True, placed_alone=True, priority=Priority.BATCH)
    clock_of(log).now_s = 103.0
    for _ in range(2):
        log.found_ended("w1", [last, replace(last, request_id="r2", placed_alone=False)])
    (told,) = log.explain("r1")
    assert (told.outcome, told.worker_id, told.epoch, told.choice) == (PLACED_ALONE, "w1", 7, 2)
    assert (told.tenant, told.version_digest, told.priority) == ("acme", "d", Priority.BATCH)
    assert (told.prompt_tokens, told.queued_unix_s, told.wait_s) == (40, 103.0, 0.0)
    assert log.explain("r2") == (), "its leader knew"
    log.check_integrity()


def test_what_was_placed_alone_is_told_once_whether_it_runs_or_ended(log: DecisionLog) -> None:
    """Also where a leader had placed it before, on the same worker."""
    log.entered(SPEC)
    log.ended(SPEC, "GRANTED", 100.0, 100.0, "w1")
    log.found_running("w1", [ReportedSequence("r1", 0, "acme", "d", 3, placed_alone=True)])
    log.found_ended("w1", [SequenceUsage("r1", 0, "acme", "d", 48, 8, placed_alone=True)])
    log.found_ended("w2", [SequenceUsage("r1", 0, "acme", "d", 56, 8, placed_alone=True)])
    told = [(one.outcome, one.worker_id, one.prompt_tokens) for one in log.explain("r1")]
    assert told == [("GRANTED", "w1", 40), (PLACED_ALONE, "w1", 48), (PLACED_ALONE, "w2", 56)]


def test_of_a_report_that_names_very_many_a_bounded_number_is_told(log: DecisionLog) -> None:
    log.found_ended("w1", (SequenceUsage(f"r{n}", 0, "t", "d", 1, 1, placed_alone=True) for n in range(9999)))
    assert log.entries == MAX_FOUND


def test_an_answer_is_bounded_whatever_a_client_names_its_requests(log: DecisionLog) -> None:
    """All under one id, with the largest fleet: the newest placements, and the best workers of each."""
    item = waiting(SPEC)
    fleet = [structs.replace(CANDIDATE, worker_id=f"worker-{number:0>100}") for number in range(200)]
    found = choose(item.query, fleet, replace(PROFILE, sample=None), Random(1))
    for number in range(500):
        spec = replace(SPEC, attempt=number)
        log.entered(spec)
        log.decided(waiting(spec), found)
        log.ended(spec, "GRANTED", 100.0, 100.0, "w1")
    told = log.explain("r1")
    assert [one.attempt for one in told] == list(range(500 - MAX_EXPLAINED, 500))
    assert max(len(one.ranked) for one in told) == MAX_RANKED
    size_bytes = sum(decision_to_proto(one).ByteSize() for one in told)
    assert size_bytes < 1024 * 1024


def test_unknown_requests_have_no_decisions(log: DecisionLog) -> None:
    assert log.explain("nobody") == ()


@pytest.mark.parametrize("bounds", [{"max_entries": 5}, {"max_bytes": 8000}])
def test_the_oldest_are_forgotten_and_it_says_since_when(bounds: dict[str, int]) -> None:
    clock = HandClock(100.0)
    log = DecisionLog(clock, PROFILE, **bounds)
    assert log.since_unix_s == 100.0
    for number in range(20):
        clock.now_s = 200.0 + number
        log.entered(replace(SPEC, request_id=f"r{number}"))
        log.check_integrity()
    assert log.entries == 5
    assert log.size_bytes <= 8000
    assert log.explain("r14") == ()
    assert log.explain("r15") != ()
    assert log.since_unix_s == 214.0
    log.ended(replace(SPEC, request_id="r3"), "GRANTED", 203.0, 220.0, "w1")  # forgotten while it waited
    log.check_integrity()
    assert [told.outcome for told in log.explain("r3")] == ["GRANTED"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("enter", "decide", "look in vain", "end", "term", "found")), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_in_any_order_the_books_agree(turns: list[tuple[str, int]]) -> None:
    log = DecisionLog(HandClock(100.0), PROFILE, max_entries=4, max_bytes=9000)
    found = choose(waiting(SPEC).query, [CANDIDATE], PROFILE, Random(1))
    for turn, number in turns:
        spec = replace(SPEC, request_id=f"r{number}")
        match turn:
            case "enter":
                log.entered(spec)
            case "decide":
                log.decided(waiting(spec), found)
            case "look in vain":
                log.decided(waiting(spec), NO_ROOM)
            case "end":
                log.ended(spec, "GRANTED", 100.0, 100.0, "w1")
            case "term":
                log.term_started(number)
            case _:
                log.found_running("w1", [ReportedSequence(spec.request_id, 0, "t", "d", 1)])
        log.check_integrity()
        log.explain(spec.request_id)
