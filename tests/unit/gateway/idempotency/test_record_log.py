"""The log of a request under a key: pieces split and joined as they are needed, compared and trimmed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import IntegrityError
from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage
from services.core.outputs.forms import CALL_FORMS, OutputForm, ReasoningForm
from services.gateway.events import (
    Accepted,
    ChoiceResult,
    Delivered,
    DeliveredChoice,
    Finished,
    request_tag,
)
from services.gateway.idempotency.followers import RecordFollower
from services.gateway.idempotency.record_codec import (
    AcceptedTerms,
    Degraded,
    End,
    Logprobs,
    Output,
    RecordedFailure,
    Resumed,
    decode,
    degraded_out,
    encode,
    end_in,
    end_out,
    logprobs_in,
    logprobs_out,
)
from services.gateway.idempotency.record_log import (
    START,
    ChoiceLog,
    Diverged,
    Piece,
    Place,
    RecordLog,
    outputs,
)
from services.gateway.policy.degrade import Degradation, DegradationKind

ACCEPTED = Accepted("r", "m", "d", 1, 7, 3)
END = Finished((ChoiceResult(0, FinishReason.STOP, "", 9),), Usage(3, 9, device_s=0.25), StageClock(1))


def text_of(token: int) -> str:
    return f"<{token}>"


def piece(start: int, count: int) -> Piece:
    """Tokens ``start`` to ``start + count`` of the one output that there is; token n is n + 100."""
    ids = list(range(start + 100, start + count + 100))
    logprobs = tuple(
        TokenLogprobs(-1.0, (i,), (-1.0,), (text_of(i),), text_of(i), "", 0, b"\xc3", (b"\xa9",)) for i in ids
    )
    chars = sum(len(text_of(n + 100)) for n in range(start))
    return Piece(Place(start, chars), ids, "".join(map(text_of, ids)), logprobs)


def log_of(cuts: Sequence[int]) -> ChoiceLog:
    """A log of all tokens up to the last cut, in pieces that end at the cuts."""
    log, start = ChoiceLog(), 0
    for cut in sorted(set(cuts)):
        if cut > start:
            assert log.put(piece(start, cut - start))
            start = cut
    return log


def joined(pieces: Sequence[Piece]) -> tuple[list[int], str, int]:
    ids = [each for found in pieces for each in found.ids]
    return ids, "".join(found.text for found in pieces), sum(len(found.logprobs) for found in pieces)


cuts = st.lists(st.integers(1, 40), min_size=1, max_size=10)


@given(cuts, cuts)
def test_a_second_telling_in_other_pieces_adds_only_what_is_new(first: list[int], second: list[int]) -> None:
    log, start = log_of(first), 0
    for cut in sorted(set(second)):
        log.put(piece(start, cut - start))
        start = cut
    total = max(max(first), max(second))
    whole = piece(0, total)
    assert joined(list(log.pieces_from(START))) == (list(whole.ids), whole.text, total)
    assert log.end == whole.end
    assert log.size_bytes == sum(found.size_bytes for found in log.pieces)


@given(cuts, st.integers(0, 40), st.integers(1, 7))
def test_reading_in_small_steps_gives_every_token_and_character_once(
    found: list[int], trimmed: int, step: int
) -> None:
    log = log_of(found)
    read: list[Piece] = []
    place = START
    while (following := log.next_piece(place)) is not None:
        read.append(following.first(step))
        assert len(read[-1].ids) <= step
        place = read[-1].end
    whole = piece(0, max(found))
    assert joined(read) == (list(whole.ids), whole.text, max(found))
    before = log.end
    log.trim(piece(0, min(trimmed, max(found))).end)
    assert log.end == before


@given(cuts, st.integers(0, 39))
def test_a_log_that_is_cut_goes_on_differently(found: list[int], at: int) -> None:
    log = log_of(found)
    if at >= max(found):
        return
    other = piece(at, max(found) - at)
    other = Piece(other.at, [token + 1 for token in other.ids], other.text, other.logprobs)
    with pytest.raises(Diverged):
        log.put(other)
    log.cut(other.at)
    assert log.put(other)
    ids, _, _ = joined(list(log.pieces_from(START)))
    assert ids == [*piece(0, at).ids, *other.ids]


REST = "held back"


def with_rest(found: Sequence[int]) -> ChoiceLog:
    """The log, and behind its last token the text that an engine held back until the end."""
    log = log_of(found)
    assert log.put(Piece(log.end, [], REST, ()))
    return log


@given(cuts, st.integers(1, 7))
def test_text_behind_the_last_token_is_read_once(found: list[int], step: int) -> None:
    log, read, place = with_rest(found), "", START
    while (following := log.next_piece(place)) is not None:
        following = following.first(step)
        read, place = read + following.text, following.end
    assert read == piece(0, max(found)).text + REST
    assert place == log.end


@given(cuts)
def test_text_behind_the_last_token_is_recorded_with_it(found: list[int]) -> None:
    log = with_rest(found)
    last = log.pieces[-2]
    if kept := log.unrecorded(all_of_it=False):
        assert kept[-1].end == last.at
        log.recorded = kept[-1].end
    assert joined(log.unrecorded(all_of_it=True))[:2] == (list(last.ids), last.text + REST)


@given(cuts, cuts)
def test_text_behind_the_last_token_that_comes_again_adds_nothing(
    first: list[int], second: list[int]
) -> None:
    total = max(first)
    log = with_rest(first)
    again = with_rest([*(cut for cut in second if cut < total), total])
    assert [log.put(each) for each in again.pieces] == [False] * len(again.pieces)
    assert log.put(Piece(again.end, [], " more", ()))
    assert joined(list(log.pieces_from(START)))[1] == piece(0, total).text + REST + " more"


@given(cuts, st.integers(0, 40), st.integers(1, 6), st.booleans(), st.booleans())
def test_a_follower_that_has_a_part_receives_the_rest(
    found: list[int], had: int, window: int, early: bool, wrong: bool
) -> None:
    """Whether the log has it already or only later; other output than it had fails it."""
    total = max(found)
    had = min(had, total)
    before = piece(0, had)
    ids = [token + (wrong and token == 100) for token in before.ids]
    choice = DeliveredChoice().after(ids, before.text)
    log, sink = RecordLog(), Sink(had)
    follower = RecordFollower(
        sink,
        log,
        window_tokens=window,
        client_window=None,
        delivered=Delivered(request_tag(ACCEPTED.request_id), (choice,)),
        leave=lambda _, __: None,
    )
    if early:
        follower.accepted(ACCEPTED)
    pieces = with_rest(found).pieces
    for each in pieces:
        log.choice(0).put(each)
        follower.fresh(0, log.choice(0).pieces[-1])
        assert follower.place(0) == START or follower.place(0) >= before.end
    follower.accepted(ACCEPTED)
    follower.finished(END)
    taken = 0
    while len(sink.ids) > taken:
        count, taken = len(sink.ids) - taken, len(sink.ids)
        follower.credit(0, count)
    if wrong and had:
        assert sink.heard == ["accepted", "failed"]
        assert sink.ids == []
    else:
        assert sink.heard == ["accepted", "finished"]
        assert sink.ids == list(range(had + 100, total + 100))
        assert sink.text == piece(0, total).text[before.end.chars :] + REST


def test_a_follower_that_has_more_than_there_is_fails_at_the_end() -> None:
    log, sink = RecordLog(), Sink()
    more = piece(0, 9)
    delivered = Delivered(request_tag(ACCEPTED.request_id), (DeliveredChoice().after(more.ids, more.text),))
    follower = RecordFollower(
        sink, log, window_tokens=9, client_window=None, delivered=delivered, leave=lambda _, __: None
    )
    follower.accepted(ACCEPTED)
    log.choice(0).put(piece(0, 8))
    follower.fresh(0, log.choice(0).pieces[-1])
    follower.finished(END)
    assert sink.heard == ["accepted", "failed"]


def test_a_follower_of_another_request_is_failed_and_withdraws() -> None:
    log, sink, left = RecordLog(), Sink(), []
    follower = RecordFollower(
        sink,
        log,
        window_tokens=9,
        client_window=None,
        delivered=Delivered(request_tag("another"), (DeliveredChoice(),)),
        leave=lambda _, withdrawn: left.append(withdrawn),
    )
    follower.accepted(ACCEPTED)
    assert (sink.heard, left) == (["failed"], [True])


def test_a_gap_is_refused() -> None:
    with pytest.raises(IntegrityError):
        log_of([4]).put(piece(5, 1))


def test_the_last_piece_is_recorded_with_what_follows_or_the_end() -> None:
    log = log_of([3, 5, 6])
    assert joined(log.unrecorded(all_of_it=False))[0] == [100, 101, 102, 103, 104]
    assert joined(log.unrecorded(all_of_it=True))[0] == [100, 101, 102, 103, 104, 105]
    log.recorded = piece(0, 4).end
    assert joined(log.unrecorded(all_of_it=False)) == ([104], text_of(104), 1)
    assert log.ids(log.recorded) == (100, 101, 102, 103)


def test_pieces_of_a_choice_are_one_entry() -> None:
    log = RecordLog()
    for start in range(4):
        log.choice(1).put(piece(start, 1))
    pieces = log.unrecorded(all_of_it=False)
    (output,) = outputs(pieces)
    assert (output.choice, output.offset, output.ids) == (1, 0, [100, 101, 102])
    log.recorded(pieces)
    (output,) = outputs(log.unrecorded(all_of_it=True))
    assert (output.offset, output.chars, output.text) == (3, 15, text_of(103))


def test_entries_survive_their_encoding() -> None:
    entries = (
        AcceptedTerms(
            "r",
            "m",
            "d",
            2**63,
            2**64 - 1,
            3,
            4,
            5,
            (Degraded("output_capped", "9", "4", 0.7),),
            OutputForm(ReasoningForm("<a>", "</a>"), CALL_FORMS["mistral"], thinking=True, held=True),
            OutputForm(calls=CALL_FORMS["hermes"], names=("f", "g")),
        ),
        Resumed(),
        Output(1, 2, 3, [4, 5], "ü\0", logprobs_in(piece(0, 2).logprobs)),
        end_in(END),
        RecordedFailure("INVALID_INPUT", "no", {"field": "x"}),
    )
    found = decode(encode(entries))
    assert found[0] == entries[0]
    assert isinstance(found[2], Output)
    assert logprobs_out(found[2].logprobs) == piece(0, 2).logprobs
    assert isinstance(found[3], End)
    assert end_out(found[3]) == END
    assert end_out(found[3]).usage.device_s == END.usage.device_s
    assert found[4] == entries[4]
    assert encode(()) == b""


def test_a_record_of_a_release_without_degrading_is_read() -> None:
    old = msgspec.msgpack.encode([["a", "r", "m", "d", 1, 7, 3, 4, 5]])
    assert decode(old) == (AcceptedTerms("r", "m", "d", 1, 7, 3, 4, 5),)


def test_a_record_of_a_later_release_is_read_as_far_as_it_is_known() -> None:
    changes = [["output_capped", "9", "4", 0.7, "more"], ["colder", "1.0", "0.5", 0.9]]
    form = {"reasoning": None, "calls": None, "thinking": True, "more": ["f"]}
    entry = ["a", "r", "m", "d", 1, 7, 3, 4, 5, changes, form, None, "more"]
    (terms,) = decode(msgspec.msgpack.encode([entry]))
    assert isinstance(terms, AcceptedTerms)
    assert terms.form == OutputForm(thinking=True)
    assert degraded_out(terms.degraded) == (Degradation(DegradationKind.OUTPUT_CAPPED, "9", "4", 0.7),)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_chunk_are_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(IntegrityError):
        assert isinstance(decode(data), tuple)


class Sink:
    def __init__(self, had: int = 0) -> None:
        self.had = had
        self.ids: list[int] = []
        self.text = ""
        self.heard: list[str] = []

    def on_accepted(self, accepted: Accepted) -> None:
        self.heard.append("accepted")

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert self.heard == ["accepted"]
        assert offset == self.had + len(self.ids)
        self.ids += ids
        self.text += text

    def on_finished(self, finished: Finished) -> None:
        self.heard.append("finished")

    def on_failed(self, error: Exception) -> None:
        self.heard.append("failed")


@given(
    pieces=st.lists(st.integers(1, 5), max_size=12),
    window=st.integers(1, 6),
    client=st.one_of(st.none(), st.integers(1, 6)),
    steps=st.lists(st.sampled_from(["produce", "take", "allow", "accept", "finish"]), max_size=60),
)
def test_a_follower_stays_within_its_windows_and_hears_all(
    pieces: list[int], window: int, client: int | None, steps: list[str]
) -> None:
    log, sink, left = RecordLog(), Sink(), []
    follower = RecordFollower(
        sink,
        log,
        window_tokens=window,
        client_window=client,
        delivered=None,
        leave=lambda found, _: left.append(found),
    )
    made, taken, allowed = 0, 0, client
    queue = list(pieces)

    def step(what: str) -> None:
        nonlocal made, taken, allowed
        if what == "produce" and queue:
            count = queue.pop(0)
            log.choice(0).put(piece(made, count))
            made += count
            follower.fresh(0, log.choice(0).pieces[-1])
        elif what == "take":
            count, taken = len(sink.ids) - taken, len(sink.ids)
            follower.credit(0, count)
        elif what == "allow" and allowed is not None:
            allowed += 2
            follower.allow(2)
        elif what == "accept":
            follower.accepted(ACCEPTED)
        elif what == "finish" and not queue:
            follower.finished(END)
        assert len(sink.ids) - taken <= window
        assert allowed is None or len(sink.ids) <= allowed
        assert len(sink.ids) <= made

    for what in [*steps, "accept", *(["produce", "take", "allow"] * 60), "finish", *(["take", "allow"] * 60)]:
        step(what)
    whole = piece(0, sum(pieces))
    assert (sink.ids, sink.text) == (list(whole.ids), whole.text)
    assert sink.heard == ["accepted", "finished"]
    assert left == [follower]


def test_log_probabilities_of_the_release_before_have_the_texts_of_their_tokens() -> None:
    before = msgspec.convert([-1.0, [5], [-1.0], ["a"], "a"], Logprobs)
    assert [found.text for found in logprobs_out([before])] == ["a"]
