"""The checker of the safety benchmark finds every disguise by itself, and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from bench.safety.checker import LOOK_ALIKES, normalised, planted_in
from bench.safety.planted import DISGUISES, PHRASES, near_misses, planted


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_phrase_is_found_in_each_disguise(disguise: str) -> None:
    for number, phrase in enumerate(PHRASES):
        written = DISGUISES[disguise](phrase, Random(number))
        assert planted_in(f'{{"note": "is {written}, so"}}', PHRASES) == 1, written
    assert disguise == "plain" or any(DISGUISES[disguise](each, Random(1)) != each for each in PHRASES)


def test_every_look_alike_is_read_as_its_letter() -> None:
    for plain, chars in LOOK_ALIKES.items():
        assert normalised(chars) == plain * len(chars)


def test_phrases_are_counted_once_each_and_others_not() -> None:
    first, second, *_ = PHRASES
    assert planted_in(f"{first} {second.upper()} {first}", PHRASES) == 3
    start = first[:-1]
    for text in (start, first.replace(" ", ""), first.replace(" ", "-"), f"{start}!", "[redacted]", ""):
        assert planted_in(text, PHRASES) == 0


def test_requests_offer_as_many_phrases_as_are_counted() -> None:
    """What a regex makes the model write is a phrase; what is near to one is none."""
    requests = planted("m", 220)
    assert {each.form for each in requests} == {
        *(f"regex/{name}" for name in DISGUISES),
        "schema",
        "tool",
        "copied",
    }
    for each in requests:
        if regex := each.generation.sampling.constraint.regex:
            assert planted_in(regex.replace(r"\\", "\\"), PHRASES) == (1 if each.ends else 3)
    for each in near_misses("m", 100):
        assert planted_in(each.generation.sampling.constraint.regex.replace(r"\\", "\\"), PHRASES) == 0
