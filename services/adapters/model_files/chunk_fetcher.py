"""Chunks from the registry alone, one at a time."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

import structlog

from services.adapters.threads import in_thread
from services.core.errors import IntegrityError, NotFound, SlowReader, StoreUnavailable, Unavailable
from services.core.manifest import ManifestFile, sha256_of
from services.ports.clock import Clock
from services.ports.registry import VersionSource

log = structlog.get_logger()

_CHUNK_TRIES: Final = 2
# Long enough for a registry to restart. Beyond it the caller decides.
_PATIENCE_S: Final = 30.0
_BUSY_S: Final = 600.0  # the same, of a registry that states when to try again
_BACKOFF_FIRST_S: Final = 0.2
_BACKOFF_MOST_S: Final = 5.0


class ChunkFetcher:
    """Fetches verified chunks: resumed after a broken connection, repeated when damaged."""

    def __init__(self, registry: VersionSource, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    async def fetch(self, file: ManifestFile, index: int) -> bytes:
        """Return one verified chunk. Damaged bytes are requested once more, then raise IntegrityError."""
        for attempt in range(_CHUNK_TRIES):
            data = await self._receive(file, index)
            if await in_thread(sha256_of, data) == file.chunks[index]:
                return data
            log.warning("model_chunk.received_damaged", path=file.path, chunk=index, attempt=attempt + 1)
        raise IntegrityError(
            f"chunk {index} of {file.path} is not {file.chunks[index]}, twice",
            path=file.path,
            chunk=index,
            digest=file.chunks[index],
        )

    async def _receive(self, file: ManifestFile, index: int) -> bytes:
        """Return the bytes that the registry sends, at most one more than the chunk's size.

        A broken connection is resumed at the byte where it broke, with capped backoff, until nothing was
        received for ``_PATIENCE_S``, or for ``_BUSY_S`` from a registry that has too many downloads.
        """
        size, received, delay_s = file.chunk_bytes(index), bytearray(), _BACKOFF_FIRST_S
        received_s = self._clock.monotonic_s()
        while True:
            try:
                async with aclosing(self._registry.download(file.chunks[index], len(received))) as pieces:
                    async for piece in pieces:
                        received += piece[: size + 1 - len(received)]
                        received_s, delay_s = self._clock.monotonic_s(), _BACKOFF_FIRST_S
                        if len(received) > size:
                            break
                return bytes(received)
            except NotFound as exc:
                raise NotFound(
                    f"the registry has chunk {index} of {file.path} no more: publish the version again",
                    path=file.path,
                    chunk=index,
                    digest=file.chunks[index],
                ) from exc
            except (Unavailable, SlowReader) as exc:  # SlowReader: this process stalled
                is_busy = exc.retry_after_s is not None and not isinstance(exc, StoreUnavailable)
                patience_s = _BUSY_S if is_busy else _PATIENCE_S
                if self._clock.monotonic_s() - received_s > patience_s:
                    raise
                log.info("model_chunk.download_broken", path=file.path, chunk=index, error=exc.message)
                await self._clock.sleep(max(delay_s, exc.retry_after_s or 0.0))
                delay_s = min(_BACKOFF_MOST_S, delay_s * 2)
