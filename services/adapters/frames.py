"""Stored bytes in frames with a checksum each, so that damage is found and named, and the rest is read.

A frame is its size, its CRC-32 and its content. CRC-32 finds every burst of up to 32 bits. Behind damaged
bytes the next frame is found by its checksum. A sealed object is a mark, a frame with the number of blocks,
and a frame for each block.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from services.core.errors import IntegrityError

Parsed = TypeVar("Parsed")
MAX_FRAME_BYTES: Final = 1024**2
_HEAD: Final = struct.Struct("<II")  # size and checksum
_COUNT: Final = struct.Struct("<Q")
_MARK: Final = b"fairway\x01"


def framed(content: bytes) -> bytes:
    """Return the content in a frame. It has 1 to ``MAX_FRAME_BYTES`` bytes."""
    assert 0 < len(content) <= MAX_FRAME_BYTES, f"{len(content)} bytes are no frame"
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


@dataclass(frozen=True, slots=True)
class FoundFrames:
    """What was read. ``damaged``: begin and end of the bytes that are in no frame, or a wrong size. ``torn``:
    only a frame at the end is cut, as by a crash."""

    starts: tuple[int, ...]
    contents: tuple[bytes, ...]
    damaged: tuple[tuple[int, int], ...]
    torn: bool


def read_frames(data: bytes, start: int = 0) -> FoundFrames:
    """Return every whole frame from ``start`` on, over what is damaged between them."""
    starts: list[int] = []
    contents: list[bytes] = []
    damaged: list[tuple[int, int]] = []
    for at, content in _frames(data, start):
        if at > start:
            damaged.append((start, at))
        starts.append(at)
        contents.append(content)
        start = at + _HEAD.size + len(content)
    rest = data[start + _HEAD.size :]
    torn = False
    # The last frame is damaged only in its size if the rest matches its checksum.
    if rest and _HEAD.unpack_from(data, start)[1] == zlib.crc32(rest):
        damaged.append((start, start + 4))
        starts.append(start)
        contents.append(rest)
    elif start < len(data):
        torn = not damaged and start + _size_at(data, start) > len(data)
        damaged.append((start, len(data)))
    return FoundFrames(tuple(starts), tuple(contents), tuple(damaged), torn)


def _size_at(data: bytes, start: int) -> int:
    """Return the size of the frame that begins there, as its head states it."""
    if start + _HEAD.size > len(data):
        return _HEAD.size
    return _HEAD.size + int(_HEAD.unpack_from(data, start)[0])


def _frames(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while 0 <= at <= len(data) - _HEAD.size:
        size, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        if 0 < size <= MAX_FRAME_BYTES and end <= len(data):
            content = data[at + _HEAD.size : end]
            if zlib.crc32(content) == checksum:
                yield at, content
                at = end
                continue
        at = data.find(0, at + 4) - 3  # the highest byte of a size is zero


def sealed(blocks: Sequence[bytes]) -> bytes:
    """Return an object of these blocks; empty ones are left out."""
    blocks = [block for block in blocks if block]
    return _MARK + b"".join(map(framed, (_COUNT.pack(len(blocks)), *blocks)))


def sealed_whole(data: bytes) -> bytes:
    """Return an object of this data, whatever its size."""
    return sealed([data[at : at + MAX_FRAME_BYTES] for at in range(0, len(data), MAX_FRAME_BYTES)])


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """``damage`` states what of the object could not be read; empty: nothing is missing. ``sealed`` is False
    for an object without checksums, as earlier versions stored them, which is one block."""

    blocks: tuple[bytes, ...]
    damage: str = ""
    sealed: bool = True


def opened(data: bytes) -> OpenedObject:
    """Return the blocks of an object that can be read."""
    if not data:
        return OpenedObject((), "the object is empty")
    start = len(_MARK)
    found = read_frames(data, start)
    is_marked = data[:start] == _MARK[: len(data)]
    if not is_marked and not found.contents:
        return OpenedObject((data,), sealed=False)
    counted = bool(found.starts) and found.starts[0] == start and len(found.contents[0]) == _COUNT.size
    blocks = found.contents[1:] if counted else found.contents
    problems = [f"bytes {begin} to {end} are damaged" for begin, end in found.damaged[:3]]
    missing = _COUNT.unpack(found.contents[0])[0] - len(blocks) if counted else 0
    if missing:
        problems.append(f"{missing} of {missing + len(blocks)} blocks are missing")
    if not is_marked or not counted:
        problems.append("its head is damaged")
    return OpenedObject(blocks, ", ".join(problems))


def parsed(data: bytes, parse: Callable[[bytes], Parsed], what: str) -> Parsed:
    """Return what ``parse`` makes of the data of a sealed object.

    Raises IntegrityError, which names ``what``, for a damaged object, also for one without checksums that
    cannot be parsed.
    """
    found = opened(data)
    problem = found.damage
    if not problem:
        try:
            return parse(b"".join(found.blocks))
        except (DecodeError, KeyError, IndexError) as error:
            problem = repr(error)
    raise IntegrityError(f"{what} damaged: {problem}")
