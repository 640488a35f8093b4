"""Request bodies in gzip, inflated within the bounds of bodies: a few KB may hold megabytes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

from services.gateway.faces.openai.errors import HttpProblem

ENCODINGS: Final = (b"gzip", b"x-gzip")
_GZIP: Final = 31  # zlib's number for a window of 32 KiB in gzip's frame
# What is inflated in the event loop, which takes a fraction of a millisecond, and in a thread at a time.
_INLINE_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 1024 * 1024


async def inflated(body: bytes, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """Return the content of a gzip body.

    Raises HttpProblem where it has more than ``max_bytes``, before that is allocated, and where it is no
    single complete gzip member. ``hold`` is called with the size so far; an error that it raises ends the
    work.
    """
    inflater = zlib.decompressobj(wbits=_GZIP)
    parts: list[bytes] = []
    size, rest = 0, body
    try:
        while not inflater.eof:
            room = max_bytes + 1 - size
            if not parts:
                part = inflater.decompress(rest, min(room, _INLINE_BYTES))
            else:
                part = await asyncio.to_thread(inflater.decompress, rest, min(room, _PIECE_BYTES))
            rest = inflater.unconsumed_tail
            if not part and not inflater.eof:  # the input is used up
                raise _malformed()
            size += len(part)
            if size > max_bytes:
                raise HttpProblem(413, f"the inflated body is larger than {max_bytes} bytes")
            hold(len(body) + size)
            parts.append(part)
    except zlib.error:
        raise _malformed() from None
    if inflater.unused_data:
        raise _malformed()
    return b"".join(parts)


def _malformed() -> HttpProblem:
    return HttpProblem(400, "the body is not one complete gzip member")
