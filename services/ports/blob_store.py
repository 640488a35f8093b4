"""Port of the blob store: bytes addressed by their sha256 digest, ``sha256:<64 hex digits>``.

A blob is stored completely or not at all and is never overwritten. A damaged blob is never returned: when a
read finds bytes that do not match their digest, the blob is set aside, counts as missing, and can be stored
again. Implementations: ``adapters/blobs/folder.py``, ``adapters/blobs/s3.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

# The largest blob that a store accepts; both sides of an upload hold one in memory.
MAX_BLOB_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob in a listing. ``written_unix_s`` is by the store's clock."""

    digest: str
    size_bytes: int
    written_unix_s: float


class BlobStore(Protocol):
    """Every method raises StoreUnavailable, within a bounded time, when the store is unreachable or full."""

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        """Store a blob completely, or not at all. An existing blob is left unchanged; a truncated one is
        replaced.

        Raises IntegrityError when the bytes have another digest or size.
        """

    def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from an offset on in pieces of at most 256 KiB, after verifying the whole blob.

        Raises NotFound, or IntegrityError for a damaged blob, which is then set aside.
        """

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Return the digests that are not stored, in the given order. Reads no contents."""

    def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        """Yield the stored blobs, a page at a time. Blobs stored or deleted meanwhile may be included or
        not."""

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        """Delete the blobs that were not written again since they were listed; return the deleted digests."""

    async def discard(self, digests: Sequence[str]) -> None:
        """Delete blobs that nothing but the caller refers to; one that is not stored is no error."""

    async def sweep(self, before_unix_s: float, *, dry_run: bool = False) -> int:
        """Remove the remains of interrupted writes and blobs set aside before a time; return their number."""
