"""A quick part of ``make engine-oracle``: against transformers over drawn schedules, and bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.engine_bfloat16 import bfloat16_oracle
from tests.support.engine_neighbours import BEFORE, compare_neighbours
from tests.support.engine_oracle import Shape, compare_schedules, oracle_of, save

SHAPES = (
    Shape("Llama", 3, 1, 24, "yarn"),
    Shape("Mistral", 5, 5, 40, "linear", window=21),
    Shape("Qwen2", 6, 2, 80, "llama3"),
    Shape("Qwen3", 3, 1, 40, "dynamic"),
)


worked: Counter[str] = Counter()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_answers_as_transformers_does(shape: Shape, tmp_path: Path) -> None:
    oracle = oracle_of(shape, save(shape, tmp_path))
    worked.update(compare_schedules(oracle, tmp_path, seed=len(str(shape)), examples=6))
    oracle.check()


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_in_bfloat16_it_answers_as_transformers_does(shape: Shape, tmp_path: Path) -> None:
    oracle = bfloat16_oracle(shape, tmp_path, save(shape, tmp_path))
    options = {"dtype": "bfloat16"}
    worked.update(compare_schedules(oracle, tmp_path, seed=len(str(shape)), examples=6, options=options))
    oracle.check()


@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[0], "float32"), (SHAPES[1], "bfloat16")], ids=str)
def test_no_neighbour_changes_a_bit(shape: Shape, dtype: str, tmp_path: Path) -> None:
    save(shape, tmp_path)
    worked.update(compare_neighbours(tmp_path, seed=1, examples=20, dtype=dtype))


def test_every_mechanism_was_at_work() -> None:
    """Runs last: what the others compare is the output with all of these in play."""
    names = ("cached", "preemptions", "mixed steps", "accepted", *BEFORE)
    assert min(worked[name] for name in names) > 0, worked
