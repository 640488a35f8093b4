"""What the engine cannot serve is found by a checkpoint's small files, and named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from fairway.formats.decoder_config import parse_config
from fairway.formats.servable import checkpoint_warnings, engine_problems, no_engine
from fairway.formats.weights import expected_shapes
from tests.support.model_folder import header_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
INDEX = "model.safetensors.index.json"
SHAPES = expected_shapes(parse_config(CONFIG))
TOKENIZER = {
    "added_tokens": [{"id": 0, "content": "<s>", "special": True}],
    "model": {"vocab": {"<s>": 0, "a": 1}},
}
PLAIN: dict[str, Any] = {"config.json": CONFIG, "tokenizer.json": TOKENIZER, "model.safetensors": 0}
SHARDED: dict[str, Any] = {name: PLAIN[name] for name in ("config.json", "tokenizer.json")} | {
    INDEX: {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}},
    "a.safetensors": {name: SHAPES[name] for name in sorted(SHAPES)[::2]},
    "b.safetensors": {name: SHAPES[name] for name in sorted(SHAPES)[1::2]},
}


POOLING = {"pooling_mode_lasttoken": True}
EMBEDS: dict[str, Any] = PLAIN | {
    "modules.json": [{"type": "m.Transformer", "path": ""}, {"type": "m.Pooling", "path": "1_Pooling"}],
    "1_Pooling/config.json": POOLING,
}


def found(files: dict[str, Any]) -> str:
    held = {name: content for name, content in files.items() if content is not ...}
    return no_engine(engine_problems(held, reader(held)))


def reader(held: dict[str, Any]) -> Callable[[str], bytes]:
    """Return what reads the files: of a tensor file a header, of 0 that of all tensors."""

    def read(name: str) -> bytes:
        content = held[name]
        if not name.endswith(".safetensors"):
            return json.dumps(content).encode()
        return header_of(SHAPES if content == 0 else content)

    return read


def test_whole_checkpoints_and_null_models_are_served() -> None:
    draft = {"draft/config.json": CONFIG, "draft/model.safetensors": 0}
    assert [found(files) for files in (PLAIN, SHARDED, PLAIN | draft)] == ["", "", ""]
    assert found({"config.json": {"vocab_size": 7}}) == ""
    assert found(EMBEDS) == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (PLAIN | {"config.json": CONFIG | {"architectures": ["MixtralForCausalLM"]}}, "MixtralForCausalLM"),
        (PLAIN | {"config.json": CONFIG | {"num_local_experts": 8}}, "num_local_experts: 8"),
        (PLAIN | {"tokenizer.json": ...}, "tokenizer.json is missing"),
        (PLAIN | {"model.safetensors": ...}, "model.safetensors is missing"),
        (SHARDED | {"b.safetensors": ...}, f"b.safetensors is missing: {INDEX}"),
        (SHARDED | {"a.safetensors": ..., "b.safetensors": ...}, "a.safetensors and 1 more"),
        (SHARDED | {INDEX: {"weight_map": {"a": 1}}}, "weight_map"),
        (PLAIN | {"draft/config.json": CONFIG | {"hidden_act": "gelu"}}, "draft/config.json: hidden_act"),
        (EMBEDS | {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}, "pooling_mode of a decoder"),
        (EMBEDS | {"1_Pooling/config.json": ...}, "1_Pooling/config.json"),
        (EMBEDS | {"1_Pooling/config.json": POOLING | {"word_embedding_dimension": 31}}, "dimension: 31"),
    ],
)
def test_what_is_not_served_is_named(files: dict[str, Any], words: str) -> None:
    assert words in found(files)


def test_a_checkpoint_without_an_architecture_has_no_engine() -> None:
    bare = {name: value for name, value in CONFIG.items() if name != "architectures"}
    refused = found(PLAIN | {"config.json": bare})
    assert refused == "config.json: architectures: None is not supported by the engine"
    text = {"config.json": {"vocab_size": 7}, "generation_config.json": {"eos_token_id": "1"}}
    assert found(text).startswith("generation_config.json: eos_token_id: '1'")


def test_a_declared_token_beyond_the_vocabulary_is_named() -> None:
    settings = {"tokenizer_config.json": {"pad_token": "<pad>"}}
    assert found(PLAIN | settings) == "", "id 2 of 100"
    full = {"vocab": {f"t{number}": number for number in range(100)}}
    refused = found(PLAIN | settings | {"tokenizer.json": {"added_tokens": [], "model": full}})
    assert "the token '<pad>' is declared beside tokenizer.json" in refused
    assert "id: 100" in refused


@pytest.mark.parametrize("seed", range(20))
def test_an_end_that_the_generation_lacks_is_a_warning(seed: int) -> None:
    rng = random.Random(seed)
    ends = rng.sample(range(100), rng.randint(0, 3))
    own = rng.random() < 0.5  # else the ids of config.json count
    named = rng.choice(["<s>", "a", "<new>", None])
    files = PLAIN | {"tokenizer_config.json": {"eos_token": named}}
    files |= {"generation_config.json": {"eos_token_id": ends}} if own else {}
    files["config.json"] = CONFIG | {"eos_token_id": [] if own else ends}
    token = {"<s>": 0, "a": 1, "<new>": 2, None: -1}[named]
    warnings = checkpoint_warnings(files, reader(files))
    assert len(warnings) == (token >= 0 and token not in ends)
    assert all(f"{named!r}, id {token}, which eos_token_id" in warning for warning in warnings)
    assert found(files) == ""
