"""The rows of a request, from texts, pictures, token ids or tensors, and their outputs as tensors.

Texts and pictures are read in the text processes, in portions that delay no other tenant's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, Protocol

import numpy as np
from msgspec import Struct

from services.core.errors import InternalError, InvalidInput, PromptTooLong, UnsupportedFeature
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import ANY, TILES, Signature, TensorSpec, tiles_of
from services.gateway.text.text_model import PictureFile, RowTexts, TextModel, Texts

MAX_ROWS: Final = 2048  # of a request, as in the proto
MAX_REQUEST_TOKENS: Final = 1_048_576  # of all its rows


class PreparedRows(Struct, frozen=True):
    """Rows that the model accepts. ``tokens``: of each row; 1 for a row without tokens.

    ``tiles``: of each image whose size is free; empty: of other rows.
    """

    rows: tuple[tuple[RawTensor, ...], ...]
    tokens: tuple[int, ...]
    tiles: tuple[int, ...] = ()

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens)


def check_count(count: int, field: str) -> None:
    """Return if a request may have so many rows. Raises InvalidInput."""
    if not 1 <= count <= MAX_ROWS:
        raise InvalidInput(
            f"{field} is empty" if not count else f"{field} has {count} rows; at most {MAX_ROWS} are taken",
            field=field,
        )


def check_total(tokens: int, field: str) -> None:
    """Return if a request may have so many tokens. Raises InvalidInput."""
    if tokens > MAX_REQUEST_TOKENS:
        raise InvalidInput(
            f"{field} has {tokens} tokens; a request has at most {MAX_REQUEST_TOKENS}",
            field=field,
            tokens=tokens,
            max_tokens=MAX_REQUEST_TOKENS,
        )


def check_length(tokens: int, max_tokens: int, field: str) -> None:
    """Return if a row has 1 to ``max_tokens`` tokens. Raises InvalidInput, PromptTooLong."""
    if not tokens:
        raise InvalidInput(f"{field} has no tokens", field=field)
    if tokens > max_tokens:
        raise PromptTooLong(
            f"{field} has {tokens} tokens; the model takes at most {max_tokens}",
            field=field,
            prompt_tokens=tokens,
            max_context_tokens=max_tokens,
        )


def token_tensor(name: str, data: bytes) -> RawTensor:
    """Return a tensor of 64-bit integers with one element per token."""
    return RawTensor(name, "INT64", (len(data) // 8,), data)


def id_rows(
    rows: Sequence[Sequence[int]], *, vocab_size: int, max_tokens: int, cut_to: int | None, field: str
) -> PreparedRows:
    """Return the rows of token ids, each cut to its first ``cut_to``. Raises InvalidInput, PromptTooLong."""
    check_count(len(rows), field)
    check_total(sum(map(len, rows)), field)
    found, counts = [], []
    for index, row in enumerate(rows):
        where = f"{field}[{index}]"
        kept = row if cut_to is None else row[:cut_to]
        check_length(len(kept), max_tokens, where)
        ids = np.fromiter(kept, np.int64, len(kept))
        check_ids(ids, vocab_size, where)
        found.append((token_tensor("input_ids", ids.tobytes()),))
        counts.append(len(ids))
    return PreparedRows(tuple(found), tuple(counts))


def token_ids_of(rows: PreparedRows) -> list[list[int]]:
    """Return the token ids of each row; none of rows that have no text."""
    return [
        np.frombuffer(tensor.data, np.int64).tolist()
        for row in rows.rows
        for tensor in row
        if tensor.name == "input_ids"
    ]


def check_ids(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], vocab_size: int, field: str) -> None:
    """Return if every id is within the vocabulary that it will index. Raises InvalidInput."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        outside = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise InvalidInput(
            f"{field} holds token {outside}; the model's vocabulary has {vocab_size}",
            field=field,
            token=outside,
            vocab_size=vocab_size,
        )


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


