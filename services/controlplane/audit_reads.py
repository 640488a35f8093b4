"""Reads of the audit log, each of which is an entry of it before it is answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Final

from fairway.formats.tlog import CHECKPOINT, WIDTH, LogDamaged, entries_of, tile_name
from fairway.mirror import Mirror, Pair
from fairway.v1 import controlplane_pb2 as pb
from services.core.audit import HEAD, Actor, AuditEntry, AuditHead
from services.core.errors import IntegrityError, InvalidInput, NotFound
from services.core.paging import DEFAULT_PAGE
from services.core.records import load
from services.ports.store import Store
from services.ports.usage import TileStore
from services.rpc.convert.inference import timestamp

MAX_BUNDLES: Final = 32  # bundles that one page reads
_SKEW_S: Final = 3600.0  # most that entries are out of the order of their times


class AuditReader:
    """Stateless: reads the head from the store, everything else from the tiles."""

    def __init__(self, store: Store, tiles: TileStore) -> None:
        """``store`` adds the entry of a call to its commits: ``runtime.audit.AuditedStore``."""
        self._store = store
        self._tiles = tiles

    async def page(self, request: pb.ListAuditEventsRequest) -> pb.ListAuditEventsResponse:
        """Return a page of entries, newest first. Raises InvalidInput, IntegrityError, StoreUnavailable."""
        before = _index_of(request.page_token)
        head = await self._read()
        most = request.page_size or DEFAULT_PAGE
        oldest_s = request.start_time.ToNanoseconds() / 1e9 - _SKEW_S
        at = head.size if before is None else min(before, head.size)
        found: list[pb.AuditEvent] = []
        for _ in range(MAX_BUNDLES):
            if not at or len(found) == most:
                break
            first = (at - 1) // WIDTH * WIDTH
            entries = [load(data, AuditEntry) for data in await self._entries(first, head.size)]
            while at > first and len(found) < most:
                at -= 1
                if _takes(request, entries[at - first]):
                    found.append(_event(entries[at - first], index=at))
            if all(entry.unix_s < oldest_s for entry in entries):
                at = 0
        return pb.ListAuditEventsResponse(events=found, next_page_token=str(at) if at else "")

    async def export(self) -> AsyncGenerator[pb.ExportAuditLogResponse, None]:
        """Yield the objects of the log: its keys, its checkpoint, its tiles. Raises as ``page`` does."""
        head = await self._read()
        yield pb.ExportAuditLogResponse(
            name="verifier", data="".join(f"{each}\n" for each in head.verifiers).encode()
        )
        if head.checkpoint:
            yield pb.ExportAuditLogResponse(name=CHECKPOINT, data=head.checkpoint.encode())
        for level, index, name in _names_of(head.size):
            data = await self._object(level, index, name)
            yield pb.ExportAuditLogResponse(name=name, data=data)
        yield pb.ExportAuditLogResponse(last=True)

    async def _read(self) -> AuditHead:
        """Return the head, once the entry of this read is in the store."""
        await self._store.commit([])
        entry = await self._store.get(HEAD)
        return AuditHead("") if entry is None else entry.load(AuditHead)

    async def _entries(self, first: int, size: int) -> list[bytes]:
        index, width = first // WIDTH, min(WIDTH, size - first)
        try:
            return entries_of(await self._object(None, index, tile_name(None, index, width % WIDTH)))[:width]
        except LogDamaged as error:
            raise IntegrityError(str(error)) from error

    async def _object(self, level: int | None, index: int, name: str) -> bytes:
        """Return a tile or a bundle, from the full one if the partial one is deleted already."""
        try:
            return await self._tiles.read(name)
        except NotFound:
            full = await self._tiles.read(tile_name(level, index))
        width = int(name.rpartition("/")[2])
        if level is None:
            entries = entries_of(full)[:width]
            return full[: sum(2 + len(entry) for entry in entries)]
        return full[: 32 * width]


def _takes(request: pb.ListAuditEventsRequest, entry: AuditEntry) -> bool:
    """Return whether the request selects the entry; what it leaves empty selects all."""
    end_s = request.end_time.ToNanoseconds() / 1e9 if request.HasField("end_time") else float("inf")
    return (
        request.start_time.ToNanoseconds() / 1e9 <= entry.unix_s < end_s
        and request.actor in ("", entry.actor.key)
        and request.action in ("", entry.method, entry.method.rpartition("/")[2])
        and request.resource in ("", entry.resource)
    )


_event: Final = Mirror(
    AuditEntry,
    pb.AuditEvent,
    {
        "unix_s": Pair("time", timestamp),
        "method": Pair("action"),
        "actor": Mirror(Actor, pb.AuditEvent, {"key": Pair("actor")}),
    },
).to_proto


def _index_of(token: str) -> int | None:
    if token and not (token.isdecimal() and len(token) < 20):
        raise InvalidInput("page_token is none that this list gave", field="page_token")
    return int(token) if token else None


def _names_of(size: int) -> Iterator[tuple[int | None, int, str]]:
    """Yield level, index and name of each tile and bundle of a log of this size."""
    level = 0
    while count := size >> 8 * level:
        for index in range(-(-count // WIDTH)):
            width = min(WIDTH, count - index * WIDTH) % WIDTH
            yield level, index, tile_name(level, index, width)
            if not level:
                yield None, index, tile_name(None, index, width)
        level += 1
