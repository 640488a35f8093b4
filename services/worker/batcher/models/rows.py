"""Rows of a batch: what a model accepts, and rows of tokens as one flat list of tokens.

A batch is padded or packed. Padded, every row has ``width`` tokens. Packed, rows stand one after the other
without padding, sorted by length, so that rows of one length share an attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from services.core.fixed_cost.signature import ANY, TILES, TensorSpec, tiles_of

Row = Mapping[str, NDArray[Any]]  # input tensors by name, without a batch dimension

DTYPES: Final[Mapping[str, Any]] = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of at most ``width`` tokens; the model fills each up."""

    rows: Sequence[Row]
    width: int = 0  # padded width of a row in tokens, or of an image in tiles


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows without padding, for a model that accepts them."""

    rows: Sequence[Row]


Batch = Padded | Packed


def row_problem(row: Row, specs: Sequence[TensorSpec], *, max_length: int = 0) -> str:
    """Return why the row cannot be computed, or an empty text."""
    if unknown := sorted(row.keys() - {spec.name for spec in specs}):
        return f"there is no input {unknown[0][:80]!r}"
    length = None
    for spec in specs:
        if (tensor := row.get(spec.name)) is None:
            if spec.optional:
                continue
            return f"the input {spec.name} is missing"
        if tensor.dtype != DTYPES[spec.datatype]:
            return f"{spec.name} has data type {tensor.dtype}, not {spec.datatype}"
        if problem := _shape_problem(spec, tensor.shape):
            return problem
        if spec.has_length:
            if length not in (None, len(tensor)):
                return f"{spec.name} has length {len(tensor)}, another input of the row has {length}"
            length = len(tensor)
        if spec.is_image and (tiles := tiles_of(tensor.shape)) > max_length:
            return f"the row has {tiles} {TILES}; the model takes at most {max_length}"
    if max_length and length is not None and length > max_length:
        return f"the row has {length} tokens; the model takes at most {max_length}"
    return ""


def _shape_problem(spec: TensorSpec, shape: tuple[int, ...]) -> str:
    fits = len(shape) == len(spec.shape) and all(
        extent == wanted or (wanted == ANY and extent > 0)
        for extent, wanted in zip(shape, spec.shape, strict=True)
    )
    return "" if fits else f"{spec.name} has shape {list(shape)}, not {list(spec.shape)}"


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of all rows, one after the other. Tensors are int64 [tokens], on the device."""

    ids: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor
    lengths: tuple[int, ...]  # lengths without padding, in the order of the rows here
    width: int  # width of every row with its padding; 0: packed
    order: tuple[int, ...]  # each row's place in the batch

    @property
    def starts(self) -> list[int]:
        """Where each row starts among the tokens."""
        if self.width:
            return [index * self.width for index in range(len(self.lengths))]
        ends = np.cumsum(self.lengths).tolist()
        return [0, *ends[:-1]]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring rows of one length, packed: how many, and the length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


def token_rows(batch: Batch, device: torch.device, *, padding_id: int, after_padding: bool) -> TokenRows:
    """Return the tokens of a checked batch.

    ``after_padding``: positions count from ``padding_id + 1`` on, and a token of that id has position
    ``padding_id``, as RoBERTa has them.
    """
    rows, order = batch.rows, list(range(len(batch.rows)))
    lengths = [len(row["input_ids"]) for row in rows]
    width = batch.width if isinstance(batch, Padded) else 0
    if isinstance(batch, Packed):
        order.sort(key=lambda index: lengths[index])
        starts = np.cumsum([0, *(lengths[index] for index in order)]).tolist()
    else:
        assert max(lengths) <= width, "a row is longer than its batch"
        starts = [place * width for place in range(len(rows) + 1)]
    ids = np.full(starts[-1], padding_id, np.int64)
    positions, types = np.zeros(starts[-1], np.int64), np.zeros(starts[-1], np.int64)
    for place, index in enumerate(order):
        row, begin = rows[index], starts[place]
        end = begin + lengths[index]
        ids[begin:end] = row["input_ids"]
        if "token_type_ids" in row:
            types[begin:end] = row["token_type_ids"]
        if after_padding:
            counted = ids[begin:end] != padding_id
            positions[begin:end] = np.cumsum(counted) * counted + padding_id
        else:
            positions[begin:end] = np.arange(lengths[index])
    tokens, places, kinds = (torch.from_numpy(each).to(device) for each in (ids, positions, types))
    return TokenRows(tokens, places, kinds, tuple(lengths[index] for index in order), width, tuple(order))
