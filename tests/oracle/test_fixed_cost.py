"""Encoders, heads and image classifiers against transformers' own code, on random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from services.core.fixed_cost.signature import Operation
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Packed, Padded
from tests.support.fixed_cost import POSITIONS, images, own_outputs, save, save_pooling, token_row

TOLERANCE = 1e-5
LENGTHS = (1, 2, 7, 7, 19, POSITIONS)
TYPED = {"Bert": 2, "Roberta": 1, "XLMRoberta": 1, "DistilBert": 0}
FAMILIES = tuple(TYPED)


def rows_of(family: str) -> list[Any]:
    rng = np.random.default_rng(5)
    return [token_row(rng, length, types=TYPED[family] == 2) for length in LENGTHS]


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs.numpy(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "normalize"), [("mean_tokens", True), ("cls_token", False)])
def test_embeddings(family: str, mode: str, normalize: bool, tmp_path: Path) -> None:
    theirs = save(family, "Model", tmp_path, type_vocab_size=max(1, TYPED[family]))
    save_pooling(tmp_path, mode=mode, normalize=normalize)
    model, rows = load_model(tmp_path), rows_of(family)
    assert model.facts.operation is Operation.EMBED
    assert [model.problem(row) for row in rows] == [""] * len(rows)
    for batch in (Padded(rows, POSITIONS), Packed(rows)):
        for own, output in zip(model.run(batch), own_outputs(theirs, rows), strict=True):
            hidden = output.last_hidden_state[0]
            expected = hidden[0] if mode == "cls_token" else hidden.mean(0)
            close(own["embedding"], F.normalize(expected, dim=0) if normalize else expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "labels", "operation"),
    [
        ("ForSequenceClassification", 3, Operation.CLASSIFY),
        ("ForSequenceClassification", 1, Operation.SCORE),
        ("ForTokenClassification", 5, Operation.TOKENS),
    ],
)
def test_heads(family: str, kind: str, labels: int, operation: Operation, tmp_path: Path) -> None:
    theirs = save(family, kind, tmp_path, num_labels=labels, type_vocab_size=max(1, TYPED[family]))
    model, rows = load_model(tmp_path), rows_of(family)
    assert model.facts.operation is operation
    for batch in (Padded(rows, POSITIONS), Packed(rows)):
        for own, output in zip(model.run(batch), own_outputs(theirs, rows), strict=True):
            close(own["logits"], output.logits[0])


def test_a_padding_id_within_a_row_has_the_position_that_transformers_gives_it(tmp_path: Path) -> None:
    theirs = save("Roberta", "ForSequenceClassification", tmp_path)
    row = {"input_ids": np.array([5, 1, 9, 1, 1, 7], np.int64)}
    with torch.inference_mode():
        mask = torch.ones(1, 6, dtype=torch.int64)
        expected = theirs(torch.from_numpy(row["input_ids"])[None], attention_mask=mask).logits[0]
    close(load_model(tmp_path).run(Padded([row], 11))[0]["logits"], expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations(activation: str, tmp_path: Path) -> None:
    theirs = save("Bert", "ForSequenceClassification", tmp_path, hidden_act=activation)
    rows = rows_of("Bert")
    for own, output in zip(load_model(tmp_path).run(Packed(rows)), own_outputs(theirs, rows), strict=True):
        close(own["logits"], output.logits[0])


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
@pytest.mark.parametrize(
    "flags", [{}, {"downsample_in_first_stage": True}, {"downsample_in_bottleneck": True}], ids=str
)
def test_resnet(layer_type: str, flags: dict[str, Any], tmp_path: Path) -> None:
    theirs = save("ResNet", "ForImageClassification", tmp_path, layer_type=layer_type, num_labels=4, **flags)
    model, rows = load_model(tmp_path), images(np.random.default_rng(1), 3, 37, 50)
    assert [model.problem(row) for row in rows] == ["", "", ""]
    for own, output in zip(model.run(Padded(rows)), own_outputs(theirs, rows), strict=True):
        close(own["logits"], output.logits[0])


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_vit(qkv_bias: bool, tmp_path: Path) -> None:
    theirs = save("ViT", "ForImageClassification", tmp_path, qkv_bias=qkv_bias, num_labels=4)
    model, rows = load_model(tmp_path), images(np.random.default_rng(1), 3, 12, 8)
    assert [model.problem(row) for row in rows] == ["", "", ""]
    for own, output in zip(model.run(Padded(rows)), own_outputs(theirs, rows), strict=True):
        close(own["logits"], output.logits[0])
