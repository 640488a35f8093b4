"""Bytes addressed by their sha256 digest, ``sha256:<64 hex digits>``.

A blob is stored whole or not at all, is never overwritten, and never read damaged: what no longer has its
digest is set aside when somebody asks for it, counts as missing from then on, and can be put again.
Implementations: ``adapters/blobs/folder.py``, ``adapters/blobs/s3.py``, ``adapters/memory/blobs.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

# The largest blob that a store takes; both sides of an upload hold one in memory.
MAX_BLOB_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob as it was listed. ``written_unix_s`` is by the store's clock."""

    digest: str
    size_bytes: int
    written_unix_s: float


class BlobStore(Protocol):
    """Every method raises StoreUnavailable, within a bounded time, when the store is away or full."""

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        """Store a blob whole, or not at all. A blob that is there stays as it is; one cut short is replaced.

        Raises IntegrityError when the bytes have another digest or size.
        """

    def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from an offset on in pieces of at most 256 KiB, the whole blob verified before.

        Raises NotFound, IntegrityError for a blob that is damaged, which is set aside by that.
        """

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Return those that are not stored, in the order given. Looks for them, reads none."""

    def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        """Yield what is stored, a page at a time. What is put or deleted meanwhile may be in it or not."""

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        """Delete those that were not written again since they were listed; return the deleted digests."""

    async def sweep(self, before_unix_s: float, *, dry_run: bool = False) -> int:
        """Remove what interrupted writes left and what was set aside before a time; return how many."""
