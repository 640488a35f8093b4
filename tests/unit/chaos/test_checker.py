"""The checker of the drills sees what it is there to see: each test records what a planted bug would show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.checker import (
    Allowance,
    Holding,
    Reference,
    Verdict,
    judge,
    process_leaks,
    still_taken,
    unhealed,
)
from tests.chaos.outcome import End, Outcome
from tests.chaos.report import Row, line, result

REFERENCE = Reference((5, 6, 7, 8), "abcd", greedy=True)
CALM = Allowance(silence_s=2.0)
FREE = Holding("worker-0", "READY", 0, 0, 0, 0)


def finished() -> Outcome:
    """A request that nothing happened to."""
    outcome = Outcome(1, 0, "gateway", began_s=10.0, accepted_s=10.1, silence_s=0.3)
    outcome.take(0, [5, 6], "ab")
    outcome.take(2, [7, 8], "cd")
    outcome.end, outcome.ended_s = End.FINISHED, 11.0
    return outcome


def verdict_of(outcome: Outcome, allowance: Allowance = CALM) -> Verdict:
    return judge([outcome], {0: REFERENCE}, allowance)


def test_a_request_that_nothing_happened_to_passes() -> None:
    verdict = verdict_of(finished())
    assert verdict.violations == []
    assert verdict.parted == []
    assert verdict.longest_silence_s == 0.3


def test_a_cancelled_request_with_the_first_tokens_passes() -> None:
    outcome = Outcome(1, 0, "gateway", began_s=10.0, accepted_s=10.1)
    outcome.take(0, [5, 6, 7], "abc")
    outcome.end = End.CANCELLED
    assert verdict_of(outcome).violations == []
    assert verdict_of(outcome).parted == []


def test_a_dropped_terminal_event_is_a_lost_request() -> None:
    outcome = replace(finished(), end=End.TRUNCATED)
    assert "without a terminal event" in verdict_of(outcome).lost[0]


def test_a_request_of_which_nothing_is_known_is_lost() -> None:
    assert len(verdict_of(replace(finished(), end=None)).lost) == 1


def test_a_request_that_hangs_is_lost() -> None:
    assert "gave up" in verdict_of(replace(finished(), end=End.HANGING)).lost[0]


def test_a_repeated_token_is_seen() -> None:
    outcome = Outcome(1, 0, "gateway", began_s=10.0)
    outcome.take(0, [5, 6], "ab")
    outcome.take(1, [6, 7, 8], "bcd")
    outcome.end = End.FINISHED
    assert any("repeated" in each for each in verdict_of(outcome).wrong)


def test_a_lost_token_is_seen() -> None:
    outcome = Outcome(1, 0, "gateway", began_s=10.0)
    outcome.take(0, [5], "a")
    outcome.take(2, [7, 8], "cd")
    outcome.end = End.FINISHED
    assert any("tokens lost" in each for each in verdict_of(outcome).wrong)


def test_lost_tokens_at_the_end_are_seen() -> None:
    outcome = Outcome(1, 0, "gateway", began_s=10.0)
    outcome.take(0, [5, 6, 7], "abc")
    outcome.end = End.FINISHED
    assert any("3 tokens" in each for each in verdict_of(outcome).wrong)


def test_an_event_after_the_terminal_one_is_seen() -> None:
    outcome = finished()
    outcome.take(4, [9], "e")
    assert any("after the terminal" in each for each in verdict_of(outcome).wrong)


@pytest.mark.parametrize("ids", [[5, 6, 9, 8], [4, 6, 7, 8]])
def test_other_tokens_than_undisturbed_are_parted(ids: list[int]) -> None:
    outcome = replace(finished(), ids=ids)
    assert verdict_of(outcome).parted == [outcome]


def test_other_text_with_the_same_tokens_is_parted() -> None:
    outcome = replace(finished(), text="abxd")
    assert verdict_of(outcome).parted == [outcome]


def test_a_stall_is_seen_but_not_a_slow_reader() -> None:
    outcome = replace(finished(), silence_s=2.5)
    assert any("without an event" in each for each in verdict_of(outcome).wrong)
    assert verdict_of(replace(outcome, slow=True)).violations == []


def test_an_error_is_lost_unless_the_drill_allows_its_reason() -> None:
    outcome = replace(finished(), end=End.ERROR, reason="STREAM_BROKEN")
    assert len(verdict_of(outcome).lost) == 1
    allowing = replace(CALM, reasons=frozenset({"STREAM_BROKEN"}))
    assert verdict_of(outcome, allowing).lost == []


def test_a_broken_connection_is_lost_unless_the_fault_was_its_gateways() -> None:
    outcome = replace(finished(), end=End.TRANSPORT, reason="UNAVAILABLE", silence_s=9.0)
    assert len(verdict_of(outcome).lost) == 1
    assert verdict_of(outcome, replace(CALM, gateways=frozenset({"gateway"}))).violations == []
    assert len(verdict_of(outcome, replace(CALM, gateways=frozenset({"gateway-1"}))).lost) == 1


def test_a_terminal_event_is_due_even_from_the_gateway_that_is_hit() -> None:
    outcome = replace(finished(), end=End.TRUNCATED)
    assert len(verdict_of(outcome, replace(CALM, gateways=frozenset({"gateway"}))).lost) == 1


def test_leaked_blocks_and_sequences_are_seen() -> None:
    assert still_taken([FREE]) == ""
    for leak in (
        replace(FREE, kv_blocks_reserved=1),
        replace(FREE, kv_blocks_used=1),
        replace(FREE, running=1),
        replace(FREE, waiting=1),
    ):
        assert "worker-0" in still_taken([FREE, leak])


def test_a_replica_that_is_missing_or_not_ready_is_seen() -> None:
    other = replace(FREE, worker="worker-1")
    assert unhealed([FREE, other], replicas=2) == ""
    assert "1 of 2" in unhealed([FREE], replicas=2)
    assert "1 of 2" in unhealed([FREE, replace(other, state="RESTARTING")], replicas=2)
    assert unhealed([FREE, other, replace(other, state="FAILED")], replicas=2) != ""


def test_a_leaked_process_is_seen() -> None:
    expected = {"gateway": 1, "worker-0": 2}
    assert process_leaks(expected, expected) == []
    assert process_leaks({"gateway": 1, "worker-0": 3}, expected) == ["worker-0 has 3 processes instead of 2"]
    assert process_leaks({"worker-0": 2, "proxy": 1}, expected) != []


def test_the_last_line_counts_what_was_found() -> None:
    bad = Row("bad", lost=["a", "b"], leaks=["c"])
    skipped = Row("skipped", skipped="needs root")
    assert result([Row("good"), bad, skipped]) == (
        'RESULT {"drills": 2, "passed": 1, "lost_requests": 2, "leaks": 1}'
    )
    assert "FAILED" in line(bad)
    assert "FAILED" not in line(Row("good"))
