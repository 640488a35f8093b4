from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.fixed_cost.config import parse_fixed_cost
from services.core.fixed_cost.signature import ANY, Operation, Signature, signature_of
from services.worker.batcher.models.loading import load_model
from tests.support import fixed_cost
from tests.support.row_versions import embedding_version, mlp_version, reranker_version


def signature(folder: Path) -> Signature:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return signature_of(parse_fixed_cost(names, lambda name: (folder / name).read_bytes()))


def test_an_embedding_model(tmp_path: Path) -> None:
    found = signature(embedding_version(tmp_path))
    assert found.operation is Operation.EMBED
    assert [(spec.name, spec.shape) for spec in found.outputs] == [("embedding", (24,))]
    assert (found.max_tokens, found.vocab_size) == (40, 53)
    assert found.normalized
    assert found.has_types
    assert not found.may_be_cut


@pytest.mark.parametrize(
    ("declared", "may_be_cut", "dimensions"),
    [
        ({"is_matryoshka": True}, True, ()),
        ({"is_matryoshka": False}, False, ()),
        ({"matryoshka_dimensions": [16, 8, 16]}, True, (8, 16)),
    ],
)
def test_cuts_are_what_the_model_declares(
    tmp_path: Path, declared: dict[str, Any], may_be_cut: bool, dimensions: tuple[int, ...]
) -> None:
    found = signature(embedding_version(tmp_path, **declared))
    assert (found.may_be_cut, found.dimensions) == (may_be_cut, dimensions)


@pytest.mark.parametrize("sizes", [[], [0], [25], ["8"], 8, [True], [1] * 65])
def test_impossible_cuts_are_rejected(tmp_path: Path, sizes: Any) -> None:
    folder = embedding_version(tmp_path, matryoshka_dimensions=sizes)
    with pytest.raises(UnsupportedModel, match="matryoshka_dimensions"):
        signature(folder)


@pytest.mark.parametrize(
    ("family", "kind", "fields", "operation", "shape"),
    [
        ("Bert", "ForSequenceClassification", {"num_labels": 3}, Operation.CLASSIFY, (3,)),
        ("Bert", "ForTokenClassification", {"num_labels": 3}, Operation.TOKENS, (ANY, 3)),
        ("ResNet", "ForImageClassification", {"num_labels": 3}, Operation.CLASSIFY, (3,)),
        ("ViT", "ForImageClassification", {"num_labels": 3}, Operation.CLASSIFY, (3,)),
    ],
)
def test_operations_and_outputs_are_those_of_the_loaded_model(
    tmp_path: Path, family: str, kind: str, fields: dict[str, Any], operation: Operation, shape: Any
) -> None:
    fixed_cost.save(family, kind, tmp_path, **fields)
    found = signature(tmp_path)
    assert (found.operation, found.outputs[0].shape) == (operation, shape)
    assert found.max_tokens == {"Bert": 40, "ResNet": 512, "ViT": 0}[family]
    facts = load_model(tmp_path).facts
    assert facts.max_tokens == found.max_tokens
    assert (facts.operation, facts.inputs, facts.outputs) == (found.operation, found.inputs, found.outputs)


def test_a_cross_encoder_scores_and_an_mlp_infers(tmp_path: Path) -> None:
    assert signature(reranker_version(tmp_path / "rerank")).operation is Operation.SCORE
    found = signature(mlp_version(tmp_path / "mlp"))
    assert found.operation is Operation.INFER
    assert found.inputs[0].shape == (4,)
    assert not found.vocab_size
