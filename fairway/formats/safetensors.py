"""Check of a safetensors header against the file's size, without loading any tensor.

Layout: eight bytes with the header's length, little endian; the header, JSON that maps a tensor's name to its
dtype, shape and place; the tensors. The places cover everything after the header exactly once: no gap, no
overlap, and no rest that could contain other data.

The number of tensors is limited before the header is parsed, which takes some microseconds per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, Final

import msgspec

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
ALIGNED_BYTES: Final = 1024 * 1024  # the least size of a tensor with chunks of its own
MAX_TENSORS: Final = 100_000  # per file; the largest published checkpoints have some thousands
_MAX_RANK: Final = 16
_METADATA: Final = "__metadata__"
_FIELDS: Final = frozenset(("dtype", "shape", "data_offsets"))
_MAX_METADATA: Final = 10_000
_MOST_COLONS: Final = 8 * MAX_TENSORS  # four per tensor; names and metadata may contain more
# fmt: off
BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}
# fmt: on


class BadHeader(ValueError):
    """The file is not a valid safetensors file; the text is the problem, without the file's name."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    dtype: str
    shape: tuple[int, ...]


def read_header(stream: BinaryIO, file_bytes: int) -> bytes:
    """Return the header at the beginning of a file of this size, checked. Raises BadHeader."""
    header = stream.read(header_bytes(stream.read(LENGTH_BYTES), file_bytes))
    check_header(header, file_bytes)
    return header


def tensors_of(header: bytes) -> dict[str, TensorHeader]:
    """Return the tensors in a header. Raises BadHeader."""
    entries = _decoded(header, dict[str, msgspec.Raw])
    entries.pop(_METADATA, None)
    found = {name: _decoded(entry, Any) for name, entry in entries.items()}
    for name, entry in found.items():
        _place(name, entry)
    return {name: TensorHeader(entry["dtype"], tuple(entry["shape"])) for name, entry in found.items()}


def chunk_starts(header: bytes, file_bytes: int, chunk_bytes: int) -> list[int]:
    """Return where chunks of at most ``chunk_bytes`` begin, so that equal tensors give equal chunks.

    Each tensor of ``ALIGNED_BYTES`` or more begins one, and so does what follows it. Thus a longer header or
    another tensor shifts no chunk beyond the next such tensor. Raises BadHeader.
    """
    entries = _decoded(header, dict[str, msgspec.Raw])
    entries.pop(_METADATA, None)
    data = LENGTH_BYTES + len(header)
    places = [_place(name, _decoded(entry, Any)) for name, entry in entries.items()]
    large = [place for place in places if place[1] - place[0] >= ALIGNED_BYTES]
    cuts = sorted({0, file_bytes, *(data + at for place in large for at in place)})
    return [start for begin, end in pairwise(cuts) for start in range(begin, end, chunk_bytes)]


def metadata_of(header: bytes) -> dict[str, str]:
    """Return the metadata in a header, empty without any. Raises BadHeader."""
    found = _decoded(header, dict[str, msgspec.Raw]).get(_METADATA)
    return {} if found is None else _decoded(found, dict[str, str])


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Return the length of the header from the first eight bytes. Raises BadHeader."""
    if file_bytes < LENGTH_BYTES or len(first) < LENGTH_BYTES:
        raise BadHeader(f"it has {file_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise BadHeader(f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if length < 2 or LENGTH_BYTES + length > file_bytes:
        raise BadHeader(f"its header claims {length} bytes, the file has {file_bytes}")
    return length


def check_header(header: bytes, file_bytes: int) -> None:
    """Return if the tensors in the header cover exactly the data after it. Raises BadHeader."""
    if not header.startswith(b"{"):
        raise BadHeader("its header does not begin with {")
    if header.count(b":") > _MOST_COLONS:
        raise BadHeader(f"its header lists more than {MAX_TENSORS} tensors")
    entries = _decoded(header, dict[str, msgspec.Raw])
    pairs = len(entries)
    metadata = _decoded(entries.pop(_METADATA, b"{}"), dict[str, str])
    if len(entries) > MAX_TENSORS or len(metadata) > _MAX_METADATA:
        raise BadHeader(f"its header lists more than {MAX_TENSORS} tensors or {_MAX_METADATA} metadata")
    data_bytes, reached = file_bytes - LENGTH_BYTES - len(header), 0
    places = sorted((*_place(name, _decoded(entry, Any)), name) for name, entry in entries.items())
    if _pairs(header) != pairs + len(metadata) + len(_FIELDS) * len(entries):
        raise BadHeader("its header has a name twice")
    for begin, end, name in places:
        if begin != reached:
            what = "overlaps the one before" if begin < reached else "leaves a gap before it"
            raise BadHeader(f"tensor {name[:80]!r} {what}")
        reached = end
    if reached > data_bytes:
        raise BadHeader(f"it is truncated: its tensors take {reached} bytes, {data_bytes} are there")
    if reached < data_bytes:
        raise BadHeader(f"{data_bytes - reached} bytes follow its last tensor")


def _place(name: str, entry: Any) -> tuple[int, int]:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise BadHeader(f"tensor {name[:80]!r} must have exactly dtype, shape and data_offsets")
    bits = BITS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if bits is None:
        raise BadHeader(f"tensor {name[:80]!r} has an unknown dtype")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape) or len(shape) > _MAX_RANK or not _counts(offsets) or len(offsets) != 2:
        raise BadHeader(f"tensor {name[:80]!r} has a malformed shape or place")
    values = 1
    for extent in shape:
        values *= extent
    begin, end = offsets
    if end < begin or values * bits != (end - begin) * 8:
        raise BadHeader(f"tensor {name[:80]!r} has a place of {end - begin} bytes, not what its shape takes")
    return begin, end


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _decoded(text: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadHeader("its header is not JSON of tensors and metadata texts") from exc


def _pairs(header: bytes) -> int:
    """Return the number of names in all objects of valid JSON; a decoder drops duplicates, this does not."""
    text = header.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes enclose texts
    return b"".join(text.split(b'"')[::2]).count(b":")
