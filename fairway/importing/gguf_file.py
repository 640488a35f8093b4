"""A GGUF file's header: its metadata, and the place of each tensor, all checked before anything is allocated.

The file may come from anyone. Layout: magic, version, two counts, the metadata pairs, the tensors'
descriptions, and the tensors' data, aligned. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_PAIRS: Final = 4096  # published files have some dozens
MAX_TENSORS: Final = 65_536
MAX_KEY_BYTES: Final = 256
MAX_TEXT_BYTES: Final = 4 * 1024 * 1024  # a chat template is the longest text
MAX_TOKEN_BYTES: Final = 64 * 1024
# Most items of all arrays together; a vocabulary of 250,000 with its merges has a million.
MAX_ITEMS: Final = 4_000_000
MAX_ARRAY_BYTES: Final = 256 * 1024 * 1024  # most bytes of all arrays together
MAX_ALIGNMENT: Final = 1 << 20
MAX_RANK: Final = 4
MAX_EXTENT: Final = 1 << 31
MAX_VALUES: Final = 1 << 40  # most values of one tensor

_TEXT, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    _BOOL: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}


class BadGguf(ValueError):
    """The file cannot be read or converted: the file, the key or tensor, and the cause."""

    def __init__(self, path: Path, key: str, problem: str) -> None:
        super().__init__(f"{path.name}: {key[:80] or '(no name)'}: {problem}")
        self.key = key
        self.problem = problem


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file."""

    shape: tuple[int, ...]  # extents, the rows first
    type: str  # name of the ggml type
    offset_bytes: int  # place in the file
    row_bytes: int  # size of one row of the last extent

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]  # values by key: int, float, bool, str, or a list of these
    tensors: Mapping[str, GgufTensor]

    def refusal(self, key: str, problem: str) -> BadGguf:
        return BadGguf(self.path, key, problem)


def read_gguf(path: Path) -> GgufFile:
    """Return the checked header of a file. Raises BadGguf, OSError."""
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        reader = _Reader(path, stream, file_bytes)
        head = reader.take(24, "header")
        if head[:4] != MAGIC:
            raise BadGguf(path, "header", "it does not begin with GGUF")
        version, tensor_count, pair_count = struct.unpack("<IQQ", head[4:])
        if version not in VERSIONS:
            if int.from_bytes(head[4:8], "big") in VERSIONS:
                raise BadGguf(
                    path, "version", "its numbers are big-endian; only little-endian files are read"
                )
            raise BadGguf(path, "version", f"{version} is not one of 2 and 3")
        if pair_count > MAX_PAIRS:
            raise BadGguf(path, "kv_count", f"{pair_count} pairs of metadata; at most {MAX_PAIRS} are read")
        if tensor_count > MAX_TENSORS:
            raise BadGguf(path, "tensor_count", f"{tensor_count} tensors; at most {MAX_TENSORS} are read")
        metadata = reader.metadata(pair_count)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise BadGguf(
                path, "general.alignment", f"{alignment!r} is no power of two up to {MAX_ALIGNMENT}"
            )
        tensors = reader.tensors(tensor_count, alignment)
    return GgufFile(path, metadata, tensors)


