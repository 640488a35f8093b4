"""A row's outputs do not depend on its batch: drawn lengths, widths and neighbours, padded and packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.model import FixedCostModel
from services.worker.batcher.models.rows import Batch, Packed, Padded
from tests.support.fixed_cost import POSITIONS, images, save, save_pooling, token_row

# Float32 sums in another order; of outputs of about 1.
TOLERANCE = 1e-5
KINDS = (
    ("Bert", "Model", "mean_tokens"),
    ("Roberta", "Model", "cls_token"),
    ("Bert", "ForSequenceClassification", ""),
    ("XLMRoberta", "ForTokenClassification", ""),
    ("DistilBert", "ForSequenceClassification", ""),
)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FixedCostModel:
    family, kind, mode = request.param
    folder = tmp_path_factory.mktemp("model")
    save(family, kind, folder, seed=3)
    if mode:
        save_pooling(folder, mode=mode)
    return load_model(folder)


def differs(own: Mapping[str, Any], alone: Mapping[str, Any]) -> bool:
    return own.keys() != alone.keys() or any(
        own[name].shape != alone[name].shape
        or not np.allclose(own[name], alone[name], atol=TOLERANCE, rtol=TOLERANCE)
        for name in alone
    )


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lengths=st.lists(st.integers(1, POSITIONS), min_size=1, max_size=9),
    spare=st.integers(0, 9),
    seed=st.integers(0, 1 << 30),
)
def test_a_row_in_any_batch_equals_the_row_alone(
    model: FixedCostModel, lengths: list[int], spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [token_row(rng, length, types=False) for length in lengths]
    batches: list[Batch] = [Padded(rows, max(lengths) + spare), Packed(rows)]
    alone = [model.run(Packed([row]))[0] for row in rows]
    for batch in batches:
        found = model.run(batch)
        assert [index for index in range(len(rows)) if differs(found[index], alone[index])] == []


def test_batches_between_its_layers_change_no_output(model: FixedCostModel) -> None:
    rng = np.random.default_rng(0)
    rows = [token_row(rng, length, types=False) for length in (POSITIONS, 3, 7)]
    others: list[Batch] = [Packed(rows[::-1]), Padded(rows[1:], 8)]
    alone, others_alone = model.run(Packed(rows)), [model.run(batch) for batch in others]
    between: list[list[Mapping[str, Any]]] = []

    def pause() -> None:
        between.append(list(model.run(others[len(between) % 2])))

    found = model.run(Packed(rows), pause)
    assert model.facts.pauses
    assert len(between) >= 2
    assert [index for index in range(3) if differs(found[index], alone[index])] == []
    for place, outputs in enumerate(between):
        assert not any(map(differs, outputs, others_alone[place % 2]))


def test_images_in_a_batch_equal_each_alone(tmp_path: Path) -> None:
    for family, size in (("ResNet", (33, 40)), ("ViT", (12, 8))):
        save(family, "ForImageClassification", tmp_path / family)
        model = load_model(tmp_path / family)
        rows = images(np.random.default_rng(0), 5, *size)
        together = model.run(Padded(rows))
        assert not any(
            differs(own, model.run(Padded([row]))[0]) for own, row in zip(together, rows, strict=True)
        )
