"""How a picture becomes the pixels of an image model: transformers' ``preprocessor_config.json``.

Processors: those of ViT and ConvNeXT, which ResNets have. Others are rejected: pixels that are made otherwise
are a wrong answer that looks right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, flag, number, positive_int

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
    mean, std = _channels({}, "", 0.0), _channels({}, "", 1.0)
    if flag(fields, "do_normalize", default=True):
        mean, std = _channels(fields, "image_mean"), _channels(fields, "image_std")
        if 0.0 in std:
            raise UnsupportedModel("image_std", fields["image_std"])
    return PictureConfig(warp, shortest, crop, resample, scale, mean, std)


def _extent(sizes: Any, name: str) -> int:
    if not isinstance(sizes, dict) or name not in sizes:
        raise UnsupportedModel(f"size: {name}", sizes)
    return positive_int(sizes, name, most=MAX_SIDE)


def _channels(fields: Mapping[str, Any], name: str, default: float = 0.5) -> tuple[float, ...]:
    """Return a number for each channel; one number stands for all."""
    value = fields.get(name, default)
    values = value if isinstance(value, list) else [value] * CHANNELS
    known = len(values) == CHANNELS and all(type(each) in (int, float) and isfinite(each) for each in values)
    if not known:
        raise UnsupportedModel(name, value)
    return tuple(map(float, values))
