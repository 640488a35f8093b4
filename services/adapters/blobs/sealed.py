"""Parts of tenants' files as encrypted blobs: AES-256-GCM by the key of the tenant.

The seal covers tenant, file and position. A blob of another tenant, file or place does not open. A
random nonce gives every blob a digest of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection, Sequence

from services.adapters.record_cipher import RecordCipher
from services.adapters.threads import in_thread
from services.core.errors import IntegrityError
from services.ports.blob_store import BlobStore
from services.ports.idempotency import RecordKey


class SealedParts:
    """Parts of tenants' files in a blob store. Sealing and opening run in a thread.

    Each call raises StoreUnavailable, within a bounded time, when the store is unreachable or full, or the
    tenant's key is (KeyUnavailable); ``put`` and ``get`` raise KeyDestroyed for an erased tenant.
    """

    def __init__(self, blobs: BlobStore, cipher: RecordCipher) -> None:
        self._blobs = blobs
        self._cipher = cipher

    async def put(self, tenant: str, file_id: str, index: int, data: bytes) -> str:
        """Store a part durably; return the digest of its blob, which no other part has."""

        key = RecordKey(tenant, file_id)
        data_key = await self._cipher.sealing(key)

        def seal() -> tuple[str, bytes]:
            sealed = self._cipher.seal(data_key, key, 0, index, data)
            return "sha256:" + hashlib.sha256(sealed).hexdigest(), sealed

        digest, sealed = await in_thread(seal)
        await self._blobs.put(digest, _one(sealed), len(sealed))
        return digest

    async def get(self, tenant: str, file_id: str, index: int, digest: str) -> bytes:
        """Return a part. Raises NotFound, or IntegrityError if it is damaged or another part."""
        key = RecordKey(tenant, file_id)
        sealed = b"".join([piece async for piece in self._blobs.get(digest)])
        data_key = await self._cipher.opening(key, sealed)
        opened = await in_thread(lambda: self._cipher.open(data_key, key, sealed))
        if opened.position != index:
            raise IntegrityError(f"a part of {file_id} stands at another place", file_id=file_id)
        return opened.chunk

    async def discard(self, digests: Sequence[str]) -> None:
        """Delete blobs of parts that no record names any more."""
        await self._blobs.discard(digests)

    async def delete_unused(self, keep: Collection[str], before_unix_s: float) -> int:
        """Delete the blobs written before a time, except those of these digests; return their number."""
        deleted = 0
        async for page in self._blobs.stored():
            old = [one for one in page if one.written_unix_s < before_unix_s and one.digest not in keep]
            deleted += len(await self._blobs.delete(old))
        return deleted + await self._blobs.sweep(before_unix_s)


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data
