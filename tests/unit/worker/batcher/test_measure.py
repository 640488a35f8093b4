"""What a loaded model takes is measured at the sizes that its rows have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest

from services.core.fixed_cost.signature import ANY, Operation, TensorSpec
from services.worker.batcher.measure import MeasuredModel, measure
from services.worker.batcher.models.model import ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Row
from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.start import MOST_BATCH_BYTES, BatchLimits
from tests.support.clocks import HandClock

PIXEL_S, PIXEL_BYTES = 1e-6, 256
MIB = 1 << 20


class ImageModel:
    """Implements ``FixedCostModel``: its time and memory are those of its pixels."""

    def __init__(self, shape: Sequence[int], *, max_tokens: int = 0) -> None:
        spec = TensorSpec("pixel_values", "FP32", tuple(shape), is_image=max_tokens > 0)
        self.facts = ModelFacts(Operation.CLASSIFY, (spec,), (), "float32", max_tokens)
        self.clock = HandClock()
        self.shapes: set[tuple[int, ...]] = set()
        self.peak_bytes = 0  # of the latest run

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        return ""

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        pixels = 0
        for row in batch.rows:
            _, height, width = shape = row["pixel_values"].shape
            self.shapes.add(shape)
            pixels += height * width
        self.peak_bytes = pixels * PIXEL_BYTES
        self.clock.now_s += 1e-3 + pixels * PIXEL_S
        return []


class ModelMeter(nullcontext["ModelMeter"]):
    """Implements ``MemoryMeter``: what the model reports of its latest run."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__(self)
        self._model = model

    def begin(self) -> None:
        """See ``MemoryMeter``."""

    def run(self, step: Callable[[], object]) -> None:
        """See ``MemoryMeter``."""
        step()

    @property
    def peak_bytes(self) -> int:
        """See ``MemoryMeter``."""
        return self._model.peak_bytes


def measured(model: ImageModel) -> MeasuredModel:
    return measure(model, lambda: ModelMeter(model), now_s=model.clock.monotonic_s)


def test_images_of_a_free_size_are_measured_at_two_sizes() -> None:
    model = ImageModel((3, ANY, ANY), max_tokens=512)
    found = measured(model)
    assert model.shapes == {(3, 32, 32), (3, 384, 384)}
    costs = found.costs
    assert costs.batch_s == pytest.approx(1e-3)
    assert costs.token_s == pytest.approx(1024 * PIXEL_S)
    pixels = 55 * 224 * 224
    curve = CostCurve(CostPrior(costs.batch_s, costs.row_s, costs.token_s))
    assert curve.mean_s(49, 55) == pytest.approx(pixels * PIXEL_S, rel=0.05)
    assert curve.limit_s(49, 55) > 8 * pixels * PIXEL_S
    assert found.largest_row_bytes == pytest.approx(512 * 1024 * PIXEL_BYTES, rel=0.01)
    most_pixels = MOST_BATCH_BYTES / (3 * 4)  # of the inputs of a batch
    assert found.largest_batch_bytes == pytest.approx(most_pixels * PIXEL_BYTES, rel=0.01)
    limits = BatchLimits(100, 0, 256 * MIB, costs.row_bytes, costs.token_bytes)
    most, _ = limits.rows_at(49)
    assert most * 224 * 224 * PIXEL_BYTES <= 256 * MIB


def test_images_of_a_fixed_size_are_measured_at_it() -> None:
    model = ImageModel((3, 224, 224))
    found = measured(model)
    assert model.shapes == {(3, 224, 224)}
    costs, image_s = found.costs, 224 * 224 * PIXEL_S
    assert (costs.token_s, costs.token_bytes) == (0.0, 0)
    assert [costs.batch_s, costs.row_s] == pytest.approx([1e-3, image_s])
    assert found.largest_batch_s == pytest.approx(1e-3 + 101 * image_s)
    assert found.largest_row_bytes == pytest.approx(224 * 224 * PIXEL_BYTES, rel=0.01)
    assert CostCurve(CostPrior(costs.batch_s, costs.row_s)).limit_s(0, 100) > 8 * 100 * image_s
