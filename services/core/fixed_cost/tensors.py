"""What a fixed-cost model computes, and the tensors that it takes and returns.

Data types are those of the public inference protocol v2. Shapes are of one row, without the batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt, prod
from typing import Final

ANY: Final = -1  # an extent that the model does not fix
TILE: Final = 32  # pixels of a side
TILES: Final = f"tiles of {TILE} x {TILE} pixels"


class Operation(StrEnum):
    """What a forward pass returns of each row."""

    EMBED = "embed"  # a vector
    CLASSIFY = "classify"  # logits of labels
    SCORE = "score"  # one logit: how well a pair of texts matches
    TOKENS = "tokens"  # logits of labels, of each token
    INFER = "infer"  # tensors that the model declares


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a row. ``ANY`` in ``shape``: any extent from 1 on."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    # The first extent is the row's length: rows of different lengths may share a batch.
    has_length: bool = False
    optional: bool = False
    # The row's length is ``tiles_of`` its shape: images of different sizes never share a batch.
    is_image: bool = False

    def shape_of(self, length: int) -> tuple[int, ...]:
        """Return the shape of a row of this length; an image is a square of at most so many tiles."""
        free = TILE * isqrt(length) if self.is_image else length
        return tuple(free if extent == ANY else extent for extent in self.shape)


def tiles_of(shape: Sequence[int]) -> int:
    """Return how many tiles cover an image whose shape ends with height and width."""
    return prod(-(-extent // TILE) for extent in shape[-2:])
