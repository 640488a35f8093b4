"""Which engine serves a checkpoint: vLLM's proved families and formats, others are named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from fairway.formats.fixed_cost.config import parse_fixed_cost
from fairway.formats.fixed_cost.encoder_config import FAMILIES
from fairway.formats.fixed_cost.layouts import layout_of
from fairway.formats.servable import engine_problems, no_engine
from fairway.formats.vllm_models import PROVED
from services.core.records import VersionRecord
from tests.support.model_folder import header_of

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
INT8 = {"num_bits": 8, "type": "int"}
W8A8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"0": {"weights": INT8, "input_activations": INT8}},
}
TOKENIZER = {"added_tokens": [], "model": {"vocab": {"a": 1}}}
EMBEDDING = ("model.embed_tokens.weight", (100, 32))


def family(name: str) -> dict[str, Any]:
    """A configuration of the family, the smallest that is served."""
    return SIZES | {"architectures": [name], "num_experts": 4, "num_local_experts": 4}


def tensors(layers: int = 2, dtype: str = "F32") -> dict[str, Any]:
    names = [f"model.layers.{layer}.mlp.experts.0.up.weight" for layer in range(layers)]
    return {EMBEDDING[0]: EMBEDDING[1]} | dict.fromkeys(names, (4, 4))


def files(config: dict[str, Any], found: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "config.json": config,
        "tokenizer.json": TOKENIZER,
        "model.safetensors": tensors() if found is None else found,
    } | more


def reader(held: dict[str, Any]) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        content = held[name]
        return header_of(content) if name.endswith(".safetensors") else json.dumps(content).encode()

    return read


def vllm(held: dict[str, Any]) -> str:
    return engine_problems(held, reader(held))["vllm"]


@pytest.mark.parametrize("name", PROVED)
def test_a_proved_family_is_served_by_vllm_alone(name: str) -> None:
    held = files(family(name))
    problems = engine_problems(held, reader(held))
    assert problems["vllm"] == ""
    assert f"architectures: ['{name}'] is not supported by the engine" in problems["torch"]
    assert no_engine(engine_problems(held, reader(held))) == ""


@pytest.mark.parametrize(
    "quantised", [W8A8, {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}]
)
def test_quantised_weights_of_llama_are_served_by_vllm_alone(quantised: dict[str, Any]) -> None:
    held = files(LLAMA | {"quantization_config": quantised})
    problems = engine_problems(held, reader(held))
    assert problems["vllm"] == ""
    assert "quantization_config" in problems["torch"]


def test_a_damaged_checkpoint_of_fairways_own_family_is_served_by_neither() -> None:
    held = files(LLAMA)
    problems = engine_problems(held, reader(held))
    assert problems["torch"] == problems["vllm"]
    assert "missing tensors" in no_engine(engine_problems(held, reader(held)))


BERT: dict[str, Any] = SIZES | {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 128}
POOLING: dict[str, Any] = {
    "modules.json": [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode": "mean"},
}


def encoder(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the files of an embedding whose tensors are those that the configuration implies."""
    held = files(config) | POOLING | more
    layout = layout_of(parse_fixed_cost(held, reader(held)))
    return held | {"model.safetensors": dict(layout.shapes)}


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta"])
def test_an_encoder_is_served_by_both_and_its_own_engine_comes_first(name: str) -> None:
    held = encoder(
        BERT | {"architectures": [f"{name}Model"], "model_type": FAMILIES[name].model_type, "pad_token_id": 0}
    )
    problems = engine_problems(held, reader(held), "fixed-cost")
    assert problems == {"torch": "", "vllm": ""}
    record = VersionRecord(
        "embed", "sha256:1", 1, 0.0, engine_problems={str(name): text for name, text in problems.items()}
    )
    assert record.servable_by == ("torch", "vllm")
    assert record.executor("", field="executor") == "torch"
    assert record.executor("vllm", field="executor") == "vllm"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BERT | {"num_attention_heads": 16}, "heads of 8"),
        (BERT | {"type_vocab_size": 3}, "type_vocab_size: vLLM has token types 0 and 1, the model 3"),
        (
            {
                "architectures": ["DistilBertModel"],
                "model_type": "distilbert",
                "vocab_size": 100,
                "dim": 64,
                "n_layers": 1,
                "n_heads": 2,
                "hidden_dim": 64,
                "max_position_embeddings": 64,
            },
            "vLLM has no distilbert, only bert, roberta, xlm-roberta",
        ),
        (
            {"architectures": ["Mlp"], "input_size": 4, "layers": [{"size": 3}]},
            "vLLM serves text encoders alone",
        ),
    ],
)
def test_an_encoder_that_vllm_does_not_pool_is_named_and_stays_with_its_own_engine(
    config: dict[str, Any], words: str
) -> None:
    held = encoder(config)
    problems = engine_problems(held, reader(held), "fixed-cost")
    assert problems["torch"] == ""
    assert words in problems["vllm"]
    assert no_engine(engine_problems(held, reader(held), "fixed-cost")) == ""


def test_what_the_own_encoder_refuses_is_refused_by_vllm_too() -> None:
    held = files(BERT | {"position_embedding_type": "relative_key"}) | POOLING
    problems = engine_problems(held, reader(held), "fixed-cost")
    assert problems["vllm"] == problems["torch"]
    assert "position_embedding_type" in no_engine(engine_problems(held, reader(held), "fixed-cost"))


