"""A resumed stream says what an undisturbed one would have said, each character once."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.worker.detokenizer import ByteLevelVocabulary, TextStream

IDS = st.lists(st.sampled_from([0x61, 0x62, 0xC3, 0xA9, 257, 258, 260, 262, 300]), max_size=30)


def run(stream: TextStream, ids: list[int]) -> str:
    text = ""
    for token in ids:
        text += stream.feed(token)
        if stream.stop:
            return text
    return text + stream.finish()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(ids=IDS, stops=st.lists(st.sampled_from(["ab", "éa", "bb", "😀"]), max_size=2), data=st.data())
def test_a_resume_changes_nothing(
    byte_level: Tokenizer, ids: list[int], stops: list[str], data: st.DataObject
) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)

    def new() -> TextStream:
        return TextStream(vocabulary.open(), stops=stops, min_tokens=0)

    undisturbed = new()
    expected = run(undisturbed, ids)

    cut = data.draw(st.integers(0, len(ids)))
    first = new()
    sent = "".join([first.feed(token) for token in ids[:cut] if not first.stop])
    delivered = data.draw(st.integers(0, len(sent)))  # the client may lag behind what was sent
    second = new()
    rest = second.resume(ids[:cut], delivered)
    if not second.stop:
        rest += run(second, ids[cut:])
    assert sent[:delivered] + rest == expected
    assert second.stop == undisturbed.stop


def test_more_delivered_than_rebuilt_is_suppressed_later(byte_level: Tokenizer) -> None:
    stream = TextStream(ByteLevelVocabulary(byte_level).open(), stops=(), min_tokens=0)
    assert stream.resume([0x61], 3) == ""
    assert not stream.plain
    assert [stream.feed(token) for token in (0x62, 0x61, 0x62)] == ["", "", "b"]
    assert stream.plain


def test_a_stop_string_before_min_tokens_does_not_end_it(byte_level: Tokenizer) -> None:
    stream = TextStream(ByteLevelVocabulary(byte_level).open(), stops=("b",), min_tokens=3)
    assert [stream.feed(token) for token in (0x62, 0x62)] == ["b", "b"]
    assert stream.stop == ""
    assert stream.feed(0x62) == ""
    assert stream.stop == "b"


def test_plain_only_while_nothing_is_pending(byte_level: Tokenizer) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)
    stream = TextStream(vocabulary.open(), stops=(), min_tokens=0)
    assert stream.plain
    stream.feed(0xC3)
    assert not stream.plain
    assert stream.feed(0xA9) == "é"
    assert stream.plain
    assert not TextStream(vocabulary.open(), stops=("x",), min_tokens=0).plain


def test_special_tokens_that_are_asked_for_are_spelled(byte_level: Tokenizer) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)
    special = next(token for token, entry in byte_level.get_added_tokens_decoder().items() if entry.special)
    name, letter = vocabulary.alone(special), byte_level.encode("a", add_special_tokens=False).ids[0]
    plain = TextStream(vocabulary.open(), stops=(), min_tokens=0)
    assert [plain.feed(token) for token in (letter, special, letter)] == ["a", "", "a"]
    spelled = TextStream(vocabulary.open(), stops=(), min_tokens=0, spelled={special: name})
    assert not spelled.plain
    assert [spelled.feed(token) for token in (letter, special, letter)] == ["a", name, "a"]
    assert not spelled.plain
    resumed = TextStream(vocabulary.open(), stops=(), min_tokens=0, spelled={special: name})
    assert resumed.resume([letter, special], delivered_chars=1) == name
