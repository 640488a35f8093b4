"""The contract of ``Grammars``: the same for the one of the tests and the one by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.adapters.grammars import grammars_of
from services.ports.grammars import GrammarRefused, Grammars, MaskRequest, Matcher
from tests.support.grammars import EOS, IDS, SIZE, ChoiceGrammars, choice, write_tokenizer

COLOURS = choice("red", "green")


@pytest.fixture(params=["of the tests", "llguidance"])
def grammars(request: pytest.FixtureRequest, tmp_path: Path) -> Grammars:
    if request.param == "of the tests":
        return ChoiceGrammars()
    write_tokenizer(tmp_path)
    return grammars_of((tmp_path / "tokenizer.json").read_text(), eos_ids=[EOS], vocab_size=SIZE)


def masks(
    grammars: Grammars, matcher: Matcher, produced: Sequence[int] = (), proposals: Sequence[int] = ()
) -> list[set[int]]:
    """Return which tokens may come where the matcher stands and after each proposal."""
    bits = np.zeros((1 + len(proposals), grammars.row_bytes), np.uint8)
    assert grammars.fill([MaskRequest(matcher, 0, produced, proposals)], bits) == {}
    return [set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()) for row in bits]


def ids(*texts: str) -> list[int]:
    return [IDS[text] for text in texts]


def test_a_mask_has_the_tokens_that_begin_or_go_on_with_a_match(grammars: Grammars) -> None:
    matcher = grammars.compile(COLOURS)
    assert masks(grammars, matcher) == [set(ids("r", "re", "red", "g", "gre"))]
    (further,) = masks(grammars, matcher, ids("gre"))
    assert ids("e")[0] in further <= set(ids("e", "en"))  # certain text may have to come in its usual tokens


def test_the_end_may_come_exactly_where_the_output_is_complete(grammars: Grammars) -> None:
    matcher = grammars.compile(choice("a", "ab"))
    assert EOS not in masks(grammars, matcher)[0]
    assert masks(grammars, matcher, ids("a")) == [{EOS, *ids("b")}]
    assert masks(grammars, matcher, ids("b")) == [{EOS}]
    assert masks(grammars, matcher, [EOS]) == [{EOS}]  # where ends of sequence are ignored


def test_a_mask_behind_each_proposal_and_the_place_stays(grammars: Grammars) -> None:
    matcher = grammars.compile(COLOURS)
    found = masks(grammars, matcher, (), ids("gre", "e"))
    assert found[0] == set(ids("r", "re", "red", "g", "gre"))
    assert ids("e")[0] in found[1] <= set(ids("e", "en"))
    assert found[2] == set(ids("n"))
    assert masks(grammars, matcher) == found[:1]


def test_proposals_fit_as_far_as_the_grammar_goes(grammars: Grammars) -> None:
    matcher = grammars.compile(COLOURS)
    assert matcher.fitting(ids("gre", "e", "d")) == 2
    assert matcher.fitting(ids("x")) == 0
    assert masks(grammars, matcher, ids("gre", "en")) == [{EOS}]


def test_outputs_of_one_grammar_stand_apart(grammars: Grammars) -> None:
    first, second = grammars.compile(COLOURS), grammars.compile(COLOURS)
    first.consume(ids("red"))
    bits = np.zeros((2, grammars.row_bytes), np.uint8)
    assert grammars.fill([MaskRequest(first, 0), MaskRequest(second, 1)], bits) == {}
    found = [set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()) for row in bits]
    assert found == [{EOS}, set(ids("r", "re", "red", "g", "gre"))]


def test_tokens_that_do_not_fit_fail_that_output_alone(grammars: Grammars) -> None:
    first, second = grammars.compile(COLOURS), grammars.compile(COLOURS)
    bits = np.zeros((2, grammars.row_bytes), np.uint8)
    problems = grammars.fill([MaskRequest(first, 0, ids("red", "x")), MaskRequest(second, 1)], bits)
    assert list(problems) == [0]
    assert bits[1].any()
    with pytest.raises(GrammarRefused):
        first.consume(ids("x"))


@pytest.mark.parametrize("source", ["", "{}", "[", "[]"])
def test_malformed_constraints_are_refused(grammars: Grammars, source: str) -> None:
    with pytest.raises(GrammarRefused):
        grammars.compile(type(COLOURS)(COLOURS.kind, source))
