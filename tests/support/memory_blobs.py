"""Blobs in this process, for tests and the simulator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence

from services.adapters.blobs.digests import PIECE_BYTES, Verifier, damaged, hex_of, is_blob
from services.core.errors import IntegrityError, NotFound, StoreUnavailable
from services.ports.blob_store import MAX_BLOB_BYTES, StoredBlob

PAGE: int = 1000


class MemoryBlobs:
    """``BlobStore`` in memory, full at ``capacity_bytes``. ``unix_s`` dates what is written."""

    def __init__(
        self, capacity_bytes: int = 256 * 1024 * 1024, *, unix_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._unix_s = unix_s
        self._blobs: dict[str, bytes] = {}
        self._written: dict[str, float] = {}

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        verifier = Verifier(digest, size_bytes, most_bytes=MAX_BLOB_BYTES)
        stored = self._blobs.get(digest)
        if stored is not None and len(stored) != size_bytes:
            if is_blob(stored, digest):
                raise IntegrityError(f"{digest} is stored with another size", digest=digest)
            self._set_aside(digest)
        elif stored is not None:
            return
        if sum(map(len, self._blobs.values())) + size_bytes > self._capacity_bytes:
            raise StoreUnavailable("the blob store is full", needed_bytes=size_bytes)
        received = bytearray()
        async for piece in data:
            verifier.expect(len(piece))
            verifier.feed(piece)
            received += piece
        verifier.finish()
        self._blobs.setdefault(digest, bytes(received))
        self._written.setdefault(digest, self._unix_s())

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        hex_of(digest)
        blob = self._blobs.get(digest)
        if blob is None:
            raise NotFound(f"{digest} is not stored", digest=digest)
        if not is_blob(blob, digest):
            self._set_aside(digest)
            raise damaged(digest)
        for start in range(offset_bytes, len(blob), PIECE_BYTES):
            yield blob[start : start + PIECE_BYTES]

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        return tuple(digest for digest in digests if hex_of(digest) and digest not in self._blobs)

    async def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        listed = [
            StoredBlob(digest, len(blob), self._written.get(digest, 0.0))
            for digest, blob in self._blobs.items()
        ]
        for start in range(0, len(listed), PAGE):
            yield tuple(listed[start : start + PAGE])

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        gone = [
            blob.digest
            for blob in blobs
            if blob.digest in self._blobs and self._written.get(blob.digest, 0.0) == blob.written_unix_s
        ]
        for digest in gone:
            self._set_aside(digest)
        return tuple(gone)

    async def discard(self, digests: Sequence[str]) -> None:
        for digest in digests:
            hex_of(digest)
            if digest in self._blobs:
                self._set_aside(digest)

    async def sweep(self, before_unix_s: float, *, dry_run: bool = False) -> int:
        return 0  # an interrupted write leaves nothing, and a blob that is set aside is removed

    def _set_aside(self, digest: str) -> None:
        del self._blobs[digest]
        self._written.pop(digest, None)
