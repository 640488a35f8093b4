"""The registry: chunks in the blob store, version and tag records in etcd, manifests as blobs.

The registry itself computes the digest of the manifest that names a version, so a client cannot replace a
version. Implements ``ports.registry.VersionSource`` for callers in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import structlog

from fairway.formats import servable
from fairway.formats.tokenizer_files import TOKENIZER
from fairway.formats.version_files import GATEWAY_FILES
from fairway.formats.weights import MAX_HEADERS_BYTES, TOO_LARGE
from services.adapters import chunk_delta
from services.adapters.threads import in_thread
from services.core.errors import (
    Conflict,
    DeadlineExceeded,
    EtagMismatch,
    FailedPrecondition,
    IntegrityError,
    InvalidInput,
    ModelNotFound,
    NotFound,
)
from services.core.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    canonical_json,
    check_draft,
    check_manifest,
    check_repetition,
    is_digest,
    is_tag,
    on_base,
    parse,
    sha256_of,
)
from services.core.paging import page_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    MODELS,
    Record,
    Tag,
    VersionRecord,
    dump,
    load,
    model_users_key,
    signatures_key,
    tag_key,
    version_key,
)
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.ports.blob_store import BlobStore
from services.ports.clock import Clock
from services.ports.registry import TextCheck
from services.ports.store import Committed, Delete, Entry, ModRevisionIs, Put, Store
from services.registry.garbage import Collected, Collector, SweepFence
from services.registry.signatures import VersionSignatures
from services.registry.tracker import DOWNLOADS, ChunkTracker, DownloadTurns
from services.registry.verification import (
    VerificationLimiter,
    chunk_of,
    computation_of,
    content_of,
    header_of,
    verify,
)
from services.runtime.idempotent_writes import RequestLog, WriteAnswer, WriteRequest, WriteSet, fingerprint_of
from services.runtime.process.folders import temporary_folder

log = structlog.get_logger()

_MISSING_BATCH: Final = 4096
_TRIES: Final = 5  # attempts of a commit that conflicts with others
UPLOAD_IDLE_S: Final = 30.0
_PIECE_BYTES: Final = 128 * 1024


@dataclass(frozen=True, slots=True)
class ModelSummary:
    name: str
    versions: int
    tags: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Use:
    """What a deletion reads of a deployment or an assigned version, whose other fields may be unreadable."""

    model: str
    version_digest: str
    deployment: str = ""


@dataclass(frozen=True, slots=True)
class _Uses:
    versions: tuple[_Use, ...] = ()


class RegistryService:
    """All methods may run concurrently; conditional writes in the store resolve conflicts."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        clock: Clock,
        *,
        texts: TextCheck | None = None,
        rng: Random | None = None,
        downloads: int = DOWNLOADS,
    ) -> None:
        """``texts`` checks the files that gateways read; without it, no version is checked. ``downloads``
        read the blob store at once."""
        self._store = store
        self._texts = texts
        self._blobs = blobs
        self._clock = clock
        self._requests = RequestLog(store)
        self._fence = SweepFence(store, clock)
        self._garbage = Collector(store, blobs, clock, fence=self._fence, manifest=self._manifest)
        self._turns = VerificationLimiter()
        self.signatures = VersionSignatures(store)
        rng = rng or Random()
        self._downloads = DownloadTurns(rng, downloads)
        self.tracker = ChunkTracker(self._readable, clock, rng)

    async def find_missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Return the chunks that are not stored, each once, in the given order."""
        return await self._missing(list(dict.fromkeys(digests)))

    async def upload(self, digest: str, size_bytes: int, data: AsyncIterator[bytes]) -> None:
        """Store one chunk completely, or nothing. An existing chunk is left unchanged.

        Raises IntegrityError when the bytes do not match the digest, InvalidInput for more than a chunk's
        size, DeadlineExceeded when the sender stops sending.
        """
        if not 1 <= size_bytes <= CHUNK_BYTES:
            raise InvalidInput(f"a chunk has 1 to {CHUNK_BYTES} bytes", field="header.size_bytes")
        await self._blobs.put(digest, with_idle_timeout(digest, data), size_bytes)

    async def download(
        self, digest: str, offset_bytes: int = 0, *, base: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a chunk from an offset on, in turn, or of its delta from the chunk ``base``.

        Raises NotFound, Unavailable.
        """
        async with self._downloads.one():
            for begin in range(0, len(delta := await self._delta(digest, base)), _PIECE_BYTES):
                yield delta[begin : begin + _PIECE_BYTES]
            if delta:
                return
            async with aclosing(self._blobs.get(digest, offset_bytes)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _delta(self, digest: str, base: str) -> bytes:
        """Return the delta of a chunk; empty: it is not smaller, or has no such base."""
        if not base:
            return b""
        data = await chunk_of(self._blobs, digest)
        try:
            delta = await in_thread(chunk_delta.encode, data, await chunk_of(self._blobs, base))
        except (NotFound, IntegrityError, ValueError):
            return b""
        return delta if len(delta) < len(data) else b""

    async def create_version(
        self, model: str, manifest: Manifest, *, publisher: str = "", for_another_engine: bool = False
    ) -> tuple[VersionRecord, bool]:
        """Return the version and whether this call created it, after reading and verifying every byte.

        An existing version is verified too: chunks that the store has lost or damaged count as missing.
        Raises InvalidInput for a manifest, a base or a file that no version may contain, and, unless it is
        ``for_another_engine``, for a version that cannot be served here; FailedPrecondition for chunks that
        are not stored; IntegrityError where the joined chunks do not match their file; Unavailable where too
        many versions of this ``publisher`` wait for verification.
        """
        async with self._turns.of(publisher):
            body = await in_thread(_body_of, manifest)
            await self._require_chunks(manifest)
            await verify(self._blobs, manifest)
            readable = manifest
            if manifest.base_digest:
                readable = on_base(manifest, await self._base_of(manifest))
            problems: dict[str, str] = {}
            if manifest.kind == "safety-pack":
                problems = pack_problems()
            elif self._texts is not None and not for_another_engine:
                problems = await require_servable(self._blobs, readable, sha256_of(body), self._texts)
            computation = await computation_of(self._blobs, readable)
        record = VersionRecord(
            model,
            sha256_of(body),
            manifest.size_bytes,
            self._clock.unix_s(),
            computation,
            problems,
            manifest.base_model,
            manifest.base_digest,
            manifest.kind,
        )
        for _ in range(_TRIES):
            await self._keep_manifest(record.digest, body)
            conditions = await self._fence.conditions()
            await self._require_chunks(manifest)
            if await self._blobs.missing([record.digest]):
                continue
            key = version_key(model, record.digest)
            if (entry := await self._store.get(key)) is not None:
                return entry.load(VersionRecord), False
            writes = [Put(key, dump(record))]
            if record.base_digest:
                base = await self._version_entry(record.base_model, record.base_digest)
                conditions = [*conditions, ModRevisionIs(base.key, base.mod_revision)]
                writes.append(Put(model_users_key(record.base_model), b""))
            done = await self._store.commit(writes, [ModRevisionIs(key, 0), *conditions])
            if isinstance(done, Committed):
                log.info("version.created", model=model, digest=record.digest, size_bytes=record.size_bytes)
                return record, True
        raise Conflict("garbage is being collected again and again: try again", model=model)

    async def delete_version(self, model: str, digest: str, *, request_id: str = "") -> None:
        """Delete a version; the next garbage collection deletes the blobs that only it needed.

        Raises NotFound, and FailedPrecondition while a tag, a deployment or an adapter uses it, naming the
        first.
        """
        request = _request("delete", VersionRecord(model, digest, 0, 0.0), request_id)
        for _ in range(_TRIES):
            if await self._requests.answered(request) is not None:
                return
            version = await self._version_entry(model, digest)
            users = await self._store.get(model_users_key(model))
            await self._require_unused(model, digest)
            conditions = (
                ModRevisionIs(version.key, version.mod_revision),
                ModRevisionIs(model_users_key(model), users.mod_revision if users is not None else 0),
            )
            write = WriteSet(conditions, (Delete(version.key), Delete(signatures_key(model, digest))))
            if isinstance(await self._requests.commit(write, request, WriteAnswer()), Committed):
                log.info("version.deleted", model=model, digest=digest)
                return
        raise Conflict(f"tags and deployments of {model} are being changed: try again", model=model)

    async def collect_garbage(self, *, min_age_s: float = 0.0, dry_run: bool = False) -> Collected:
        """Delete what no version needs and is old enough; see ``garbage.py``."""
        return await self._garbage.collect(min_age_s=min_age_s, dry_run=dry_run)

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        """Return a version by digest or tag. Raises NotFound, IntegrityError for a damaged manifest."""
        record = await self._record(model, await self.resolve(model, version))
        try:
            return record, await self._manifest(record.digest)
        except (NotFound, IntegrityError) as error:
            raise IntegrityError(
                f"the manifest of {model} {record.digest} was lost or damaged: publish the version again",
                model=model,
                digest=record.digest,
            ) from error

    async def resolve(self, model: str, version: str) -> str:
        """Return the digest that a digest or a tag names. Raises NotFound for a tag that is not set."""
        if is_digest(version):
            return version
        if not is_tag(version):
            raise InvalidInput("version is neither a digest nor a tag", field="version")
        entry = await self._store.get(tag_key(model, version))
        if entry is None:
            raise NotFound(f"{model} has no tag {version}", model=model, tag=version)
        return entry.load(Tag).digest

    async def list_versions(
        self, model: str, *, size: int = 0, token: str = ""
    ) -> tuple[tuple[VersionRecord, ...], str]:
        """Return a page of a model's versions, sorted by digest, and the next page's token."""
        listing = await self._store.list(f"{MODELS}{model}/versions/")
        records = [entry.load(VersionRecord) for entry in listing.entries]
        return page_of(records, lambda record: record.digest, size=size, token=token)

    async def tags(self, model: str) -> dict[str, str]:
        """Return the model's tags and the digests they point at, sorted by tag."""
        listing = await self._store.list(f"{MODELS}{model}/tags/")
        found = (entry.load(Tag) for entry in listing.entries)
        return {tag.tag: tag.digest for tag in found}

    async def list_models(self, *, size: int = 0, token: str = "") -> tuple[tuple[ModelSummary, ...], str]:
        """Return a page of the models that have a version, sorted by name, and the next page's token."""
        versions: dict[str, int] = {}
        tags: dict[str, dict[str, str]] = {}
        for entry in (await self._store.list(MODELS)).entries:
            model, kind, name = entry.key.removeprefix(MODELS).split("/", 2)
            if kind == "versions":
                versions[model] = versions.get(model, 0) + 1
            elif kind == "tags":
                tags.setdefault(model, {})[name] = entry.load(Tag).digest
        models = [ModelSummary(name, versions[name], tags.get(name, {})) for name in sorted(versions)]
        return page_of(models, lambda model: model.name, size=size, token=token)

    async def set_tag(
        self, model: str, tag: str, digest: str, *, etag: str = "", request_id: str = ""
    ) -> int:
        """Point a tag at a version and return the revision of the change.

        ``etag`` is the digest that the tag points at. Raises NotFound, and EtagMismatch when it points
        elsewhere.
        """
        key, record = tag_key(model, tag), Tag(model, tag, digest)
        request = _request("set", record, request_id, etag)
        for _ in range(_TRIES):
            if (found := await self._requests.answered(request)) is not None:
                return found.revision
            version = await self._version_entry(model, digest)
            conditions = [ModRevisionIs(version.key, version.mod_revision)]
            if etag:
                conditions.append(_unmoved(key, await self._store.get(key), etag))
            write = WriteSet(conditions, (Put(key, dump(record)), Put(model_users_key(model), b"")))
            done = await self._requests.commit(write, request, WriteAnswer())
            if isinstance(done, Committed):
                log.info("tag.set", model=model, tag=tag, digest=digest)
                return done.revision
        raise Conflict(f"the tag {tag} is being moved by others: try again", model=model, tag=tag)

    async def delete_tag(self, model: str, tag: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove a tag; versions stay. Raises NotFound when it is not set, EtagMismatch like ``set_tag``."""
        key = tag_key(model, tag)
        request = _request("delete", Tag(model, tag, ""), request_id, etag)
        for _ in range(_TRIES):
            if await self._requests.answered(request) is not None:
                return
            entry = await self._store.get(key)
            if entry is None:
                raise NotFound(f"{model} has no tag {tag}", model=model, tag=tag)
            write = WriteSet((_unmoved(key, entry, etag),), (Delete(key),))
            if isinstance(await self._requests.commit(write, request, WriteAnswer()), Committed):
                log.info("tag.deleted", model=model, tag=tag)
                return
        raise Conflict(f"the tag {tag} is being moved by others: try again", model=model, tag=tag)

    async def _record(self, model: str, digest: str) -> VersionRecord:
        return load((await self._version_entry(model, digest)).value, VersionRecord)

    async def _version_entry(self, model: str, digest: str) -> Entry:
        entry = await self._store.get(version_key(model, digest))
        if entry is None:
            raise ModelNotFound(f"{model} has no version {digest}", model=model, digest=digest)
        return entry

    async def _readable(self, model: str, digest: str) -> Manifest:
        _, manifest = await self.get_version(model, digest)
        return on_base(manifest, await self._base_of(manifest)) if manifest.base_digest else manifest

    async def _base_of(self, adapter: Manifest) -> Manifest:
        """Return the manifest of an adapter's base. Raises ModelNotFound, InvalidInput for no decoder."""
        _, base = await self.get_version(adapter.base_model, adapter.base_digest)
        if base.base_digest or base.kind != "causal-lm":
            what = "an adapter" if base.base_digest else f"of kind {base.kind}"
            raise InvalidInput(
                f"the base {adapter.base_model} {adapter.base_digest} is {what}: name a causal-lm version "
                "with weights of its own",
                field="manifest.base_digest",
            )
        return base

    async def _require_no_adapter(self, model: str, digest: str) -> None:
        for entry in (await self._store.list(MODELS)).entries:
            name, kind, found = entry.key.removeprefix(MODELS).split("/", 2)
            if kind != "versions" or entry.key == version_key(model, digest):
                continue
            if await self._base_in(entry, found) == (model, digest):
                raise FailedPrecondition(
                    f"the adapter {name} {found} is based on {digest}: delete it first",
                    model=name,
                    digest=found,
                )

    async def _base_in(self, entry: Entry, digest: str) -> tuple[str, str]:
        """Return the base of a stored version, by its manifest where the record cannot be read."""
        version: VersionRecord | Manifest
        try:
            version = entry.load(VersionRecord)
        except IntegrityError:
            try:
                version = await self._manifest(digest)
            except (NotFound, IntegrityError):
                version = _used(entry, VersionRecord)
        return version.base_model, version.base_digest

    async def _require_unused(self, model: str, digest: str) -> None:
        await self._require_no_adapter(model, digest)
        listing = await self._store.list(f"{MODELS}{model}/tags/")
        named = [_used(entry, Tag) for entry in listing.entries]
        tags = [tag.tag for tag in named if tag.digest == digest]
        if tags:
            raise FailedPrecondition(
                f"the tag {tags[0]} of {model} points at {digest}: move or delete it first",
                model=model,
                tag=tags[0],
            )
        models: dict[str, str] = {}
        for entry in (await self._store.list(DEPLOYMENTS)).entries:
            name, deployment = entry.key.removeprefix(DEPLOYMENTS), _used(entry, _Use)
            models[name] = deployment.model
            if (deployment.model, deployment.version_digest) == (model, digest):
                raise FailedPrecondition(
                    f"the deployment {name} runs {digest}: update or delete it first", deployment=name
                )
        for entry in (await self._store.list(ROUTES)).entries:
            name = entry.key.removeprefix(ROUTES)
            if models.get(name) != model:
                continue
            if any(arm.version_digest == digest for arm in _used(entry, ModelRoute).arms):
                raise FailedPrecondition(
                    f"a rollout of {name} uses {digest}: abort it first, or update {name} if none is open",
                    deployment=name,
                )
        for entry in (await self._store.list(ASSIGNMENTS)).entries:
            for assigned in _used(entry, _Uses).versions:
                if (assigned.model, assigned.version_digest) == (model, digest):
                    name = assigned.deployment
                    raise FailedPrecondition(
                        f"{digest} serves the deployment {name} until its update is over", deployment=name
                    )

    async def _keep_manifest(self, digest: str, body: bytes) -> None:
        """Store the manifest if it is missing or damaged."""
        try:
            await self._manifest(digest)
        except (NotFound, IntegrityError):
            await self._blobs.put(digest, _pieces(body), len(body))

    async def _manifest(self, digest: str) -> Manifest:
        body = bytearray()
        async with aclosing(self._blobs.get(digest)) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_MANIFEST_BYTES:
                    raise IntegrityError(f"the manifest {digest} is too large", digest=digest)
        return await in_thread(parse, bytes(body), digest)

    async def _missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        found: list[str] = []
        for start in range(0, len(digests), _MISSING_BATCH):
            found += await self._blobs.missing(digests[start : start + _MISSING_BATCH])
        return tuple(found)

    async def _require_chunks(self, manifest: Manifest) -> None:
        wanted = list(dict.fromkeys(chunk for file in manifest.files for chunk in file.chunks))
        missing = await self._missing(wanted)
        if missing:
            raise FailedPrecondition(
                f"{len(missing)} of {len(wanted)} chunks are not stored, {missing[0]} among them",
                missing=len(missing),
                chunks=len(wanted),
                first=missing[0],
            )


def _body_of(manifest: Manifest) -> bytes:
    """Return the canonical JSON of a valid manifest. Raises InvalidInput.

    The largest manifests take most of a second: it runs in a thread.
    """
    check_manifest(manifest)
    check_draft(manifest)
    check_repetition(manifest)
    body = canonical_json(manifest)
    if len(body) > MAX_MANIFEST_BYTES:
        raise InvalidInput(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes", field="manifest")
    return body


def _request(verb: str, record: Tag | VersionRecord, request_id: str, etag: str = "") -> WriteRequest:
    return WriteRequest(type(record).__name__.lower(), request_id, fingerprint_of(verb, dump(record), etag))


def _used(entry: Entry, kind: type[Record]) -> Record:
    """Return a record that may use a version. Raises FailedPrecondition with its key if it is unreadable."""
    try:
        return entry.load(kind)
    except IntegrityError as error:
        raise FailedPrecondition(
            f"{entry.key} in etcd may use the version and cannot be read: write it again or delete it",
            key=entry.key,
        ) from error


def _unmoved(key: str, entry: Entry | None, etag: str) -> ModRevisionIs:
    """Return the condition that the tag has not changed since it was read. Raises EtagMismatch if it points
    elsewhere."""
    digest = "" if entry is None else entry.load(Tag).digest
    if etag and etag != digest:
        raise EtagMismatch(
            f"the tag points at {digest or 'nothing'}, not at {etag}: read it again", etag=etag
        )
    return ModRevisionIs(key, entry.mod_revision if entry is not None else 0)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 256 * 1024):
        yield body[start : start + 256 * 1024]


async def with_idle_timeout(digest: str, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the sender's bytes, with a time limit between pieces; the blob store verifies them."""
    while True:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S):
                piece = await anext(data, b"")
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the upload of {digest} sent nothing for {UPLOAD_IDLE_S:g} s") from exc
        if not piece:
            return
        yield piece


def pack_problems() -> dict[str, str]:
    """Return by executor why it does not serve a safety pack; an empty text: it does."""
    return {str(engine): why for engine, why in servable.engine_problems((), _no_file, "safety-pack").items()}


def _no_file(path: str) -> bytes:
    raise FileNotFoundError(path)


_READ: Final = frozenset((*GATEWAY_FILES, *servable.READ))
MAX_PROBLEM: Final = 1000  # bytes of an engine's problem in a version's record
_NEXT: Final = "publish it for another engine, or repair it"


async def require_servable(
    blobs: BlobStore, manifest: Manifest, digest: str, texts: TextCheck
) -> dict[str, str]:
    """Return the engines' problems with a verified version that one of them and the gateways can serve; an
    adapter has the files of its base.

    Raises InvalidInput that names the unusable file, Unavailable where the check could not run.
    """
    with temporary_folder("fw-text-") as folder:
        files = {file.path: file for file in manifest.files}
        for path in _READ & files.keys():
            await _write(folder / path, await content_of(blobs, files[path]))

        def read(path: str) -> bytes:
            return (folder / path).read_bytes()

        names, is_adapter = list(files), bool(manifest.base_digest)
        headers_bytes = 0
        found = partial(servable.tensor_files, names, read, is_adapter=is_adapter)
        for path in await in_thread(found):
            header = await header_of(blobs, files[path])
            headers_bytes += len(header)
            if headers_bytes > MAX_HEADERS_BYTES:
                raise InvalidInput(TOO_LARGE, field="manifest.files")
            await _write(folder / path, header)
        judge = partial(servable.engine_problems, names, read, manifest.kind, is_adapter=is_adapter)
        problems = await in_thread(judge)
        problem = servable.no_engine(problems)
        has_text = manifest.kind == "causal-lm" or TOKENIZER in names
        if not problem and has_text:
            try:
                problem = await texts.fault(folder, digest)
            except FailedPrecondition as error:
                problem = error.message
    if problem:
        raise InvalidInput(f"the version cannot be served here: {problem}; {_NEXT}", field="manifest.files")
    return {str(engine): found[:MAX_PROBLEM] for engine, found in problems.items()}


async def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    await in_thread(path.write_bytes, body)
