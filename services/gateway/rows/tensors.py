"""Tensors with a batch dimension as rows, and outputs of rows as tensors with a batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, Protocol

import numpy as np

from services.core.errors import InternalError, InvalidInput, UnsupportedFeature
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import ANY, TILES, Signature, TensorSpec, tiles_of
from services.gateway.rows.inputs import PreparedRows, check_count, check_ids, check_length, check_total

ELEMENT_BYTES: Final = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}


class BatchTensor(Protocol):
    """A tensor of a request: the first extent is the batch, the data row-major and little-endian."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def data(self) -> bytes: ...


def tensor_rows(tensors: Sequence[BatchTensor], signature: Signature) -> PreparedRows:
    """Return the slices of the tensors. Raises InvalidInput, PromptTooLong, UnsupportedFeature."""
    specs = {spec.name: spec for spec in signature.inputs}
    count = _check_names(tensors, specs)
    check_count(count, "inputs")
    sliced: list[list[RawTensor]] = [[] for _ in range(count)]
    length = tiles = 0
    for tensor in tensors:
        field, shape = f"inputs.{tensor.name}", tuple(tensor.shape)
        spec = specs[tensor.name]
        _check_tensor(tensor, shape, spec, count, field)
        if spec.has_length:
            if length and shape[1] != length:
                raise InvalidInput(
                    f"{field} has length {shape[1]}, another input has {length}", field=f"{field}.shape"
                )
            length = shape[1]
        if spec.is_image:
            tiles = check_image(shape, signature.max_tokens, field)
        if signature.vocab_size and tensor.name == "input_ids":
            check_length(length, signature.max_tokens, field)
            check_total(length * count, field)
            check_ids(np.frombuffer(tensor.data, np.int64), signature.vocab_size, field)
        size = len(tensor.data) // count
        for index, row in enumerate(sliced):
            data = tensor.data[index * size : (index + 1) * size]
            row.append(RawTensor(tensor.name, tensor.datatype, shape[1:], data))
    return PreparedRows(tuple(map(tuple, sliced)), (length or 1,) * count, (tiles,) * count if tiles else ())


def output_tensors(
    ends: Sequence[RowEnd], names: Sequence[str], signature: Signature
) -> tuple[RawTensor, ...]:
    """Return the outputs of all rows, each with the batch as its first extent; no names: all outputs."""
    found = []
    for name in names or [spec.name for spec in signature.outputs]:
        rows = [tensor for end in ends for tensor in end.outputs if tensor.name == name]
        first = rows[0] if rows else None
        if first is None or len(rows) != len(ends) or any(row.shape != first.shape for row in rows):
            raise InternalError(f"the rows have no output {name} of one shape")
        data = b"".join(row.data for row in rows)
        found.append(RawTensor(name, first.datatype, (len(rows), *first.shape), data))
    return tuple(found)


def check_outputs(names: Sequence[str], signature: Signature) -> None:
    """Return if the model has all these outputs. Raises InvalidInput."""
    known = [spec.name for spec in signature.outputs]
    for index, name in enumerate(names):
        if name not in known or name in names[:index]:
            problem = "is named twice" if name in known else f"is no output; there is {', '.join(known)}"
            raise InvalidInput(f"outputs[{index}] {name!r} {problem}", field=f"outputs[{index}]")


def _check_names(tensors: Sequence[BatchTensor], specs: dict[str, TensorSpec]) -> int:
    """Return the rows of the first tensor. Raises InvalidInput for unknown, repeated or missing inputs."""
    seen: set[str] = set()
    for index, tensor in enumerate(tensors):
        if tensor.name not in specs:
            raise InvalidInput(
                f"inputs[{index}]: there is no input {tensor.name!r}; the model has {', '.join(specs)}",
                field=f"inputs[{index}].name",
            )
        if tensor.name in seen:
            raise InvalidInput(f"the input {tensor.name} is there twice", field=f"inputs[{index}].name")
        seen.add(tensor.name)
    for name, spec in specs.items():
        if name not in seen and not spec.optional:
            raise InvalidInput(f"the input {name} is missing", field="inputs")
    return tensors[0].shape[0] if tensors and tensors[0].shape else 0


def check_image(shape: tuple[int, ...], most: int, field: str) -> int:
    """Return the tiles of each image. Raises InvalidInput for more than ``most``."""
    tiles, (height, width) = tiles_of(shape), shape[-2:]
    if tiles > most:
        raise InvalidInput(
            f"{field} has images of {height} x {width} pixels, which are {tiles} {TILES}; "
            f"the model takes at most {most}",
            field=f"{field}.shape",
            tiles=tiles,
            max_tiles=most,
        )
    return tiles


def _check_tensor(
    tensor: BatchTensor, shape: tuple[int, ...], spec: TensorSpec, count: int, field: str
) -> None:
    if tensor.datatype not in ELEMENT_BYTES:
        raise UnsupportedFeature(
            f"{field}: data type {tensor.datatype} is not offered by this server", field=f"{field}.datatype"
        )
    if tensor.datatype != spec.datatype:
        raise InvalidInput(
            f"{field} has data type {tensor.datatype}, not {spec.datatype}", field=f"{field}.datatype"
        )
    fits = len(shape) == len(spec.shape) + 1 and all(
        extent == wanted or (wanted == ANY and extent > 0)
        for extent, wanted in zip(shape[1:], spec.shape, strict=True)
    )
    if not fits or shape[0] != count:
        wanted = [count, *spec.shape]
        raise InvalidInput(f"{field} has shape {list(shape)}, not {wanted}", field=f"{field}.shape")
    size = prod(shape) * ELEMENT_BYTES[tensor.datatype]
    if len(tensor.data) != size:
        raise InvalidInput(
            f"{field} has {len(tensor.data)} bytes; its shape and data type need {size}",
            field=f"{field}.data",
        )
