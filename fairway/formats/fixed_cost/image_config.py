"""Converts the ``config.json`` of an image classifier, ResNet or ViT, to its shape, or rejects it.

How a picture becomes the pixels of an image model: transformers' ``preprocessor_config.json``.

Processors: those of ViT and ConvNeXT, which ResNets have. Others are rejected: pixels that are made otherwise
are a wrong answer that looks right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, flag, number, positive_int, require_inert
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


PREPROCESSOR: Final = "preprocessor_config.json"
CHANNELS: Final = 3  # the colours of a picture
MAX_SIDE: Final = 1024  # the side of what is computed, in pixels
_ENDINGS: Final = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")
_WARPED_FROM: Final = 384  # ConvNeXT crops below this size, and warps from it on
_UNSERVED: Final = ("do_center_crop", "do_pad", "do_reduce_labels")
# The fields' defaults in transformers, by processor: the resampling filter of Pillow.
_FILTERS: Final = {"ViT": 2, "ConvNext": 3}


@dataclass(frozen=True, slots=True)
class PictureConfig:
    """The steps, in this order. Sizes are height and width in pixels."""

    warp: tuple[int, int] | None  # the size that the picture is resized to
    shortest: int  # else the length that its shorter side is resized to; 0: it keeps its size
    crop: int  # the side of the square that is then cut from its middle; 0: it is not cut
    resample: int  # Pillow's filter
    scale: float  # what 0 to 255 are multiplied by
    mean: tuple[float, ...]
    std: tuple[float, ...]


def parse_pictures(fields: Mapping[str, Any]) -> PictureConfig:
    """Return the steps. Raises UnsupportedModel with the first field that cannot be served."""
    kind = fields.get("image_processor_type", fields.get("feature_extractor_type"))
    name = next((str(kind).removesuffix(end) for end in _ENDINGS if str(kind).endswith(end)), "")
    if name not in _FILTERS:
        raise UnsupportedModel("image_processor_type", kind)
    for field in _UNSERVED:
        if fields.get(field):
            raise UnsupportedModel(field, fields[field])
    warp, shortest, crop = None, 0, 0
    if flag(fields, "do_resize", default=True):
        sizes = fields.get("size", {"height": 224, "width": 224} if name == "ViT" else {"shortest_edge": 384})
        if name == "ViT":
            square = {"height": sizes, "width": sizes} if isinstance(sizes, int) else sizes
            warp = _extent(square, "height"), _extent(square, "width")
        else:
            edge = _extent({"shortest_edge": sizes} if isinstance(sizes, int) else sizes, "shortest_edge")
            ratio = number(fields, "crop_pct", default=224 / 256, above=0.0)
            if ratio > 1 or edge / ratio > MAX_SIDE:
                raise UnsupportedModel("crop_pct", ratio)
            if edge < _WARPED_FROM:
                shortest, crop = int(edge / ratio), edge
            else:
                warp = edge, edge
    resample = fields.get("resample", _FILTERS[name])
    if type(resample) is not int or not 0 <= resample <= 5:
        raise UnsupportedModel("resample", resample)
    rescales = flag(fields, "do_rescale", default=True)
    scale = number(fields, "rescale_factor", default=1 / 255, above=0.0) if rescales else 1.0
    mean, std = _of_channels({}, "", 0.0), _of_channels({}, "", 1.0)
    if flag(fields, "do_normalize", default=True):
        mean, std = _of_channels(fields, "image_mean"), _of_channels(fields, "image_std")
        if 0.0 in std:
            raise UnsupportedModel("image_std", fields["image_std"])
    return PictureConfig(warp, shortest, crop, resample, scale, mean, std)


def _extent(sizes: Any, name: str) -> int:
    if not isinstance(sizes, dict) or name not in sizes:
        raise UnsupportedModel(f"size: {name}", sizes)
    return positive_int(sizes, name, most=MAX_SIDE)


def _of_channels(fields: Mapping[str, Any], name: str, default: float = 0.5) -> tuple[float, ...]:
    """Return a number for each channel; one number stands for all."""
    value = fields.get(name, default)
    values = value if isinstance(value, list) else [value] * CHANNELS
    known = len(values) == CHANNELS and all(type(each) in (int, float) and isfinite(each) for each in values)
    if not known:
        raise UnsupportedModel(name, value)
    return tuple(map(float, values))
