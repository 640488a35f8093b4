"""The kernels against float64, under Triton's interpreter: they are run, not compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from services.worker.engine.cuda.plan import Cutting, Padding
from tests.triton.steps import Shape, Step, expected, filled, new_rows, run, steps, tensors_of

pytestmark = pytest.mark.timeout(900)  # the interpreter takes a second for an example, or many

FREE = Cutting(tile=16, rows=16, pieces=3)
EXACT = Cutting(tile=16, rows=16, pieces=3, exact=True, exact_tokens=32)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
# The interpreter takes a second for an example; to explain a failure it would run it traced, for minutes.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)

LONG = Step(Shape(), ((1, 70), (1, 3)), 1)  # several pieces, the last not whole
CHUNK = Step(Shape(kv_heads=1, group=3, dim=6, block_size=3), ((21, 45),), 2)  # full and masked tiles
WINDOW = Step(Shape(window=17, dim=4), ((20, 50), (1, 60)), 3)
BFLOAT16 = Step(Shape(dtype=torch.bfloat16), ((18, 30), (1, 33)), 4)


@given(steps(), st.sampled_from([FREE, EXACT]))
@example(LONG, FREE)
@example(LONG, EXACT)
@example(CHUNK, FREE)
@example(WINDOW, FREE)
@example(WINDOW, EXACT)
@example(BFLOAT16, FREE)
@settings(max_examples=25, deadline=None, phases=PHASES)
def test_any_mix_of_decodes_and_chunks_attends_as_in_float64(step: Step, cutting: Cutting) -> None:
    tensors = tensors_of(step)
    result = run(filled(step, tensors, cutting), step, tensors)
    assert result.dtype == step.shape.dtype
    tolerance = TOLERANCE[step.shape.dtype]
    torch.testing.assert_close(result.double(), expected(step, tensors), atol=tolerance, rtol=tolerance)


def test_keys_and_values_are_written_where_the_step_says_and_nowhere_else() -> None:
    step = WINDOW
    tensors = tensors_of(step)
    attention = filled(step, tensors, FREE)
    before = [pool.clone() for pool in attention.cache.pool(0)]
    run(attention, step, tensors)
    for pool, earlier, written in zip(attention.cache.pool(0), before, new_rows(step, tensors), strict=True):
        torch.testing.assert_close(pool[step.slots()], written, atol=0, rtol=0)
        earlier[step.slots()] = written
        assert torch.equal(pool, earlier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_fixed_cuts_a_row_is_the_same_in_any_batch_and_chunk(dtype: torch.dtype) -> None:
    """Bit for bit: decoded alone, decoded beside others, and prefilled in chunks of any length."""
    shape = Shape(dtype=dtype, window=41)
    whole = Step(shape, ((50, 50),), 5)
    tensors = tensors_of(whole)
    rows = run(filled(whole, tensors, EXACT), whole, tensors)
    for first, last in ((49, 50), (37, 50), (12, 20)):
        part = Step(shape, ((last - first, last), (1, 70), (3, 9)), 6)
        others = tensors_of(part)
        mine = slice(0, last - first)
        others.q[mine] = tensors.q[first:last]
        others.keys[0], others.values[0] = tensors.keys[0][:last], tensors.values[0][:last]
        again = run(filled(part, others, EXACT), part, others)
        assert torch.equal(again[mine], rows[first:last])


@pytest.mark.parametrize("padding", [None, Padding((1, 5), scratch_slot=0, table_entries=64)])
def test_what_kernels_are_given_is_aligned(padding: Padding | None) -> None:
    """Each other alignment of each argument would be compiled anew, in the middle of serving."""
    for spans in (((1, 13), (1, 5), (1, 2)), ((11, 20), (1, 3))):
        step = Step(Shape(), spans, 8)
        attention = filled(step, tensors_of(step), FREE, padding)
        attention.begin(step.columns, step.slots())
        assert all(table.data_ptr() % 16 == 0 for table in attention.tables if len(table))


@pytest.mark.parametrize("cutting", [FREE, EXACT])
def test_padding_changes_no_row_and_writes_to_its_own_block_only(cutting: Cutting) -> None:
    """As a replayed graph does: all rows of the padded size are computed."""
    step = Step(Shape(window=9), ((1, 40), (1, 7), (1, 1)), 7)
    tensors = tensors_of(step)
    plain = run(filled(step, tensors, cutting), step, tensors)
    scratch = step.blocks * step.shape.block_size
    padding = Padding((2, 5), scratch_slot=scratch, table_entries=64)
    attention = filled(step, tensors, cutting, padding)
    before = [pool.clone() for pool in attention.cache.pool(0)]
    attention.begin(step.columns, step.slots())
    assert attention.shape is not None
    assert attention.shape.rows == 5
    noise = torch.full((2, 4, 8), 9.0)
    keys, values = new_rows(step, tensors)
    padded = attention.attend(
        0,
        torch.cat((tensors.q, noise)),
        torch.cat((keys, noise[:, :2])),
        torch.cat((values, noise[:, :2])),
    )
    tolerance = 0.0 if cutting.exact else 3e-6
    torch.testing.assert_close(padded[:3], plain, atol=tolerance, rtol=tolerance)
    assert not padded[3:].any()
    for pool, earlier in zip(attention.cache.pool(0), before, strict=True):
        pool[step.slots()] = earlier[step.slots()]
        assert torch.equal(pool[:scratch], earlier[:scratch])
