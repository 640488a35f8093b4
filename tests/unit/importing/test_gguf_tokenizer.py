"""Tokenizers converted from a GGUF file: how they cut, merge, mark and decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from fairway.formats.tokenizer_files import read_tokenizer_files, require_decodable
from fairway.importing.gguf_convert import SPLITS, GgufTokens, tokens_of
from fairway.importing.gguf_file import GgufFile
from tests.support.gguf_files import CONTROL, NORMAL, TEMPLATE, USER, byte_alphabet, byte_level, sentencepiece

TEXTS = (
    "",
    " ",
    "the quick brown fox",
    "  two  blanks\n\n\tand a tab \r\n",
    "I'll, DON'T 12345 x=3.14;",
    "zwölf Boxkämpfer 漢字 🦊 \u200d",
    "<|im_start|>user\nhi<|im_end|> <think>",
)


def tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, GgufTokens]:
    found = tokens_of(GgufFile(Path("m.gguf"), metadata, {}), 1000)
    text = json.dumps(found.tokenizer)
    require_decodable(text.encode())
    return Tokenizer.from_str(text), found


@pytest.mark.parametrize("pre", SPLITS)
def test_a_byte_level_one_gives_back_every_text(pre: str) -> None:
    built, _ = tokenizer(byte_level(pre))
    for text in TEXTS:
        assert (
            built.decode(built.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
        )


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " DON", "'", "T", " 1234", " ", " x"]),
        ("default", ["I", "'ll", " DON", "'", "T", " 1234", " ", " x"]),
        ("smollm", ["I", "'ll", " DON", "'", "T", " ", "1", "2", "3", "4", " ", " x"]),
        ("llama-bpe", ["I", "'ll", " DON", "'T", " ", "123", "4", " ", " x"]),
        ("qwen2", ["I", "'ll", " DON", "'T", " ", "1", "2", "3", "4", " ", " x"]),
        ("tekken", ["I", "'ll", " DON", "'T", " ", "1", "2", "3", "4", " ", " x"]),
    ],
)
def test_text_is_cut_as_the_split_says(pre: str, pieces: list[str]) -> None:
    built, _ = tokenizer(byte_level(pre))
    text = "I'll DON'T 1234  x"
    assert [text[a:b] for _, (a, b) in built.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_a_piece_that_is_a_token_is_not_merged_where_the_split_says_so() -> None:
    """As in llama.cpp, the vocabulary of Llama 3 is searched before its merges."""
    alphabet = byte_alphabet()
    fields = byte_level("llama-bpe") | {
        "tokenizer.ggml.tokens": [*alphabet, "ab", "bc", "abc"],
        "tokenizer.ggml.token_type": [NORMAL] * 259,
        "tokenizer.ggml.merges": ["b c", "a b", "ab c"],
        "tokenizer.ggml.eot_token_id": 3,
    }
    assert tokenizer(fields)[0].encode("abc", add_special_tokens=False).tokens == ["abc"]
    fields["tokenizer.ggml.pre"] = "gpt-2"
    assert tokenizer(fields)[0].encode("abc", add_special_tokens=False).tokens == ["a", "bc"]


def test_control_tokens_are_special_and_user_defined_ones_are_whole_words() -> None:
    built, found = tokenizer(byte_level("qwen2"))
    ids = built.encode("<|im_start|><think>").ids
    assert [built.id_to_token(number) for number in ids] == ["<|im_start|>", "<think>"]
    assert built.decode(ids) == "<think>"
    assert found.settings["bos_token"] == "<|im_start|>"
    assert found.end_ids == (2, 0)
    assert found.ids == {"bos_token_id": 1, "eos_token_id": 2}
    assert found.templates == {"chat_template.jinja": TEMPLATE}
    names = ["tokenizer.json", "tokenizer_config.json"]
    contents = {names[0]: found.tokenizer, names[1]: found.settings}
    read = read_tokenizer_files(names, lambda name: json.dumps(contents[name]).encode())
    assert read.outside == {}
    assert read.ids["<think>"] == ids[1]


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("qwen2", {}, ("", "")),
        ("qwen2", {"add_bos_token": True}, ("<|im_start|>", "")),
        ("qwen2", {"add_eos_token": True}, ("", "<|im_end|>")),
        ("llama-bpe", {"add_bos_token": None}, ("<|im_start|>", "")),
        ("llama-bpe", {"add_bos_token": False}, ("", "")),
        ("llama-bpe", {"add_bos_token": None, "bos_token_id": None}, ("", "")),
    ],
)
def test_marks_stand_around_a_text_as_the_flags_say(
    pre: str, flags: dict[str, Any], around: tuple[str, str]
) -> None:
    fields = byte_level(pre) | {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    built, _ = tokenizer({key: value for key, value in fields.items() if value is not None})
    tokens = built.encode("x").tokens
    assert tokens == [text for text in (around[0], "x", around[1]) if text]


def test_a_template_for_tools_has_the_file_that_gateways_read() -> None:
    fields = byte_level("qwen2") | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert tokenizer(fields)[1].templates["additional_chat_templates/tool_use.jinja"] == "{{ tools }}"


def test_sentencepiece_merges_by_scores_and_falls_back_to_bytes() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -3.0, "bc": -2.0, "▁a": -1.0, "abc": -4.0}
    fields = sentencepiece() | {
        "tokenizer.ggml.tokens": [*tokens, *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [*pieces.values()],
        "tokenizer.ggml.token_type": sentencepiece()["tokenizer.ggml.token_type"][:259] + [NORMAL] * 8,
    }
    built, _ = tokenizer(fields)
    assert built.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert built.encode("ab").tokens == ["<s>", "▁a", "b"]
    assert built.encode("cé").tokens == ["<s>", "▁", "c", "<0xC3>", "<0xA9>"]
    for text in ("abc  a", " a", "c\n漢🦊"):
        assert built.decode(built.encode(text).ids) == text
    fields["tokenizer.ggml.add_space_prefix"] = False
    assert tokenizer(fields)[0].encode("abc").tokens == ["<s>", "abc"]


def test_a_token_that_begins_with_a_blank_is_part_of_a_merge() -> None:
    """Some vocabularies have blanks as they are: the one between two tokens is the second at the earliest."""
    fields = byte_level("gpt-2") | {
        "tokenizer.ggml.tokens": [*byte_alphabet(), " ", " a"],
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [USER, CONTROL],
        "tokenizer.ggml.merges": ["  a"],
        "tokenizer.ggml.eot_token_id": 3,
    }
    assert tokenizer(fields)[1].tokenizer["model"]["merges"] == [[" ", "a"]]
