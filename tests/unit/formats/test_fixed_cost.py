"""What a folder of a fixed-cost model declares, and every field that refuses it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.fixed_cost.config import is_fixed_cost, parse_fixed_cost
from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.fixed_cost.layouts import layout_of
from fairway.formats.servable import engine_problems, kind_of, no_engine
from tests.support.model_folder import header_of

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}
ROBERTA = BERT | {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "model_type": "xlm-roberta",
    "id2label": {"0": "relevance"},
    "pad_token_id": 1,
    "max_position_embeddings": 66,
}
VIT: dict[str, Any] = {
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
RESNET: dict[str, Any] = {
    "architectures": ["ResNetForImageClassification"],
    "hidden_sizes": [8, 16],
    "depths": [1, 2],
}
MLP: dict[str, Any] = {"architectures": ["Mlp"], "input_size": 4, "layers": [{"size": 3}]}
MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
MEAN = {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
FOLDER: dict[str, Any] = {
    "config.json": BERT,
    "modules.json": MODULES,
    "1_Pooling/config.json": MEAN,
    "sentence_bert_config.json": {"max_seq_length": 32},
    "tokenizer.json": {"added_tokens": []},
    "model.safetensors": 0,
}


def problem(files: dict[str, Any], kind: str = "fixed-cost") -> str:
    held = {name: content for name, content in files.items() if content is not ...}

    def read(name: str) -> bytes:
        if name != "model.safetensors":
            return json.dumps(held[name]).encode()
        return header_of(layout_of(parse_fixed_cost(held, read)).shapes)

    return no_engine(engine_problems(held, read, kind))


def parsed(fields: dict[str, Any], **more: Any) -> Any:
    files = {"config.json": fields} | more
    return parse_fixed_cost(files, lambda name: json.dumps(files[name]).encode())


def test_whole_folders_are_served_and_their_kind_is_found() -> None:
    others = [{"config.json": fields, "model.safetensors": 0} for fields in (VIT, RESNET, MLP)]
    reranker = {"config.json": ROBERTA, "tokenizer.json": {}, "model.safetensors": 0}
    folders = [FOLDER, reranker, *others]
    assert [problem(folder) for folder in folders] == [""] * len(folders)
    kinds = [kind_of(folder, lambda name, f=folder: json.dumps(f[name]).encode()) for folder in folders]  # type: ignore[misc]
    assert set(kinds) == {"fixed-cost"}
    assert kind_of(["config.json"], lambda _: b'{"architectures": ["LlamaForCausalLM"]}') == "causal-lm"
    assert kind_of([], lambda _: b"") == "causal-lm"


def test_pooling_and_lengths_are_those_that_are_declared() -> None:
    config = parsed(BERT, **{name: FOLDER[name] for name in list(FOLDER)[1:4]})
    assert (config.pooling, config.normalize, config.max_tokens) == ("mean", True, 32)
    newer = {"modules.json": MODULES[:2], "1_Pooling/config.json": {"pooling_mode": "cls"}}
    config = parsed(BERT, **newer)
    assert (config.pooling, config.normalize, config.max_tokens) == ("cls", False, 64)
    config = parsed(ROBERTA)
    assert isinstance(config, EncoderConfig)
    assert (config.labels, config.max_tokens) == (1, 64)


IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
TANH = "torch.nn.modules.activation.Tanh"
OLDER = "sbert_ce_default_activation_function"


@pytest.mark.parametrize(
    ("declared", "score"),
    [
        ({}, "sigmoid"),
        ({OLDER: None}, "sigmoid"),
        ({OLDER: IDENTITY}, "logit"),
        ({OLDER: SIGMOID}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.0.1"}}, "logit"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}, OLDER: SIGMOID}, "logit"),
        ({"sentence_transformers": {"activation_fn": None}, OLDER: IDENTITY}, "sigmoid"),
        ({"sentence_transformers": {"version": "4.0.1"}, OLDER: IDENTITY}, "logit"),
        ({"id2label": None, OLDER: TANH}, "sigmoid"),  # two labels: no reranker
    ],
)
def test_a_reranker_scores_by_the_activation_that_it_declares(declared: dict[str, Any], score: str) -> None:
    assert parsed(ROBERTA | declared).score == score


def test_texts_of_an_embedding_are_lowercased_where_that_is_declared() -> None:
    files = {name: FOLDER[name] for name in list(FOLDER)[1:4]}
    assert not parsed(BERT, **files).lowercase
    for value in (True, False, None):
        sentences = {"max_seq_length": 32, "do_lower_case": value}
        config = parsed(BERT, **files | {"sentence_bert_config.json": sentences})
        assert (config.lowercase, config.max_tokens) == (value is True, 32)


def with_module(index: int, **changes: Any) -> dict[str, Any]:
    modules = [module | (changes if place == index else {}) for place, module in enumerate(MODULES)]
    return FOLDER | {"modules.json": modules}


def with_pooling(**fields: Any) -> dict[str, Any]:
    return FOLDER | {"1_Pooling/config.json": MEAN | fields}


def with_config(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return FOLDER | {"config.json": fields | changes}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (FOLDER | {"modules.json": ...}, "modules.json, which declares how an embedding is pooled"),
        (FOLDER | {"modules.json": {}}, "modules.json: modules"),
        (FOLDER | {"1_Pooling/config.json": ...}, "1_Pooling/config.json: missing"),
        (with_module(2, type="sentence_transformers.models.Dense", path="2_Dense"), "models.Dense"),
        (with_module(0, path="0_Transformer"), "path of Transformer: 0_Transformer"),
        (with_pooling(pooling_mode_mean_tokens=False, pooling_mode_max_tokens=True), "max_tokens is not"),
        (with_pooling(pooling_mode_cls_token=True), "mean_tokens and cls_token is not supported"),
        (with_pooling(word_embedding_dimension=25), "word_embedding_dimension: 25"),
        (with_pooling(pooling_mode="lasttoken"), "pooling_mode: lasttoken"),
        (FOLDER | {"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length: 0"),
        (FOLDER | {"sentence_bert_config.json": {"do_lower_case": 1}}, "config.json: do_lower_case: 1"),
        (
            with_config(ROBERTA) | {"sentence_bert_config.json": {"do_lower_case": True}},
            "sentence_bert_config.json: do_lower_case: True is not",
        ),
        (with_config(ROBERTA, **{OLDER: TANH}), f"config.json: {OLDER}: {TANH} is not"),
        (with_config(ROBERTA, **{OLDER: ["torch"]}), f"{OLDER}: ['torch']"),
        (
            with_config(ROBERTA, sentence_transformers={"activation_fn": "my.Act"}),
            "config.json: sentence_transformers.activation_fn: my.Act is not",
        ),
        (with_config(ROBERTA, sentence_transformers=7), "sentence_transformers: 7"),
        (FOLDER | {"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "query is not"),
        (FOLDER | {"tokenizer.json": ...}, "tokenizer.json is missing"),
        (FOLDER | {"model.safetensors": ...}, "model.safetensors is missing"),
        (FOLDER | {"config.json": ...}, "config.json: missing"),
        (FOLDER | {"draft/config.json": {}}, "has no draft"),
        (with_config(BERT, architectures=["BertForMaskedLM"]), "config.json: architectures: ['BertFor"),
        (with_config(BERT, hidden_act="silu"), "hidden_act: silu"),
        (with_config(BERT, position_embedding_type="relative_key"), "relative_key"),
        (with_config(BERT, is_decoder=True), "is_decoder: True"),
        (with_config(BERT, hidden_size=25), "hidden_size: 25"),
        (with_config(ROBERTA, pad_token_id=None), "pad_token_id: None"),
        (with_config(ROBERTA, max_position_embeddings=2), "max_position_embeddings: 2"),
        (with_config(VIT, patch_size=64), "patch_size"),
        (with_config(VIT, image_size=[1, 2, 3]), "image_size: [1, 2, 3]"),
        (with_config(RESNET, depths=[1]), "depths: [1]"),
        (with_config(RESNET, hidden_sizes=[6, 8]), "hidden_sizes: [6, 8]"),
        (with_config(RESNET, hidden_act="gelu"), "hidden_act: gelu"),
        (with_config(MLP, layers=[]), "layers: []"),
        (with_config(MLP, layers=[{"size": 3, "activation": "exp"}]), "layers[0].activation: exp"),
        (with_config(MLP, layers=[{"size": 3, "dropout": 1}]), "layers[0].dropout"),
        (with_config(MLP, dropout=0.5), "dropout: 0.5"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(files: dict[str, Any], words: str) -> None:
    found = problem(files)
    assert words in found
    assert found.endswith(
        ("by the batcher", "to tokenize text", "has no draft", "there is no model.safetensors.index.json")
    )


def test_the_kind_must_be_that_of_the_architecture() -> None:
    assert "BertModel is a fixed-cost model" in problem(FOLDER, "causal-lm")
    llama = {"config.json": {"architectures": ["LlamaForCausalLM"]}, "model.safetensors": 0}
    assert "architectures: ['LlamaForCausalLM'] is not supported" in problem(llama)


@pytest.mark.parametrize("value", [None, [], ["BertModel", "BertModel"], [["BertModel"]], "BertModel", [7]])
def test_an_architecture_is_one_name(value: Any) -> None:
    assert not is_fixed_cost({"architectures": value})
    with pytest.raises(UnsupportedModel, match="architectures"):
        parsed(BERT | {"architectures": value})
