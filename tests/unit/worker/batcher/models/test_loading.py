"""Folders become models, or are refused by what is wrong; a row that does not fit is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fairway.formats.config_fields import UnsupportedModel
from services.core.fixed_cost.signature import Operation
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Padded, Row
from services.worker.engine.unsupported import BadCheckpoint
from tests.support.fixed_cost import VOCABULARY, images, save, save_pooling

WEIGHTS = "model.safetensors"
MLP = {
    "architectures": ["Mlp"],
    "input_size": 6,
    "layers": [{"size": 5, "activation": "relu"}, {"size": 3, "activation": "none"}],
}


def save_mlp(folder: Path, fields: dict[str, Any] = MLP) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    tensors = {f"layers.{i}.{part}": getattr(net[2 * i], part) for i in (0, 1) for part in ("weight", "bias")}
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(fields))
    return net


def test_an_mlp_is_the_layers_that_are_described(tmp_path: Path) -> None:
    net, model = save_mlp(tmp_path), load_model(tmp_path)
    rows: list[Row] = [{"input": np.full(6, value, np.float32)} for value in (0.5, -2.0)]
    with torch.inference_mode():
        expected = net(torch.tensor([[0.5] * 6, [-2.0] * 6])).numpy()
    np.testing.assert_allclose([own["output"] for own in model.run(Padded(rows))], expected, atol=1e-6)
    assert model.facts.operation is Operation.INFER
    assert model.facts.weight_bytes == 4 * (6 * 5 + 5 + 5 * 3 + 3)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    save("Bert", "Model", tmp_path)
    save_pooling(tmp_path)
    row: Row = {"input_ids": np.arange(2, 12)}
    whole, half = (load_model(tmp_path, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.facts.dtype == "bfloat16"
    assert half.facts.weight_bytes * 2 == whole.facts.weight_bytes
    pair = [model.run(Padded([row], 16))[0]["embedding"] for model in (whole, half)]
    assert float(pair[0] @ pair[1]) > 0.99


def test_buffers_and_an_unused_pooler_may_be_there(tmp_path: Path) -> None:
    save("Bert", "Model", tmp_path)
    save_pooling(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert "pooler.dense.weight" in tensors
    save_file(tensors | {"embeddings.position_ids": torch.arange(40)[None]}, tmp_path / WEIGHTS)
    load_model(tmp_path)
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    save_file(without, tmp_path / WEIGHTS)
    load_model(tmp_path)


def test_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    save("Bert", "ForSequenceClassification", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        (tensors | {"bert.extra": torch.zeros(1)}, "unexpected tensors: bert.extra"),
        (tensors | {"classifier.bias": torch.zeros(7)}, r"classifier.bias has shape \(7,\)"),
        ({k: v for k, v in tensors.items() if k != "bert.pooler.dense.bias"}, "missing tensors: bert.pooler"),
        (tensors | {"classifier.bias": torch.full((2,), torch.nan)}, "classifier.bias holds values"),
    ]
    for content, words in cases:
        save_file(content, tmp_path / WEIGHTS)
        with pytest.raises(BadCheckpoint, match=words):
            load_model(tmp_path)


def test_a_pickle_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    load_model(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(BadCheckpoint, match=f"{WEIGHTS} is missing"):
        load_model(tmp_path)


def test_a_config_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    (tmp_path / "config.json").write_text(" " * (17 << 20))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        load_model(tmp_path)


def ids(*values: int, dtype: Any = np.int64) -> Row:
    return {"input_ids": np.array(values, dtype)}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "input_ids is missing"),
        (ids(1, VOCABULARY), f"input_ids must be 0 to {VOCABULARY - 1}"),
        (ids(-1), "input_ids must be 0"),
        (ids(), r"input_ids has shape \[0\]"),
        ({"input_ids": np.zeros((1, 3), np.int64)}, r"input_ids has shape \[1, 3\], not \[-1\]"),
        (ids(1, dtype=np.int32), "data type int32, not INT64"),
        (ids(*[3] * 41), "41 tokens; the model takes at most 40"),
        ({**ids(1, 2), "token_type_ids": np.zeros(3, np.int64)}, "length 3, another input of the row has 2"),
        ({**ids(1), "token_type_ids": np.array([2])}, "token_type_ids must be 0 to 1"),
        ({**ids(1), "mask": np.array([1])}, "there is no input 'mask'"),
    ],
)
def test_a_row_that_does_not_fit_is_named(row: Row, words: str, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("bert")
    save("Bert", "ForTokenClassification", folder)
    found = load_model(folder).problem(row)
    assert re.search(words, found), found


def test_an_image_beyond_the_largest_is_named_and_one_below_runs(tmp_path: Path) -> None:
    save("ResNet", "ForImageClassification", tmp_path)
    model, rng = load_model(tmp_path), np.random.default_rng(0)
    (largest,), (beyond,) = images(rng, 1, 512, 1024), images(rng, 1, 736, 736)
    assert not model.problem(largest)
    assert model.problem(beyond) == "the row has 529 tiles of 32 x 32 pixels; the model takes at most 512"
    for side in (1, 33):
        (row,) = images(rng, 1, side, side)
        assert not model.problem(row)
        assert np.isfinite(model.run(Padded([row]))[0]["logits"]).all()


def test_images_of_another_size_are_named(tmp_path: Path) -> None:
    save("ViT", "ForImageClassification", tmp_path)
    (row,) = images(np.random.default_rng(0), 1, 8, 12)
    assert "pixel_values has shape [3, 8, 12], not [3, 12, 8]" in load_model(tmp_path).problem(row)
