"""Publish a model folder: chunks that the registry lacks, then the version, then a tag.

    channel = grpc.aio.insecure_channel("127.0.0.1:9091")
    key = (("authorization", f"Bearer {admin_key}"),)
    done = await publish(channel, Path("models/tiny"), "tiny", "latest", metadata=key)

Publishing the same folder again uploads nothing and returns the same digest. An upload that was
interrupted goes on where it was: chunks that arrived stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import grpc

from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc

CHUNK_BYTES: Final = 4 * 1024 * 1024
MESSAGE_BYTES: Final = 512 * 1024
FIND_BATCH: Final = 8192
PARALLEL_UPLOADS: Final = 4
CALL_TIMEOUT_S: Final = 30.0
UPLOAD_TIMEOUT_S: Final = 300.0
VERIFY_TIMEOUT_S: Final = 3600.0
_UPLOAD_TRIES: Final = 4
_UNHEARD: Final = "Internal error from Core"
_RETRIED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Kind = Literal["causal-lm", "fixed-cost"]
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Progress:
    """``phase`` is "hash", "upload" or "create"; ``done_ratio`` is 0..1 within it."""

    phase: Literal["hash", "upload", "create"]
    done_ratio: float


@dataclass(frozen=True, slots=True)
class Published:
    """``created`` is False when the version was there already."""

    model: str
    digest: str
    created: bool
    size_bytes: int
    uploaded_chunks: int
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    path: Path
    offset: int
    size_bytes: int


@dataclass(slots=True)
class _Hashed:
    """A folder after hashing: its files, and one place where each chunk can be read."""

    files: list[pb.ManifestFile] = field(default_factory=list)
    chunks: dict[str, _Chunk] = field(default_factory=dict)


async def publish(
    channel: grpc.aio.Channel,
    folder: Path,
    model: str,
    tag: str = "",
    progress: Callable[[Progress], None] | None = None,
    *,
    metadata: Metadata = (),
    kind: Kind = "causal-lm",
    max_context_tokens: int = 0,
) -> Published:
    """Return once the version is registered and ``tag``, unless empty, points at it.

    Files and folders whose name begins with a dot are left out; links to files are followed. Raises
    FileNotFoundError for a folder without files, grpc.aio.AioRpcError for what the registry refuses.
    """
    tell = progress or _silent
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    paths = await asyncio.to_thread(_files_of, folder)
    loop = asyncio.get_running_loop()
    hashed = await asyncio.to_thread(
        _hash_files, folder, paths, lambda ratio: loop.call_soon_threadsafe(tell, Progress("hash", ratio))
    )
    request = pb.CreateVersionRequest(
        model=model, manifest=_manifest(folder, hashed.files, kind, max_context_tokens)
    )
    # Asked before the upload: a folder that no version may be made of is refused now, not after gigabytes.
    answer = await _create_if_stored(stub, request, metadata)
    missing = await _missing(stub, list(hashed.chunks), metadata)
    await _upload_all(stub, {digest: hashed.chunks[digest] for digest in missing}, metadata, tell)
    tell(Progress("create", 0.0))
    if answer is None:
        answer = await stub.CreateVersion(request, metadata=tuple(metadata), timeout=VERIFY_TIMEOUT_S)
    digest = answer.version.digest
    if tag:
        await stub.SetTag(
            pb.SetTagRequest(model=model, tag=tag, digest=digest),
            metadata=tuple(metadata),
            timeout=CALL_TIMEOUT_S,
        )
    tell(Progress("create", 1.0))
    return Published(
        model,
        digest,
        answer.created,
        sum(file.size_bytes for file in hashed.files),
        len(missing),
        sum(hashed.chunks[chunk].size_bytes for chunk in missing),
    )


async def _create_if_stored(
    stub: registry_pb2_grpc.RegistryServiceAsyncStub, request: pb.CreateVersionRequest, metadata: Metadata
) -> pb.CreateVersionResponse | None:
    """Return the version, or None while the registry lacks chunks of it. Raises what it refuses for good."""
    try:
        return await stub.CreateVersion(request, metadata=tuple(metadata), timeout=VERIFY_TIMEOUT_S)
    except grpc.aio.AioRpcError as exc:
        if exc.code() is not grpc.StatusCode.FAILED_PRECONDITION:
            raise
        return None


def _files_of(folder: Path) -> list[str]:
    found = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise FileNotFoundError(f"{folder} holds no files to publish")
    return sorted(found)


def _hash_files(folder: Path, paths: Sequence[str], tell: Callable[[float], object]) -> _Hashed:
    total = sum((folder / path).stat().st_size for path in paths)
    hashed, done = _Hashed(), 0
    for path in paths:
        whole, chunks, offset = hashlib.sha256(), [], 0
        with (folder / path).open("rb") as stream:
            while data := stream.read(CHUNK_BYTES):
                whole.update(data)
                digest = "sha256:" + hashlib.sha256(data).hexdigest()
                chunks.append(digest)
                hashed.chunks.setdefault(digest, _Chunk(folder / path, offset, len(data)))
                offset += len(data)
                done += len(data)
                tell(min(1.0, done / max(1, total)))
        hashed.files.append(
            pb.ManifestFile(path=path, size_bytes=offset, digest="sha256:" + whole.hexdigest(), chunks=chunks)
        )
    return hashed


def _manifest(
    folder: Path, files: Sequence[pb.ManifestFile], kind: Kind, max_context_tokens: int
) -> pb.Manifest:
    digests = {file.path: file.digest for file in files}
    template = digests.get("chat_template.jinja", "")
    if not template and _has_template(folder / "tokenizer_config.json"):
        template = digests.get("tokenizer_config.json", "")
    return pb.Manifest(
        schema=1,
        files=files,
        kind=kind,
        tokenizer_digest=digests.get("tokenizer.json", ""),
        chat_template_digest=template,
        sampling_defaults_digest=digests.get("generation_config.json", ""),
        safety_policy_digest=digests.get("safety_policy.json", ""),
        max_context_tokens=max_context_tokens,
    )


def _has_template(path: Path) -> bool:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


async def _missing(
    stub: registry_pb2_grpc.RegistryServiceAsyncStub, digests: Sequence[str], metadata: Metadata
) -> list[str]:
    missing: list[str] = []
    for start in range(0, len(digests), FIND_BATCH):
        request = pb.FindMissingChunksRequest(digests=digests[start : start + FIND_BATCH])
        answer = await stub.FindMissingChunks(request, metadata=tuple(metadata), timeout=CALL_TIMEOUT_S)
        missing += answer.digests
    return missing


async def _upload_all(
    stub: registry_pb2_grpc.RegistryServiceAsyncStub,
    chunks: dict[str, _Chunk],
    metadata: Metadata,
    tell: Callable[[Progress], None],
) -> None:
    """Upload with bounded parallelism; the first that fails for good ends the others."""
    waiting = iter(chunks.items())
    done = 0

    async def worker() -> None:
        nonlocal done
        for digest, chunk in waiting:  # one iterator for all: each chunk is taken once
            await _upload(stub, digest, chunk, metadata)
            done += 1
            tell(Progress("upload", done / len(chunks)))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(PARALLEL_UPLOADS, len(chunks))):
                group.create_task(worker())
    except* grpc.aio.AioRpcError as failed:
        raise failed.exceptions[0] from None
    tell(Progress("upload", 1.0))


async def _upload(
    stub: registry_pb2_grpc.RegistryServiceAsyncStub, digest: str, chunk: _Chunk, metadata: Metadata
) -> None:
    data = await asyncio.to_thread(_read, chunk)
    told: grpc.aio.AioRpcError | None = None
    for attempt in range(1, _UPLOAD_TRIES + 1):
        try:
            await stub.UploadChunk(
                _messages(digest, data), metadata=tuple(metadata), timeout=UPLOAD_TIMEOUT_S
            )
            return
        except grpc.aio.AioRpcError as exc:
            # A server that ends the call while this side writes may leave only grpc's own error here.
            is_unheard = exc.code() is grpc.StatusCode.INTERNAL and exc.details() == _UNHEARD
            told = told if is_unheard else exc
            if not (is_unheard or exc.code() in _RETRIED) or attempt == _UPLOAD_TRIES:
                raise (told or exc) from None
            await asyncio.sleep(0.2 * 2**attempt)


async def _messages(digest: str, data: bytes) -> AsyncIterator[pb.UploadChunkRequest]:
    yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=len(data)))
    for start in range(0, len(data), MESSAGE_BYTES):
        yield pb.UploadChunkRequest(data=data[start : start + MESSAGE_BYTES])


def _read(chunk: _Chunk) -> bytes:
    with chunk.path.open("rb") as stream:
        stream.seek(chunk.offset)
        return stream.read(chunk.size_bytes)


def _silent(_: Progress) -> None:
    return
