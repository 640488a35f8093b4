"""Streamed text equals a full decode, for every kind of decoder and every way to cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.core.errors import FailedPrecondition
from services.worker.detokenizer import (
    ByteLevelVocabulary,
    Detokenizer,
    Vocabulary,
    WindowedVocabulary,
    byte_of_char,
    is_byte_level,
    load_vocabulary,
)

SAMPLES = (
    "plain text",
    "naïve café",
    "日本語のテキスト",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "a😀é\n\tb  c",
    "",
    " leading",
    "x" * 200,
)
words = st.text(alphabet=st.characters(codec="utf-8"), max_size=30) | st.sampled_from(SAMPLES)
lax = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


def stream(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.feed(token) for token in ids]) + detokenizer.flush()


def fast(vocabulary: ByteLevelVocabulary, ids: list[int]) -> str:
    """The way of the token path: the table while nothing is pending."""
    detokenizer = vocabulary.open()
    text = ""
    for token in ids:
        piece = vocabulary.texts[token] if detokenizer.clean else None
        text += detokenizer.feed(token) if piece is None else piece
    return text + detokenizer.flush()


@lax
@given(ids=st.lists(st.integers(0, 310), max_size=60))
def test_byte_level_equals_a_full_decode_of_any_ids(byte_level: Tokenizer, ids: list[int]) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)
    vocabulary.cover(320)
    expected = byte_level.decode(ids)
    assert stream(vocabulary.open(), ids) == expected
    assert fast(vocabulary, ids) == expected


@lax
@given(text=words)
def test_byte_level_gives_the_text_back(byte_level: Tokenizer, text: str) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)
    assert fast(vocabulary, byte_level.encode(text).ids) == text


def test_partial_characters_are_held_back(byte_level: Tokenizer) -> None:
    detokenizer = ByteLevelVocabulary(byte_level).open()
    pieces = [detokenizer.feed(byte) for byte in "😀é".encode()]
    assert pieces == ["", "", "", "😀", "", "é"]
    assert detokenizer.feed(0xF0) == ""
    assert not detokenizer.clean
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text_but_a_name(byte_level: Tokenizer) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)
    vocabulary.cover(400)
    assert vocabulary.texts[300] == ""
    assert vocabulary.alone(300) == "<eos>"
    assert vocabulary.alone(0x61) == "a"
    assert vocabulary.alone(0xC3) == "\ufffd"
    assert vocabulary.alone(399) == ""
    assert vocabulary.alone(10_000) == ""
    assert vocabulary.open().feed(10_000) == ""


def bytes_of(vocabulary: Vocabulary, token: int) -> bytes:
    return vocabulary.part(token) or vocabulary.alone(token).encode()


@lax
@given(text=words)
def test_names_and_parts_of_byte_level_tokens_are_the_bytes_of_the_text(
    byte_level: Tokenizer, text: str
) -> None:
    vocabulary, ids = ByteLevelVocabulary(byte_level), byte_level.encode(text).ids
    assert b"".join(bytes_of(vocabulary, token) for token in ids) == text.encode()
    table = byte_of_char()
    for token in ids:
        own = bytes(table[char] for char in byte_level.id_to_token(token) or "")
        assert bytes_of(vocabulary, token) == own
        assert bool(vocabulary.part(token)) == (
            "\ufffd" in own.decode(errors="replace") and "\ufffd" not in text
        )
    assert [vocabulary.part(token) for token in (300, 10_000, -1)] == [b"", b"", b""]


def test_the_byte_table_is_a_bijection() -> None:
    table = byte_of_char()
    assert sorted(table.values()) == list(range(256))
    assert all(byte_of_char()[char] == ord(char) for char in "aZ09!~")
    assert table["Ġ"] == 0x20
    assert table["Ċ"] == 0x0A


# --- decoders whose tokens depend on each other ----------------------------------------------------


def llama_like() -> Tokenizer:
    """Metaspace by normaliser, byte fallback: the tokenizer of the Llama 2 and Mistral family."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.", "ab", "▁a", "▁ab", "▁▁", "th", "▁th"]:
        vocab[piece] = len(vocab)
    merges = [("a", "b"), ("▁", "a"), ("▁a", "b"), ("▁", "▁"), ("t", "h"), ("▁", "th")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", *"abcdefghij", "▁a", "▁b", "ab", "▁ab"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


LLAMA = llama_like()
METASPACE = metaspace()


@lax
@given(text=words)
def test_byte_fallback_gives_the_text_back(text: str) -> None:
    ids = LLAMA.encode(text).ids
    assert stream(WindowedVocabulary(LLAMA, byte_fallback=True).open(), ids) == LLAMA.decode(ids)


@lax
@given(ids=st.lists(st.sampled_from([1, 2, *range(259, 293)]), max_size=40))
def test_byte_fallback_equals_a_full_decode_of_any_pieces(ids: list[int]) -> None:
    assert stream(WindowedVocabulary(LLAMA, byte_fallback=True).open(), ids) == LLAMA.decode(ids)


@lax
@given(ids=st.lists(st.integers(0, METASPACE.get_vocab_size() - 1), max_size=40))
def test_metaspace_equals_a_full_decode_of_any_ids(ids: list[int]) -> None:
    assert stream(WindowedVocabulary(METASPACE, byte_fallback=False).open(), ids) == METASPACE.decode(ids)


@lax
@given(text=words)
@pytest.mark.parametrize("tokenizer", [LLAMA, METASPACE], ids=["llama", "metaspace"])
def test_names_and_parts_of_sentencepiece_tokens_are_their_pieces(tokenizer: Tokenizer, text: str) -> None:
    vocabulary = WindowedVocabulary(tokenizer, byte_fallback=tokenizer is LLAMA)
    ids = [token for token in tokenizer.encode(text).ids if token != 0]
    for token in ids:
        piece = str(tokenizer.id_to_token(token))
        byte = bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else b""
        assert bytes_of(vocabulary, token) == (byte or piece.replace("▁", " ").encode())
        assert vocabulary.part(token) == (byte if byte >= b"\x80" else b"")
    if tokenizer is LLAMA and text and "▁" not in text:
        assert b"".join(bytes_of(vocabulary, token) for token in ids) == f" {text}".encode()
    assert vocabulary.part(10_000) == vocabulary.part(-1) == b""


def runs_of(ids: list[int]) -> list[tuple[bool, list[int]]]:
    """The tokens with text, in runs of byte tokens and of others."""
    runs: list[tuple[bool, list[int]]] = []
    for token in ids:
        if token <= 2:
            continue
        is_byte = token <= 258
        if not runs or runs[-1][0] != is_byte:
            runs.append((is_byte, []))
        runs[-1][1].append(token)
    return runs


def valid_length(data: bytes) -> int:
    """How many bytes are complete characters before the first invalid or missing byte."""
    try:
        data.decode()
    except UnicodeDecodeError as exc:
        return exc.start
    return len(data)


def by_the_rule(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A run of byte tokens is its complete characters, and U+FFFD for each byte from there on."""
    text = ""
    for is_byte, tokens in runs_of(ids):
        if is_byte:
            data = bytes(token - 3 for token in tokens)
            valid = valid_length(data)
            text += data[:valid].decode() + "\ufffd" * (len(data) - valid)
        else:
            text += "".join(str(tokenizer.id_to_token(token)) for token in tokens).replace("▁", " ")
    return text.removeprefix(" ")


# Bytes of characters whole and cut, bytes that no character has, pieces, special and unknown tokens.
llama_ids = st.lists(
    st.lists(st.integers(3, 258), min_size=1, max_size=4)
    | st.sampled_from(["é", "漢", "😀", "a", " "]).map(lambda char: [byte + 3 for byte in char.encode()])
    | st.sampled_from(["é", "漢", "😀"]).map(lambda char: [byte + 3 for byte in char.encode()[:-1]])
    | st.sampled_from([[1], [2], [260], [262], [286], [290], [9999]]),
    max_size=16,
).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=500, deadline=None)
@given(ids=llama_ids)
def test_text_next_to_invalid_bytes_is_that_of_a_full_decode(ids: list[int]) -> None:
    found = stream(WindowedVocabulary(LLAMA, byte_fallback=True).open(), ids)
    known = [token for token in ids if token < 1000]
    assert found == by_the_rule(LLAMA, known)
    # Unless a run was valid for a while, there is nothing that a stream could not foresee.
    lengths = [
        (valid_length(bytes(token - 3 for token in tokens)), len(tokens))
        for is_byte, tokens in runs_of(known)
        if is_byte
    ]
    if all(valid in (0, total) for valid, total in lengths):
        assert found == LLAMA.decode(ids)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0xFF + 3, 260, 261], "\ufffdab"),
        ([260, 0xE6 + 3, 0xBC + 3, 261], "a\ufffd\ufffdb"),
        ([260, 0xE6 + 3, 0xBC + 3], "a\ufffd\ufffd"),
        ([0xC3 + 3, 0xA9 + 3, 0xE6 + 3, 0xBC + 3], "é\ufffd\ufffd"),
        ([0xFF + 3, 0xC3 + 3, 0xA9 + 3, 260, 0xC3 + 3, 0xA9 + 3], "\ufffd\ufffd\ufffdaé"),
        ([0xC3 + 3, 1, 0xA9 + 3], "é"),
        ([0x80 + 3] * 12 + [260], "\ufffd" * 12 + "a"),
    ],
)
def test_invalid_bytes_are_replaced_one_by_one(ids: list[int], text: str) -> None:
    assert stream(WindowedVocabulary(LLAMA, byte_fallback=True).open(), ids) == text


@lax
@given(ids=st.lists(st.integers(3, 258).filter(lambda token: token != 0x20 + 3), max_size=40))
def test_bytes_are_never_held_for_long(ids: list[int]) -> None:
    detokenizer = WindowedVocabulary(LLAMA, byte_fallback=True).open()
    held = 0
    for token in ids:
        held = 0 if detokenizer.feed(token) else held + 1
        assert held < 4
    assert len(detokenizer.flush()) == held


# --- output behind a prompt ------------------------------------------------------------------------


def id_of(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None
    return found


def behind(vocabulary: Vocabulary, prompt: list[int], output: list[int]) -> str:
    """Return the text of a prompt and that of an output that goes on from it."""
    before = vocabulary.open()
    text = "".join([before.feed(token) for token in prompt])
    return text + stream(vocabulary.open(prompt), output)


@lax
@given(prompt=words, output=words, cut=st.integers(0, 400))
def test_prompt_and_output_are_one_text_of_byte_fallback(prompt: str, output: str, cut: int) -> None:
    ids = LLAMA.encode(f"{prompt} {output}").ids
    vocabulary = WindowedVocabulary(LLAMA, byte_fallback=True)
    assert behind(vocabulary, ids[:cut], ids[cut:]) == LLAMA.decode(ids)


@lax
@given(ids=st.lists(st.integers(1, 15), max_size=50), cut=st.integers(0, 50))
def test_prompt_and_output_are_one_text_of_metaspace(ids: list[int], cut: int) -> None:
    special = id_of(METASPACE, "</s>")
    vocabulary = WindowedVocabulary(METASPACE, byte_fallback=False)
    assert behind(vocabulary, ids[:cut], ids[cut:]) == METASPACE.decode(ids)
    assert behind(vocabulary, [*ids[:cut], special], ids[cut:]) == METASPACE.decode(ids)


@lax
@given(ids=st.lists(st.integers(0, 262), max_size=50), cut=st.integers(0, 50))
def test_prompt_and_output_are_one_text_of_bytes(byte_level: Tokenizer, ids: list[int], cut: int) -> None:
    vocabulary = ByteLevelVocabulary(byte_level)
    assert behind(vocabulary, ids[:cut], ids[cut:]) == byte_level.decode(ids)


def test_an_output_keeps_the_blank_that_parts_it_from_its_prompt() -> None:
    prompt, output = [id_of(LLAMA, "▁ab")], [id_of(LLAMA, "▁th"), id_of(LLAMA, "a")]
    vocabulary = WindowedVocabulary(LLAMA, byte_fallback=True)
    assert stream(vocabulary.open(prompt), output) == " tha"
    assert stream(vocabulary.open(), output) == "tha", "a text of its own begins without it"
    wide = [byte + 3 for byte in "漢".encode()]
    assert stream(vocabulary.open([*prompt, *wide * 99, *wide[:1]]), [*wide[1:], *output]) == "漢 tha"


# --- loading ---------------------------------------------------------------------------------------


def test_the_decoder_decides(byte_level: Tokenizer, save: Callable[[Tokenizer], Path]) -> None:
    assert isinstance(load_vocabulary(save(byte_level)), ByteLevelVocabulary)
    assert isinstance(load_vocabulary(save(LLAMA)), WindowedVocabulary)
    assert is_byte_level({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]})
    assert not is_byte_level({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]})
    assert not is_byte_level(None)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"model": 3}', "\udcff"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(FailedPrecondition, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 9,
        },
        {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99},
        {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": []}]},
        {"type": "Unheard"},
    ],
)
def test_a_decoder_without_a_small_bound_is_refused(tmp_path: Path, decoder: dict[str, Any]) -> None:
    state = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(FailedPrecondition, match="decoder"):
        load_vocabulary(tmp_path)


def test_what_turns_text_into_tokens_is_not_loaded(tmp_path: Path) -> None:
    step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "aa"}
    state = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [step] * 24},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "("},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {"type": "Explodes"},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert load_vocabulary(tmp_path).alone(1) == "b"


def test_a_token_of_endless_text_is_refused(tmp_path: Path) -> None:
    state = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b" * 10**6: 1}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(FailedPrecondition, match="characters"):
        load_vocabulary(tmp_path)
