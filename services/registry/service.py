"""The registry: chunks in the blob store, version and tag records in etcd, manifests as blobs.

A version is named by the digest that the registry itself computes over the manifest, so nothing that
a client sends can replace one. Implements ``ports.registry.VersionSource`` for callers in this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import structlog

from services.core.errors import (
    Conflict,
    DeadlineExceeded,
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
    ManifestFile,
    canonical_json,
    check_manifest,
    digest_of,
    is_digest,
    parse,
)
from services.core.paging import page_of
from services.core.records import MODELS, Tag, VersionRecord, dump, load, tag_key, version_key
from services.ports.blob_store import BlobStore
from services.ports.clock import Clock
from services.ports.store import Committed, Delete, Entry, ModRevisionIs, Put, Store

log = structlog.get_logger()

_TAG: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_MISSING_BATCH: Final = 4096
_TAG_TRIES: Final = 5
UPLOAD_IDLE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ModelSummary:
    name: str
    versions: int
    tags: dict[str, str]


class RegistryService:
    """All methods may run at once; what they change is decided by conditional writes in the store."""

    def __init__(self, store: Store, blobs: BlobStore, clock: Clock) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock

    async def find_missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Return the chunks that are not stored, each once, in the order given."""
        return await self._missing(list(dict.fromkeys(digests)))

    async def upload(self, digest: str, size_bytes: int, data: AsyncIterator[bytes]) -> None:
        """Store one chunk whole, or nothing. One that is there is left as it is.

        Raises IntegrityError for other bytes than named, InvalidInput for more than a chunk's size,
        DeadlineExceeded when the sender falls silent.
        """
        if not 1 <= size_bytes <= CHUNK_BYTES:
            raise InvalidInput(f"a chunk has 1 to {CHUNK_BYTES} bytes", field="header.size_bytes")
        if not await self._blobs.missing([digest]):
            return
        await self._blobs.put(digest, _timely(digest, data), size_bytes)

    def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a chunk from an offset on. Raises NotFound."""
        return self._blobs.get(digest, offset_bytes)

    async def create_version(self, model: str, manifest: Manifest) -> tuple[VersionRecord, bool]:
        """Return the version and whether this call made it. Every byte of it was read and verified.

        Raises InvalidInput for a manifest that no version may have, FailedPrecondition for chunks that
        are not stored, IntegrityError where the joined chunks are not the file they claim to be.
        """
        check_manifest(manifest)
        body = canonical_json(manifest)
        if len(body) > MAX_MANIFEST_BYTES:
            raise InvalidInput(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes", field="manifest")
        digest = digest_of(manifest)
        key = version_key(model, digest)
        if (entry := await self._store.get(key)) is not None:
            return load(entry.value, VersionRecord), False
        await self._require_chunks(manifest)
        for file in manifest.files:
            await self._verify_file(file)
        await self._blobs.put(digest, _pieces(body), len(body))
        record = VersionRecord(model, digest, manifest.size_bytes, self._clock.unix_s())
        if isinstance(await self._store.commit([Put(key, dump(record))], [ModRevisionIs(key, 0)]), Committed):
            log.info("version.created", model=model, digest=digest, size_bytes=record.size_bytes)
            return record, True
        return await self._record(model, digest), False

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        """Return a version by digest or tag. Raises NotFound, IntegrityError for a damaged manifest."""
        record = await self._record(model, await self.resolve(model, version))
        return record, parse(await self._manifest_bytes(record.digest), record.digest)

    async def resolve(self, model: str, version: str) -> str:
        """Return the digest that a digest or a tag names. Raises NotFound for a tag that is not set."""
        if is_digest(version):
            return version
        if not _TAG.fullmatch(version):
            raise InvalidInput("version is neither a digest nor a tag", field="version")
        entry = await self._store.get(tag_key(model, version))
        if entry is None:
            raise NotFound(f"{model} has no tag {version}", model=model, tag=version)
        return load(entry.value, Tag).digest

    async def list_versions(
        self, model: str, *, size: int = 0, token: str = ""
    ) -> tuple[tuple[VersionRecord, ...], str]:
        """Return a page of a model's versions, sorted by digest, and the next page's token."""
        listing = await self._store.list(f"{MODELS}{model}/versions/")
        records = [load(entry.value, VersionRecord) for entry in listing.entries]
        return page_of(records, lambda record: record.digest, size=size, token=token)

    async def tags(self, model: str) -> dict[str, str]:
        """Return the model's tags and the digests they point at, sorted by tag."""
        listing = await self._store.list(f"{MODELS}{model}/tags/")
        found = (load(entry.value, Tag) for entry in listing.entries)
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
                tags.setdefault(model, {})[name] = load(entry.value, Tag).digest
        models = [ModelSummary(name, versions[name], tags.get(name, {})) for name in sorted(versions)]
        return page_of(models, lambda model: model.name, size=size, token=token)

    async def set_tag(self, model: str, tag: str, digest: str) -> int:
        """Point a tag at a version and return the revision of the change. Raises NotFound."""
        key = version_key(model, digest)
        version = await self._version_entry(model, digest)
        done = await self._store.commit(
            [Put(tag_key(model, tag), dump(Tag(model, tag, digest)))],
            [ModRevisionIs(key, version.mod_revision)],
        )
        if not isinstance(done, Committed):
            raise Conflict(f"the record of {digest} changed meanwhile", model=model, digest=digest)
        log.info("tag.set", model=model, tag=tag, digest=digest)
        return done.revision

    async def delete_tag(self, model: str, tag: str) -> None:
        """Remove a tag; versions stay. Raises NotFound when it is not set."""
        key = tag_key(model, tag)
        for _ in range(_TAG_TRIES):
            entry = await self._store.get(key)
            if entry is None:
                raise NotFound(f"{model} has no tag {tag}", model=model, tag=tag)
            done = await self._store.commit([Delete(key)], [ModRevisionIs(key, entry.mod_revision)])
            if isinstance(done, Committed):
                log.info("tag.deleted", model=model, tag=tag)
                return
        raise Conflict(f"the tag {tag} is being moved by others", model=model, tag=tag)

    async def _record(self, model: str, digest: str) -> VersionRecord:
        return load((await self._version_entry(model, digest)).value, VersionRecord)

    async def _version_entry(self, model: str, digest: str) -> Entry:
        entry = await self._store.get(version_key(model, digest))
        if entry is None:
            raise ModelNotFound(f"{model} has no version {digest}", model=model, digest=digest)
        return entry

    async def _manifest_bytes(self, digest: str) -> bytes:
        body = bytearray()
        async with aclosing(self._blobs.get(digest)) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_MANIFEST_BYTES:
                    raise IntegrityError(f"the manifest {digest} is too large", digest=digest)
        return bytes(body)

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

    async def _verify_file(self, file: ManifestFile) -> None:
        """Read the chunks in order: each has the size that its place demands, the whole the file's digest."""
        whole = hashlib.sha256()
        for index, chunk in enumerate(file.chunks):
            size, expected = 0, file.chunk_bytes(index)
            async with aclosing(self._blobs.get(chunk)) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    whole.update(piece)
                    await self._clock.sleep(0)  # hashing gigabytes must not starve the other calls
            if size != expected:
                raise IntegrityError(
                    f"chunk {index} of {file.path} has {size} bytes, not {expected}",
                    path=file.path,
                    chunk=chunk,
                    size_bytes=size,
                    expected_bytes=expected,
                )
        if "sha256:" + whole.hexdigest() != file.digest:
            raise IntegrityError(f"the chunks of {file.path} are not the file {file.digest}", path=file.path)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 256 * 1024):
        yield body[start : start + 256 * 1024]


async def _timely(digest: str, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass the bytes on while the sender speaks; the blob store verifies them."""
    while True:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S):
                piece = await anext(data, b"")
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the upload of {digest} sent nothing for {UPLOAD_IDLE_S:g} s") from exc
        if not piece:
            return
        yield piece
