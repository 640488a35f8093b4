"""The RPC by which nodes fetch chunks of model files from each other."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Final

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.model_files.shared_chunks import SharedChunks
from services.rpc.bounded_writes import BoundedWrites

_UNREAD_S: Final = 10.0


class ChunkServicer(worker_pb2_grpc.ChunkServiceServicer):
    def __init__(self, chunks: SharedChunks) -> None:
        self._chunks = chunks

    async def ReadChunk(  # type: ignore[override]  # the stubs type generators only
        self, request: worker_pb2.ReadChunkRequest, context: Any
    ) -> None:
        with BoundedWrites(context, _UNREAD_S) as stream:
            async with aclosing(
                self._chunks.pieces(request.version_digest, request.index, request.base_digest)
            ) as pieces:
                async for piece in pieces:
                    await stream.write(worker_pb2.ReadChunkResponse(data=piece))
