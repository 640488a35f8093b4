"""What a fixed-cost model computes, and the tensors that it takes and returns.

Data types are those of the public inference protocol v2. Shapes are of one row, without the batch dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ANY: Final = -1  # an extent that the model does not fix


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
