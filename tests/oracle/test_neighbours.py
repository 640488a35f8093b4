"""Bit for bit the same request, alone and in company: families, head counts, scalings of positions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.engine_neighbours import compare_neighbours
from tests.support.engine_oracle import Shape, save

SHAPES = (
    Shape("Llama", 3, 1, 24, "llama3"),
    Shape("Llama", 5, 5, 80, "dynamic"),
    Shape("Mistral", 6, 2, 40, "yarn", window=21),
    Shape("Qwen2", 5, 5, 24, "longrope"),
    Shape("Qwen2", 6, 2, 80, "linear", window=7),
    Shape("Qwen3", 3, 1, 40, "default"),
)
EXAMPLES = 60

worked: Counter[str] = Counter()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_neighbour_changes_a_bit(shape: Shape, tmp_path: Path) -> None:
    save(shape, tmp_path)
    worked.update(compare_neighbours(tmp_path, seed=sum(str(shape).encode()), examples=EXAMPLES))


def test_every_mechanism_was_at_work() -> None:
    """Runs last; prints how much of each there was."""
    print(dict(worked))
    assert min(worked[name] for name in ("cached", "preemptions", "mixed steps", "accepted")) > 0
