"""A model converted from a GGUF file: it has the file's values, and answers as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fairway.client.publish.publish import declared_kind, find_files, require_servable
from fairway.importing.gguf_convert import convert_gguf
from fairway.importing.gguf_file import BadGguf
from tests.support.gguf_files import byte_level, sentencepiece, shape_of, write_file, write_model

VOCABULARY = 900
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama-tied": ("Llama", "llama", {"tie_word_embeddings": True, "head_dim": 128}),
    "llama-biases": ("Llama", "llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", "llama", {"sliding_window": 9}),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 128}),
}
QUANTISED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
CASES = [(name, "F32") for name in FAMILIES] + [("llama", type_name) for type_name in QUANTISED]
CASES += [("qwen3", "Q4_K"), ("llama-tied", "Q6_K"), ("qwen2", "Q8_0")]
MARGIN = 1e-4


def converted(source: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(source, folder)
    files = find_files(folder)
    assert require_servable(files, declared_kind(files)) == (("torch", "vllm"), ())
    return folder


def float32(found: Any) -> Any:
    """Halves of bfloat16 have no type in NumPy."""
    return found.astype(np.float32)


@pytest.mark.parametrize(("name", "type_name"), CASES)
def test_it_answers_as_transformers_does_with_the_values_of_the_file(
    name: str, type_name: str, save_model: Any, load_engine: Any, submit: Any, drive: Any, tmp_path: Path
) -> None:
    family, architecture, overrides = FAMILIES[name]
    model, _ = save_model(family, seed=len(name), **SIZES | overrides)
    tokenizer = sentencepiece() if name == "mistral" else byte_level("qwen2")
    values = write_model(tmp_path / "m.gguf", model, architecture, tokenizer, type_name=type_name)
    folder = converted(tmp_path / "m.gguf", tmp_path / "m")
    if type_name != "BF16":
        found = load_file(folder / "model.safetensors")
        assert found.keys() == values.keys()
        for key, wanted in values.items():
            np.testing.assert_array_equal(float32(found[key]), wanted, key)
    model.load_state_dict({key: torch.tensor(value) for key, value in values.items()}, strict=False)
    prompt = [(7 * place) % VOCABULARY for place in range(1, 24)]
    tokens = drive(load_engine(folder), [submit(1, prompt, 12, ignore_eos=True)]).tokens[1]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert best.max() <= MARGIN, best


def llama3_divisors(head_dim: int, theta: float, factor: float) -> Any:
    """Return what transformers multiplies wavelengths by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": theta, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config: Any = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 8.0), (128, 16.0), (64, 32.0)])
def test_divisors_of_llama_3_become_its_scaling(
    head_dim: int, factor: float, save_model: Any, tmp_path: Path
) -> None:
    theta = 500000.0
    sizes = SIZES | {"head_dim": head_dim, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    model, _ = save_model("Llama", **sizes)
    fields = {"general.architecture": "llama", **shape_of(model.config, "llama"), **byte_level("llama-bpe")}
    values = write_model(tmp_path / "plain.gguf", model, "llama", byte_level("llama-bpe"))
    divisors = llama3_divisors(head_dim, theta, factor)

    def write(divisors: Any) -> Path:
        from fairway.importing.gguf_convert import _source_of
        from tests.support.gguf_files import interleaved

        heads = {"q_proj": 4, "k_proj": 2}
        tensors = {
            _source_of(key): (
                interleaved(value, count) if (count := heads.get(key.split(".")[-2], 0)) else value,
                "F32",
            )
            for key, value in values.items()
        }
        write_file(tmp_path / "m.gguf", fields, {**tensors, "rope_freqs.weight": (divisors, "F32")})
        return tmp_path / "m.gguf"

    config = json.loads((converted(write(divisors), tmp_path / "m") / "config.json").read_text())
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors[head_dim // 4] *= 1.1
    with pytest.raises(BadGguf, match=r"m\.gguf: rope_freqs\.weight: the divisors are not those of Llama 3"):
        converted(write(divisors), tmp_path / "refused")
