"""Files of tenants: uploaded in parts, listed, read and deleted. No tenant sees another's.

A part is stored before the record that names it, so a gateway that dies leaves parts without a record. The
sweep deletes them, and files whose time is over.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final

import structlog

from services.adapters.blobs.sealed import SealedParts
from services.core.batches import (
    BATCHES,
    FILES,
    PART_BYTES,
    BatchRecord,
    FilePart,
    FilePurpose,
    StoredFile,
    file_key,
    id_of_key,
)
from services.core.errors import (
    Conflict,
    FairwayError,
    IdempotencyConflict,
    InvalidInput,
    NotFound,
    OverQuota,
    ShareExceeded,
)
from services.gateway.batches.store import BatchStore
from services.gateway.service_types import subtract
from services.ports.clock import Clock
from services.runtime.fleet_state.informer import RecordView

log = structlog.get_logger()
MAX_NAME_CHARS: Final = 255
# Longer than an upload or a commit of results may take.
_UNUSED_S: Final = 7200.0
_SWEEP_S: Final = 1800.0
_SWEPT_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Bounds of files. Sizes in bytes, times in seconds."""

    max_bytes: int = 200 * 1024**2
    max_tenant_bytes: int = 10 * 1024**3
    max_tenant_files: int = 2000
    retention_s: float = 30 * 86_400.0
    part_bytes: int = PART_BYTES
    # Uploads at once: each holds one part in memory.
    max_uploads: int = 16
    max_tenant_uploads: int = 4
    # Downloads at once: each holds one part in memory.
    max_downloads: int = 16
    max_tenant_downloads: int = 4


