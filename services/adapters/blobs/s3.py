"""Blobs in an S3-compatible bucket: ``<prefix>/sha256/<64 hex>``; damaged ones are in ``damaged/``.

A blob is verified in memory and stored by one conditional request (``If-None-Match: *``). So nothing is
overwritten, and an interrupted upload leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import configparser
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import obstore
import structlog
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from fairway.task_group import TaskGroup
from services.adapters.blobs.digests import PIECE_BYTES, Verifier, damaged, hex_of, is_blob, is_name
from services.adapters.threads import in_thread
from services.core.errors import IntegrityError, NotFound, StoreUnavailable, first_failure
from services.ports.blob_store import MAX_BLOB_BYTES, StoredBlob
from services.ports.clock import Clock
from services.runtime.config import ConfigError, Settings

log = structlog.get_logger()
T = TypeVar("T")

QUICK_S: Final = 10.0  # one HEAD, one deletion or one page of a listing
BULK_S: Final = 60.0  # the bytes of a blob, retries included
_PARALLEL_CHECKS: Final = 64
_PARALLEL_PUTS: Final = 16
_PAGE: Final = 1000
_BLOBS: Final = "sha256/"
_DAMAGED: Final = "damaged/"
_RETRY_AFTER_S: Final = 5.0
_TICK_S: Final = 1.0  # listings may return milliseconds where HEAD returns seconds
_CONNECT_S: Final = 3
_REQUEST_S: Final = 30
_RETRIES: Final = 3
_NO_PROXY: Final = "http://127.0.0.1:9"
_REREAD: Final = timedelta(minutes=5)  # the longest time until a rotated secret is used


def open_bucket(settings: Settings, clock: Clock) -> S3Store:
    """Return the bucket of ``FAIRWAY_BLOB_STORE`` without any request. Raises ConfigError.

    Sources of credentials, in this order: ``FAIRWAY_S3_CREDENTIALS_FILE``, the ``AWS_*`` environment
    variables, a web identity token or the container's endpoint, the instance's role.
    """
    url = urlsplit(settings.blob_store)
    assert url.scheme == "s3", "no bucket is configured"
    options: dict[str, Any] = {}
    if settings.s3_endpoint:
        options["endpoint"] = settings.s3_endpoint
    if settings.s3_credentials_file is not None:
        options["credential_provider"] = credentials_of(settings.s3_credentials_file, clock)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(seconds=_REQUEST_S),
        "allow_http": settings.s3_endpoint.startswith("http://"),
    }
    if client["allow_http"]:
        # A store without TLS is inside the fleet. Only a proxy of its own replaces the environment's: it is
        # excluded for the one host that there is.
        client |= {"proxy_url": _NO_PROXY, "proxy_excludes": urlsplit(settings.s3_endpoint).hostname or ""}
    if settings.s3_ca_file is not None:
        client["root_certificate"] = _read(settings.s3_ca_file)
    return S3Store(
        url.netloc,
        prefix=url.path.strip("/") or None,
        region=settings.s3_region,
        virtual_hosted_style_request=not settings.s3_path_style,
        conditional_put="etag",
        client_options=client,  # type: ignore[arg-type]
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=_REQUEST_S),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
        **options,
    )


def credentials_of(path: Path, clock: Clock) -> Callable[[], dict[str, Any]]:
    """Return a reader of a credentials file's ``[default]`` section. Raises ConfigError for a bad one."""
    _parse(_read(path), path)

    def provide() -> dict[str, Any]:
        try:
            section = _parse(_read(path), path)
        except ConfigError as error:
            raise StoreUnavailable(str(error)) from error
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.fromtimestamp(clock.unix_s(), UTC) + _REREAD,
        }

    return provide


