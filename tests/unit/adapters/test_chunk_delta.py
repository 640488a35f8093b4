"""A delta restores its chunk bit for bit, is small for few changes, and is refused when it is none."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from services.adapters.chunk_delta import decode, encode
from services.core.errors import IntegrityError

RNG = np.random.default_rng(3)
BASE = RNG.standard_normal(1 << 20, np.float32)


def changed(ratio: float) -> bytes:
    found = BASE.copy()
    where = RNG.random(found.size) < ratio
    found[where] = RNG.standard_normal(int(where.sum()), np.float32)
    return found.tobytes()


@pytest.mark.parametrize(("ratio", "most"), [(0.0, 0.001), (0.01, 0.02), (1.0, 1.01)])
def test_a_delta_restores_its_chunk(ratio: float, most: float) -> None:
    data = changed(ratio)
    delta = encode(data, BASE.tobytes())
    assert decode(delta, BASE.tobytes()) == data
    assert len(delta) <= most * len(data)


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        b"no frame at all",
        encode(b"1" * 64, b"2" * 64)[:-4],
        encode(b"1" * 65, b"2" * 65),
        zstandard.ZstdCompressor().compress(bytes(1 << 26)),  # 64 MiB in 2 KB
        zstandard.ZstdCompressor(write_content_size=False).compress(b"1" * 64),
    ],
)
def test_what_is_no_delta_of_the_base_is_refused(delta: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(delta, b"2" * 64)
