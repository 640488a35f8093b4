"""Sequences that end with their prefill: the last token's hidden state, beside generations of others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from services.worker.engine_protocol import Submit

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 101) for _ in range(length)] for length in (1, 31, 16, 17, 40, 7)]
OVERRIDES: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen3": {"head_dim": 12}}


def embed(command: Submit) -> Submit:
    return structs.replace(command, embed=True)


def run(engine: Any, commands: list[Any]) -> tuple[dict[int, Any], dict[int, str], dict[int, list[int]]]:
    """Return vectors, ends and tokens by handle; no sequence and no block is left."""
    vectors: dict[int, Any] = {}
    ends: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    for command in commands:
        engine.apply(command)
    while engine.has_work:
        event = engine.step()
        engine.check_integrity()
        for handle, vector in event.embeddings.items():
            assert event.finished[handle] == "length"
            vectors[handle] = np.frombuffer(vector, np.float32)
        ends |= event.finished
        for handle, token in zip(event.handles, event.tokens, strict=True):
            tokens.setdefault(handle, []).append(token)
    return vectors, ends, tokens


@pytest.mark.parametrize("family", OVERRIDES)
def test_vectors_are_those_of_transformers_alone_and_in_company(
    family: str, save_model: Any, load_engine: Any, submit: Any
) -> None:
    """Chunked prefills beside decodes, few blocks: to 1e-5, and the neighbours' tokens do not change."""
    model, folder = save_model(family, seed=3, **OVERRIDES[family])
    with torch.inference_mode():
        expected = [model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy() for ids in PROMPTS]
    neighbours = [submit(100 + index, ids, 12, ignore_eos=True) for index, ids in enumerate(PROMPTS[:3])]
    _, _, alone = run(load_engine(folder), neighbours)
    engine = load_engine(folder, kv_blocks=48, token_budget=9, max_sequences=4)
    commands = [embed(submit(index, ids, 0)) for index, ids in enumerate(PROMPTS)]
    vectors, ends, tokens = run(engine, [*neighbours, *commands])
    for index, vector in enumerate(expected):
        np.testing.assert_allclose(vectors[index], vector, atol=1e-5)
    assert tokens == alone, "an embedding has output, or changed a neighbour's"
    assert set(ends) == {*range(len(PROMPTS)), 100, 101, 102}
    assert engine.heartbeat().kv_blocks_used == 0


def test_a_cached_prefix_gives_the_same_vector(save_model: Any, load_engine: Any, submit: Any) -> None:
    _, folder = save_model("Llama", seed=4)
    prompt = PROMPTS[4] * 3  # one prefix block and more
    names = {"prefix_root": 9, "prefix_hashes": [11]}
    engine = load_engine(folder)
    (first, again, plain) = (
        run(engine, [embed(submit(handle, prompt, 0, **more))])[0][handle]
        for handle, more in enumerate((names, names, {}))
    )
    np.testing.assert_allclose(again, first, atol=1e-6)
    np.testing.assert_allclose(plain, first, atol=1e-6)


@pytest.mark.parametrize("kv_blocks", [8, 48])
def test_a_row_takes_the_whole_context(
    save_model: Any, load_engine: Any, submit: Any, kv_blocks: int
) -> None:
    """The last token needs a position and KV of its own, and nothing follows it."""
    model, folder = save_model("Llama", seed=4)
    engine = load_engine(folder, kv_blocks=kv_blocks)
    context = engine.max_model_len
    ids = [RNG.randrange(3, 101) for _ in range(context)]
    with torch.inference_mode():
        expected = model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    neighbour = submit(7, PROMPTS[0], 4, ignore_eos=True)
    rows = [embed(submit(0, ids, 0)), neighbour, embed(submit(1, [*ids, 5], 0))]
    vectors, ends, _ = run(engine, rows)
    np.testing.assert_allclose(vectors[0], expected, atol=1e-5)
    assert ends == {0: "length", 7: "length", 1: "error"}


def test_output_is_refused(save_model: Any, load_engine: Any, submit: Any) -> None:
    _, folder = save_model("Llama", seed=4)
    vectors, ends, _ = run(load_engine(folder), [embed(submit(0, [5, 6], 2))])
    assert (vectors, ends) == ({}, {0: "error"})
