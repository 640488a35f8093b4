"""Publish a model folder: chunks that the registry lacks, then the version, then a tag.

    channel = grpc.aio.insecure_channel("127.0.0.1:9091")
    key = (("authorization", f"Bearer {admin_key}"),)
    done = await publish(channel, Path("models/tiny"), "tiny", "latest", metadata=key)

A repeated publication of the same folder uploads nothing and returns the same digest; chunks that the
registry's store lost or damaged since are sent again. An interrupted upload continues where it stopped: the
uploaded chunks are retained.

A model folder prepared for the registry: its files, their digests, and the location of each chunk.

All checks of the registry are applied here first, before a byte is sent.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import random
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar, cast

import grpc

from fairway.client.errors import STATUS_LOST
from fairway.formats.adapter import parse_adapter
from fairway.formats.config_fields import UnsupportedModel, object_in
from fairway.formats.contents import MAX_TEXT_BYTES, ContentRefused, checker_for
from fairway.formats.limits import LIMITS_NAME, POLICY_NAME
from fairway.formats.safetensors import LENGTH_BYTES, chunk_starts, read_header
from fairway.formats.servable import Kind, checkpoint_warnings, engine_problems, kind_of, no_engine
from fairway.formats.version_files import (
    ADAPTER_CONFIG,
    TENSOR_SUFFIX,
    adapter_problem,
    draft_problem,
    name_problem,
    repetition_problem,
    suffix_of,
    weights_digest,
)
from fairway.task_group import TaskGroup
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc

CHUNK_BYTES: Final = 4 * 1024 * 1024
SCHEMA: Final = 2
ADAPTER_SCHEMA: Final = 3
_READ_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Base:
    """The version that an adapter changes. ``version`` is a digest or a tag."""

    model: str
    version: str = "latest"


class PublishRefused(ValueError):
    """The folder cannot be a version. ``next_step`` is what the user can do about it."""

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step


@dataclass(frozen=True, slots=True)
class Chunk:
    """The location of the bytes of one chunk."""

    path: Path
    offset_bytes: int
    size_bytes: int


@dataclass(slots=True)
class Hashed:
    """A folder after hashing: its files, and one location of each distinct chunk."""

    files: list[pb.ManifestFile] = field(default_factory=list)
    chunks: dict[str, Chunk] = field(default_factory=dict)


def find_files(folder: Path) -> dict[str, Path]:
    """Return the files to publish by their name in the version, sorted. Raises PublishRefused, OSError.

    Names that begin with a dot are left out. A link is followed only to a file inside the folder, and from a
    snapshot of a Hugging Face cache to its blobs.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    root = folder.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    found: dict[str, Path] = {}
    for here, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [*folders, *sorted(names)]:
            path = Path(here) / name
            if not name.startswith(".") and (name not in folders or path.is_symlink()):
                found[path.relative_to(folder).as_posix()] = _inside(path, roots)
    if not found:
        raise FileNotFoundError(f"{folder} contains no files to publish")
    return dict(sorted(found.items()))


def _inside(path: Path, roots: tuple[Path, ...]) -> Path:
    """Return the regular file at this path or link target; it must be inside one of the folders."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:  # a loop is a RuntimeError before Python 3.13
        if isinstance(exc, OSError) and exc.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        raise PublishRefused(f"{path} is a broken link", next_step="remove it") from exc
    if not any(map(real.is_relative_to, roots)):
        raise PublishRefused(
            f"{path} is a link to a place outside the folder",
            next_step="copy the folder with its links resolved (cp -RL), and publish the copy",
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise PublishRefused(f"{path} is neither a file nor a plain folder", next_step="remove it")
    return real


def declared_kind(files: dict[str, Path]) -> Kind:
    """Return the kind that the folder's ``config.json`` declares. Raises OSError."""
    return kind_of(files, _reader(files))


