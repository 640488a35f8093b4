"""How often a name was asked for: never too few, seldom too many, and forgotten in time."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.prefix.eviction import MOST, FrequencySketch


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2**64 - 1).map(lambda name: name % 40 + 1), max_size=100))
def test_it_counts_at_least_what_was_asked(names: list[int]) -> None:
    sketch = FrequencySketch(128)
    counted: dict[int, int] = {}
    for name in names:
        counted[name] = counted.get(name, 0) + 1
        assert sketch.count(name) == sketch.requests(name) >= min(MOST, counted[name])


def test_names_that_nobody_asked_for_seldom_count() -> None:
    rng = Random(1)
    sketch = FrequencySketch(1024)
    for _ in range(1023):
        sketch.count(rng.getrandbits(64))
    strangers = [rng.getrandbits(64) for _ in range(2000)]
    assert sum(sketch.requests(name) > 0 for name in strangers) < 0.025 * len(strangers)


def test_one_ask_outlives_one_halving_and_no_more() -> None:
    rng = Random(2)
    sketch = FrequencySketch(100)
    name = rng.getrandbits(64)
    seen: list[int] = []
    for _ in range(3):
        sketch.count(name) if not seen else sketch.count(rng.getrandbits(64))
        for _ in range(99):
            sketch.count(rng.getrandbits(64))
        seen.append(sketch.requests(name))
    assert seen[0] == 1
    assert seen[2] == 0


def test_counts_end_at_the_most() -> None:
    sketch = FrequencySketch(1000)
    for _ in range(40):
        sketch.count(7)
    assert sketch.requests(7) == MOST
