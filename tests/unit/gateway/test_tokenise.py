"""Tokenising is bounded before, during and after."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.core.errors import PromptTooLong, Unavailable
from services.gateway import tokenise
from services.gateway.chat_template import Message
from services.gateway.text_model import TextModel
from services.gateway.tokenise import Tokeniser


class CountingModel:
    """A text model that counts, and waits where the test says."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.encoded = 0
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        self.encoded += 1
        assert self.gate.wait(10)
        return self._model.encode_prompt(text)

    def encode_chat(self, messages: Any) -> tuple[int, ...]:
        self.encoded += 1
        return self._model.encode_chat(messages)


@pytest.fixture
def model(text_model: TextModel) -> Any:
    return CountingModel(text_model)


LONG = "word " * 400


async def test_the_same_text_is_tokenised_once_per_tenant(model: Any, executor: ThreadPoolExecutor) -> None:
    tokeniser = Tokeniser(executor)
    model.max_prompt_bytes_override = None
    turns = [Message("user", "hello")]
    first = await tokeniser.chat(model, "acme", turns)
    assert await tokeniser.chat(model, "acme", turns) == first
    assert model.encoded == 1
    # Another tenant's request must take as long as if nobody had sent it.
    assert await tokeniser.chat(model, "rival", turns) == first
    assert model.encoded == 2
    tokeniser.check_integrity()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([Message("user", "ab")], [Message("user", "a"), Message("user", "b")]),
        ([Message("user", "b", "a")], [Message("user", "ab")]),
        ([Message("user", "a")], [Message("system", "a")]),
        ([Message("user", "a"), Message("assistant", "")], [Message("user", ""), Message("assistant", "a")]),
    ],
)
async def test_different_conversations_share_no_entry(
    model: Any, executor: ThreadPoolExecutor, one: list[Message], other: list[Message]
) -> None:
    tokeniser = Tokeniser(executor)
    await tokeniser.chat(model, "acme", one)
    found = await tokeniser.chat(model, "acme", other)
    assert found == model.encode_chat(other)
    assert model.encoded == 3


async def test_the_cache_is_bounded_in_tokens(model: Any, executor: ThreadPoolExecutor) -> None:
    tokeniser = Tokeniser(executor, max_cached_tokens=100)
    for number in range(50):
        await tokeniser.chat(model, "acme", [Message("user", f"number {number}")])
        tokeniser.check_integrity()
    await tokeniser.chat(model, "acme", [Message("user", "x" * 100)])  # a quarter of the cache at most
    tokeniser.check_integrity()


async def test_text_that_cannot_fit_is_refused_unread(model: Any, executor: ThreadPoolExecutor) -> None:
    tokeniser = Tokeniser(executor)
    huge = "x" * (model.max_prompt_bytes + 1)
    with pytest.raises(PromptTooLong) as caught:
        await tokeniser.prompt(model, "acme", huge)
    assert caught.value.metadata["size_bytes"] == str(len(huge))
    with pytest.raises(PromptTooLong):
        await tokeniser.chat(model, "acme", [Message("user", huge[:-5]), Message("user", "12345")])
    assert model.encoded == 0


async def test_waiting_prompts_are_bounded_and_the_loop_runs_on(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenise, "MAX_PENDING", 3)
    monkeypatch.setattr(tokenise, "INLINE_BYTES", 0)
    with ThreadPoolExecutor(1) as threads:
        tokeniser = Tokeniser(threads)
        model.gate.clear()
        waiting = [asyncio.ensure_future(tokeniser.prompt(model, "acme", f"prompt {n}")) for n in range(3)]
        await asyncio.sleep(0.02)
        with pytest.raises(Unavailable) as caught:
            await tokeniser.prompt(model, "acme", "one more")
        assert caught.value.retry_after_s
        waiting[2].cancel()
        await asyncio.sleep(0)
        model.gate.set()
        assert all(await asyncio.gather(*waiting[:2]))
        assert await tokeniser.prompt(model, "acme", "one more")
        tokeniser.check_integrity()