class FileService:
    """Raises the tree of ``core/errors.py``."""

    def __init__(
        self,
        store: BatchStore,
        parts: SealedParts,
        files: RecordView[StoredFile],
        batches: RecordView[BatchRecord],
        clock: Clock,
        limits: FileLimits,
        *,
        new_id: Callable[[], str],
        retention_of: Callable[[str], float] = lambda tenant: 0.0,
    ) -> None:
        """``new_id`` returns 24 random hex digits. ``retention_of`` returns a tenant's own bound; 0: none."""
        self.limits = limits
        self._store = store
        self._parts = parts
        self._files = files
        self._batches = batches
        self._clock = clock
        self._new_id = new_id
        self._retention_of = retention_of
        self._uploads: Counter[str] = Counter()
        self._downloads: Counter[str] = Counter()

    def upload(self, tenant: str, key: str = "") -> Upload:
        """Return a new upload, which the caller closes. ``key``: an idempotency key, which has one file.

        Raises ShareExceeded, OverQuota.
        """
        limits, mine = self.limits, self._uploads[tenant]
        if mine >= limits.max_tenant_uploads or self._uploads.total() >= limits.max_uploads:
            raise ShareExceeded(
                "too many uploads at once; send the file later", retry_after_s=1.0, uploads=mine
            )
        file_id = f"file-{id_of_key('file', tenant, key) if key else self._new_id()}"
        held = self._files.view.get(file_key(tenant, file_id))
        is_repeat = held is not None and held.record.expire_unix_s > self._clock.unix_s()
        stored = self._stored(tenant)
        if len(stored) >= limits.max_tenant_files and not is_repeat:
            raise OverQuota(
                f"the tenant has {len(stored)} files, the maximum; delete some", files=len(stored)
            )
        self._uploads[tenant] += 1
        room = limits.max_bytes if is_repeat else min(limits.max_bytes, self.room_bytes(tenant))
        return Upload(
            tenant,
            file_id,
            None if is_repeat else self._parts,
            (room, limits.part_bytes),
            lambda: subtract(self._uploads, tenant),
            hashes=bool(key),
        )

    def retention_s(self, tenant: str) -> float:
        """Return for how long a file of the tenant is stored from now on."""
        return min(self._retention_of(tenant) or self.limits.retention_s, self.limits.retention_s)

    def room_bytes(self, tenant: str) -> int:
        """Return how many bytes the tenant may store in addition to its files; less than 0 above the
        bound."""
        return self.limits.max_tenant_bytes - sum(file.size_bytes for file in self._stored(tenant))

    def _stored(self, tenant: str) -> list[StoredFile]:
        return [file.record for file in self._files.view.values() if file.record.tenant == tenant]

    async def add(self, upload: Upload, filename: str) -> StoredFile:
        """Return the file of a complete upload, which exists from now on, or that of its idempotency key.

        Raises IdempotencyConflict if the key has another file, and Conflict if that was deleted meanwhile.
        """
        now_s = self._clock.unix_s()
        file = StoredFile(
            upload.file_id,
            upload.tenant,
            shown_name(filename),
            FilePurpose.BATCH,
            now_s,
            now_s + self.retention_s(upload.tenant),
            await upload.finish(),
            upload.content_hash,
        )
        if upload.is_repeat:
            try:
                return _same(file, await self.file(file.tenant, file.file_id))
            except NotFound:
                raise Conflict(
                    "the file of this key was deleted meanwhile; send it again", retry_after_s=1.0
                ) from None
        upload.kept = True  # whatever the store answers: the sweep deletes parts that no record names
        found = await self._store.add_file(file)
        upload.kept = found is file
        return _same(file, found)

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file. Raises NotFound."""
        return (await self._store.file(tenant, file_id)).record

    def files(self, tenant: str) -> list[StoredFile]:
        """Return the tenant's files, the newest first."""
        now_s = self._clock.unix_s()
        found = [
            held.record
            for key, held in self._files.view.items()
            if key.startswith(f"{FILES}{tenant}/") and held.record.expire_unix_s > now_s
        ]
        return sorted(found, key=lambda file: (-file.create_unix_s, file.file_id))

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file, a part at once. Raises ShareExceeded, NotFound, IntegrityError."""
        limits, mine = self.limits, self._downloads[file.tenant]
        if mine >= limits.max_tenant_downloads or self._downloads.total() >= limits.max_downloads:
            raise ShareExceeded(
                "too many downloads at once; fetch the file later", retry_after_s=1.0, downloads=mine
            )
        self._downloads[file.tenant] += 1
        try:
            for index, part in enumerate(file.parts):
                yield await self._parts.get(file.tenant, file.file_id, index, part.digest)
        finally:
            subtract(self._downloads, file.tenant)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Return once the file is gone. Raises NotFound, or Conflict while a batch reads it."""
        found = await self._store.file(tenant, file_id)
        for key, held in self._batches.view.items():
            batch = held.record
            reads = key.startswith(f"{BATCHES}{tenant}/") and batch.input_file_id == file_id
            if reads and not batch.status.is_over:
                raise Conflict(f"{batch.batch_id} reads the file; cancel it first", field="file_id")
        await self._store.delete_file(found)
        await self._parts.discard([part.digest for part in found.record.parts])

    async def erase(self, tenant: str) -> int:
        """Delete all batches and files of a tenant; return how many parts they had."""
        parts = 0
        while True:
            files, batches = await self._store.all_of(tenant)
            if not files and not batches:
                return parts
            for batch in batches:
                await self._store.delete_batch(batch)
            for file in files:
                with suppress(Conflict):
                    await self._store.delete_file(file)
            named = [part.digest for batch in batches for part in batch.record.parts]
            named += [part.digest for file in files for part in file.record.parts]
            await self._parts.discard(named)
            parts += len(named)

    async def sweep_forever(self, rng: Random) -> None:
        """Delete what is over; a task of the process."""
        while True:
            await self._clock.sleep(rng.uniform(_SWEEP_S / 2, _SWEEP_S))
            try:
                await self.sweep()
            except FairwayError as error:
                log.warning("files.sweep_failed", error=error.message)

    async def sweep(self) -> int:
        """Delete files, batches and parts whose time is over; return how many parts were deleted."""
        now_s = self._clock.unix_s()
        old = [held for held in self._files.view.values() if held.record.expire_unix_s <= now_s]
        for file in old[:_SWEPT_AT_ONCE]:
            with suppress(Conflict):
                await self._store.delete_file(file)
        ended = [
            held
            for held in self._batches.view.values()
            if (one := held.record).status.is_over and one.end_unix_s + self.retention_s(one.tenant) <= now_s
        ]
        for batch in ended[:_SWEPT_AT_ONCE]:
            await self._store.delete_batch(batch)
        # Read after the deletions and from the store: a part that is named later is younger than the bound.
        named = await self._store.named_parts()
        return await self._parts.delete_unused(named, now_s - _UNUSED_S)


