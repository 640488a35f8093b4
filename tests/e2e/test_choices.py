"""As many choices as a request may have, of the bundled model over HTTP: each is a draw of its own."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.support.stack import Stack

MOST = 128
CHAT = {"messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 12}


def ask(stack: Stack, **fields: Any) -> bytes:
    request = urllib.request.Request(
        f"{stack.http}/v1/chat/completions",
        json.dumps({"model": stack.model, "temperature": 1.0, "seed": 5, **CHAT, **fields}).encode(),
        {"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def texts_of(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    return [choice["message"]["content"] for choice in answer["choices"]]


def streamed_texts(data: bytes) -> list[str]:
    texts = [""] * MOST
    for line in data.decode().split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
    return texts


def test_every_one_of_128_choices_has_a_seed_of_its_own(stack: Stack) -> None:
    answer = json.loads(ask(stack, n=MOST))
    texts = texts_of(answer)
    assert len(texts) == MOST
    assert len(set(texts)) > 0.9 * MOST, "choices that share a seed have one text"
    assert MOST < answer["usage"]["completion_tokens"] <= 12 * MOST
    # A choice is decided by the request's seed and its number alone.
    assert texts_of(json.loads(ask(stack, n=3))) == texts[:3]
    assert streamed_texts(ask(stack, n=MOST, stream=True)) == texts
    assert not set(texts_of(json.loads(ask(stack, n=MOST, seed=6)))) & set(texts)
