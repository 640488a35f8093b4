"""Converts the ``config.json`` of an image classifier, ResNet or ViT, to its shape, or rejects it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fairway.formats.config_fields import (
    UnsupportedModel,
    flag,
    number,
    positive_int,
    require_inert,
)
from fairway.formats.decoder_config import MAX_LAYERS
from fairway.formats.fixed_cost.encoder_config import (
    NO_CLASSES,
    Classes,
    activation_of,
    classes_of,
    labels_of,
)

MAX_EXTENT: Final = 16_384  # largest side of an image in pixels
MAX_CHANNELS: Final = 1 << 16
MAX_TILES: Final = 512  # most tiles of 32 x 32 pixels in an image whose size is free
RESNET: Final = "ResNetForImageClassification"
VIT: Final = "ViTForImageClassification"
_INERT: Final[Mapping[str, tuple[Any, ...]]] = {"quantization_config": (None,), "auto_map": (None,)}


@dataclass(frozen=True, slots=True)
class ResNetStage:
    """Layers of one width; the first of them has the stride."""

    channels: int
    layers: int
    stride: int


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """A residual network. Images of one batch have one size; any size up to ``MAX_TILES`` is computed."""

    channels: int  # channels of an image
    stem_channels: int
    stages: tuple[ResNetStage, ...]
    bottleneck: bool
    # The first convolution of a bottleneck has the stride, instead of its second.
    stride_first: bool
    labels: int
    classes: Classes = NO_CLASSES


@dataclass(frozen=True, slots=True)
class VitConfig:
    """A vision transformer. Images have one size."""

    channels: int
    image_size: tuple[int, int]  # height, width
    patch_size: tuple[int, int]
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    qkv_bias: bool
    norm_eps: float
    activation: str
    labels: int
    classes: Classes = NO_CLASSES

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        (height, width), (rows, columns) = self.image_size, self.patch_size
        return (height // rows) * (width // columns)


def parse_resnet(fields: Mapping[str, Any]) -> ResNetConfig:
    """Return the network. Raises UnsupportedModel with the first field that cannot be served."""
    _check(fields, "resnet")
    if fields.get("hidden_act", "relu") != "relu":
        raise UnsupportedModel("hidden_act", fields["hidden_act"])
    kind = fields.get("layer_type", "bottleneck")
    if kind not in ("bottleneck", "basic"):
        raise UnsupportedModel("layer_type", kind)
    sizes, depths = _sizes(fields, "hidden_sizes", MAX_CHANNELS), _sizes(fields, "depths", MAX_LAYERS)
    if len(sizes) != len(depths):
        raise UnsupportedModel("depths", depths)
    if kind == "bottleneck" and any(size % 4 for size in sizes):
        raise UnsupportedModel("hidden_sizes", sizes)
    first = 2 if flag(fields, "downsample_in_first_stage") else 1
    strides = [first, *[2] * (len(sizes) - 1)]
    return ResNetConfig(
        channels=_channels(fields),
        stem_channels=_int_or(fields, "embedding_size", 64, MAX_CHANNELS),
        stages=tuple(ResNetStage(*stage) for stage in zip(sizes, depths, strides, strict=True)),
        bottleneck=kind == "bottleneck",
        stride_first=flag(fields, "downsample_in_bottleneck"),
        labels=labels_of(fields),
        classes=classes_of(fields),
    )


def parse_vit(fields: Mapping[str, Any]) -> VitConfig:
    """Return the transformer. Raises UnsupportedModel with the first field that cannot be served."""
    _check(fields, "vit")
    hidden_size, heads = positive_int(fields, "hidden_size"), positive_int(fields, "num_attention_heads")
    if hidden_size % heads:
        raise UnsupportedModel("hidden_size", hidden_size)
    image, patch = _pair(fields, "image_size"), _pair(fields, "patch_size")
    if image[0] < patch[0] or image[1] < patch[1]:
        raise UnsupportedModel("patch_size", patch)
    return VitConfig(
        channels=_channels(fields),
        image_size=image,
        patch_size=patch,
        hidden_size=hidden_size,
        intermediate_size=positive_int(fields, "intermediate_size"),
        layers=positive_int(fields, "num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        qkv_bias=flag(fields, "qkv_bias", default=True),
        norm_eps=number(fields, "layer_norm_eps", default=1e-12, above=0.0),
        activation=activation_of(fields, "hidden_act"),
        labels=labels_of(fields),
        classes=classes_of(fields),
    )


def _check(fields: Mapping[str, Any], model_type: str) -> None:
    if fields.get("model_type", model_type) != model_type:
        raise UnsupportedModel("model_type", fields["model_type"])
    require_inert(fields, _INERT)


def _channels(fields: Mapping[str, Any]) -> int:
    return _int_or(fields, "num_channels", 3, MAX_CHANNELS)


def _int_or(fields: Mapping[str, Any], name: str, default: int, most: int) -> int:
    return positive_int(fields, name, most=most) if name in fields else default


def _sizes(fields: Mapping[str, Any], name: str, most: int) -> list[int]:
    value = fields.get(name)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_LAYERS:
        raise UnsupportedModel(name, "missing" if value is None else value)
    if not all(type(size) is int and 0 < size <= most for size in value):
        raise UnsupportedModel(name, value)
    return value


def _pair(fields: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return height and width; one number means a square."""
    value = fields.get(name)
    pair: list[Any] = value if isinstance(value, list) else [value, value]
    if len(pair) != 2 or not all(type(size) is int and 0 < size <= MAX_EXTENT for size in pair):
        raise UnsupportedModel(name, "missing" if value is None else value)
    return pair[0], pair[1]
