"""Publish a model folder: chunks that the registry lacks, then the version, then a tag.

    channel = grpc.aio.insecure_channel("127.0.0.1:9091")
    key = (("authorization", f"Bearer {admin_key}"),)
    done = await publish(channel, Path("models/tiny"), "tiny", "latest", metadata=key)

A repeated publication of the same folder uploads nothing and returns the same digest; chunks that the
registry's store lost or damaged since are sent again. An interrupted upload continues where it stopped: the
uploaded chunks are retained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import grpc

from fairway.client.publish.folder import (
    CHUNK_BYTES,
    PublishRefused,
    declared_kind,
    find_files,
    hash_files,
    manifest_of,
    require_servable,
)
from fairway.client.publish.transfer import CALL_TIMEOUT_S, PATIENCE_S, Metadata, Transfer
from fairway.formats.servable import Kind
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc

__all__ = ["CHUNK_BYTES", "Kind", "Metadata", "PublishProgress", "PublishRefused", "Published", "publish"]

VERIFY_TIMEOUT_S: Final = 3600.0
# Between the check that nothing is missing and the version, an unreferenced chunk may be collected.
_ROUNDS: Final = 3

Phase = Literal["hash", "upload", "create", "done"]


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """Progress of a publication. In "create" the registry reads and verifies everything."""

    phase: Phase  # current phase
    # Bytes of the files.
    total_bytes: int
    # Bytes of the files.
    hashed_bytes: int = 0
    # Bytes of distinct chunks; set from the phase "upload" on.
    to_send_bytes: int = 0
    # Decreases when a connection breaks and a chunk is sent again.
    sent_bytes: int = 0
    # Distinct chunks.
    chunks: int = 0
    # Chunks that the registry has already; set from the phase "upload" on.
    skipped_chunks: int = 0

    @property
    def done_ratio(self) -> float:
        """0..1 within the phase."""
        match self.phase:
            case "hash":
                return min(1.0, self.hashed_bytes / max(1, self.total_bytes))
            case "upload":
                return self.sent_bytes / self.to_send_bytes if self.to_send_bytes else 1.0
            case "create":
                return 0.0
            case "done":
                return 1.0


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a publication. ``created`` is False when the version existed already."""

    model: str
    digest: str
    created: bool
    size_bytes: int
    uploaded_chunks: int
    uploaded_bytes: int
    warnings: tuple[str, ...] = ()  # where the version may not mean what its files seem to


async def publish(
    channel: grpc.aio.Channel,
    folder: Path,
    model: str,
    tag: str = "",
    progress: Callable[[PublishProgress], None] | None = None,
    *,
    metadata: Metadata = (),
    kind: Kind | None = None,
    max_context_tokens: int = 0,
    for_another_engine: bool = False,
    patience_s: float = PATIENCE_S,
) -> Published:
    """Return once the version is registered and verified and ``tag``, unless empty, points at it.

    ``kind``: by default the one that ``config.json`` declares. A folder that Fairway cannot serve is
    rejected, unless ``for_another_engine``. Files and folders whose name begins with a dot are left out. An
    unreachable registry is retried for ``patience_s``. Raises PublishRefused for a folder that cannot be a
    version, OSError for one that cannot be read, and
    grpc.aio.AioRpcError when the registry rejects it.
    """
    files = await asyncio.to_thread(find_files, folder)
    declared = await asyncio.to_thread(declared_kind, files) if kind is None else kind
    warnings: tuple[str, ...] = ()
    if not for_another_engine:
        warnings = await asyncio.to_thread(require_servable, files, declared)
    reporter = _ProgressReporter(progress, sum(path.stat().st_size for path in files.values()))
    hashed = await asyncio.to_thread(hash_files, files, reporter.hashed_from_thread)
    reporter.update(hashed_bytes=reporter.now.total_bytes, chunks=len(hashed.chunks))
    manifest = manifest_of(files, hashed.files, declared, max_context_tokens)
    request = pb.CreateVersionRequest(model=model, manifest=manifest, for_another_engine=for_another_engine)
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    transfer = Transfer(stub, metadata, sent=reporter.sent, patience_s=patience_s)
    publication = _Publication(stub, transfer, tuple(metadata), reporter)
    # Called before the upload: a folder that cannot be a version is rejected before gigabytes are sent.
    answer = await publication.create_if_stored(request)
    uploaded: set[str] = set()
    for last in range(_ROUNDS - 1, -1, -1):
        if answer is not None:
            break
        missing = await transfer.missing(list(hashed.chunks))
        uploaded.update(missing)
        reporter.upload([hashed.chunks[digest].size_bytes for digest in missing], len(hashed.chunks))
        await transfer.upload({digest: hashed.chunks[digest] for digest in missing})
        reporter.update(phase="create")
        answer = await publication.create_if_stored(request, is_last=not last)
    assert answer is not None, "the last round raises"
    if tag:
        await publication.set_tag(model, tag, answer.version.digest)
    reporter.update(phase="done")
    return Published(
        model,
        answer.version.digest,
        answer.created,
        sum(file.size_bytes for file in hashed.files),
        len(uploaded),
        sum(hashed.chunks[chunk].size_bytes for chunk in uploaded),
        warnings,
    )


@dataclass(frozen=True, slots=True)
class _Publication:
    stub: registry_pb2_grpc.RegistryServiceAsyncStub
    transfer: Transfer
    metadata: Metadata
    reporter: _ProgressReporter

    async def create_if_stored(
        self, request: pb.CreateVersionRequest, *, is_last: bool = False
    ) -> pb.CreateVersionResponse | None:
        """Return the version, or None while the registry lacks chunks of it."""
        try:
            return await self.transfer.again(
                lambda: self.stub.CreateVersion(request, metadata=self.metadata, timeout=VERIFY_TIMEOUT_S)
            )
        except grpc.aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.FAILED_PRECONDITION or is_last:
                raise
            return None

    async def set_tag(self, model: str, tag: str, digest: str) -> None:
        request = pb.SetTagRequest(model=model, tag=tag, digest=digest)
        await self.transfer.again(
            lambda: self.stub.SetTag(request, metadata=self.metadata, timeout=CALL_TIMEOUT_S)
        )


class _ProgressReporter:
    """Stores the progress and passes it to the receiver, in the event loop."""

    def __init__(self, receiver: Callable[[PublishProgress], None] | None, total_bytes: int) -> None:
        self.now = PublishProgress("hash", total_bytes)
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()

    def update(
        self, *, phase: Phase | None = None, hashed_bytes: int | None = None, chunks: int | None = None
    ) -> None:
        self.now = replace(
            self.now,
            phase=self.now.phase if phase is None else phase,
            hashed_bytes=self.now.hashed_bytes if hashed_bytes is None else hashed_bytes,
            chunks=self.now.chunks if chunks is None else chunks,
        )
        self._report()

    def hashed_from_thread(self, hashed_bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._note_hashed, hashed_bytes)

    def upload(self, sizes_bytes: list[int], chunks: int) -> None:
        self.now = replace(
            self.now,
            phase="upload",
            to_send_bytes=sum(sizes_bytes),
            sent_bytes=0,
            skipped_chunks=chunks - len(sizes_bytes),
        )
        self._report()

    def sent(self, size_bytes: int) -> None:
        self.now = replace(self.now, sent_bytes=self.now.sent_bytes + size_bytes)
        self._report()

    def _note_hashed(self, hashed_bytes: int) -> None:
        if self.now.phase == "hash":
            self.update(hashed_bytes=max(hashed_bytes, self.now.hashed_bytes))

    def _report(self) -> None:
        if self._receiver is not None:
            self._receiver(self.now)
