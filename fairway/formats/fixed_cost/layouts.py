"""Names and shapes of a fixed-cost checkpoint's tensors, as transformers writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fairway.formats.fixed_cost.config import FixedCostConfig, MlpConfig
from fairway.formats.fixed_cost.encoder_config import EncoderConfig, encoder_layout
from fairway.formats.fixed_cost.image_config import ResNetConfig, VitConfig
from fairway.formats.weights import Shape, TensorLayout

COUNTERS: Final = re.compile(r".+\.num_batches_tracked")
_STEM: Final = "resnet.embedder.embedder"
STATISTICS: Final = ("weight", "bias", "running_mean", "running_var")
VIT_EMBEDDINGS: Final = "vit.embeddings."
VIT_QKV: Final = ("attention.attention.query", "attention.attention.key", "attention.attention.value")


def layout_of(config: FixedCostConfig) -> TensorLayout:
    """Return the tensors that a checkpoint of this model holds."""
    match config:
        case EncoderConfig():
            return encoder_layout(config)
        case ResNetConfig():
            return resnet_layout(config)
        case VitConfig():
            return vit_layout(config)
        case _:
            return mlp_layout(config)


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A convolution with its normalisation, before it is loaded."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Convolutions one after the other, and what is added: the input, or a convolution of it."""

    layers: tuple[ConvolutionShape, ...]
    shortcut: ConvolutionShape | None


def stem_of(config: ResNetConfig) -> ConvolutionShape:
    return ConvolutionShape(_STEM, config.channels, config.stem_channels, 7, 2)


def blocks_of(config: ResNetConfig) -> list[ResidualBlock]:
    """Return all blocks, in order."""
    blocks, inputs = [], config.stem_channels
    for number, stage in enumerate(config.stages):
        for index in range(stage.layers):
            prefix = f"resnet.encoder.stages.{number}.layers.{index}."
            blocks.append(_block(config, prefix, inputs, stage.channels, stage.stride if not index else 1))
            inputs = stage.channels
    return blocks


def _block(config: ResNetConfig, prefix: str, inputs: int, outputs: int, stride: int) -> ResidualBlock:
    shapes: tuple[tuple[int, int, int, int], ...]
    if config.bottleneck:
        inner = outputs // 4
        strides = (stride, 1) if config.stride_first else (1, stride)
        shapes = ((inputs, inner, 1, strides[0]), (inner, inner, 3, strides[1]), (inner, outputs, 1, 1))
    else:
        shapes = ((inputs, outputs, 3, stride), (outputs, outputs, 3, 1))
    layers = tuple(ConvolutionShape(f"{prefix}layer.{i}", *shape) for i, shape in enumerate(shapes))
    changes = inputs != outputs or stride != 1
    shortcut = ConvolutionShape(f"{prefix}shortcut", inputs, outputs, 1, stride) if changes else None
    return ResidualBlock(layers, shortcut)


def resnet_layout(config: ResNetConfig) -> TensorLayout:
    """Return the layout of the checkpoint."""
    convolutions = [stem_of(config)]
    for block in blocks_of(config):
        convolutions += [*block.layers, *([block.shortcut] if block.shortcut else [])]
    last = config.stages[-1].channels
    shapes: dict[str, Shape] = {
        "classifier.1.weight": (config.labels, last),
        "classifier.1.bias": (config.labels,),
    }
    for one in convolutions:
        shapes[f"{one.name}.convolution.weight"] = (one.outputs, one.inputs, one.kernel, one.kernel)
        shapes |= {f"{one.name}.normalization.{name}": (one.outputs,) for name in STATISTICS}
    return TensorLayout(shapes, ignored=COUNTERS)


def vit_layout(config: VitConfig) -> TensorLayout:
    """Return the layout of the checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        f"{VIT_EMBEDDINGS}cls_token": (1, 1, hidden),
        f"{VIT_EMBEDDINGS}position_embeddings": (1, config.patches + 1, hidden),
        f"{VIT_EMBEDDINGS}patch_embeddings.projection.weight": (hidden, config.channels, *config.patch_size),
        f"{VIT_EMBEDDINGS}patch_embeddings.projection.bias": (hidden,),
        "classifier.weight": (config.labels, hidden),
        "classifier.bias": (config.labels,),
        "vit.layernorm.weight": (hidden,),
        "vit.layernorm.bias": (hidden,),
    }
    layer: dict[str, Shape] = {}
    for name in ("layernorm_before", "layernorm_after"):
        layer |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    for name, rows, columns in (
        *((name, hidden, hidden) for name in (*VIT_QKV, "attention.output.dense")),
        ("intermediate.dense", inner, hidden),
        ("output.dense", hidden, inner),
    ):
        layer[f"{name}.weight"] = (rows, columns)
        if config.qkv_bias or name not in VIT_QKV:
            layer[f"{name}.bias"] = (rows,)
    for index in range(config.layers):
        shapes |= {f"vit.encoder.layer.{index}.{name}": shape for name, shape in layer.items()}
    return TensorLayout(shapes)


def mlp_layout(config: MlpConfig) -> TensorLayout:
    """Return the layout of the checkpoint."""
    shapes: dict[str, Shape] = {}
    inputs = config.input_size
    for index, layer in enumerate(config.layers):
        shapes[f"layers.{index}.weight"] = (layer.size, inputs)
        shapes[f"layers.{index}.bias"] = (layer.size,)
        inputs = layer.size
    return TensorLayout(shapes)
