"""Where the text is cut into pieces changes nothing; a stop string never gets out, not even in part."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.detokenizer import StopFinder

ALPHABET = "aaaabbbbé😀"  # few letters: stop strings overlap and contain each other
texts = st.text(alphabet=ALPHABET, max_size=40)
stop_lists = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str]:
    """The match that ends first, of two the one that starts first; by brute force."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, ""


def streamed(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    finder = StopFinder(stops)
    out = ""
    for piece in pieces:
        text, stop = finder.feed(piece)
        out += text
        if stop:
            return out, stop
    return out + finder.flush(), ""


@settings(max_examples=500, deadline=None)
@given(texts, stop_lists, st.data())
def test_equals_the_search_in_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(pieces, stops) == reference(text, stops)
    assert streamed(list(text), stops) == reference(text, stops)


@settings(deadline=None)
@given(texts, stop_lists)
def test_what_is_out_is_never_the_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    out = ""
    for char in text:
        piece, stop = finder.feed(char)
        out += piece
        if stop:
            break
        assert not any(out.endswith(other) for other in stops)


def test_no_text_is_held_back_that_cannot_begin_a_match() -> None:
    finder = StopFinder(["END"])
    assert finder.feed("xE") == ("x", "")
    assert finder.feed("x") == ("Ex", "")
    assert finder.feed("EN") == ("", "")
    assert finder.feed("DE") == ("", "END")


def test_the_match_that_ends_first_wins() -> None:
    finder = StopFinder(["abab", "b"])
    assert finder.feed("xabab") == ("xa", "b")
    assert StopFinder(["b", "ab"]).feed("xab") == ("x", "ab")


def test_an_empty_stop_string_is_none() -> None:
    assert StopFinder(["", "b"]).feed("ab") == ("a", "b")
    assert StopFinder([""]).feed("ab") == ("ab", "")
