from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.client.errors import StreamDiverged
from fairway.client.ledger import Ledger
from fairway.client.values import Accepted, TokenLogprobs, Tokens

IDS = tuple(range(100, 160))
TEXTS = tuple(f"<{one}>" if one % 3 else "" for one in IDS)  # some tokens' text comes with a later one


def accepted(seed: int = 1, digest: str = "sha256:x", request_id: str = "r") -> Accepted:
    return Accepted(request_id, "tiny", digest, 1, seed, 3)


def cut(points: set[int], upto: int = len(IDS), *, shift_text: int = 0) -> list[Tokens]:
    """The stream in pieces; a part of each piece's text may come with the next one."""
    edges = sorted({0, upto, *(point for point in points if point < upto)})
    found, pending = [], ""
    for start, end in pairwise(edges):
        text = pending + "".join(TEXTS[start:end])
        held = min(shift_text, len(text)) if end < len(IDS) else 0
        text, pending = text[: len(text) - held], text[len(text) - held :]
        logprobs = tuple(TokenLogprobs(str(one), -1.0, ()) for one in IDS[start:end])
        found.append(Tokens(0, start, IDS[start:end], text, logprobs))
    return found


POINTS = st.sets(st.integers(1, len(IDS) - 1), max_size=20)


@given(st.lists(st.tuples(POINTS, st.integers(0, len(IDS)), st.integers(0, 9)), max_size=5), POINTS)
def test_each_token_and_character_comes_once_however_often_it_breaks(
    broken: list[tuple[set[int], int, int]], last: set[int]
) -> None:
    ledger = Ledger()
    found: list[Tokens] = []
    attempts = [cut(points, upto, shift_text=held) for points, upto, held in broken]
    for pieces in [*attempts, cut(last)]:
        ledger.attempt_began()
        ledger.accept(accepted())
        for piece in pieces:
            news = ledger.news(piece)
            if news is not None:
                assert news.offset == sum(len(one.ids) for one in found)
                assert len(news.logprobs) == len(news.ids)
                found.append(news)
    assert tuple(one for piece in found for one in piece.ids) == IDS
    assert "".join(piece.text for piece in found) == "".join(TEXTS)
    assert tuple(one.token for piece in found for one in piece.logprobs) == tuple(map(str, IDS))
    assert ledger.delivered_tokens == ledger.furthest == len(IDS)


@given(st.integers(1, len(IDS) - 1), POINTS, POINTS, st.data())
def test_other_tokens_under_the_same_key_are_noticed(
    delivered: int, first: set[int], second: set[int], data: st.DataObject
) -> None:
    ledger = Ledger()
    for piece in cut(first, delivered):
        ledger.news(piece)
    wrong = data.draw(st.integers(0, delivered - 1))
    ledger.attempt_began()
    with pytest.raises(StreamDiverged):
        for piece in cut(second):
            ids = tuple(one + (piece.offset + at == wrong) for at, one in enumerate(piece.ids))
            ledger.news(Tokens(0, piece.offset, ids, piece.text))


@pytest.mark.parametrize("offset", [0, 2, 4])
def test_a_gap_or_an_overlap_is_noticed(offset: int) -> None:
    ledger = Ledger()
    ledger.news(Tokens(0, 0, (1, 2, 3), ""))
    with pytest.raises(StreamDiverged, match="instead of 3"):
        ledger.news(Tokens(0, offset, (9,), ""))


def test_choices_are_apart() -> None:
    ledger = Ledger()
    assert ledger.news(Tokens(1, 0, (1, 2), "ab")) == Tokens(1, 0, (1, 2), "ab")
    assert ledger.news(Tokens(0, 0, (5,), "c")) == Tokens(0, 0, (5,), "c")
    ledger.attempt_began()
    assert ledger.news(Tokens(1, 0, (1,), "a")) is None
    assert ledger.news(Tokens(0, 0, (5, 6), "cd")) == Tokens(0, 1, (6,), "d")
    assert (ledger.delivered(0), ledger.delivered(1), ledger.delivered(2)) == (2, 2, 0)
    assert ledger.furthest == 2


def test_a_replay_to_the_stream_that_was_accepted_first_is_none() -> None:
    ledger = Ledger()
    assert ledger.accept(accepted(1))
    ledger.attempt_began()
    assert not ledger.accept(replace(accepted(1), replayed=True))
    assert ledger.accepted == accepted(1)
    other = Ledger()
    assert other.accept(replace(accepted(1), replayed=True))
    assert other.accepted is not None
    assert other.accepted.replayed


def test_accepted_is_news_until_something_was_delivered() -> None:
    ledger = Ledger()
    assert ledger.accept(accepted(1))
    ledger.attempt_began()
    assert not ledger.accept(accepted(1))
    assert ledger.accept(accepted(2)), "another run, of which nothing was delivered"
    ledger.news(Tokens(0, 0, (1,), "a"))
    ledger.attempt_began()
    assert not ledger.accept(accepted(2, request_id="another gateway's"))
    for other in (accepted(3), accepted(2, digest="sha256:y")):
        ledger.accepted = accepted(2)
        with pytest.raises(StreamDiverged):
            ledger.accept(other)
