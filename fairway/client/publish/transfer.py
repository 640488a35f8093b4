"""Upload of chunks to the registry: several at once, each repeated when the connection breaks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

import grpc

from fairway.client.errors import STATUS_LOST
from fairway.client.publish.folder import Chunk, read_chunk
from fairway.task_group import TaskGroup
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc

MESSAGE_BYTES: Final = 512 * 1024
FIND_BATCH: Final = 2048
PARALLEL_UPLOADS: Final = 4
CALL_TIMEOUT_S: Final = 30.0
UPLOAD_TIMEOUT_S: Final = 300.0
# A registry that restarts is back within seconds; a longer outage needs an operator.
PATIENCE_S: Final = 60.0
_DELAY_FIRST_S: Final = 0.2
_DELAY_MOST_S: Final = 5.0
_RETRIED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Errors of a write after the server ended the call. The call's status has the reason.
_WRITE_FAILED: Final = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)

Metadata = Sequence[tuple[str, str]]
T = TypeVar("T")


class Transfer:
    """Calls of one publication. ``sent`` receives the bytes sent, negative when they must be sent again."""

    def __init__(
        self,
        stub: registry_pb2_grpc.RegistryServiceAsyncStub,
        metadata: Metadata,
        *,
        sent: Callable[[int], object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._stub = stub
        self._metadata = tuple(metadata)
        self._sent = sent
        self._patience_s = patience_s
        self._responded_s = time.monotonic()

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Return the digests that the registry lacks."""
        missing: list[str] = []
        for start in range(0, len(digests), FIND_BATCH):
            missing += await self.again(partial(self._lacking, digests[start : start + FIND_BATCH]))
        return missing

    async def upload(self, chunks: Mapping[str, Chunk]) -> None:
        """Return once all are stored; the first permanent failure cancels the others."""
        waiting = iter(chunks.items())

        async def worker() -> None:
            for digest, chunk in waiting:  # one iterator for all workers: each chunk is taken once
                await self._upload(digest, chunk)

        try:
            async with TaskGroup() as group:
                for _ in range(min(PARALLEL_UPLOADS, len(chunks))):
                    group.create_task(worker())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the call's result; it is retried while the registry is unreachable, within the patience.

        The patience restarts with every response of the registry.
        """
        last_error: grpc.aio.AioRpcError | None = None
        delay_s = _DELAY_FIRST_S
        while True:
            try:
                answer = await call()
                self._responded_s = time.monotonic()
                return answer
            except grpc.aio.AioRpcError as exc:
                is_status_lost = _is_status_lost(exc)
                last_error = last_error if is_status_lost else exc
                is_over = time.monotonic() - self._responded_s > self._patience_s
                if is_over or not (is_status_lost or exc.code() in _RETRIED):
                    raise (last_error or exc) from None
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(_DELAY_MOST_S, delay_s * 2)

    async def _upload(self, digest: str, chunk: Chunk) -> None:
        data = await asyncio.to_thread(read_chunk, digest, chunk)

        is_again = False

        async def once() -> None:
            nonlocal is_again
            if is_again and not await self._lacking([digest]):  # it was stored before the connection broke
                self._sent(len(data))
                return
            is_again = True
            counted = 0
            call = self._stub.UploadChunk(metadata=self._metadata, timeout=UPLOAD_TIMEOUT_S)
            status = _Status(call)
            try:
                with suppress(*_WRITE_FAILED):
                    await call.write(
                        pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=len(data)))
                    )
                    for start in range(0, len(data), MESSAGE_BYTES):
                        part = data[start : start + MESSAGE_BYTES]
                        await call.write(pb.UploadChunkRequest(data=part))
                        counted += len(part)
                        self._sent(len(part))
                    await call.done_writing()
                await status.succeeded()
            except BaseException:
                call.cancel()
                self._sent(-counted)
                raise
            self._sent(len(data) - counted)  # another publisher stored it: the server does not read the rest

        await self.again(once)

    async def _lacking(self, digests: Sequence[str]) -> Sequence[str]:
        """Return those of at most FIND_BATCH digests that the registry lacks, in one call."""
        request = pb.FindMissingChunksRequest(digests=digests)
        answer = await self._stub.FindMissingChunks(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        return answer.digests


class _Status:
    """The server's status at the end of a call.

    A write that fails after the status arrived makes grpc.aio replace it by its own internal error.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._received: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """Store the status now: a later read may return grpc.aio's replacement."""
        code, details = _result(call.code()), _result(call.details())
        initial, trailing = _result(call.initial_metadata()), _result(call.trailing_metadata())
        self._received = grpc.aio.AioRpcError(code, initial, trailing, details)

    async def succeeded(self) -> None:
        """Return when the call succeeded. Raises the error of the server's status."""
        try:
            await self._call
        except grpc.aio.AioRpcError as error:
            received = self._received if _is_status_lost(error) else error
            if received is None or _is_status_lost(received):
                raise
            if received.code() is not grpc.StatusCode.OK:
                raise received from None


def _is_status_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether this is the error with which grpc.aio replaces a status when a write fails."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == STATUS_LOST


def _result(of: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that completes without waiting."""
    try:
        of.send(None)
    except StopIteration as ended:
        return cast("T", ended.value)
    of.close()
    raise RuntimeError("the call has no status yet")
