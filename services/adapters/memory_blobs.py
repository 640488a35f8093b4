"""Blobs in this process, for tests and the simulator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence

from services.adapters.digests import PIECE_BYTES, Verifier, hex_of
from services.core.errors import IntegrityError, NotFound, StoreUnavailable


class MemoryBlobs:
    """``BlobStore`` in memory, full at ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int = 256 * 1024 * 1024) -> None:
        self._capacity_bytes = capacity_bytes
        self._blobs: dict[str, bytes] = {}

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        verifier = Verifier(digest, size_bytes)
        stored = self._blobs.get(digest)
        if stored is not None:
            if len(stored) != size_bytes:
                raise IntegrityError(f"{digest} is stored with another size", digest=digest)
            return
        if sum(map(len, self._blobs.values())) + size_bytes > self._capacity_bytes:
            raise StoreUnavailable("the blob store is full", needed_bytes=size_bytes)
        received = bytearray()
        async for piece in data:
            verifier.expect(len(piece))
            verifier.feed(piece)
            received += piece
        verifier.finish()
        self._blobs[digest] = bytes(received)

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        hex_of(digest)
        blob = self._blobs.get(digest)
        if blob is None:
            raise NotFound(f"{digest} is not stored", digest=digest)
        for start in range(offset_bytes, len(blob), PIECE_BYTES):
            yield blob[start : start + PIECE_BYTES]

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        return tuple(digest for digest in digests if hex_of(digest) and digest not in self._blobs)
