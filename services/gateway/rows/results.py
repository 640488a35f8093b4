"""Outputs of rows as what the interfaces return: vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fairway.formats.fixed_cost.encoder_config import Classes
from services.core.errors import InternalError, InvalidInput, UnsupportedFeature
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import Signature

PROBABILITIES: Final = "probs"
LABEL: Final = "label"
MAX_PROBABILITIES: Final = 262_144  # the values of all rows of an answer
_SIZE: Final = Struct("<I")  # the length before an element, as in the public inference protocol v2

Vector = NDArray[np.float32]
Vectors = NDArray[np.float32]  # one row of it per row of the request


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


def embedding_output(ends: Sequence[RowEnd], dimensions: int, signature: Signature) -> RawTensor:
    """Return the embeddings of all rows, cut to their first dimensions; 0: whole.

    A cut vector of a model whose vectors have length 1 is scaled to length 1 again.
    """
    found = _floats(ends)
    is_cut = bool(dimensions) and dimensions != signature.outputs[0].shape[0]
    if is_cut:
        found = found[:, :dimensions]
    # An encoder returns whole vectors normalised, a decoder's engine the hidden state.
    if signature.normalized and (is_cut or signature.by_prefill):
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-12))
    return RawTensor("embedding", "FP32", found.shape, found.tobytes())


def score_output(ends: Sequence[RowEnd], signature: Signature) -> RawTensor:
    """Return each row's logit or its sigmoid, as the version declares."""
    found = _floats(ends)[:, 0].astype(np.float64)
    if signature.score == "sigmoid":
        # Both forms are exact for their sign, and neither overflows.
        small = np.exp(-np.abs(found))
        found = np.where(found >= 0, 1.0 / (1.0 + small), small / (1.0 + small))
    return RawTensor("score", "FP64", found.shape, found.tobytes())


def class_outputs(logits: RawTensor, classes: Classes) -> tuple[RawTensor, RawTensor]:
    """Return the probabilities of each row's labels, and the name of its most probable label."""
    found = np.frombuffer(logits.data, np.float32).reshape(logits.shape).astype(np.float64)
    with np.errstate(all="ignore"):  # NaN and infinities are data
        if classes.probabilities == "softmax":
            found = np.exp(found - found.max(axis=1, keepdims=True))
            found /= found.sum(axis=1, keepdims=True)
        elif classes.probabilities == "sigmoid":
            found = 1.0 / (1.0 + np.exp(-found))
    names = [classes.names[index].encode() for index in found.argmax(axis=1)]
    return (
        RawTensor(PROBABILITIES, "FP64", found.shape, found.tobytes()),
        RawTensor(LABEL, "BYTES", (len(names),), b"".join(_SIZE.pack(len(name)) + name for name in names)),
    )


def label_names(label: RawTensor) -> list[str]:
    """Return the elements of a tensor of names."""
    names, at = [], 0
    while at < len(label.data):
        (size,) = _SIZE.unpack_from(label.data, at)
        at += _SIZE.size + size
        names.append(label.data[at - size : at].decode())
    return names


def check_probabilities(rows: int, classes: Classes, field: str) -> None:
    """Return if an answer may have the probabilities of so many rows. Raises InvalidInput."""
    most = max(1, MAX_PROBABILITIES // len(classes.names))
    if rows > most:
        raise InvalidInput(
            f"{field} has {rows} rows; of a model with {len(classes.names)} labels at most {most} are taken",
            field=field,
            max_rows=most,
        )


def vectors(output: RawTensor) -> list[Vector]:
    """Return the embedding of each row."""
    return list(np.frombuffer(output.data, np.float32).reshape(output.shape))


def scores(output: RawTensor) -> list[float]:
    """Return the score of each row."""
    found: list[float] = np.frombuffer(output.data, np.float64).tolist()
    return found


def _floats(ends: Sequence[RowEnd]) -> Vectors:
    """Return the only output of every row. Raises InternalError for outputs of another kind."""
    first = ends[0].outputs[:1]
    shapes = {(tensor.datatype, tensor.shape) for end in ends for tensor in end.outputs}
    if not first or len(shapes) != 1 or first[0].datatype != "FP32" or any(len(e.outputs) != 1 for e in ends):
        raise InternalError("a row has another output than one tensor of FP32")
    data = b"".join(end.outputs[0].data for end in ends)
    return np.frombuffer(data, np.float32).reshape(len(ends), -1)
