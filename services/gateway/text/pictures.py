"""Decodes a picture of a client, a PNG or a JPEG, to the pixels of a version. Its process may crash."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fairway.formats.fixed_cost.image_config import MAX_SIDE, PictureConfig
from services.core.errors import InvalidInput
from services.core.fixed_cost.signature import ANY
from services.gateway.text.text_model import Pixels

MAX_PIXELS: Final = 16 * 1024 * 1024
FORMATS: Final = ("PNG", "JPEG")


class PictureDecoder:
    """``shape`` is that of the version's pixels."""

    def __init__(self, config: PictureConfig, shape: Sequence[int]) -> None:
        self._config = config
        self._shape = tuple(shape)
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS

    def pixels(self, data: bytes) -> Pixels:
        """Return the pixels of the whole picture, or of the first one of several. Raises InvalidInput.

        Its size is checked before anything of that size is allocated.
        """
        config = self._config
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opened = Image.open(BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError:
            raise _refused(f"it has more than {MAX_PIXELS} pixels") from None
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders fail on damaged files in many ways
            raise _unreadable(error) from None
        with opened:
            if opened.format == "PNG" and getattr(opened, "is_animated", False):
                raise _refused("it is animated")
            _check_size(opened.size, MAX_PIXELS)
            if opened.mode.startswith("I"):
                raise _refused("it has 16 bits for each grey pixel: send 8")
            try:
                # transformers opens a file this way.
                picture = ImageOps.exif_transpose(opened).convert("RGB")
            except MemoryError:
                raise
            except Exception as error:
                raise _unreadable(error) from None
        if config.warp is not None:
            picture = picture.resize(config.warp[::-1], config.resample)
        elif config.shortest:
            shorter = min(picture.size)
            width, height = (
                config.shortest if side == shorter else int(config.shortest * side / shorter)
                for side in picture.size
            )
            _check_size((width, height), MAX_PIXELS)
            picture = picture.resize((width, height), config.resample)
            left, top = (width - config.crop) // 2, (height - config.crop) // 2
            picture = picture.crop((left, top, left + config.crop, top + config.crop))
        _check_size(picture.size, MAX_SIDE**2)
        values = np.asarray(picture, np.float32).transpose(2, 0, 1) * np.float32(config.scale)
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (config.mean, config.std))
        values = np.ascontiguousarray((values - mean) / std)
        if any(wanted not in (ANY, extent) for extent, wanted in zip(values.shape, self._shape, strict=True)):
            raise _refused(f"it has {picture.height} x {picture.width} pixels, not {self._shape[1:]}")
        return Pixels(values.shape, values.tobytes())


def _check_size(size: tuple[int, int], most: int) -> None:
    width, height = size
    if width * height > most:
        raise _refused(f"it has or would get {width} x {height} pixels; at most {most} are taken")


def _unreadable(error: Exception) -> InvalidInput:
    # Pillow names the object there, by its address.
    text = "" if isinstance(error, UnidentifiedImageError) else str(error)
    cause = "".join(each for each in text[:80] if each.isascii() and each.isprintable())
    return _refused("it is no PNG or JPEG that can be decoded" + (f" ({cause})" if cause else ""))


def _refused(why: str) -> InvalidInput:
    return InvalidInput(f"the picture cannot be read: {why}", field="images")