PORTION_BYTES: Final = 12 * 1024  # below the size of a short text
PORTION_ROWS: Final = 128
MAX_PIXEL_BYTES: Final = 16 * 1024 * 1024  # the pixels of a request, bounded as its tensors are
_ID_BYTES: Final = 8


async def text_rows(
    texts: Texts,
    model: TextModel,
    tenant_id: str,
    firsts: Sequence[str],
    seconds: Sequence[str],
    *,
    cut_to: int | None,
    field: str,
) -> PreparedRows:
    """Return a row for each text, or for each pair where there are ``seconds``.

    ``cut_to``: a longer row loses tokens at its end, a pair at the longer of its texts first. Raises
    InvalidInput, PromptTooLong, and the errors of ``Texts.read_rows``.
    """
    check_count(len(firsts), field)
    most = 0 if cut_to is None else min(cut_to or model.max_context_tokens, model.max_context_tokens)
    sizes = [
        len(first.encode()) + (len(seconds[index].encode()) if seconds else 0)
        for index, first in enumerate(firsts)
    ]
    rows: list[tuple[RawTensor, ...]] = []
    counts: list[int] = []
    for begin, end, size in _portions(sizes):
        if size > 2 * model.max_prompt_bytes:
            raise PromptTooLong(
                f"{field}[{begin}] of {size} bytes is more than a row may have",
                field=f"{field}[{begin}]",
                size_bytes=size,
                max_prompt_bytes=2 * model.max_prompt_bytes,
            )
        portion = RowTexts(firsts[begin:end], seconds[begin:end], most)
        found = await texts.read_rows(model, tenant_id, portion, size_bytes=size)
        for index, length in enumerate(found.lengths, start=begin):
            check_length(length, model.max_context_tokens, f"{field}[{index}]")
        counts += found.lengths
        check_total(sum(counts), field)
        rows += _rows(found.lengths, found.ids, found.types if _takes_types(model) else b"")
    return PreparedRows(tuple(rows), tuple(counts))


async def picture_rows(
    texts: Texts, model: TextModel, tenant_id: str, signature: Signature, files: Sequence[bytes]
) -> PreparedRows:
    """Return a row for each picture. Raises InvalidInput, UnsupportedFeature, and as ``Texts.read`` does."""
    rows: list[tuple[RawTensor, ...]] = []
    tiles: list[int] = []
    total = 0
    for index, data in enumerate(files):
        field = f"images[{index}]"
        try:
            pixels = await texts.read_picture(model, tenant_id, PictureFile(data))
        except InvalidInput as error:
            raise InvalidInput(f"{field}: {error.message}", field=field) from None
        total += len(pixels.data)
        if total > MAX_PIXEL_BYTES:
            raise InvalidInput(
                f"images: the first {index + 1} have {total} bytes of pixels; a request has at most "
                f"{MAX_PIXEL_BYTES}: send fewer",
                field="images",
            )
        if signature.inputs[0].is_image:
            tiles.append(check_image((1, *pixels.shape), signature.max_tokens, field))
        rows.append((RawTensor("pixel_values", "FP32", tuple(pixels.shape), pixels.data),))
    return PreparedRows(tuple(rows), (1,) * len(rows), tuple(tiles))


def _portions(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and bytes of runs of texts; a long text is a run of its own."""
    begin = total = 0
    for index, size in enumerate(sizes):
        if index > begin and (total + size > PORTION_BYTES or index - begin >= PORTION_ROWS):
            yield begin, index, total
            begin, total = index, 0
        total += size
    yield begin, len(sizes), total


def _rows(lengths: Sequence[int], ids: bytes, types: bytes) -> Iterator[tuple[RawTensor, ...]]:
    begin = 0
    for length in lengths:
        end = begin + length * _ID_BYTES
        row = (token_tensor("input_ids", ids[begin:end]),)
        yield (*row, token_tensor("token_type_ids", types[begin:end])) if types else row
        begin = end


def _takes_types(model: TextModel) -> bool:
    return model.signature is not None and model.signature.has_types
