"""ViT as an image classifier: patches as tokens, the class token's vector to logits."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from fairway.formats.fixed_cost.image_config import VitConfig
from fairway.formats.fixed_cost.layouts import VIT_EMBEDDINGS, VIT_QKV
from services.core.fixed_cost.signature import signature_of
from services.worker.batcher.models.blocks import ACTIVATIONS, TensorSource, linear, norm, whole_attention
from services.worker.batcher.models.model import ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Row, row_problem


class VitModel:
    """Implements ``FixedCostModel``."""

    def __init__(self, config: VitConfig, tensor: TensorSource, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._class_token = tensor(f"{VIT_EMBEDDINGS}cls_token")
        self._positions = tensor(f"{VIT_EMBEDDINGS}position_embeddings")
        self._patches = linear(tensor, f"{VIT_EMBEDDINGS}patch_embeddings.projection")
        self._layers = tuple(_VitLayer(config, tensor, index) for index in range(config.layers))
        self._norm = norm(tensor, "vit.layernorm", config.norm_eps)
        self._classify = linear(tensor, "classifier")
        signature = signature_of(config)
        self.facts = ModelFacts(
            signature.operation, signature.inputs, signature.outputs, "float32", pauses=True
        )

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        return row_problem(row, self.facts.inputs)

    @torch.inference_mode()
    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        dtype = self._class_token.dtype
        pixels = torch.from_numpy(np.stack([row["pixel_values"] for row in batch.rows]))
        pixels = pixels.to(self._device, dtype)
        projection = self._patches
        patches = F.conv2d(pixels, projection.weight, projection.bias, self._config.patch_size)
        x = patches.flatten(2).transpose(1, 2)  # [rows, patches, hidden]
        x = torch.cat([self._class_token.expand(len(x), -1, -1), x], dim=1) + self._positions
        for number, layer in enumerate(self._layers):
            if number:
                pause()
            x = layer(x)
        logits = self._classify(self._norm(x[:, 0])).float().cpu().numpy()
        return [{"logits": values} for values in logits]


class _VitLayer:
    def __init__(self, config: VitConfig, tensor: TensorSource, index: int) -> None:
        prefix = f"vit.encoder.layer.{index}."
        self._heads = config.heads
        self._before = norm(tensor, f"{prefix}layernorm_before", config.norm_eps)
        self._qkv = linear(tensor, *(prefix + name for name in VIT_QKV), bias=config.qkv_bias)
        self._attended = linear(tensor, f"{prefix}attention.output.dense")
        self._after = norm(tensor, f"{prefix}layernorm_after", config.norm_eps)
        self._inner = linear(tensor, f"{prefix}intermediate.dense")
        self._outer = linear(tensor, f"{prefix}output.dense")
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, hidden = x.shape
        qkv = self._qkv(self._before(x)).view(rows * tokens, 3, self._heads, hidden // self._heads)
        x = x + self._attended(whole_attention(rows)(qkv)).view(rows, tokens, hidden)
        return x + self._outer(self._activation(self._inner(self._after(x))))
