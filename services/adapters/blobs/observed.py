"""A blob store with traffic metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing

from services.core.errors import IntegrityError
from services.ports.blob_store import BlobStore, StoredBlob
from services.runtime.telemetry.metrics import Metrics


class ObservedBlobs:
    """A ``BlobStore`` decorator that counts calls and bytes."""

    def __init__(self, inner: BlobStore, metrics: Metrics) -> None:
        self._inner = inner
        blobs = metrics.counter(
            "fairway_registry_blobs_total",
            "Blobs stored, read, or already present at an upload",
            ("operation",),
        )
        sizes = metrics.counter(
            "fairway_registry_blob_bytes_total", "Bytes of blobs stored and read", ("operation",)
        )
        self._stored, self._read = blobs.cell("stored"), blobs.cell("read")
        self._present = blobs.cell("already_present")
        self._bytes_in, self._bytes_out = sizes.cell("stored"), sizes.cell("read")
        damaged = metrics.counter(
            "fairway_registry_verification_failures_total",
            "Blobs whose bytes do not match their digest, at upload or read",
            ("operation",),
        )
        # Created at the start: Prometheus sees no increase in a series that begins with its first count.
        self._damaged_in, self._damaged_out = damaged.cell("store"), damaged.cell("read")

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        try:
            await self._inner.put(digest, data, size_bytes)
        except IntegrityError:
            self._damaged_in.add()
            raise
        self._stored.add()
        self._bytes_in.add(size_bytes)

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self._read.add()
        try:
            async with aclosing(self._inner.get(digest, offset_bytes)) as pieces:
                async for piece in pieces:
                    self._bytes_out.add(len(piece))
                    yield piece
        except IntegrityError:
            self._damaged_out.add()
            raise

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        found = await self._inner.missing(digests)
        self._present.add(len(digests) - len(found))
        return found

    def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        return self._inner.stored()

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        return await self._inner.delete(blobs)

    async def discard(self, digests: Sequence[str]) -> None:
        await self._inner.discard(digests)

    async def sweep(self, before_unix_s: float, *, dry_run: bool = False) -> int:
        return await self._inner.sweep(before_unix_s, dry_run=dry_run)
