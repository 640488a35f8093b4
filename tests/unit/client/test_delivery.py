from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairway.client.errors import StreamDiverged
from fairway.client.generation import DeliveryPositions
from fairway.client.values import (
    Accepted,
    ChoiceResult,
    Finished,
    FinishReason,
    StageClock,
    TokenLogprobs,
    Tokens,
    Usage,
)
from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText, answer_of

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
    positions = DeliveryPositions()
    found: list[Tokens] = []
    attempts = [cut(points, upto, shift_text=held) for points, upto, held in broken]
    for pieces in [*attempts, cut(last)]:
        positions.attempt_began()
        positions.accept(accepted())
        for piece in pieces:
            news = positions.undelivered(piece)
            if news is not None:
                assert news.offset == sum(len(one.ids) for one in found)
                assert len(news.logprobs) == len(news.ids)
                found.append(news)
    assert tuple(one for piece in found for one in piece.ids) == IDS
    assert "".join(piece.text for piece in found) == "".join(TEXTS)
    assert tuple(one.token for piece in found for one in piece.logprobs) == tuple(map(str, IDS))
    assert positions.delivered_tokens == positions.max_delivered == len(IDS)


# By its meaning: reasoning, content, two calls, the second of them without arguments, and content again.
WHOLE = (
    ReasoningText("why"),
    ContentText("so"),
    CallDelta(0, "c0", "f", '{"a": 1}'),
    CallDelta(1, "c1", "g"),
    ContentText("then"),
)


def in_pieces(points: set[int]) -> list[tuple[OutputPart, ...]]:
    """The parts of an output in several events, cut anywhere."""
    found: list[tuple[OutputPart, ...]] = []
    event: list[OutputPart] = []
    at = 0
    for part in WHOLE:
        text = part.arguments if isinstance(part, CallDelta) else part.text
        for number in range(max(1, len(text))):
            if isinstance(part, CallDelta):
                head = part if not number else CallDelta(part.index)
                event.append(replace(head, arguments=text[number : number + 1]))
            else:
                event.append(replace(part, text=text[number : number + 1]))
            at += 1
            if at in points:
                found.append(tuple(event))
                event = []
    return [*found, tuple(event)]


CUTS = st.sets(st.integers(1, 18))


@given(st.lists(st.tuples(CUTS, st.integers(0, 18)), max_size=5), CUTS)
@example([({13}, 1)], set())
def test_parts_come_once_however_they_are_cut(broken: list[tuple[set[int], int]], last: set[int]) -> None:
    positions = DeliveryPositions()
    found: list[OutputPart] = []
    *pieces, rest = in_pieces(last)
    for attempt in [*(in_pieces(points)[:upto] for points, upto in broken), pieces]:
        positions.attempt_began()
        for offset, parts in enumerate(attempt):
            news = positions.undelivered(Tokens(0, offset, (offset,), "", (), parts))
            found += news.parts if news is not None else ()
    result = ChoiceResult(0, FinishReason.STOP, "", 9, rest)
    end = Finished((result,), Usage(1, 1, 0), StageClock(0, *[0.0] * 8), 0)
    found += positions.last(end).choices[0].parts
    assert answer_of(found) == answer_of(WHOLE)
    assert all(part.name or part.arguments if isinstance(part, CallDelta) else part.text for part in found)
    assert [part.name for part in found if isinstance(part, CallDelta) and part.name] == ["f", "g"]


@given(st.integers(1, len(IDS) - 1), POINTS, POINTS, st.data())
def test_other_tokens_under_the_same_key_are_noticed(
    delivered: int, first: set[int], second: set[int], data: st.DataObject
) -> None:
    positions = DeliveryPositions()
    for piece in cut(first, delivered):
        positions.undelivered(piece)
    wrong = data.draw(st.integers(0, delivered - 1))
    positions.attempt_began()
    with pytest.raises(StreamDiverged):
        for piece in cut(second):
            ids = tuple(one + (piece.offset + at == wrong) for at, one in enumerate(piece.ids))
            positions.undelivered(Tokens(0, piece.offset, ids, piece.text))


@pytest.mark.parametrize("offset", [0, 2, 4])
def test_a_gap_or_an_overlap_is_noticed(offset: int) -> None:
    positions = DeliveryPositions()
    positions.undelivered(Tokens(0, 0, (1, 2, 3), ""))
    with pytest.raises(StreamDiverged, match="instead of 3"):
        positions.undelivered(Tokens(0, offset, (9,), ""))


def test_choices_are_apart() -> None:
    positions = DeliveryPositions()
    assert positions.undelivered(Tokens(1, 0, (1, 2), "ab")) == Tokens(1, 0, (1, 2), "ab")
    assert positions.undelivered(Tokens(0, 0, (5,), "c")) == Tokens(0, 0, (5,), "c")
    positions.attempt_began()
    assert positions.undelivered(Tokens(1, 0, (1,), "a")) is None
    assert positions.undelivered(Tokens(0, 0, (5, 6), "cd")) == Tokens(0, 1, (6,), "d")
    assert (positions.delivered(0), positions.delivered(1), positions.delivered(2)) == (2, 2, 0)
    assert positions.max_delivered == 2


def test_a_replay_to_the_stream_that_was_accepted_first_is_none() -> None:
    positions = DeliveryPositions()
    assert positions.accept(accepted(1))
    positions.attempt_began()
    assert not positions.accept(replace(accepted(1), replayed=True))
    assert positions.accepted == accepted(1)
    other = DeliveryPositions()
    assert other.accept(replace(accepted(1), replayed=True))
    assert other.accepted is not None
    assert other.accepted.replayed


def test_accepted_is_news_until_something_was_delivered() -> None:
    positions = DeliveryPositions()
    assert positions.accept(accepted(1))
    positions.attempt_began()
    assert not positions.accept(accepted(1))
    assert positions.accept(accepted(2)), "another run, of which nothing was delivered"
    positions.undelivered(Tokens(0, 0, (1,), "a"))
    positions.attempt_began()
    assert not positions.accept(accepted(2, request_id="another gateway's"))
    for other in (accepted(3), accepted(2, digest="sha256:y")):
        positions.accepted = accepted(2)
        with pytest.raises(StreamDiverged):
            positions.accept(other)