def require_servable(files: dict[str, Path], kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the executors that serve the folder, by its small files and its tensors' headers, and warnings.

    Raises PublishRefused, OSError.
    """
    if ADAPTER_CONFIG in files and "config.json" not in files:
        raise PublishRefused("the folder is an adapter", next_step="name its base: --base MODEL@VERSION")
    problems = engine_problems(files, _reader(files), kind)
    if problem := no_engine(problems):
        raise PublishRefused(
            problem, next_step="repair the folder; or, where another engine serves it: --for-another-engine"
        )
    servable_by = tuple(engine for engine, problem in problems.items() if not problem)
    return servable_by, checkpoint_warnings(files, _reader(files), kind)


def require_adapter(files: dict[str, Path]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what ``require_servable`` does, of an adapter; the registry compares its tensors with its base.

    Raises PublishRefused, OSError.
    """
    problem = adapter_problem(files)
    if not problem:
        try:
            parse_adapter(object_in(ADAPTER_CONFIG, _reader(files)))
        except UnsupportedModel as refused:
            problem = f"{ADAPTER_CONFIG}: {refused}"
    if problem:
        raise PublishRefused(problem, next_step="merge it into its base, and publish that")
    return ("torch", "vllm"), ()


def _reader(files: dict[str, Path]) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        with _open(files[name]) as stream:
            if suffix_of(name) == TENSOR_SUFFIX:
                return read_header(stream, os.fstat(stream.fileno()).st_size)
            return stream.read(MAX_TEXT_BYTES)

    return read


def hash_files(files: dict[str, Path], report: Callable[[int], object]) -> Hashed:
    """Return digests and chunks; ``report`` receives the bytes read. Raises PublishRefused, OSError."""
    for name in files:
        if problem := name_problem(name):
            raise PublishRefused(problem, next_step="remove the file from the folder, or convert it")
    if problem := draft_problem(files):
        raise PublishRefused(problem, next_step="make the folder `draft` a checkpoint, or remove it")
    for name, path in files.items():
        if suffix_of(name) == TENSOR_SUFFIX:
            _check_tensors(name, path)
    hashed, done_bytes = Hashed(), 0
    for name, path in files.items():
        for size_bytes in _hash_file(hashed, name, path):
            done_bytes += size_bytes
            report(done_bytes)
    distinct_bytes = sum(chunk.size_bytes for chunk in hashed.chunks.values())
    if problem := repetition_problem(done_bytes, distinct_bytes):
        raise PublishRefused(problem, next_step="remove the files that repeat others")
    return hashed


def _check_tensors(name: str, path: Path) -> None:
    """Check a tensor file by its header, before gigabytes are hashed."""
    with _open(path) as stream, _content_errors():
        size_bytes = os.fstat(stream.fileno()).st_size
        checker = checker_for(name, size_bytes)
        head = stream.read(LENGTH_BYTES)
        checker.feed(head)  # raises for a length beyond the end of the file
        if len(head) == LENGTH_BYTES:
            checker.feed(stream.read(int.from_bytes(head, "little")))
        checker.finish()


def _hash_file(hashed: Hashed, name: str, path: Path) -> Iterator[int]:
    whole, digests, offset = hashlib.sha256(), [], 0
    with _open(path) as stream, _content_errors():
        size_bytes = os.fstat(stream.fileno()).st_size
        checker = checker_for(name, size_bytes)
        starts = _starts(name, stream, size_bytes)
        for start, end in pairwise((*starts, size_bytes)):
            data = stream.read(end - start)
            if len(data) != end - start:
                raise _changed(path)
            checker.feed(data)
            whole.update(data)
            digest = "sha256:" + hashlib.sha256(data).hexdigest()
            digests.append(digest)
            hashed.chunks.setdefault(digest, Chunk(path, offset, len(data)))
            offset += len(data)
            yield len(data)
        checker.finish()
    if starts == list(range(0, offset, CHUNK_BYTES)):
        starts = []
    digest = "sha256:" + whole.hexdigest()
    hashed.files.append(
        pb.ManifestFile(path=name, size_bytes=offset, digest=digest, chunks=digests, chunk_starts=starts)
    )


def _starts(name: str, stream: BinaryIO, size_bytes: int) -> list[int]:
    """Return where the chunks of a file begin. Raises BadHeader."""
    if suffix_of(name) != TENSOR_SUFFIX or size_bytes <= CHUNK_BYTES:
        return list(range(0, size_bytes, CHUNK_BYTES))
    header = read_header(stream, size_bytes)
    stream.seek(0)
    return chunk_starts(header, size_bytes, CHUNK_BYTES)


def read_chunk(digest: str, chunk: Chunk) -> bytes:
    """Return the bytes of a chunk. Raises PublishRefused when they differ from the hashed ones."""
    with _open(chunk.path) as stream:
        stream.seek(chunk.offset_bytes)
        data = stream.read(chunk.size_bytes)
    if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
        raise _changed(chunk.path)
    return data


def _changed(path: Path) -> PublishRefused:
    return PublishRefused(
        f"{path} changed while it was being published",
        next_step="publish again once nothing writes to the folder",
    )


def manifest_of(
    files: dict[str, Path], hashed: Sequence[pb.ManifestFile], kind: Kind, max_context_tokens: int
) -> pb.Manifest:
    """Return the manifest: every file, and the digests of those that determine behaviour."""
    digests = {file.path: file.digest for file in hashed}
    template = digests.get("chat_template.jinja", "")
    if not template and _has_template(files.get("tokenizer_config.json")):
        template = digests["tokenizer_config.json"]
    return pb.Manifest(
        schema=SCHEMA,
        files=hashed,
        kind=kind,
        weights_digest=weights_digest((file.path, file.digest) for file in hashed),
        tokenizer_digest=digests.get("tokenizer.json", "") or digests.get("tokenizer.model", ""),
        chat_template_digest=template,
        sampling_defaults_digest=digests.get("generation_config.json", ""),
        safety_policy_digest=digests.get(POLICY_NAME, ""),
        engine_limits_digest=digests.get(LIMITS_NAME, ""),
        max_context_tokens=max_context_tokens,
    )


def _has_template(path: Path | None) -> bool:
    if path is None:
        return False
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _open(path: Path) -> BinaryIO:
    # The path is resolved already; a link that replaces the file meanwhile is not followed.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", _READ_BYTES)


@contextmanager
def _content_errors() -> Iterator[None]:
    try:
        yield
    except ContentRefused as exc:
        raise PublishRefused(str(exc), next_step="repair or remove the file, then publish again") from exc


def _fail(error: OSError) -> None:
    raise error


MESSAGE_BYTES: Final = 512 * 1024
FIND_BATCH: Final = 2048
PARALLEL_UPLOADS: Final = 4
CALL_TIMEOUT_S: Final = 30.0
UPLOAD_TIMEOUT_S: Final = 300.0
# A registry that restarts is back within seconds; a longer outage needs an operator.
PATIENCE_S: Final = 60.0
_DELAY_FIRST_S: Final = 0.2
_DELAY_MOST_S: Final = 5.0
_RETRIED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Errors of a write after the server ended the call. The call's status has the reason.
_WRITE_FAILED: Final = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)

