"""The families in bfloat16 against transformers, over drawn schedules, by the rule of ``engine_bfloat16``."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from tests.support.engine_bfloat16 import bfloat16_oracle, check_counts
from tests.support.engine_oracle import ROPES, Shape, compare_schedules, save

HEADS = ((3, 1), (5, 5), (6, 2))
HEAD_DIMS = (24, 40, 80)
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
SHAPES = (
    *(
        Shape(family, *HEADS[number % 3], HEAD_DIMS[number // 3 % 3], rope)
        for number, (family, rope) in enumerate(product(FAMILIES, ROPES))
    ),
    *(Shape(family, 6, 2, 40, "default", window) for family, window in product(FAMILIES[1:], (7, 64))),
)
EXAMPLES = 8

pytestmark = pytest.mark.timeout(900)

worked: Counter[str] = Counter()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_answers_as_transformers_does(shape: Shape, tmp_path: Path) -> None:
    seed = sum(str(shape).encode())
    oracle = bfloat16_oracle(shape, tmp_path, save(shape, tmp_path, seed=seed))
    for number, mode in enumerate(("auto", "free")):  # auto: exact where operators are
        options = {"dtype": "bfloat16", "mode": mode}
        worked.update(
            compare_schedules(oracle, tmp_path, seed=seed + number, examples=EXAMPLES // 2, options=options)
        )
    worked.update(compared=oracle.compared, excused=oracle.excused, theirs=oracle.theirs)
    oracle.check()


def test_all_together_are_as_near_as_transformers_own_bfloat16() -> None:
    """Runs last; prints how much of each there was."""
    print(dict(worked))
    check_counts(worked["excused"], worked["theirs"])
    assert min(worked[name] for name in ("cached", "preemptions", "mixed steps", "accepted")) > 0
