"""Outputs of rows as what the interfaces return: vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.core.errors import InternalError, InvalidInput, UnsupportedFeature
from services.core.fixed_cost.rows import RowEnd
from services.core.fixed_cost.signature import Signature

Vector = NDArray[np.float32]


def check_dimensions(dimensions: int, signature: Signature) -> None:
    """Return if embeddings of so many dimensions can be returned; 0: the model's own.

    Raises InvalidInput, UnsupportedFeature.
    """
    (own,) = signature.outputs[0].shape
    if dimensions in (0, own):
        return
    if dimensions > own:
        raise InvalidInput(
            f"dimensions {dimensions} is above the model's {own}", field="dimensions", max_dimensions=own
        )
    if not signature.may_be_cut:
        raise UnsupportedFeature(
            f"dimensions: the model does not declare that its vectors of {own} may be cut", field="dimensions"
        )
    if signature.dimensions and dimensions not in signature.dimensions:
        raise InvalidInput(
            f"dimensions must be one of {', '.join(map(str, signature.dimensions))}", field="dimensions"
        )


def vectors(ends: Sequence[RowEnd], dimensions: int, signature: Signature) -> list[Vector]:
    """Return the embedding of each row, cut to its first dimensions; 0: whole.

    A cut vector of a model whose vectors have length 1 is scaled to length 1 again.
    """
    found = [_floats(end) for end in ends]
    if not dimensions or dimensions == signature.outputs[0].shape[0]:
        return found
    cut = [vector[:dimensions] for vector in found]
    if not signature.normalized:
        return cut
    return [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in cut]


def scores(ends: Sequence[RowEnd]) -> list[float]:
    """Return the sigmoid of each row's logit, as sentence-transformers and vLLM return it for one label."""
    logits = np.array([_floats(end)[0] for end in ends], np.float64)
    # Both forms are exact for their sign, and neither overflows.
    small = np.exp(-np.abs(logits))
    found: list[float] = np.where(logits >= 0, 1.0 / (1.0 + small), small / (1.0 + small)).tolist()
    return found


def _floats(end: RowEnd) -> Vector:
    if len(end.outputs) != 1 or end.outputs[0].datatype != "FP32":
        raise InternalError("a row has another output than one tensor of FP32")
    return np.frombuffer(end.outputs[0].data, np.float32)