class _Reader:
    """Reads the header in order. Every length is compared with the file's size before it is used."""

    def __init__(self, path: Path, stream: BinaryIO, file_bytes: int) -> None:
        self._path = path
        self._stream = stream
        self._file_bytes = file_bytes
        self._at = 0
        self._items = 0
        self._array_bytes = 0

    def take(self, size_bytes: int, key: str) -> bytes:
        if size_bytes > self._file_bytes - self._at:
            left = self._file_bytes - self._at
            raise BadGguf(
                self._path, key, f"the file is truncated: {size_bytes} bytes are needed, {left} are left"
            )
        data = self._stream.read(size_bytes)
        if len(data) != size_bytes:
            raise BadGguf(self._path, key, "the file became shorter while it was read")
        self._at += size_bytes
        return data

    def number(self, form: str, key: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), key))[0]

    def text(self, key: str, most: int) -> str:
        length = self.number("<Q", key)
        if length > most:
            raise BadGguf(self._path, key, f"a text of {length} bytes; at most {most} are read")
        try:
            return self.take(length, key).decode()
        except UnicodeDecodeError as error:
            raise BadGguf(self._path, key, "a text is not UTF-8") from error

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(count):
            key = self.text(f"metadata key {number}", MAX_KEY_BYTES)
            if key in found:
                raise BadGguf(self._path, key, "it occurs twice")
            found[key] = self._value(key, self.number("<I", key))
        return found

    def _value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self.text(key, MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise BadGguf(self._path, key, f"its type {kind} is unknown")
        return self._scalars(key, kind, 1)[0]

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        form = _SCALARS[kind]
        data = self.take(count * struct.calcsize(form), key)
        values = list(struct.unpack(f"<{count}{form[1]}", data))
        if kind != _BOOL:
            return values
        if not set(values) <= {0, 1}:
            raise BadGguf(self._path, key, "a bool is neither 0 nor 1")
        return [bool(value) for value in values]

    def _array(self, key: str) -> list[Any]:
        kind, count = self.number("<I", key), self.number("<Q", key)
        if kind not in _SCALARS and kind != _TEXT:
            what = "arrays of arrays are" if kind == _ARRAY else f"an array of the unknown type {kind} is"
            raise BadGguf(self._path, key, f"{what} not read")
        self._items += count
        if self._items > MAX_ITEMS:
            raise BadGguf(self._path, key, f"an array of {count}; all arrays have at most {MAX_ITEMS} values")
        if kind != _TEXT:
            return self._scalars(key, kind, count)
        began = self._at
        texts = []
        for _ in range(count):
            texts.append(self.text(key, MAX_TOKEN_BYTES))
            if self._array_bytes + self._at - began > MAX_ARRAY_BYTES:
                raise BadGguf(self._path, key, f"all arrays have at most {MAX_ARRAY_BYTES} bytes")
        self._array_bytes += self._at - began
        return texts

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors with their places in the file: inside it, aligned, and none over another."""
        described: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
        for number in range(count):
            name = self.text(f"name of tensor {number}", MAX_KEY_BYTES)
            if name in described:
                raise BadGguf(self._path, name, "two tensors have this name")
            described[name] = self._tensor(name, alignment)
        begin = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor(shape, kind, begin + offset, row_bytes)
            for name, (shape, kind, offset, row_bytes) in described.items()
        }
        reached, before = begin, ""
        for name, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].offset_bytes, pair[0])):
            if tensor.offset_bytes < reached:
                raise BadGguf(self._path, name, f"its data overlaps that of {before[:80]}")
            reached, before = tensor.offset_bytes + tensor.size_bytes, name
            if reached > self._file_bytes:
                raise BadGguf(
                    self._path, name, f"its data ends at byte {reached}, the file has {self._file_bytes}"
                )
        return tensors

    def _tensor(self, name: str, alignment: int) -> tuple[tuple[int, ...], str, int, int]:
        rank = self.number("<I", name)
        if not 1 <= rank <= MAX_RANK:
            raise BadGguf(self._path, name, f"it has {rank} dimensions, not 1 to {MAX_RANK}")
        extents = struct.unpack(f"<{rank}Q", self.take(8 * rank, name))
        if not all(1 <= extent <= MAX_EXTENT for extent in extents) or prod(extents) > MAX_VALUES:
            raise BadGguf(self._path, name, f"its shape {extents[::-1]} is outside what is read")
        kind, offset = self.number("<I", name), self.number("<Q", name)
        block, block_bytes, type_name = _block(self._path, name, kind)
        if extents[0] % block:
            raise BadGguf(self._path, name, f"rows of {extents[0]} are no multiple of {type_name}'s {block}")
        if offset % alignment:
            raise BadGguf(self._path, name, f"its offset {offset} is no multiple of {alignment}")
        return extents[::-1], type_name, offset, extents[0] // block * block_bytes


def _block(path: Path, name: str, kind: int) -> tuple[int, int, str]:
    """Return values and bytes of a block of a ggml type, and its name."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        found = GGMLQuantizationType(kind)
        return (*GGML_QUANT_SIZES[found], found.name)
    except (ValueError, KeyError):
        raise BadGguf(path, name, f"its ggml type {kind} is unknown") from None
