"""Converted GGUF files against transformers' own loading of the same: values, shape, tokens, template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from fairway.importing.gguf_convert import convert_gguf
from tests.support.engine_oracle import Shape, save
from tests.support.gguf_files import CORPUS, byte_level, sentencepiece, write_model

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
VOCABULARY = 900
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
    "bos_token_id",
    "pad_token_id",
)


class Sized(Shape):
    """A shape whose rows are whole blocks."""

    @property
    def fields(self) -> dict[str, Any]:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256}
        return super().fields | sizes


def model_of(folder: Path, path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)


def tokenizer_of(folder: Path, path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, gguf_file=path.name)


def texts(seed: int, *, blanks: bool) -> list[str]:
    """Return texts of words, digits, signs and other scripts; ``blanks``: also with several in a row."""
    rng = random.Random(seed)
    parts = [*CORPUS.split(), "1234", "x=1", "漢字", "🦊", "'s", "I'll", "\n", "ÉTÉ", "<|im_end|>", "<think>"]
    spaces = (" ", "", "  ", "\t") if blanks else (" ", "")
    return [
        "".join(rng.choice(parts) + rng.choice(spaces) for _ in range(rng.randint(1, 30))) for _ in range(60)
    ]


@pytest.mark.parametrize("type_name", [*TYPES, *K_TYPES])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_values_and_shape_are_those_that_transformers_loads(
    architecture: str, type_name: str, tmp_path: Path
) -> None:
    seed = K_TYPES.index(type_name) if type_name in K_TYPES else TYPES.index(type_name)
    # The head's size is a GGUF key that transformers reads of llama only.
    head_dim = 64 if architecture != "qwen3" else 128
    shape = Sized(FAMILIES[architecture], 4, (1, 2, 4)[seed % 3], head_dim)
    path = tmp_path / "m.gguf"
    write_model(
        path, save(shape, tmp_path / "own", seed=seed), architecture, byte_level("gpt-2"), type_name=type_name
    )
    (tmp_path / "m").mkdir()
    convert_gguf(path, tmp_path / "m")
    wanted = model_of(tmp_path, path)
    found = load_file(tmp_path / "m" / "model.safetensors")
    state = wanted.state_dict()
    assert found.keys() == state.keys() - ({"lm_head.weight"} if wanted.config.tie_word_embeddings else set())
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), state[name]), name
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for name in SHAPE_FIELDS:
        assert config.get(name) == getattr(wanted.config, name, head_dim), name
    assert config["rope_theta"] == wanted.config.rope_parameters["rope_theta"]
    assert config["model_type"] == wanted.config.model_type


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("seed", range(5))
def test_byte_level_tokens_are_those_of_transformers(pre: str, seed: int, tmp_path: Path) -> None:
    """Where it has no rule for digits of a split, texts have no blanks in a row, which alone show that."""
    path = tmp_path / "m.gguf"
    model = save(Sized("Llama", 4, 2, 64), tmp_path / "own")
    write_model(path, model, "llama", byte_level(pre, seed=seed))
    (tmp_path / "m").mkdir()
    convert_gguf(path, tmp_path / "m")
    own = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    wanted = tokenizer_of(tmp_path, path)
    for text in texts(seed, blanks=pre != "smollm"):
        ids = own.encode(text).ids
        assert ids == wanted(text)["input_ids"], text
        assert own.decode(ids, skip_special_tokens=False) == text
    assert (tmp_path / "m" / "chat_template.jinja").read_text() == wanted.chat_template


@pytest.mark.parametrize("seed", range(10))
def test_sentencepiece_tokens_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = save(Sized("Llama", 4, 2, 64), tmp_path / "own")
    write_model(path, model, "llama", sentencepiece(seed=seed))
    (tmp_path / "m").mkdir()
    convert_gguf(path, tmp_path / "m")
    own = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    wanted = tokenizer_of(tmp_path, path)
    for text in texts(seed, blanks=True):
        assert own.encode(text).ids == wanted(text)["input_ids"], text
