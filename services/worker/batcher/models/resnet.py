"""ResNet as an image classifier. The normalisations are folded into the convolutions when it is loaded."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from fairway.formats.fixed_cost.image_config import ResNetConfig
from fairway.formats.fixed_cost.layouts import STATISTICS, ConvolutionShape, ResidualBlock, blocks_of, stem_of
from services.core.fixed_cost.signature import signature_of
from services.worker.batcher.models.blocks import TensorSource, linear
from services.worker.batcher.models.model import ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Row, row_problem

EPS: Final = 1e-5  # torch's default in batch normalisation, which the configuration does not change


class ResNetModel:
    """Implements ``FixedCostModel``. Images of up to ``MAX_TILES``; those of one batch have one size."""

    def __init__(self, config: ResNetConfig, tensor: TensorSource, *, device: torch.device) -> None:
        self._device = device
        self._stem = _Convolution(stem_of(config), tensor)
        self._blocks = tuple(_Block(block, tensor) for block in blocks_of(config))
        self._classify = linear(tensor, "classifier.1")
        signature = signature_of(config)
        self.facts = ModelFacts(
            signature.operation, signature.inputs, signature.outputs, "float32", signature.max_tokens
        )

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        return row_problem(row, self.facts.inputs, max_length=self.facts.max_tokens)

    @torch.inference_mode()
    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        pixels = torch.from_numpy(np.stack([row["pixel_values"] for row in batch.rows]))
        x = F.relu(self._stem(pixels.to(self._device, self._classify.weight.dtype)))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        for block in self._blocks:
            x = block(x)
        logits = self._classify(x.mean((2, 3))).float().cpu().numpy()
        return [{"logits": values} for values in logits]


class _Convolution:
    """A convolution and its normalisation in one: ``w s``, ``b - m s`` with ``s = g / sqrt(v + eps)``."""

    def __init__(self, shape: ConvolutionShape, tensor: TensorSource) -> None:
        weight = tensor(f"{shape.name}.convolution.weight")
        gain, bias, mean, variance = (
            tensor(f"{shape.name}.normalization.{name}").double() for name in STATISTICS
        )
        scale = gain * (variance + EPS).rsqrt()
        self._weight = (weight.double() * scale[:, None, None, None]).to(weight.dtype)
        self._bias = (bias - mean * scale).to(weight.dtype)
        self._stride, self._padding = shape.stride, shape.kernel // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self._weight, self._bias, self._stride, self._padding)


class _Block:
    def __init__(self, block: ResidualBlock, tensor: TensorSource) -> None:
        self._layers = tuple(_Convolution(shape, tensor) for shape in block.layers)
        self._shortcut = _Convolution(block.shortcut, tensor) if block.shortcut is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self._shortcut is None else self._shortcut(x)
        for layer in self._layers[:-1]:
            x = F.relu(layer(x))
        return F.relu(self._layers[-1](x) + kept)