class Upload:
    """A file that is being received. Holds one part in memory; ``close`` discards what no record names."""

    def __init__(
        self,
        tenant: str,
        file_id: str,
        parts: SealedParts | None,
        sizes: tuple[int, int],
        leave: Callable[[], None],
        *,
        hashes: bool,
    ) -> None:
        """``parts`` is None for a repeat, which stores nothing. ``sizes`` has the most bytes of the file and
        of a part. ``leave`` ends its count. ``hashes``: it has a ``content_hash``."""
        self.tenant = tenant
        self.file_id = file_id
        self.kept = False
        self._store = parts
        self._room, self._part_bytes = sizes
        self._leave = leave
        self._parts: list[FilePart] = []
        self._buffer = bytearray()
        self._size_bytes = 0
        self._hash = hashlib.blake2b(digest_size=32) if hashes else None

    @property
    def is_repeat(self) -> bool:
        return self._store is None

    @property
    def content_hash(self) -> str:
        """A hash of the bytes so far."""
        return self._hash.hexdigest() if self._hash is not None else ""

    async def write(self, data: bytes) -> None:
        """Add bytes. Raises InvalidInput above the bounds, before they are held."""
        self._size_bytes += len(data)
        if self._size_bytes > self._room:
            raise InvalidInput(
                f"the file has more than the {max(0, self._room)} bytes that are left for it", field="file"
            )
        if self._hash is not None:
            self._hash.update(data)
        if self._store is None:
            return
        self._buffer += data
        while len(self._buffer) >= self._part_bytes:
            await self._put(self._store, bytes(self._buffer[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    async def finish(self) -> tuple[FilePart, ...]:
        """Return the parts of the whole file. Raises InvalidInput for an empty one."""
        if not self._size_bytes:
            raise InvalidInput("the file is empty", field="file")
        if self._buffer and self._store is not None:
            await self._put(self._store, bytes(self._buffer))
            self._buffer.clear()
        return tuple(self._parts)

    async def _put(self, store: SealedParts, data: bytes) -> None:
        digest = await store.put(self.tenant, self.file_id, len(self._parts), data)
        self._parts.append(FilePart(digest, len(data)))

    async def close(self) -> None:
        """End the upload; the parts stay only if they are of a file."""
        self._leave()
        if self._store is not None and self._parts and not self.kept:
            with suppress(FairwayError, asyncio.TimeoutError):
                await self._store.discard([part.digest for part in self._parts])


def _same(uploaded: StoredFile, found: StoredFile) -> StoredFile:
    """Return the file that was found. Raises IdempotencyConflict if it is another one."""
    if (uploaded.filename, uploaded.content_hash) != (found.filename, found.content_hash):
        raise IdempotencyConflict(
            "this idempotency key was used for another file; take a new key for a new file",
            field="idempotency_key",
        )
    return found


def shown_name(filename: str) -> str:
    """Return a client's name of a file as text to show: it never becomes a path."""
    shown = "".join(char if char.isprintable() and char not in '\\/"' else "_" for char in filename)
    return shown[:MAX_NAME_CHARS] or "file"
