"""Every family, head count and scaling of positions against transformers, over drawn schedules."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from tests.support.engine_oracle import ROPES, Shape, compare_schedules, oracle_of, save

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
HEADS = ((3, 1), (5, 5), (6, 2))
HEAD_DIMS = (24, 40, 80)
PLAIN = tuple(
    Shape(family, *heads, head_dim, rope)
    for family, heads, head_dim, rope in product(FAMILIES, HEADS, HEAD_DIMS, ROPES)
)
WINDOWED = tuple(
    Shape(family, 6, 2, 40, rope, window)
    for family, rope, window in product(FAMILIES[1:], ("default", "yarn", "dynamic"), (7, 64))
)
EXAMPLES = 8

worked: Counter[str] = Counter()


@pytest.mark.parametrize("shape", [*PLAIN, *WINDOWED], ids=str)
def test_it_answers_as_transformers_does(shape: Shape, tmp_path: Path) -> None:
    seed = sum(str(shape).encode())
    oracle = oracle_of(shape, save(shape, tmp_path, seed=seed))
    worked.update(compare_schedules(oracle, tmp_path, seed=seed, examples=EXAMPLES))
    worked.update({"compared": oracle.compared, "excused": oracle.excused})
    oracle.check()


def test_every_mechanism_was_at_work() -> None:
    """Runs last; prints how much of each there was."""
    print(dict(worked))
    assert min(worked[name] for name in ("cached", "preemptions", "mixed steps", "accepted")) > 0
