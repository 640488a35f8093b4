"""Configurations: what is served is read as its family reads it, what is not is refused by name."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import FAMILIES, INERT_VALUES, parse_config
from fairway.formats.rope_config import COMMON_KEYS, KEYS, context_of
from services.worker.engine.execute.rope import Rope
from services.worker.engine.load.config import eos_ids, read_json, vocab_size_of
from services.worker.engine.load.loading import load
from services.worker.engine.unsupported import BadEngineConfig
from services.worker.engine_protocol import EngineConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def of(family: str, **changes: Any) -> dict[str, Any]:
    fields = LLAMA | {"architectures": [family], "model_type": FAMILIES[family].model_type} | changes
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        ({"architectures": ...}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"model_type": "mixtral"}, "model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": []}, "hidden_act"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope_type"),
        ({"rope_scaling": {"type": []}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}},
            "rope_parameters.mrope_section",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, "truncate"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "rope_theta"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 10**5000}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e308}}, "beta_fast"),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings",
        ),
        ({"sliding_window": 8}, "sliding_window"),
        ({"attention_chunk_size": 8}, "attention_chunk_size"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4}}, "long_factor"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": [{}] * 4}, "layer_types"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        parse_config(of("LlamaForCausalLM", **changes) if "model_type" not in changes else LLAMA | changes)
    assert refused.value.field == field
    assert field in str(refused.value)


def test_a_family_of_several_windows_is_refused_where_it_has_one() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(UnsupportedModel, match="layer_types"):
        parse_config(of("MistralForCausalLM", sliding_window=8, layer_types=types))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (of("LlamaForCausalLM", sliding_window=None), (None,) * 4),
        (of("MistralForCausalLM"), (4096,) * 4),
        (of("MistralForCausalLM", sliding_window=None), (None,) * 4),
        (of("MistralForCausalLM", sliding_window=8), (8,) * 4),
        (of("Qwen2ForCausalLM", sliding_window=8), (None,) * 4),
        (of("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True), (None,) * 4),
        (
            of("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=3),
            (None,) * 3 + (8,),
        ),
        (
            of(
                "Qwen3ForCausalLM",
                sliding_window=8,
                use_sliding_window=True,
                layer_types=["full_attention", "sliding_attention"] * 2,
            ),
            (None, 8, None, 8),
        ),
    ],
)
def test_windows_are_read_as_the_family_reads_them(
    fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse_config(fields).windows == windows


def test_biases_and_norms_are_those_of_the_family() -> None:
    def shape(family: str) -> tuple[bool, ...]:
        parsed = parse_config(of(family, attention_bias=True, mlp_bias=True))
        return parsed.qkv_bias, parsed.output_bias, parsed.mlp_bias, parsed.qk_norm

    assert shape("LlamaForCausalLM") == (True, True, True, False)
    assert shape("MistralForCausalLM") == (False, False, False, False)
    assert shape("Qwen2ForCausalLM") == (True, False, False, False)
    assert shape("Qwen3ForCausalLM") == (True, True, False, True)


def test_head_dim_is_given_or_derived_or_the_familys() -> None:
    assert parse_config(of("LlamaForCausalLM")).head_dim == 8
    assert parse_config(of("LlamaForCausalLM", head_dim=None)).head_dim == 8
    assert parse_config(of("LlamaForCausalLM", head_dim=6)).head_dim == 6
    assert parse_config(of("Qwen3ForCausalLM")).head_dim == 128


def test_kv_heads_default_to_heads_where_the_family_says_so() -> None:
    assert parse_config(of("LlamaForCausalLM", num_key_value_heads=...)).kv_heads == 4
    assert parse_config(of("MistralForCausalLM", num_key_value_heads=None)).kv_heads == 4
    with pytest.raises(UnsupportedModel, match="num_key_value_heads"):
        parse_config(of("MistralForCausalLM", num_key_value_heads=...))


SCALED: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "default"}, 64),
    ({"rope_type": "linear", "factor": 2.5}, 160),
    ({"rope_type": "linear", "factor": 0.5}, 64),
    ({"rope_type": "dynamic", "factor": 2.0}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}, 256),
    ({"rope_type": "yarn", "factor": 4.0}, 256),
    ({"rope_type": "yarn", "original_max_position_embeddings": 32}, 64),
    ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32}, 64),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
        64,
    ),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 64),
]


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rope", "context"), SCALED)
def test_scaled_contexts_reach_as_far_as_they_say(
    rope: dict[str, Any], context: int, family: str, key: str, section: str
) -> None:
    rope = {key if name == "rope_type" else name: value for name, value in rope.items()}
    fields = of(family, head_dim=8, **{section: rope})
    assert parse_config(fields).max_context == context
    assert context_of(fields) == context  # which the gateways go by


def test_an_older_section_goes_before_a_newer_one() -> None:
    fields = of(
        "LlamaForCausalLM",
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "linear", "factor": 3.0},
    )
    assert context_of(fields) == parse_config(fields).max_context == 128


VALUES: tuple[Any, ...] = (
    *(
        None,
        "",
        "32",
        "nan",
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        4096,
        2**80,
        10**5000,
        0.0,
        1e-300,
        0.5,
        1.0,
        1e308,
    ),
    *(float("nan"), float("inf"), [], [1], ["x"], {}, {"a": 1}, ...),
)
ROPE_FIELDS = sorted({name for names in KEYS.values() for name in names} | COMMON_KEYS)


@pytest.mark.parametrize("seed", range(8))
def test_every_odd_config_is_a_shape_or_a_refusal_by_name(seed: int) -> None:
    """Fields of each family take drawn values: a shape whose rotations are finite, or UnsupportedModel."""
    rng = random.Random(seed)
    names = sorted({*LLAMA, *INERT_VALUES, "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"})
    names += ["attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers"]
    names += ["layer_types", "partial_rotary_factor", "original_max_position_embeddings"]
    served = refused = 0
    for _ in range(400):
        fields = of(rng.choice(sorted(FAMILIES)), head_dim=8)
        for name in rng.sample(names, rng.choice((0, 1, 1, 2))):
            fields[name] = rng.choice(VALUES)
        kind = rng.choice(sorted(KEYS))
        rope: dict[str, Any] = {
            "rope_type": kind,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
        rope = {name: value for name, value in rope.items() if name in KEYS[kind] | COMMON_KEYS}
        for name in rng.sample(ROPE_FIELDS, rng.choice((0, 0, 1, 2))):
            rope[name] = rng.choice(VALUES)
        fields[rng.choice(("rope_scaling", "rope_parameters"))] = rope
        fields = {name: value for name, value in fields.items() if value is not ...}
        if ... in rope.values():
            continue
        try:
            shape = parse_config(fields)
        except UnsupportedModel as error:
            refused += bool(error.field and str(error))
            continue
        served += 1
        assert shape.max_context == context_of(fields)
        table = Rope(shape.rope, max_model_len=4, dtype=torch.float32, device=torch.device("cpu"))
        positions = torch.tensor([0, 1, min(shape.max_context, 4096) - 1])
        for part in table.cos_sin(positions.clamp(max=3), torch.tensor([1, 2, 4])):
            assert part.isfinite().all(), fields
    assert served
    assert refused


@pytest.mark.parametrize("content", ["[1]", "{", '"x"', "[" * 100_000])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="missing"):
        read_json(tmp_path / "config.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UnsupportedModel, match="bytes"):
        read_json(tmp_path / "huge.json")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (None, None, set()),
        (2, {"eos_token_id": [5, 6]}, {5, 6}),
        (2, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": 5}, {5}),
        (2, {"eos_token_id": None}, set()),
        (2, {"temperature": 0.5}, set()),
        (2, {"eos_token_id": [2, 1000, -1]}, {2}),  # outside the vocabulary: never sampled, never masked
        ([1000, -1], None, set()),
    ],
)
def test_eos_ids_of_the_generation_config_replace_those_of_the_config(
    tmp_path: Path, config: Any, generation: dict[str, Any] | None, expected: set[int]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_ids(tmp_path, {"eos_token_id": config}, 100) == expected


def test_an_eos_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        eos_ids(tmp_path, {"eos_token_id": ["</s>"]}, 100)


def test_a_null_model_needs_nothing_but_may_name_its_vocabulary() -> None:
    assert vocab_size_of({}) == 32000
    assert vocab_size_of({"vocab_size": 7}) == 7


def engine_config(folder: Path, **changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"executor": "null", "kv_blocks": 8, "block_size": 4} | changes
    return EngineConfig(socket_path="", model_dir=str(folder), **options)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"token_budget": 3, "max_sequences": 4}, "token_budget"),
        ({"block_size": 0}, "block_size"),
        ({"kv_blocks": -1}, "kv_blocks"),
        ({"kv_blocks": 0, "kv_memory_bytes": 100}, "KV blocks"),
        ({"kv_blocks": 1 << 40}, "KV blocks"),
        ({"kv_blocks": 1, "block_size": 1}, "no room"),
        ({"executor": "torch", "max_model_len": 65}, "max_model_len"),
        ({"speculation": "prompt_lookup", "max_proposals": 0}, "max_proposals"),
        ({"speculation": "draft"}, "draft_model_dir"),
        ({"draft_model_dir": "/tmp"}, "draft_model_dir"),
        ({"speculation": "draft", "draft_model_dir": "/tmp"}, "null engine"),
    ],
)
def test_limits_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(BadEngineConfig, match=word):
        load(engine_config(tmp_path, **changes), lambda phase, ratio: None)


def test_a_context_that_the_pool_cannot_hold_is_not_promised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ready = load(engine_config(tmp_path), lambda phase, ratio: None)[1]
    assert (ready.max_model_len, ready.kv_blocks_total, ready.vocab_size) == (32, 8, 100)
    ready = load(engine_config(tmp_path, kv_blocks=100), lambda phase, ratio: None)[1]
    assert ready.max_model_len == 64
    scaled = LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(scaled))
    ready = load(engine_config(tmp_path, kv_blocks=100), lambda phase, ratio: None)[1]
    assert ready.max_model_len == 256


def test_a_null_model_without_any_file_loads(tmp_path: Path) -> None:
    ready = load(engine_config(tmp_path, kv_blocks=0), lambda phase, ratio: None)[1]
    assert ready.vocab_size == 32000
    assert ready.kv_blocks_total * ready.kv_bytes_per_block <= 256 * 1024 * 1024


def test_attention_costs_as_much_as_the_rest_where_its_full_layers_say_so() -> None:
    plain = parse_config(of("LlamaForCausalLM", hidden_size=64, intermediate_size=128, num_hidden_layers=2))
    dense = 2 * (64 * plain.head_dim * 2 * (plain.heads + plain.kv_heads) + 3 * 64 * 128)
    assert plain.attention_half_tokens == dense // (2 * plain.heads * plain.head_dim * 2)
    assert plain.flops_per_token == 2 * (dense + plain.hidden_size * plain.vocab_size)
    assert replace(plain, windows=(None, 8)).attention_half_tokens == 2 * plain.attention_half_tokens
    assert replace(plain, windows=(8, 8)).attention_half_tokens == dense