def test_a_decoder_of_vllm_embeds_by_its_last_token_or_is_refused() -> None:
    last = files(GEMMA) | POOLING | {"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}
    assert vllm(last) == ""
    assert "how it embeds" in vllm(files(GEMMA) | POOLING)


def test_gguf_is_no_business_of_vllm() -> None:
    held = files(family("Gemma2ForCausalLM")) | {"model.gguf": {}}
    assert "fairway models import" in vllm(held)
    assert "fairway models import" in no_engine(engine_problems(held, reader(held)))


GEMMA = family("Gemma2ForCausalLM")
SHARDS = {"a.safetensors": tensors(), "b.safetensors": {"model.norm.weight": (32,)}}
INDEX = "model.safetensors.index.json"
LISTED = dict.fromkeys(tensors(), "a.safetensors") | {"model.norm.weight": "b.safetensors"}


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (files(GEMMA | {"auto_map": {"AutoModel": "m.M"}}), "auto_map names program code"),
        (files(GEMMA) | {"modeling.py": {}}, "modeling.py"),
        (files(GEMMA | {"kv_lora_rank": 512}), "latent attention"),
        (files(family("DeepseekV2ForCausalLM")), "DeepseekV2ForCausalLM is refused: its latent attention"),
        (files(family("DeepseekV3ForCausalLM")), "DeepseekV3ForCausalLM is refused"),
        (files(family("MambaForCausalLM")), "MambaForCausalLM is refused"),
        (files(family("JambaForCausalLM")), "JambaForCausalLM is refused"),
        (files(family("AnyForCausalLM")), "architectures: ['AnyForCausalLM']"),
        (files(GEMMA | {"architectures": "Gemma2ForCausalLM"}), "architectures"),
        (files(GEMMA | {"architectures": [{}]}), "architectures"),
        (files(GEMMA | {"model_type": "gemma3"}), "model_type"),
        (files(GEMMA | {"quantization_config": W8A8}), "quantised weights is not proved"),
        (files(LLAMA | {"quantization_config": {"quant_method": "fp8"}}), "quantization_config"),
        (files(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 2}}), "gptq of other than 4"),
        (files(LLAMA | {"quantization_config": [1]}), "quantization_config: list"),
        (files(LLAMA | {"quantization_config": W8A8, "hidden_act": "gelu"}), "hidden_act"),
        (files(GEMMA | {"hidden_size": -1}), "hidden_size"),
        (files(GEMMA | {"num_hidden_layers": 10**9}), "num_hidden_layers"),
        (files(GEMMA | {"vocab_size": 10**400}), "vocab_size"),
        (files(GEMMA | {"max_position_embeddings": True}), "max_position_embeddings"),
        (files(GEMMA | {"num_key_value_heads": 3}), "num_key_value_heads"),
        (files(GEMMA | {"eos_token_id": "x"}), "eos_token_id"),
        (files(family("MixtralForCausalLM") | {"num_local_experts": None}), "num_local_experts"),
        (
            files(
                family("MixtralForCausalLM"),
                {EMBEDDING[0]: EMBEDDING[1]}
                | {f"model.layers.{layer}.mlp.up.weight": (4, 4) for layer in range(2)},
            ),
            "no tensor is of an expert",
        ),
        (files(GEMMA, tensors(layers=1)), "the tensors are of 1 layers"),
        (files(GEMMA, tensors(layers=3)), "the tensors are of 3 layers"),
        (files(GEMMA, tensors() | {EMBEDDING[0]: (100, 31)}), "model.embed_tokens.weight is of shape"),
        (files(GEMMA, {}), "model.embed_tokens.weight is missing"),
        ({"config.json": GEMMA, "model.safetensors": tensors()}, "tokenizer.json is missing"),
        ({"config.json": GEMMA, "tokenizer.json": TOKENIZER}, "model.safetensors is missing"),
        (
            {
                "config.json": GEMMA,
                "tokenizer.json": TOKENIZER,
                **SHARDS,
                INDEX: {"weight_map": LISTED | {"more": "a.safetensors"}},
            },
            "differ: more",
        ),
        (files(GEMMA) | {"draft/config.json": LLAMA, "draft/model.safetensors": {}}, "draft"),
    ],
)
def test_what_vllm_does_not_serve_is_named(held: dict[str, Any], words: str) -> None:
    assert words in vllm(held)


def test_shards_are_served() -> None:
    held = {"config.json": GEMMA, "tokenizer.json": TOKENIZER, **SHARDS, INDEX: {"weight_map": LISTED}}
    assert vllm(held) == ""


def test_no_configuration_ends_the_check() -> None:
    """Values drawn by seed in place of each field: each has an answer, sizes out of bounds are refused."""
    rng = random.Random(37)
    values: list[Any] = [None, True, -1, 0, 10**30, 1e308, "x", [], {}, [[]], {"a": [1]}, 2**31 + 1]
    for name in PROVED:
        for field in [
            *family(name),
            "quantization_config",
            "rope_scaling",
            "kv_lora_rank",
            "auto_map",
            "head_dim",
        ]:
            held = files(family(name) | {field: rng.choice(values)})
            engine_problems(held, reader(held))
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        for wrong in values:
            assert vllm(files(GEMMA | {field: wrong})), (field, wrong)
