"""Bit for bit the same request, alone and in company: families, heads, scalings of positions, data types."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.engine_neighbours import HAPPENED, compare_neighbours
from tests.support.engine_oracle import Shape, save

SHAPES = (
    Shape("Llama", 3, 1, 24, "llama3"),
    Shape("Llama", 5, 5, 80, "dynamic"),
    Shape("Mistral", 6, 2, 40, "yarn", window=21),
    Shape("Qwen2", 5, 5, 24, "longrope"),
    Shape("Qwen2", 6, 2, 80, "linear", window=7),
    Shape("Qwen3", 3, 1, 40, "default"),
)
DTYPES = ("float32", "bfloat16")
EXAMPLES = 60

pytestmark = pytest.mark.timeout(900)

worked: dict[str, Counter[str]] = {dtype: Counter() for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_neighbour_changes_a_bit(shape: Shape, dtype: str, tmp_path: Path) -> None:
    save(shape, tmp_path)
    seed = sum(f"{shape}-{dtype}".encode())
    worked[dtype].update(compare_neighbours(tmp_path, seed=seed, examples=EXAMPLES, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mechanism_was_at_work(dtype: str) -> None:
    """Runs last; prints how much of each there was."""
    print(dtype, dict(worked[dtype]))
    assert min(worked[dtype][name] for name in (*HAPPENED, "preemptions", "mixed steps")) > 0
