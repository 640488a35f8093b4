"""Tokens that files declare beside tokenizer.json are those of transformers, drawn over eight places."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.tokenizer_files import (
    MAX_DECLARED,
    NAMED,
    SETTINGS,
    SPECIAL_MAP,
    TOKENIZER,
    TokenizerFiles,
    read_tokenizer_files,
)

WORDS = ["a", "b", "ab", "x", "Hello", "<s>", "</s>", "<|user|>", "<|tool|>", "<pad>", "▁", "#", "u", "<unk>"]
VOCAB = {word: number for number, word in enumerate(WORDS)}
TOKENS = ["<s>", "</s>", "<|user|>", "<|tool|>", "<pad>", "<new>", "<other>", "ab", "<é>", "<|us"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def flagged(rng: random.Random, content: str, **more: Any) -> dict[str, Any]:
    chosen = {name: rng.random() < 0.4 for name in FLAGS if rng.random() < 0.7}
    return {"content": content, **chosen, **more}


def whole(rng: random.Random, content: str, number: int) -> dict[str, Any]:
    return {"id": number, "content": content, **{name: rng.random() < 0.4 for name in FLAGS}}


def typed(rng: random.Random, content: str) -> Any:
    return flagged(rng, content, __type="AddedToken") if rng.random() < 0.3 else content


def tokenizer_state(rng: random.Random) -> dict[str, Any]:
    vocab = VOCAB
    models: list[dict[str, Any]] = [
        {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": "<unk>", "fuse_unk": True},
        {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        {"type": "Unigram", "vocab": [[word, -1.0 - number] for word, number in vocab.items()], "unk_id": 13},
    ]
    own = rng.sample(TOKENS[:5], rng.randint(0, 3))
    entries = [whole(rng, text, vocab[text]) for text in own]
    if rng.random() < 0.3:
        entries.append(whole(rng, "<new>", len(vocab)))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        "normalizer": rng.choice([None, {"type": "Lowercase"}]),
        "pre_tokenizer": {"type": "Whitespace"} if rng.random() < 0.5 else None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": rng.choice(models),
    }


def draw(rng: random.Random) -> dict[str, Any]:
    """Return the files of a version that declares tokens in several of eight places, conflicts among them."""

    def some() -> list[str]:
        return rng.sample(TOKENS, rng.randint(1, 4))

    state = tokenizer_state(rng)
    settings: dict[str, Any] = {}
    files: dict[str, Any] = {"tokenizer.json": state, "tokenizer_config.json": settings}
    places = {name for name in range(8) if rng.random() < 0.35} or {rng.randrange(8)}
    if 0 in places:  # an id may be that of another token, or of none
        settings["added_tokens_decoder"] = {
            str(rng.choice([VOCAB.get(text, 20), rng.randrange(40)])): flagged(rng, text) for text in some()
        }
    if 1 in places:
        settings["extra_special_tokens"] = [typed(rng, text) for text in some()]
    if 2 in places:
        settings["extra_special_tokens"] = {f"mark_{n}": typed(rng, text) for n, text in enumerate(some())}
    if 3 in places:
        settings["additional_special_tokens"] = [typed(rng, text) for text in some()]
    if 4 in places:
        names = rng.sample([*NAMED, "image_token", "eot_token"], 3)
        settings |= {name: typed(rng, text) for name, text in zip(names, some(), strict=False)}
    if 5 in places:
        names = rng.sample([*NAMED, "boi_token"], 3)
        special: dict[str, Any] = {
            name: flagged(rng, text) if rng.random() < 0.5 else text
            for name, text in zip(names, some(), strict=False)
        }
        if rng.random() < 0.5:
            special[rng.choice(["additional_special_tokens", "extra_special_tokens"])] = some()
        files["special_tokens_map.json"] = special
    if 6 in places:
        files["added_tokens.json"] = {text: rng.randrange(40) for text in some()}
    if 7 in places:  # the same token again, with other flags
        again = rng.choice(TOKENS)
        settings["pad_token"] = flagged(rng, again, __type="AddedToken")
        settings.setdefault("extra_special_tokens", [again])
    return files


def text_of(rng: random.Random) -> str:
    return "".join(rng.choice([*TOKENS, *WORDS, " ", "  ", "A", "<|", "é"]) for _ in range(12))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_declarations_are_read_as_transformers_reads_them(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    files = draw(rng)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    expected: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = read_tokenizer_files(files, lambda name: (tmp_path / name).read_bytes())
    ours = Tokenizer.from_buffer(found.tokenizer)
    assert ours.get_vocab() == expected.get_vocab()
    for text in [text_of(rng) for _ in range(10)]:
        ids = expected.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == expected.decode(
                ids, skip_special_tokens=skip
            )
    for number, token in ours.get_added_tokens_decoder().items():
        hidden = expected.decode([number], skip_special_tokens=True) == ""
        assert token.special == hidden, "the guard and the detokeniser read the flag"
    assert dict(found.named) == {name: str(value) for name, value in expected.special_tokens_map.items()}
    assert found.outside.items() <= ours.get_vocab().items()


def with_special_map(before: list[Any], listed: list[Any]) -> TokenizerFiles:
    """Return the tokenizer of files whose settings and map of special tokens have extra ones."""
    files = {
        TOKENIZER: tokenizer_state(random.Random(0)) | {"added_tokens": []},
        SETTINGS: {"extra_special_tokens": before},
        SPECIAL_MAP: {"extra_special_tokens": listed},
    }
    return read_tokenizer_files([*files], lambda name: json.dumps(files[name]).encode())


def calls_of_reading(count: int) -> int:
    """Return how many Python calls it takes to read a map of so many special tokens, half of them twice."""
    before = [f"<{number}>" for number in range(count)]
    listed = [{"content": f"<{number}>", "normalized": False} for number in range(count // 2, count * 3 // 2)]
    calls = 0

    def count_call(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_call)
    try:
        found = with_special_map(before, listed)
    finally:
        sys.setprofile(None)
    assert len(found.outside) == count * 3 // 2
    return calls


def test_the_work_on_a_map_of_special_tokens_grows_with_its_size_and_no_faster() -> None:
    assert calls_of_reading(2000) < 5 * calls_of_reading(500)


def test_a_map_of_more_special_tokens_than_a_version_may_declare_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel, match=SPECIAL_MAP) as caught:
        with_special_map([], [f"<{number}>" for number in range(MAX_DECLARED + 1)])
    assert "100001 tokens" in str(caught.value)
