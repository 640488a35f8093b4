"""Probes have recorded shapes, fit the engine, end in time, and judge what comes back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.core.estimates.traffic_shapes import DEFAULT_SHAPES, RequestShape, SamplingKind
from services.core.fixed_cost.signature import ANY, TensorSpec
from services.worker.engine.sequence import ModelLimits, refusal
from services.worker.engine_protocol import Ready, RowCosts
from services.worker.policy.probes import (
    MOST_DEADLINE_S,
    MOST_OUTPUT_TOKENS,
    MOST_PREFILL_S,
    SLACK_S,
    EngineSpeed,
    answer_problem,
    plan_probe,
    plan_row_probe,
)

READY = Ready(64, 16, 1024, 500, 0, 0)
SPEED = EngineSpeed(512, 0.1)
KINDS = [kind for kind in SamplingKind if kind is not SamplingKind.ROW]
SHAPES = st.builds(RequestShape, st.integers(0, 1 << 20), st.integers(0, 1 << 16), st.sampled_from(KINDS))


@given(
    st.lists(SHAPES, max_size=6),
    st.integers(1, 200),
    st.sampled_from((1, 16, 64)),
    st.integers(2, 5000),
    st.floats(0, 100),
)
@example([], 1, 16, 2, 5e-324)
def test_every_prompt_is_one_that_the_engine_takes(
    shapes: list[RequestShape], blocks: int, size: int, longest: int, full_step_s: float
) -> None:
    longest = min(longest, blocks * size)
    if longest < 2:
        return
    plan = plan_probe(shapes, Ready(blocks, size, longest, 500, 0, 0), EngineSpeed(512, full_step_s))
    prompts = [one for each in plan.rounds for one in each]
    assert [one.handle for one in prompts] == list(range(1, len(prompts) + 1))
    assert [refusal(one, ModelLimits(500, longest)) for one in prompts] == [None] * len(prompts)
    assert all(one.credit_limit == one.limits.max_tokens for one in prompts)
    for together in plan.rounds:
        needed = sum(-(-(len(one.prompt.ids) + one.limits.max_tokens) // size) for one in together)
        assert needed <= blocks
    assert SLACK_S <= plan.deadline_s <= MOST_DEADLINE_S


def test_recorded_lengths_are_probed_and_the_longest_within_the_context() -> None:
    shapes = (RequestShape(300, 9, SamplingKind.SAMPLED), RequestShape(5000, 700, SamplingKind.GREEDY))
    plan = plan_probe(shapes, READY, SPEED)
    lengths = [(len(one.prompt.ids), one.limits.max_tokens) for each in plan.rounds for one in each]
    assert lengths == [(300, 9), (1024 - MOST_OUTPUT_TOKENS, MOST_OUTPUT_TOKENS)]


def test_a_prompt_that_would_take_too_long_is_cut() -> None:
    slow = EngineSpeed(512, 10.0)
    plan = plan_probe((RequestShape(100_000, 4, SamplingKind.GREEDY),), ready_for(1 << 20), slow)
    (prompt,) = plan.rounds[0]
    assert len(prompt.prompt.ids) == int(MOST_PREFILL_S / 10.0 * 512)


def ready_for(tokens: int) -> Ready:
    return Ready(tokens // 16, 16, tokens, 500, 0, 0)


def test_the_deadline_follows_the_cost() -> None:
    shapes = (RequestShape(512, 10, SamplingKind.GREEDY),)
    assert plan_probe(shapes, READY, EngineSpeed(512, 0.0)).deadline_s == SLACK_S
    assert plan_probe(shapes, READY, SPEED).deadline_s == pytest.approx(SLACK_S + 10 * (1 + 10) * 0.1)


def test_ids_depend_on_the_shape_alone() -> None:
    one, same = plan_probe(DEFAULT_SHAPES, READY, SPEED), plan_probe(DEFAULT_SHAPES, READY, SPEED)
    assert one == same
    ids = [tuple(prompt.prompt.ids) for each in one.rounds for prompt in each]
    assert len(set(ids)) == len(DEFAULT_SHAPES)


def test_without_recorded_shapes_or_with_those_of_rows_the_defaults_are_used() -> None:
    expected = plan_probe(DEFAULT_SHAPES, READY, SPEED)
    assert plan_probe((), READY, SPEED) == expected
    assert plan_probe((RequestShape(9, 0, SamplingKind.ROW),), READY, SPEED) == expected


@pytest.mark.parametrize(
    ("tokens", "reason", "error", "problem"),
    [
        ([1, 2, 3, 4], "length", "", ""),
        ([1, 2, 3], "length", "", "3 of 4 tokens"),
        ([1, 2, 3, 4], "stop", "", "the end 'stop'"),
        ([1, 2, 3, 500], "length", "", "outside of the vocabulary of 500"),
        ([1, 2, 3, -1], "length", "", "outside of the vocabulary"),
        ([], "error", "cannot do that", "cannot do that"),
        ([1], "not_finite", "", "no finite numbers"),
        ([1], "preempted", "", "1 of 4 tokens, and then the end 'preempted'"),
    ],
)
def test_answers_are_judged(tokens: list[int], reason: str, error: str, problem: str) -> None:
    asked = plan_probe((RequestShape(8, 4, SamplingKind.GREEDY),), READY, SPEED).rounds[0][0]
    found = answer_problem(asked, tokens, reason, error, 500)
    assert (problem in found) if problem else not found


COSTS = RowCosts(0.001, 0.0001, 0.00001, 4096, 1024)
TOKENS = (
    TensorSpec("input_ids", "INT64", (ANY,), has_length=True),
    TensorSpec("kinds", "INT64", (ANY,), True, True),
)


def rows(*widths: int) -> tuple[RequestShape, ...]:
    return tuple(RequestShape(width, 0, SamplingKind.ROW) for width in widths)


def test_rows_have_recorded_widths_within_the_model_s() -> None:
    plan = plan_row_probe(rows(40, 900, 7), TOKENS, COSTS, max_tokens=512, memory_bytes=0)
    assert [row[0].shape for row in plan.rows] == [(512,), (40,), (7,)]
    assert [[tensor.name for tensor in row] for row in plan.rows] == [["input_ids"]] * 3
    assert all(len(row[0].data) == 8 * row[0].shape[0] for row in plan.rows)
    assert plan.width == 512


def test_rows_stay_within_the_memory_of_a_batch() -> None:
    one_row = 4096 + 512 * 1024
    plan = plan_row_probe(rows(512, 40, 7), TOKENS, COSTS, max_tokens=512, memory_bytes=2 * one_row)
    assert len(plan.rows) == 2
    least = plan_row_probe(rows(512, 40, 7), TOKENS, COSTS, max_tokens=512, memory_bytes=1)
    assert len(least.rows) == 1


def test_rows_of_pictures_have_no_width() -> None:
    picture = (TensorSpec("pixel_values", "FP32", (3, 32, 32)),)
    plan = plan_row_probe(rows(0), picture, picture_costs(), max_tokens=0, memory_bytes=0)
    assert (plan.width, plan.rows[0][0].shape) == (0, (3, 32, 32))


def test_pictures_of_any_size_have_the_largest_recorded_one_in_one_batch() -> None:
    picture = (TensorSpec("pixel_values", "FP32", (3, ANY, ANY), is_image=True),)
    costs = RowCosts(0.001, 0.0001, 0.01, 4096, 1 << 20)
    plan = plan_row_probe(rows(49, 1), picture, costs, max_tokens=512, memory_bytes=0)
    assert (plan.width, [row[0].shape for row in plan.rows]) == (49, [(3, 224, 224)] * 2)
    assert plan.deadline_s > 10 * 2 * 49 * 0.01
    tight = plan_row_probe(rows(49, 1), picture, costs, max_tokens=512, memory_bytes=50 << 20)
    assert len(tight.rows) == 1


def picture_costs() -> RowCosts:
    return RowCosts(0.001, 0.0001, 0.0, 4096, 0)
