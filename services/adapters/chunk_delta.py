"""A chunk as its difference from another of the same size: where a fine-tune changed few elements, the
exclusive or of both is mostly zeros, which zstandard makes small.

For 1 % of float32 elements it takes 1.3 to 1.7 % of the chunk, of bfloat16 1.2 %.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard

from services.core.errors import IntegrityError

_LEVEL: Final = 1  # higher levels make no smaller deltas, and take longer


def encode(data: bytes, base: bytes) -> bytes:
    """Return the delta of ``data`` from ``base``. Raises ValueError for a base of another size."""
    if len(data) != len(base):
        raise ValueError(f"a chunk of {len(data)} bytes has no delta from one of {len(base)}")
    return zstandard.ZstdCompressor(_LEVEL).compress(_xor(data, base))


def decode(delta: bytes, base: bytes) -> bytes:
    """Return what ``encode`` was given. Raises IntegrityError for a delta of another size, or none.

    Memory is bounded by the size of the base, whatever the delta says.
    """
    try:
        params = zstandard.get_frame_parameters(delta)
        if params.content_size != len(base) or params.window_size > max(1024, 2 * len(base)):
            raise IntegrityError(f"a delta is of {params.content_size} bytes, its base of {len(base)}")
        return _xor(zstandard.ZstdDecompressor().decompress(delta), base)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a delta cannot be read: {error}") from error


def _xor(one: bytes, other: bytes) -> bytes:
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).tobytes()
