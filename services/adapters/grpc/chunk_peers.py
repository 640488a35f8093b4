"""The client of nodes that serve chunks. What it returns is not verified."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.grpc.registry_client import CHUNK_TIMEOUT_S, data_of
from services.core.swarm import ChunkPeer
from services.rpc.channel import RoleChannels, auth_metadata
from services.runtime.certificates import Certificates


class ChunkPeers:
    """Owns a channel for each of the nodes that were read last."""

    def __init__(self, token: str, certificates: Certificates | None = None) -> None:
        self._metadata = auth_metadata(token)
        self._channels = RoleChannels(lambda address: certificates)

    def read(
        self, peer: ChunkPeer, digest: str, index: int, base_digest: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a chunk of a version, or of its delta from the version ``base_digest``.

        Raises NotFound for a node that lacks it, Unavailable.
        """
        stub = worker_pb2_grpc.ChunkServiceStub(self._channels(peer.address, peer.role)())
        request = worker_pb2.ReadChunkRequest(version_digest=digest, index=index, base_digest=base_digest)
        return data_of(lambda: stub.ReadChunk(request, timeout=CHUNK_TIMEOUT_S, metadata=self._metadata))

    async def close(self) -> None:
        await self._channels.close()
