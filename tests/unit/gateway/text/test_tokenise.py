"""Tokenising is bounded before, during and after."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.core.errors import PromptTooLong
from services.gateway.text.text_model import ChatMessage, Conversation, EncodedText, TextModel
from services.gateway.text.tokenise import Tokeniser
from simulator.fleet.nodes.gateway_node import LocalTexts
from tests.unit.gateway.conftest import write_folder

DIGEST = "sha256:" + "ab" * 32


class CountingTexts(LocalTexts):
    """Texts that are read here, and counted."""

    count = 0

    async def read(self, *args: Any, **kwargs: Any) -> EncodedText:
        self.count += 1
        return await super().read(*args, **kwargs)


@pytest.fixture
async def texts(executor: ThreadPoolExecutor, clock: Any) -> CountingTexts:
    return CountingTexts(executor, clock)


@pytest.fixture
async def model(texts: CountingTexts, model_folder: Path) -> TextModel:
    return await texts.load(DIGEST, lambda: nullcontext(model_folder))


async def test_the_same_text_is_tokenised_once_per_tenant(model: TextModel, texts: CountingTexts) -> None:
    tokeniser = Tokeniser(texts)
    turns = Conversation([ChatMessage("user", "hello")])
    first = await tokeniser.chat(model, "acme", turns)
    assert await tokeniser.chat(model, "acme", turns) == first
    assert texts.count == 1
    # Another tenant's request must take as long as if nobody had sent it.
    assert await tokeniser.chat(model, "rival", turns) == first
    assert texts.count == 2
    tokeniser.check_integrity()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([ChatMessage("user", "ab")], [ChatMessage("user", "a"), ChatMessage("user", "b")]),
        ([ChatMessage("user", "b", "a")], [ChatMessage("user", "ab")]),
        ([ChatMessage("user", "a")], [ChatMessage("system", "a")]),
        (
            [ChatMessage("user", "a"), ChatMessage("assistant", "")],
            [ChatMessage("user", ""), ChatMessage("assistant", "a")],
        ),
    ],
)
async def test_different_conversations_share_no_entry(
    model: TextModel, texts: CountingTexts, one: list[ChatMessage], other: list[ChatMessage]
) -> None:
    tokeniser = Tokeniser(texts)
    await tokeniser.chat(model, "acme", Conversation(one))
    found = await tokeniser.chat(model, "acme", Conversation(other))
    assert found == (await texts.read(model, "acme", Conversation(other), size_bytes=0)).ids
    assert texts.count == 3


async def test_the_cache_is_bounded_in_tokens(model: TextModel, texts: CountingTexts) -> None:
    tokeniser = Tokeniser(texts, max_cached_tokens=100)
    for number in range(50):
        await tokeniser.chat(model, "acme", Conversation([ChatMessage("user", f"number {number}")]))
        tokeniser.check_integrity()
    long = Conversation([ChatMessage("user", "x" * 100)])  # a quarter of the cache at most
    await tokeniser.chat(model, "acme", long)
    tokeniser.check_integrity()


async def test_text_that_cannot_fit_is_refused_unread(model: TextModel, texts: CountingTexts) -> None:
    tokeniser = Tokeniser(texts)
    huge = "x" * (model.max_prompt_bytes + 1)
    with pytest.raises(PromptTooLong) as caught:
        await tokeniser.prompt(model, "acme", huge)
    assert caught.value.metadata["size_bytes"] == str(len(huge))
    with pytest.raises(PromptTooLong):
        turns = [ChatMessage("user", huge[:-5]), ChatMessage("user", "12345")]
        await tokeniser.chat(model, "acme", Conversation(turns))
    assert texts.count == 0


async def test_blanks_that_the_tokenizer_drops_are_no_tokens(
    texts: CountingTexts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    state = json.loads(tokenizer.to_str())
    state["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    folder = write_folder(tmp_path / "strips", Tokenizer.from_str(json.dumps(state)))
    model = await texts.load("sha256:" + "cd" * 32, lambda: nullcontext(folder))
    tokeniser = Tokeniser(texts)
    short = await tokeniser.prompt(model, "acme", "a b")
    assert await tokeniser.prompt(model, "acme", " " * 20_000 + "a b" + " " * 20_000) == short
    blank, plain = (Conversation([ChatMessage("user", "a" + end)]) for end in (" " * 20_000, ""))
    assert await tokeniser.chat(model, "acme", blank) == await tokeniser.chat(model, "acme", plain)


async def test_a_text_beyond_the_context_is_an_error_with_its_count(
    model: TextModel, texts: CountingTexts
) -> None:
    tokeniser = Tokeniser(texts)
    with pytest.raises(PromptTooLong) as caught:
        await tokeniser.prompt(model, "acme", "q" * 200)
    assert caught.value.metadata["prompt_tokens"] == "201"
    assert caught.value.metadata["max_context_tokens"] == str(model.max_context_tokens)
