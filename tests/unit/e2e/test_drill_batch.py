"""The checks of the batch drill: what it would not notice is not shown."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from tests.e2e.drill_batch import Used, charge_problems, first_token_s, problems_beside, reported

ANSWERED = {"a": Used(1, 5, 8), "b": Used(1, 6, 8)}
NO_KILLS, KILLS = Counter[str](), Counter({"gateway": 1})


def charged(user: str, requests: int, prompt: int, output: int) -> dict[str, Any]:
    """Return a record as `fairway usage -o json` prints it."""
    record = {"requests": str(requests), "source": "USAGE_SOURCE_GATEWAY"}
    return record | {"user": user, "prompt_tokens": str(prompt), "output_tokens": str(output)}


A, B = charged("a", 1, 5, 8), charged("b", 1, 6, 8)


def test_what_lines_report_is_read_from_their_answers() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    line = {"custom_id": "a", "response": {"body": {"usage": usage}}}
    assert reported([line]) == {"a": Used(1, 5, 8)}


def test_equal_charges_are_in_order() -> None:
    assert charge_problems(ANSWERED, [A, B]) == []
    workers = charged("", 1, 6, 8) | {"source": "USAGE_SOURCE_WORKER"}
    assert charge_problems(ANSWERED, [A, workers]) == [], "its gateway died before it reported"


@pytest.mark.parametrize(
    "records",
    [
        [A, charged("b", 2, 12, 16)],
        [A, charged("b", 1, 6, 9)],
        [A],
        [A, B, charged("", 1, 6, 8)],
        [A, charged("", 1, 6, 16)],
        [A, B, charged("c", 1, 6, 8)],
        [charged("a", 2, 10, 16), charged("", 0, 0, 0)],
    ],
    ids=["twice", "tokens", "not", "twice-nameless", "nameless-tokens", "no-answer", "one-for-another"],
)
def test_every_difference_is_a_problem(records: list[dict[str, Any]]) -> None:
    assert charge_problems(ANSWERED, records)


def test_a_batch_that_stands_or_is_over_makes_the_ratio_void() -> None:
    assert problems_beside([0, 3, 5, 9, 12], 20, Counter(), KILLS) == []
    assert problems_beside([0, 3, 3, 9, 12], 20, Counter(), KILLS)
    assert problems_beside([20, 20, 20, 20, 20], 20, Counter(), KILLS)
    assert problems_beside([0, 3, 5, 9, 12], 20, Counter({"500": 1}), KILLS)
    assert problems_beside([0, 3, 5, 9, 12], 20, Counter(), NO_KILLS)


def test_a_stream_counts_only_with_a_token_and_its_end() -> None:
    token, done = b'data: {"choices": [{"text": "x"}]}\n', b"data: [DONE]\n"
    assert first_token_s([b"\n", token, token, done], time.monotonic()) >= 0.0
    for stream in ([done], [token], [b'data: {"error": {"code": "QUEUE_TIMEOUT"}}\n', done]):
        with pytest.raises(ValueError, match="a stream"):
            first_token_s(stream, time.monotonic())
