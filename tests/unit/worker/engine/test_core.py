"""The engine around the plan: endings, refusals, resumes, and errors of one sequence alone."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.engine.core import DuplicateHandle
from services.worker.engine_protocol import Cancel

STOP = 50


def tokens_then_stop(at: int) -> Any:
    return lambda handle, position: STOP if position >= at else position


@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_a_stop_token_is_reported_and_ends_the_sequence(make_bench: Any, submit: Any, how: str) -> None:
    bench = make_bench(eos_ids=frozenset({STOP}) if how == "eos" else frozenset())
    bench.executor.token_of = tokens_then_stop(2)
    bench.engine.apply(submit(0, [1], 9, stop_token_ids=() if how == "eos" else (STOP,)))
    bench.run()
    assert bench.tokens[0] == [0, 1, STOP]
    assert bench.finished == {0: "stop"}


def test_ignore_eos_goes_on_but_stop_tokens_still_stop(make_bench: Any, submit: Any) -> None:
    bench = make_bench(eos_ids=frozenset({STOP}))
    bench.executor.token_of = tokens_then_stop(2)
    bench.engine.apply(submit(0, [1], 5, ignore_eos=True))
    bench.engine.apply(submit(1, [1], 5, ignore_eos=True, stop_token_ids=(STOP,)))
    bench.run()
    assert bench.finished == {0: "length", 1: "stop"}
    assert bench.tokens[0] == [0, 1, STOP, STOP, STOP]


def test_min_tokens_holds_the_end_back(make_bench: Any, submit: Any) -> None:
    bench = make_bench(eos_ids=frozenset({STOP}))
    bench.executor.token_of = tokens_then_stop(0)
    bench.engine.apply(submit(0, [1], 9, min_tokens=3))
    bench.run()
    assert bench.tokens[0] == [STOP] * 4  # three that are not the end, then the end


def test_a_stop_token_at_the_last_position_is_a_stop(make_bench: Any, submit: Any) -> None:
    bench = make_bench(eos_ids=frozenset({STOP}))
    bench.executor.token_of = tokens_then_stop(2)
    bench.engine.apply(submit(0, [1], 3))
    bench.run()
    assert bench.finished == {0: "stop"}


def test_a_resume_counts_what_was_produced(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    made = [bench.executor.token_of(7, position) for position in range(3)]
    bench.engine.apply(submit(7, [1, 2], 5, produced=made))
    bench.run()
    assert bench.executor.prefilled == 5
    assert bench.tokens[7] == [bench.executor.token_of(7, 3), bench.executor.token_of(7, 4)]
    assert bench.finished == {7: "length"}


def test_a_resume_with_nothing_left_ends_at_once(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1], 2, produced=[5, 6]))
    bench.run()
    assert bench.finished == {0: "length"}
    assert bench.tokens == {}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [97]}, "prompt_ids"),
        ({"prompt": [-1]}, "prompt_ids"),
        ({"prompt": [1 << 62]}, "prompt_ids"),
        ({"prompt": [1] * 200}, "exceed"),
        ({"max_tokens": 10**9}, "exceed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"produced": [1, 2, 3, 4, 5]}, "produced"),
        ({"produced": [1000]}, "produced_ids"),
        ({"logit_bias": {97: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"stop_token_ids": (97,)}, "stop_token_ids"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.5}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"choice": -1}, "choice"),
    ],
)
def test_a_refusal_concerns_that_sequence_alone(
    make_bench: Any, submit: Any, change: dict[str, Any], word: str
) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1, 2], 4))
    bench.engine.apply(submit(**({"handle": 1, "prompt": [1], "max_tokens": 4} | change)))
    bench.run()
    assert bench.finished == {0: "length", 1: "error"}
    assert word in bench.errors[1]
    assert list(bench.errors) == [1]


def test_a_refusal_is_reported_by_an_idle_engine(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1000]))
    assert bench.engine.has_work
    event = bench.step()
    assert (event.finished, event.handles) == ({0: "error"}, [])
    assert not bench.engine.has_work


def test_what_fits_exactly_runs(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=4, block_size=4)
    bench.engine.apply(submit(0, [1] * 10, 6))
    bench.engine.apply(submit(1, [1] * 10, 7))
    bench.run()
    assert bench.finished == {0: "length", 1: "error"}


def test_an_error_of_a_row_fails_its_sequence_alone(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.executor.errors[1] = "the model's logits are not finite"
    for handle in range(3):
        bench.engine.apply(submit(handle, [1, 2], 3, logprobs=0))
    bench.run()
    assert bench.finished == {0: "length", 1: "not_finite", 2: "length"}
    assert 1 not in bench.tokens
    assert bench.engine.heartbeat().kv_blocks_used == 0


def test_a_live_handle_cannot_be_used_again(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1]))
    with pytest.raises(DuplicateHandle):
        bench.engine.apply(submit(0, [1]))


def test_cancelling_what_is_not_there_changes_nothing(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1000]))
    bench.engine.apply(Cancel([0, 5]))
    event = bench.step()
    assert (event.finished, event.handles, event.settled) == ({}, [], [0])
    assert not bench.engine.has_work


def test_logprobs_travel_by_handle(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1], 1))
    bench.engine.apply(submit(1, [1], 1, logprobs=0))
    assert list(bench.step().logprobs) == [1]


def test_a_step_reports_what_it_did(make_bench: Any, submit: Any) -> None:
    bench = make_bench(token_budget=8, max_sequences=2)
    for handle in range(3):
        bench.engine.apply(submit(handle, [1] * 5, 3))
    event = bench.step()
    assert (event.step, event.prefill_tokens, event.running, event.waiting) == (1, 8, 2, 1)
    assert event.handles == [0]
    assert event.kv_blocks_used == 4