def _parse(text: str, path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        section = dict(parser["default"])
        if not (section["aws_access_key_id"] and section["aws_secret_access_key"]):
            raise KeyError("aws_access_key_id")
    except (configparser.Error, KeyError) as error:
        raise ConfigError(
            f"{path} has no [default] section with aws_access_key_id and aws_secret_access_key"
        ) from error
    return section


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


class S3Blobs:
    """``BlobStore`` in a bucket. ``store`` has the prefix, credentials and timeouts: see ``open_bucket``."""

    def __init__(self, store: S3Store, *, quick_s: float = QUICK_S, bulk_s: float = BULK_S) -> None:
        self._store = store
        self._quick_s = quick_s
        self._bulk_s = bulk_s
        self._puts = asyncio.Semaphore(_PARALLEL_PUTS)  # each upload holds a blob in memory

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        verifier = Verifier(digest, size_bytes, most_bytes=MAX_BLOB_BYTES)
        if await self._is_stored(digest, size_bytes):
            return
        async with self._puts:
            received = bytearray()
            async for piece in data:
                verifier.expect(len(piece))
                verifier.feed(piece)
                received += piece
            verifier.finish()
            try:
                await self._within(
                    obstore.put_async(
                        self._store, _key(digest), bytes(received), mode="create", use_multipart=False
                    ),
                    self._bulk_s,
                )
            except AlreadyExistsError:
                return
            except FileNotFoundError as error:
                raise _unavailable("there is no such bucket: see FAIRWAY_BLOB_STORE", error) from error

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        blob = await self._verified(digest)
        if blob is None:
            await self._set_aside(digest)
            raise damaged(digest)
        for start in range(offset_bytes, len(blob), PIECE_BYTES):
            yield blob[start : start + PIECE_BYTES]

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        keys = {digest: _key(digest) for digest in digests}
        waiting = iter(keys.items())
        absent: set[str] = set()

        async def check() -> None:
            for digest, key in waiting:  # the workers share one iterator
                if await self._size_of(key) is None:
                    absent.add(digest)

        await _together([check() for _ in range(min(_PARALLEL_CHECKS, len(keys)))])
        return tuple(digest for digest in digests if digest in absent)

    async def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        async for page in self._listed(_BLOBS):
            yield tuple(
                StoredBlob("sha256:" + meta["path"].removeprefix(_BLOBS), meta["size"], _written(meta))
                for meta in page
                if is_name(meta["path"].removeprefix(_BLOBS))
            )

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        deleted = []
        for blob in blobs:
            try:
                meta = await self._within(obstore.head_async(self._store, _key(blob.digest)), self._quick_s)
                if abs(_written(meta) - blob.written_unix_s) < _TICK_S:
                    await self._within(obstore.delete_async(self._store, _key(blob.digest)), self._quick_s)
                    deleted.append(blob.digest)
            except FileNotFoundError:
                continue
        return tuple(deleted)

    async def discard(self, digests: Sequence[str]) -> None:
        for digest in digests:
            with suppress(FileNotFoundError):
                await self._within(obstore.delete_async(self._store, _key(digest)), self._quick_s)

    async def sweep(self, before_unix_s: float, *, dry_run: bool = False) -> int:
        swept = 0
        async for page in self._listed(_DAMAGED):
            old = [meta["path"] for meta in page if _written(meta) < before_unix_s]
            swept += len(old)
            for path in old if not dry_run else ():
                with suppress(FileNotFoundError):
                    await self._within(obstore.delete_async(self._store, path), self._quick_s)
        return swept

    async def _is_stored(self, digest: str, size_bytes: int) -> bool:
        """Return whether the blob is stored. Raises IntegrityError if it is good but has another size."""
        stored_bytes = await self._size_of(_key(digest))
        if stored_bytes is None or stored_bytes == size_bytes:
            return stored_bytes is not None
        try:
            if await self._verified(digest) is not None:
                raise IntegrityError(
                    f"{digest} is stored with {stored_bytes} bytes instead of {size_bytes}",
                    digest=digest,
                    size_bytes=size_bytes,
                )
        except NotFound:
            return False
        await self._set_aside(digest)
        return False

    async def _verified(self, digest: str) -> bytes | None:
        """Return the blob, or None when it is damaged. Reads it twice, to exclude transfer errors."""
        for _ in range(2):
            try:
                blob = await self._within(self._bytes_of(_key(digest)), self._bulk_s)
            except FileNotFoundError:
                raise NotFound(f"{digest} is not stored", digest=digest) from None
            if blob is not None and await in_thread(is_blob, blob, digest):
                return blob
        return None

    async def _bytes_of(self, key: str) -> bytes | None:
        found = await obstore.get_async(self._store, key)
        if found.meta["size"] > MAX_BLOB_BYTES:
            return None
        return bytes(await found.bytes_async())

    async def _size_of(self, key: str) -> int | None:
        try:
            return (await self._within(obstore.head_async(self._store, key), self._quick_s))["size"]
        except FileNotFoundError:
            return None

    async def _set_aside(self, digest: str) -> None:
        with suppress(FileNotFoundError):
            await self._within(
                obstore.rename_async(self._store, _key(digest), _DAMAGED + hex_of(digest)), self._bulk_s
            )
            log.warning("blob.found_damaged", digest=digest)

    async def _listed(self, prefix: str) -> AsyncIterator[Sequence[obstore.ObjectMeta]]:
        pages = aiter(obstore.list(self._store, prefix, chunk_size=_PAGE))
        with suppress(StopAsyncIteration):
            while True:
                yield await self._within(anext(pages), self._quick_s)

    async def _within(self, request: Awaitable[T], timeout_s: float) -> T:
        """Return the response. Raises StoreUnavailable, or that an object is missing or already exists."""
        async with store_errors(timeout_s):
            return await request


def _key(digest: str) -> str:
    return _BLOBS + hex_of(digest)


def _written(meta: obstore.ObjectMeta) -> float:
    return meta["last_modified"].timestamp()


async def _together(checks: Sequence[Awaitable[None]]) -> None:
    """Run all; return when all succeeded. The first failure cancels the others."""

    async def one(check: Awaitable[None]) -> None:
        await check

    try:
        async with TaskGroup() as group:
            for check in checks:
                group.create_task(one(check))
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


@asynccontextmanager
async def store_errors(timeout_s: float) -> AsyncIterator[None]:
    """Turn errors of store and network into StoreUnavailable, whose text has no address and no key."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise _unavailable(f"the object store did not answer within {timeout_s:g} s", error) from error
    except (FileNotFoundError, AlreadyExistsError):
        raise
    except (PermissionDeniedError, UnauthenticatedError) as error:
        message = "the object store refuses the credentials: see FAIRWAY_S3_CREDENTIALS_FILE"
        raise _unavailable(message, error) from error
    except (BaseError, OSError) as error:
        raise _unavailable("the object store cannot be reached or answers with an error", error) from error


def _unavailable(message: str, error: BaseException) -> StoreUnavailable:
    log.warning("object_store.failed", error=str(error)[:500])
    return StoreUnavailable(message, retry_after_s=_RETRY_AFTER_S)
