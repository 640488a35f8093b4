"""The cache on torch: the tokens are those of an engine without one, and the process says what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.core.generation import Prompt
from services.core.prefix import prefix_chain
from services.worker.engine.load.loading import load
from services.worker.engine.unsupported import BadEngineConfig
from services.worker.engine_protocol import EngineConfig, Stepped, Submit

PROMPT = [3 + place * 7 % 90 for place in range(70)]


def named(submit: Submit, root: int = 5) -> Submit:
    ids = submit.prompt.ids
    return msgspec.structs.replace(submit, prompt=Prompt(ids, prefix_chain(root, ids), root))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("Llama", {}), ("Mistral", {"sliding_window": 24}), ("Qwen3", {"head_dim": 8})],
)
def test_tokens_are_the_same_with_and_without(
    save_model: Any, load_engine: Any, submit: Callable[..., Submit], family: str, overrides: dict[str, Any]
) -> None:
    """Whole blocks, copied ones, output that is found again, and two that begin alike in one step."""
    _, folder = save_model(family, **overrides)
    with_cache, without = load_engine(folder, block_size=16), load_engine(folder, prefix_cache=False)
    first = run(with_cache, [named(submit(0, PROMPT, 20))])
    text = PROMPT + first.tokens[0]
    rounds = [
        [submit(1, PROMPT, 20, temperature=1.0), submit(2, PROMPT[:64], 20)],
        [submit(3, text, 9), submit(4, [*text[:80], 1, 2, 3], 9), submit(5, [*PROMPT[:60], 9, 9], 9)],
        [submit(handle, [8] * 66, 5, temperature=1.0) for handle in range(6, 9)],
        [submit(9, PROMPT, 30, produced=first.tokens[0])],
    ]
    for submits in rounds:
        found = run(with_cache, [named(each) for each in submits])
        assert found.tokens == run(without, submits).tokens
        first.cached |= found.cached
    assert first.cached == {0: 0, 1: 64, 2: 63, 3: 89, 4: 80, 5: 48, 6: 0, 7: 64, 8: 64, 9: 80}


class Found:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}


def run(engine: Any, submits: list[Submit]) -> Found:
    found = Found()
    for each in submits:
        engine.apply(each)
    while engine.has_work:
        event: Stepped = engine.step()
        engine.check_integrity()
        found.cached |= event.cached
        for handle, token in zip(event.handles, event.tokens, strict=True):
            found.tokens.setdefault(handle, []).append(token)
    return found


def test_blocks_that_cannot_be_shared_switch_it_off(save_model: Any, load_engine: Any, submit: Any) -> None:
    _, folder = save_model("Llama")
    engine = load_engine(folder, block_size=24)
    for handle in range(2):
        assert run(engine, [named(submit(handle, PROMPT, 2))]).cached == {}


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(tmp_path: Any, ratio: float) -> None:
    config = EngineConfig("", str(tmp_path), executor="null", cache_domain_ratio=ratio)
    with pytest.raises(BadEngineConfig, match="cache_domain_ratio"):
        load(config, lambda phase, done: None)
