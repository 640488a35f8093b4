"""Verification of a version before it is created: every byte is read and compared with its manifest."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from fairway.formats import safetensors
from fairway.formats.contents import MAX_TEXT_BYTES, Checker, ContentRefused, checker_for
from services.adapters.threads import in_thread
from services.core.errors import FailedPrecondition, IntegrityError, InvalidInput, NotFound, Unavailable
from services.core.manifest import Manifest, ManifestFile
from services.core.rollouts.computation import READ, computation_digest
from services.ports.blob_store import BlobStore

PARALLEL: Final = 2
MAX_WAITING: Final = 8  # most uploads of one publisher, including the one being verified


@dataclass(slots=True)
class _Publisher:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class VerificationLimiter:
    """Limits verifications to ``PARALLEL`` at once and one per publisher, so that no publisher blocks the
    others."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(PARALLEL)
        self._publishers: dict[str, _Publisher] = {}

    @asynccontextmanager
    async def of(self, publisher: str) -> AsyncIterator[None]:
        """Enter one verification of this publisher. Raises Unavailable when too many of its versions wait."""
        mine = self._publishers.setdefault(publisher, _Publisher())
        if mine.waiting >= MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} versions of this API key are being verified", retry_after_s=2.0)
        mine.waiting += 1
        try:
            async with mine.lock, self._running:
                yield
        finally:
            mine.waiting -= 1
            if not mine.waiting:
                del self._publishers[publisher]


async def verify(blobs: BlobStore, manifest: Manifest) -> None:
    """Return if the files match the manifest and their names.

    Raises InvalidInput for a file that no version may contain, IntegrityError for a file that does not match
    its chunks, FailedPrecondition when stored chunks were lost or damaged: those count as missing from then
    on.
    """
    lost: list[str] = []
    for file in manifest.files:
        lost += await _File(file).verify(blobs)
    if lost:
        raise FailedPrecondition(
            f"{len(lost)} stored chunks were lost or damaged, {lost[0]} among them: send them again",
            missing=len(lost),
            first=lost[0],
        )


async def computation_of(blobs: BlobStore, manifest: Manifest) -> str:
    """Return the digest of the computation of a verified version; empty where it shares no engine.

    The manifest of an adapter includes the files of its base.
    """
    if manifest.kind != "causal-lm":
        return ""
    contents = {file.path: await content_of(blobs, file) for file in manifest.files if file.path in READ}
    return await in_thread(computation_digest, manifest, contents)


async def content_of(blobs: BlobStore, file: ManifestFile, most_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return a file, or the chunks of it that hold its first ``most_bytes``."""
    body = bytearray()
    for index, chunk in enumerate(file.chunks):
        if file.start(index) >= most_bytes:
            break
        body += await chunk_of(blobs, chunk)
    return bytes(body)


async def chunk_of(blobs: BlobStore, digest: str) -> bytes:
    """Return a chunk. Raises NotFound, IntegrityError."""
    async with aclosing(blobs.get(digest)) as pieces:
        return b"".join([piece async for piece in pieces])


async def header_of(blobs: BlobStore, file: ManifestFile) -> bytes:
    """Return the header of a verified tensor file."""
    begin = safetensors.LENGTH_BYTES
    head = await content_of(blobs, file, begin)
    end = begin + safetensors.header_bytes(head, file.size_bytes)
    if end > len(head):
        head = await content_of(blobs, file, end)
    return head[begin:end]


class _File:
    """One file whose chunks are read in order; the blob store verifies each chunk."""

    def __init__(self, file: ManifestFile) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self._checker = _checker(file)

    async def verify(self, blobs: BlobStore) -> list[str]:
        """Return the chunks that the store cannot return; after the first, the rest of the file is not
        checked."""
        lost: list[str] = []
        for index, chunk in enumerate(self._file.chunks):
            try:
                await self._read(blobs, index, chunk, judge=not lost)
            except (NotFound, IntegrityError) as error:
                if error.metadata.get("digest") != chunk:
                    raise
                lost.append(chunk)
        if not lost:
            await in_thread(self._finish)
        return lost

    async def _read(self, blobs: BlobStore, index: int, chunk: str, *, judge: bool) -> None:
        size_bytes, expected_bytes = 0, self._file.chunk_bytes(index)
        async with aclosing(blobs.get(chunk)) as pieces:
            async for piece in pieces:
                size_bytes += len(piece)
                if judge:
                    await in_thread(self._feed, piece)
        if size_bytes != expected_bytes:
            raise IntegrityError(
                f"chunk {index} of {self._file.path} has {size_bytes} bytes, not {expected_bytes}",
                path=self._file.path,
                chunk=chunk,
                size_bytes=size_bytes,
                expected_bytes=expected_bytes,
            )

    def _feed(self, piece: bytes) -> None:
        self._whole.update(piece)
        try:
            self._checker.feed(piece)
        except ContentRefused as refused:
            raise _refusal(refused) from refused

    def _finish(self) -> None:
        path, digest = self._file.path, self._file.digest
        if "sha256:" + self._whole.hexdigest() != digest:
            raise IntegrityError(f"the chunks of {path} are not the file {digest}", path=path)
        try:
            self._checker.finish()
        except ContentRefused as refused:
            raise _refusal(refused) from refused


def _checker(file: ManifestFile) -> Checker:
    try:
        return checker_for(file.path, file.size_bytes)
    except ContentRefused as refused:
        raise _refusal(refused) from refused


def _refusal(refused: ContentRefused) -> InvalidInput:
    return InvalidInput(str(refused), field="manifest.files", path=refused.path)
