"""Proposals from the text itself, against a search through all of it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine.speculation.speculator import (
    GRAM,
    MAX_CANDIDATES,
    MAX_MATCH,
    WINDOW,
    PromptLookup,
    SuffixIndex,
)
from tests.support.submits import make_submit


def found_by_search(tokens: list[int], most: int) -> list[int]:
    """What followed the longest, then latest, earlier run that the text ends with."""
    best, best_agreeing = 0, 0
    candidates = [end for end in range(GRAM, len(tokens)) if tokens[end - GRAM : end] == tokens[-GRAM:]]
    for end in candidates[-MAX_CANDIDATES:]:
        agreeing = 0
        while agreeing < min(end, MAX_MATCH) and tokens[end - 1 - agreeing] == tokens[-1 - agreeing]:
            agreeing += 1
        if agreeing >= best_agreeing:
            best, best_agreeing = end, agreeing
    if not best_agreeing:
        return []
    text = list(tokens)
    for place in range(most):
        text.append(text[best + place])
    return text[len(tokens) :]


def sequence(handle: int, tokens: list[int]) -> SequenceState:
    command = make_submit(handle, tokens, 99, seed=0, max_tokens=99)
    return sequence_of(command, arrival=0, eos_ids=frozenset())


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=6), min_size=1, max_size=12),
    again=st.lists(st.integers(0, 11), max_size=4),
    most=st.integers(1, 9),
)
def test_it_proposes_what_a_search_finds(parts: list[list[int]], again: list[int], most: int) -> None:
    """The text grows as a sequence does: what is asked early does not spoil what is asked later."""
    text = [token for part in parts for token in part]
    text += [token for place in again for token in parts[place % len(parts)]]
    index = SuffixIndex()
    for end in range(1, len(text) + 1):
        assert index.after(text[:end], most) == found_by_search(text[:end], most)


def test_no_more_places_are_compared_than_a_look_may() -> None:
    text = [1, 0, 0, 0, *([0] * 8), 1, 0, 0, 0]
    assert SuffixIndex().after(text, 1) == [1]
    assert SuffixIndex().after(text[:5] + text[-4:], 1) == [0]


def test_asking_now_and_then_finds_what_asking_always_finds() -> None:
    text = [place * place % 23 for place in range(400)]
    often, seldom = SuffixIndex(), SuffixIndex()
    answers = [often.after(text[:end], 5) for end in range(1, 401)]
    for end in range(37, 401, 37):
        assert seldom.after(text[:end], 5) == answers[end - 1]


def test_a_repetition_is_continued() -> None:
    assert SuffixIndex().after([9, 1, 2, 3, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_what_left_the_window_is_not_found() -> None:
    marked = [1, 2, 3, 4, 5]
    for gap, expected in ((WINDOW - 20, [4, 5]), (WINDOW + 20, [])):
        text = [*marked, *range(100, 100 + gap), 1, 2, 3]
        assert SuffixIndex().after(text, 2) == expected
        index = SuffixIndex()
        for end in range(1, len(text), 997):
            index.after(text[:end], 2)
        assert index.after(text, 2) == expected


def test_each_sequence_has_its_own_text(submit: Any) -> None:
    proposer = PromptLookup(max_sequences=2)
    one, two = sequence(1, [1, 2, 3, 7, 1, 2, 3]), sequence(2, [1, 2, 3, 8, 1, 2, 3])
    three = sequence(3, [4, 5, 6])
    assert proposer.propose([(one, 1), (two, 1)]) == [[7], [8]]
    assert proposer.propose([(three, 4), (one, 2), (two, 0)]) == [[], [7, 1], []]
    for handle in (1, 2, 3, 3):
        proposer.forget(handle)
    assert proposer.propose([(one, 3)]) == [[7, 1, 2]]
