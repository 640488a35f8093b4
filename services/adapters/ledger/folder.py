"""Objects of the usage ledger in a folder that several processes may share.

Each is written to a temporary file, synced, and linked to its name, which fails if the name exists.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from services.adapters.ledger.names import checked
from services.adapters.synced_files import disk_errors, on_disk, remove_unlocked, sync_folder
from services.core.errors import NotFound

_STORE: Final = "usage ledger"


class FolderLedger:
    """``LedgerStore`` in a folder of a local or shared file system. File I/O runs in the loop's threads."""

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
