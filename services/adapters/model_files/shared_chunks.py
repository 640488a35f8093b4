"""Chunks of this node's folders for other nodes: of complete folders, and the verified of partial ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.adapters import chunk_delta
from services.adapters.model_files.folders import ChunkPlace, read_chunk
from services.adapters.threads import in_thread
from services.core.errors import IntegrityError, NotFound, Unavailable
from services.core.manifest import CHUNK_BYTES, ManifestFile, distinct_chunks, sha256_of
from services.core.swarm import FailedChunk, bitmap_of
from services.core.token_bucket import TokenBucket
from services.ports.clock import Clock

PIECE_BYTES: Final = 128 * 1024
UPLOADS: Final = 16  # most chunks that are sent at once
_TURN_S: Final = 2.0  # longest wait for one of them to end
_CHUNK_S: Final = 4.0  # longest time for which a node's rate delays a chunk


@dataclass(frozen=True, slots=True)
class ChunkBase:
    """A complete version on this node. ``places``: of the chunk that each chunk is a change of, by digest."""

    digest: str = ""
    places: Mapping[str, ChunkPlace] = field(default_factory=dict)

    def chunk(self, chunk: str) -> str:
        """Return the chunk that a chunk is a change of, empty where none is known."""
        return self.places[chunk].digest if chunk in self.places else ""

    def read(self, chunk: str) -> bytes | None:
        """Return what a chunk is a change of, verified. None: no place is known, or it is lost or damaged."""
        return self.places[chunk].read() if chunk in self.places else None


class SharedVersion:
    """A version of which this node has chunks, and what its next report to the tracker has.

    Chunks are counted over the distinct ones of its files.
    """

    def __init__(
        self,
        model: str,
        digest: str,
        files: Sequence[ManifestFile],
        folders: Sequence[Path],
        base: ChunkBase | None = None,
    ) -> None:
        """``folders`` are those that have its files: the complete one and the partial one. With a ``base``
        it is shared with nodes that have that version too."""
        places = distinct_chunks(files)
        self.model = model
        self.digest = digest
        self.base = base or ChunkBase()
        self.chunks = tuple(places)
        self.places = tuple(places.values())
        self.gained: list[int] = []
        self.failed: list[FailedChunk] = []
        self.sends_bitmap = True
        self.is_fetching = False
        self.due_s = 0.0  # time of the next report
        self._folders = folders
        self._has = bytearray(len(places))

    def add(self, index: int) -> None:
        """Share a chunk that was verified, and of which every place is written."""
        self._has[index] = 1
        self.gained.append(index)

    def add_all(self) -> None:
        self._has = bytearray(b"\1" * len(self.chunks))

    def lacking(self) -> list[int]:
        return [index for index, has in enumerate(self._has) if not has]

    def bitmap(self) -> bytes:
        return bitmap_of((index for index, has in enumerate(self._has) if has), len(self.chunks))

    def chunk_bytes(self, index: int) -> int:
        file, at = self.places[index][0]
        return file.chunk_bytes(at)

    @property
    def key(self) -> tuple[str, str]:
        return self.digest, self.base.digest

    def sent(self, index: int) -> bytes:
        """Return a chunk, or its delta if that is smaller. Blocks for I/O. Raises as ``read``."""
        data = self.read(index)
        base = self.base.read(self.chunks[index])
        delta = data if base is None else chunk_delta.encode(data, base)
        return min(data, delta, key=len)

    def verified(self, index: int, data: bytes, base: bytes | None) -> bytes | None:
        """Return the chunk that was received as it is or as its delta; None: neither has its digest."""
        digest = self.chunks[index]
        if sha256_of(data) == digest:
            return data
        try:
            found = None if base is None else chunk_delta.decode(data, base)
        except IntegrityError:
            return None
        return found if found is not None and sha256_of(found) == digest else None

    def read(self, index: int) -> bytes:
        """Return a chunk. Blocks for I/O. Raises NotFound for one that is not here (any more)."""
        if index < len(self._has) and self._has[index]:
            file, at = self.places[index][0]
            for folder in self._folders:  # a complete folder was the partial one a moment ago
                try:
                    return read_chunk(folder / file.path, file, at)
                except OSError:
                    continue
        raise NotFound(f"chunk {index} of {self.digest} is not here")


class ByteRate:
    """Bytes per second of one direction of this node. 0: no bound."""

    def __init__(self, rate: int, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._bucket = TokenBucket(rate, max(PIECE_BYTES, rate // 4))
        self._turn = asyncio.Lock()

    def at_once(self, most: int) -> int:
        """Return how many chunks are to pass at once, so that none takes longer than ``_CHUNK_S``."""
        return min(most, max(1, int(self._rate * _CHUNK_S) // CHUNK_BYTES)) if self._rate else most

    async def take(self, size_bytes: int) -> None:
        """Return when so many bytes may pass, in the order of the calls."""
        if not self._rate:
            return
        async with self._turn:
            while size_bytes := size_bytes - self._bucket.take(size_bytes, self._clock.monotonic_s()):
                await self._clock.sleep(min(size_bytes, PIECE_BYTES) / self._rate)


class SharedChunks:
    """The versions that this node shares. Up to ``UPLOADS`` chunks are sent at once, fewer at a low rate."""

    def __init__(self, clock: Clock, *, bytes_per_s: int = 0) -> None:
        self.versions: dict[tuple[str, str], SharedVersion] = {}
        self.sent_bytes = 0
        self._pace = ByteRate(bytes_per_s, clock)
        self._most = self._pace.at_once(UPLOADS)
        self._turns = asyncio.Semaphore(self._most)

    async def pieces(self, digest: str, index: int, base_digest: str = "") -> AsyncGenerator[bytes, None]:
        """Yield a chunk, or its delta from that of a version which the caller has.

        Raises NotFound, and Unavailable with a time while too many are being sent.
        """
        if (version := self.versions.get((digest, base_digest))) is None:
            raise NotFound(f"no chunks of {digest} are shared here")
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            raise Unavailable(f"{self._most} chunks are being sent", retry_after_s=1.0) from None
        try:
            data = memoryview(await in_thread(version.sent, index))
            for begin in range(0, len(data), PIECE_BYTES):
                piece = bytes(data[begin : begin + PIECE_BYTES])
                await self._pace.take(len(piece))
                self.sent_bytes += len(piece)
                yield piece
        finally:
            self._turns.release()