Metadata = Sequence[tuple[str, str]]
T = TypeVar("T")


class Transfer:
    """Calls of one publication. ``sent`` receives the bytes sent, negative when they must be sent again."""

    def __init__(
        self,
        stub: registry_pb2_grpc.RegistryServiceAsyncStub,
        metadata: Metadata,
        *,
        sent: Callable[[int], object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._stub = stub
        self._metadata = tuple(metadata)
        self._sent = sent
        self._patience_s = patience_s
        self._responded_s = time.monotonic()

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Return the digests that the registry lacks."""
        missing: list[str] = []
        for start in range(0, len(digests), FIND_BATCH):
            missing += await self.again(partial(self._lacking, digests[start : start + FIND_BATCH]))
        return missing

    async def upload(self, chunks: Mapping[str, Chunk]) -> None:
        """Return once all are stored; the first permanent failure cancels the others."""
        waiting = iter(chunks.items())

        async def worker() -> None:
            for digest, chunk in waiting:  # one iterator for all workers: each chunk is taken once
                await self._upload(digest, chunk)

        try:
            async with TaskGroup() as group:
                for _ in range(min(PARALLEL_UPLOADS, len(chunks))):
                    group.create_task(worker())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the call's result; it is retried while the registry is unreachable, within the patience.

        The patience restarts with every response of the registry.
        """
        last_error: grpc.aio.AioRpcError | None = None
        delay_s = _DELAY_FIRST_S
        while True:
            try:
                answer = await call()
                self._responded_s = time.monotonic()
                return answer
            except grpc.aio.AioRpcError as exc:
                is_status_lost = _is_status_lost(exc)
                last_error = last_error if is_status_lost else exc
                is_over = time.monotonic() - self._responded_s > self._patience_s
                if is_over or not (is_status_lost or exc.code() in _RETRIED):
                    raise (last_error or exc) from None
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(_DELAY_MOST_S, delay_s * 2)

    async def _upload(self, digest: str, chunk: Chunk) -> None:
        data = await asyncio.to_thread(read_chunk, digest, chunk)

        is_again = False

        async def once() -> None:
            nonlocal is_again
            if is_again and not await self._lacking([digest]):  # it was stored before the connection broke
                self._sent(len(data))
                return
            is_again = True
            counted = 0
            call = self._stub.UploadChunk(metadata=self._metadata, timeout=UPLOAD_TIMEOUT_S)
            status = _Status(call)
            try:
                with suppress(*_WRITE_FAILED):
                    await call.write(
                        pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=len(data)))
                    )
                    for start in range(0, len(data), MESSAGE_BYTES):
                        part = data[start : start + MESSAGE_BYTES]
                        await call.write(pb.UploadChunkRequest(data=part))
                        counted += len(part)
                        self._sent(len(part))
                    await call.done_writing()
                await status.succeeded()
            except BaseException:
                call.cancel()
                self._sent(-counted)
                raise
            self._sent(len(data) - counted)  # another publisher stored it: the server does not read the rest

        await self.again(once)

    async def _lacking(self, digests: Sequence[str]) -> Sequence[str]:
        """Return those of at most FIND_BATCH digests that the registry lacks, in one call."""
        request = pb.FindMissingChunksRequest(digests=digests)
        answer = await self._stub.FindMissingChunks(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        return answer.digests


class _Status:
    """The server's status at the end of a call.

    A write that fails after the status arrived makes grpc.aio replace it by its own internal error.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._received: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """Store the status now: a later read may return grpc.aio's replacement."""
        code, details = _result(call.code()), _result(call.details())
        initial, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
        self._received = grpc.aio.AioRpcError(code, initial, trailing, details)

    async def succeeded(self) -> None:
        """Return when the call succeeded. Raises the error of the server's status."""
        try:
            await self._call
        except grpc.aio.AioRpcError as error:
            received = self._received if _is_status_lost(error) else error
            if received is None or _is_status_lost(received):
                raise
            if received.code() is not grpc.StatusCode.OK:
                raise received from None


def _is_status_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether this is the error with which grpc.aio replaces a status when a write fails."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == STATUS_LOST


def _result(of: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that completes without waiting."""
    try:
        of.send(None)
    except StopIteration as ended:
        return cast("T", ended.value)
    of.close()
    raise RuntimeError("the call has no status yet")


__all__ = [
    "CHUNK_BYTES",
    "Base",
    "Kind",
    "Metadata",
    "PublishProgress",
    "PublishRefused",
    "Published",
    "publish",
]

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
    servable_by: tuple[str, ...] = ()  # executors that serve it; empty: it was published without a check


async def publish(
    channel: grpc.aio.Channel,
    folder: Path,
    model: str,
    tag: str = "",
    progress: Callable[[PublishProgress], None] | None = None,
    *,
    metadata: Metadata = (),
    base: Base | None = None,
    kind: Kind | None = None,
    max_context_tokens: int = 0,
    for_another_engine: bool = False,
    patience_s: float = PATIENCE_S,
) -> Published:
    """Return once the version is registered and verified and ``tag``, unless empty, points at it.

    ``base``: that of an adapter. ``kind``: by default the one that ``config.json`` declares; of a safety-pack
    the folder is its file. A folder that
    Fairway cannot serve is rejected, unless ``for_another_engine``. Files and folders whose name begins with
    a dot are left out. An unreachable registry is retried for ``patience_s``. Raises PublishRefused for a
    folder that cannot be a version, OSError for one that cannot be read, and grpc.aio.AioRpcError when the
    registry rejects it.
    """
    files = {POLICY_NAME: folder} if kind == "safety-pack" else await asyncio.to_thread(find_files, folder)
    declared = await asyncio.to_thread(declared_kind, files) if kind is None else kind
    found: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    if not for_another_engine:
        require = partial(require_servable, kind=declared) if base is None else require_adapter
        found = await asyncio.to_thread(require, files)
    reporter = _ProgressReporter(progress, sum(path.stat().st_size for path in files.values()))
    hashed = await asyncio.to_thread(hash_files, files, reporter.hashed_from_thread)
    reporter.update(hashed_bytes=reporter.now.total_bytes, chunks=len(hashed.chunks))
    manifest = manifest_of(files, hashed.files, declared, max_context_tokens)
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    transfer = Transfer(stub, metadata, sent=reporter.sent, patience_s=patience_s)
    publication = _Publication(stub, transfer, tuple(metadata), reporter)
    if base is not None:
        await publication.name_base(manifest, base)
    request = pb.CreateVersionRequest(model=model, manifest=manifest, for_another_engine=for_another_engine)
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
    digest = answer.version.digest
    if tag:
        await publication.set_tag(model, tag, digest)
    reporter.update(phase="done")
    size_bytes = sum(file.size_bytes for file in hashed.files)
    sent_bytes = sum(hashed.chunks[chunk].size_bytes for chunk in uploaded)
    known = (model, digest, answer.created, size_bytes, len(uploaded), sent_bytes)
    return Published(*known, warnings=found[1], servable_by=found[0])


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

    async def name_base(self, manifest: pb.Manifest, base: Base) -> None:
        request = pb.GetVersionRequest(model=base.model, version=base.version)
        answer = await self.transfer.again(
            lambda: self.stub.GetVersion(request, metadata=self.metadata, timeout=CALL_TIMEOUT_S)
        )
        manifest.schema, manifest.base_model = ADAPTER_SCHEMA, base.model
        manifest.base_digest = answer.version.digest

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
