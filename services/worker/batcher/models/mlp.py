"""A plain multi-layer perceptron."""

from __future__ import annotations

import numpy as np
import torch

from fairway.formats.fixed_cost.config import MlpConfig
from services.core.fixed_cost.signature import signature_of
from services.worker.batcher.models.blocks import ACTIVATIONS, TensorSource, linear
from services.worker.batcher.models.model import ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Row, row_problem


class MlpModel:
    """Implements ``FixedCostModel``."""

    def __init__(self, config: MlpConfig, tensor: TensorSource, *, device: torch.device) -> None:
        self._device = device
        self._layers = tuple(
            (linear(tensor, f"layers.{index}"), ACTIVATIONS[layer.activation])
            for index, layer in enumerate(config.layers)
        )
        signature = signature_of(config)
        self.facts = ModelFacts(signature.operation, signature.inputs, signature.outputs, "float32")

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        return row_problem(row, self.facts.inputs)

    @torch.inference_mode()
    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        x = torch.from_numpy(np.stack([row["input"] for row in batch.rows]))
        x = x.to(self._device, self._layers[0][0].weight.dtype)
        for layer, activation in self._layers:
            x = activation(layer(x))
        return [{"output": values} for values in x.float().cpu().numpy()]
