"""Objects of the usage ledger, and those of the audit log: in a folder that several processes may share, or
in a bucket."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from services.adapters.blobs.s3 import BULK_S, QUICK_S, store_errors
from services.adapters.synced_files import disk_errors, on_disk, remove_unlocked, sync_folder
from services.core.errors import NotFound, StoreUnavailable

USAGE: Final = "usage ledger"
AUDIT: Final = "audit log"
_ROOTS: Final = {USAGE: "ledger/", AUDIT: "audit/"}
_NAME: Final = re.compile(r"[a-z0-9]+(/[a-z0-9-]{1,64}(\.p)?){0,8}")
T = TypeVar("T")
_PAGE: Final = 1000


class S3Ledger:
    """``TileStore`` in a bucket that lists what was created before. See ``blobs/s3.py``."""

    def __init__(
        self, store: S3Store, of: str = USAGE, *, quick_s: float = QUICK_S, bulk_s: float = BULK_S
    ) -> None:
        """``of``: USAGE or AUDIT, which have their own objects."""
        self._store = store
        self._of = of
        self._root = _ROOTS[of]
        self._quick_s = quick_s
        self._bulk_s = bulk_s

    async def create(self, name: str, data: bytes) -> bool:
        try:
            await self._put(name, data, "create")
        except AlreadyExistsError:
            return False
        return True

    async def replace(self, name: str, data: bytes) -> None:
        await self._put(name, data, "overwrite")

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        found: list[str] = []
        folder = prefix.partition("/")[0] + "/"
        offset = self._root + after if after else None
        pages = aiter(obstore.list(self._store, self._root + folder, offset=offset, chunk_size=_PAGE))
        with suppress(StopAsyncIteration):
            while True:
                page = await self._within(anext(pages), self._quick_s)
                found += [meta["path"].removeprefix(self._root) for meta in page]
        return tuple(sorted(name for name in found if name.startswith(prefix) and name > after))

    async def read(self, name: str) -> bytes:
        try:
            return await self._within(self._bytes_of(self._root + checked(name)), self._bulk_s)
        except FileNotFoundError:
            raise NotFound(f"the {self._of} has no {name}", name=name) from None

    async def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _PAGE):
            keys = [self._root + checked(name) for name in names[start : start + _PAGE]]
            with suppress(FileNotFoundError):
                await self._within(obstore.delete_async(self._store, keys), self._bulk_s)

    async def _put(self, name: str, data: bytes, mode: Literal["create", "overwrite"]) -> None:
        put = obstore.put_async(self._store, self._root + checked(name), data, mode=mode, use_multipart=False)
        try:
            await self._within(put, self._bulk_s)
        except FileNotFoundError as error:
            raise StoreUnavailable("there is no such bucket: see FAIRWAY_BLOB_STORE") from error

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
    """``TileStore`` in a folder of a local or shared file system. File I/O runs in the loop's threads.

    An object is written to a temporary file, synced, and linked to its name, which fails if the name exists.
    """

    def __init__(self, root: Path, of: str = USAGE) -> None:
        """Create the folder and remove the files of interrupted writes. ``of`` names the store in errors.

        Raises StoreUnavailable.
        """
        self._root = root
        self._of = of
        self._unfinished = root / "unfinished"
        with disk_errors(of):
            self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in sorted(self._unfinished.iterdir()):
                remove_unlocked(leftover)

    async def create(self, name: str, data: bytes) -> bool:
        write = partial(self._write, self._root / checked(name), data, os.link)
        return await on_disk(write, store=self._of)

    async def replace(self, name: str, data: bytes) -> None:
        await on_disk(partial(self._write, self._root / checked(name), data, os.replace), store=self._of)

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        return await on_disk(partial(self._names, prefix, after), store=self._of)

    async def read(self, name: str) -> bytes:
        return await on_disk(partial(self._read, name), store=self._of)

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._root / checked(name) for name in names]

        def remove() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        await on_disk(remove, store=self._of)

    def _write(self, path: Path, data: bytes, place: Callable[[str, Path], None]) -> bool:
        """Return whether the data is at the path, where ``place`` puts it; it may refuse a taken path."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._unfinished)
        try:
            with os.fdopen(descriptor, "wb") as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # marks it as in use, for ``remove_unlocked``
                file.write(data)
                file.flush()
                os.fsync(descriptor)
                try:
                    place(name, path)
                except FileExistsError:
                    return False
            for folder in path.parents[: len(path.relative_to(self._root).parts)]:
                sync_folder(folder)
            return True
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def _read(self, name: str) -> bytes:
        try:
            return (self._root / checked(name)).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"the {self._of} has no {name}", name=name) from None

    def _names(self, prefix: str, after: str) -> tuple[str, ...]:
        folder = self._root / prefix.partition("/")[0]
        try:
            found = [f"{folder.name}/{entry}" for entry in os.listdir(folder)]
        except FileNotFoundError:
            return ()
        return tuple(sorted(name for name in found if name.startswith(prefix) and name > after))
