"""Objects of the usage ledger in an S3-compatible bucket, under ``ledger/``."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from services.adapters.blobs.s3 import BULK_S, QUICK_S, store_errors
from services.adapters.ledger.names import checked
from services.core.errors import NotFound, StoreUnavailable

T = TypeVar("T")
_ROOT: Final = "ledger/"
_PAGE: Final = 1000


class S3Ledger:
    """``LedgerStore`` in a bucket that lists what was created before. See ``blobs/s3_bucket.py``."""

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
