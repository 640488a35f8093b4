"""Lines and traces of a timeline. Structure of traces: monotone, nested or disjoint, on named tracks."""

from random import Random

import pytest

from fairway.timelines import chrome_trace, lines_of, neighbours_of
from fairway.v1 import controlplane_pb2 as pb
from tests.support.timelines import check_trace, sample_timeline


def test_a_trace_is_well_formed() -> None:
    trace = chrome_trace(sample_timeline())
    check_trace(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert "this request, choice 0" in names
    assert "beta req_" + "b" * 24 in names
    assert " (not recorded)" in names
    bars = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"request", "queue", "prefill", "decode", "prefill 32", "GRANTED", "step of 3"} <= {*bars}
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == 1
    stages = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert sum(event["dur"] for event in stages[1:]) == stages[0]["dur"], "the stages sum to the request"


@pytest.mark.parametrize("seed", range(30))
def test_traces_of_any_steps_are_well_formed(seed: int) -> None:
    """Steps in order as a worker's answer has them, clocks off by up to a second, parts missing."""
    rng, found = Random(seed), sample_timeline()
    if rng.random() < 0.3:
        found.ClearField("finished")
    host, skew_us = found.workers[0], rng.randrange(-1_000_000, 1_000_000)
    at_us = host.steps[0].start_unix_us + skew_us
    for step in host.steps:
        at_us += rng.choice((0, rng.randrange(90_000)))
        step.start_unix_us, step.took_us = at_us, rng.choice((0, rng.randrange(1, 90_000)))
        at_us += step.took_us
    if rng.random() < 0.3:
        host.sequences[0].ended_unix_us = 0
        host.sequences[0].reason = ""
    check_trace(chrome_trace(found))
    lines = lines_of(found)
    assert [line.at_us for line in lines] == sorted(line.at_us for line in lines)
    assert all(line.took_us >= 0 for line in lines)


def test_a_trace_whose_bars_cross_is_found() -> None:
    found = sample_timeline()
    found.workers[0].steps[1].start_unix_us -= 7_000
    with pytest.raises(AssertionError, match="cross"):
        check_trace(chrome_trace(found))


def test_lines_group_steps_and_show_what_was_slow() -> None:
    lines = {(line.what, line.at_us): line.detail for line in lines_of(sample_timeline())}
    assert lines["prefill in 2 steps", 25_000] == (
        "64 tokens; with 1 other; 960 prompt tokens of others; mean 14.2 ms, longest 14.5 ms"
    )
    assert lines["decode in 2 steps", 54_500] == "with 1 to 2 others; mean 5.2 ms, longest 5.5 ms"
    assert ("preempted", 66_000) in lines
    assert ("in no step", 65_500) in lines
    assert lines["decode in 1 step", 133_000] == "slow: 5.0 ms predicted; with 1 other"
    assert lines["placement", 2100] == "GRANTED; no room at 7 of 9 looks; best of 1"
    assert lines["length", 199_500] == "6 output tokens"


def test_neighbours_are_ranked_by_their_prefill() -> None:
    first, second = neighbours_of(sample_timeline())
    assert (first.tenant, first.steps, first.prefilled_tokens, first.output_tokens) == ("beta", 6, 960, 4)
    assert (second.request_id, second.steps) == ("", 1)


def test_nothing_but_an_id_has_no_line_and_an_empty_trace() -> None:
    empty = pb.GetTimelineResponse(request_id="r")
    assert lines_of(empty) == []
    check_trace(chrome_trace(empty))
