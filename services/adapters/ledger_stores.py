"""Objects of the usage ledger, in a folder that several processes may share or in a bucket."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from services.adapters.blobs.s3 import BULK_S, QUICK_S, store_errors
from services.adapters.synced_files import disk_errors, on_disk, remove_unlocked, sync_folder
from services.core.errors import NotFound, StoreUnavailable

_STORE: Final = "usage ledger"
_NAME: Final = re.compile(r"[a-z]+/[0-9-]{1,64}")
T = TypeVar("T")
_ROOT: Final = "ledger/"
_PAGE: Final = 1000


class S3Ledger:
    """``LedgerStore`` in a bucket that lists what was created before. See ``blobs/s3.py``."""

    def __init__(self, store: S3Store, *, quick_s: float = QUICK_S, bulk_s: float = BULK_S) -> None:
        self._store = store
        self._quick_s = quick_s
        self._bulk_s = bulk_s

    async def create(self, name: str, data: bytes) -> bool:
        put = obstore.put_async(self._store, _ROOT + checked(name), data, mode="create", use_multipart=False)
        try:
            await self._within(put, self._bulk_s)
        except AlreadyExistsError:
            return False
        except FileNotFoundError as error:
            raise StoreUnavailable("there is no such bucket: see FAIRWAY_BLOB_STORE") from error
        return True

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        found: list[str] = []
        folder = prefix.partition("/")[0] + "/"
        offset = _ROOT + after if after else None
        pages = aiter(obstore.list(self._store, _ROOT + folder, offset=offset, chunk_size=_PAGE))
        with suppress(StopAsyncIteration):
            while True:
                page = await self._within(anext(pages), self._quick_s)
                found += [meta["path"].removeprefix(_ROOT) for meta in page]
        return tuple(sorted(name for name in found if name.startswith(prefix) and name > after))

    async def read(self, name: str) -> bytes:
        try:
            return await self._within(self._bytes_of(_ROOT + checked(name)), self._bulk_s)
        except FileNotFoundError:
            raise NotFound(f"the ledger has no {name}", name=name) from None

    async def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _PAGE):
            keys = [_ROOT + checked(name) for name in names[start : start + _PAGE]]
            with suppress(FileNotFoundError):
                await self._within(obstore.delete_async(self._store, keys), self._bulk_s)

    async def _bytes_of(self, key: str) -> bytes:
        found = await obstore.get_async(self._store, key)
        return bytes(await found.bytes_async())

    async def _within(self, request: Awaitable[T], timeout_s: float) -> T:
        async with store_errors(timeout_s):
            return await request


def checked(name: str) -> str:
    """Return the name, validated before it becomes a path. Our own names are always valid."""
    assert _NAME.fullmatch(name), f"{name!r} is no name of an object"
    return name


class FolderLedger:
    """``LedgerStore`` in a folder of a local or shared file system. File I/O runs in the loop's threads.

    An object is written to a temporary file, synced, and linked to its name, which fails if the name exists.
    """

    def __init__(self, root: Path) -> None:
        """Create the folder and remove the files of interrupted writes. Raises StoreUnavailable."""
        self._root = root
        self._unfinished = root / "unfinished"
        with disk_errors(_STORE):
            self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in sorted(self._unfinished.iterdir()):
                remove_unlocked(leftover)

    async def create(self, name: str, data: bytes) -> bool:
        return await on_disk(partial(self._create, self._root / checked(name), data), store=_STORE)

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        return await on_disk(partial(self._names, prefix, after), store=_STORE)

    async def read(self, name: str) -> bytes:
        return await on_disk(partial(self._read, name), store=_STORE)

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._root / checked(name) for name in names]

        def remove() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        await on_disk(remove, store=_STORE)

    def _create(self, path: Path, data: bytes) -> bool:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._unfinished)
        try:
            with os.fdopen(descriptor, "wb") as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # marks it as in use, for ``remove_unlocked``
                file.write(data)
                file.flush()
                os.fsync(descriptor)
                try:
                    os.link(name, path)
                except FileExistsError:
                    return False
            for folder in (path.parent, self._root):
                sync_folder(folder)
            return True
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def _read(self, name: str) -> bytes:
        try:
            return (self._root / checked(name)).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"the ledger has no {name}", name=name) from None

    def _names(self, prefix: str, after: str) -> tuple[str, ...]:
        folder = self._root / prefix.partition("/")[0]
        try:
            found = [f"{folder.name}/{entry}" for entry in os.listdir(folder)]
        except FileNotFoundError:
            return ()
        return tuple(sorted(name for name in found if name.startswith(prefix) and name > after))
