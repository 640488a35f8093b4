"""Bytes addressed by their sha256 digest, ``sha256:<64 hex digits>``.

Implementations: ``adapters/folder_blobs.py``, ``adapters/memory_blobs.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Protocol


class BlobStore(Protocol):
    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        """Store a blob whole, or not at all. A blob that is there stays as it is.

        Raises IntegrityError when the bytes have another digest or size, StoreUnavailable when the
        disk is full or the store does not answer.
        """

    def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from an offset on in pieces of at most 256 KiB. Raises NotFound."""

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Return those that are not stored, in the order given."""
