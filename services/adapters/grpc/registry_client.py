"""The registry client over gRPC. Implements ``ports.registry.VersionSource``; its results are verified."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import grpc

from fairway.v1 import registry_pb2, registry_pb2_grpc
from services.core.errors import IntegrityError, InvalidInput
from services.core.manifest import Manifest, check_manifest, digest_of, is_digest
from services.core.records import VersionRecord
from services.core.swarm import ChunkOrders, ChunkReport
from services.rpc.channel import auth_metadata
from services.rpc.convert.registry import (
    manifest_from_proto,
    orders_from_proto,
    record_from_proto,
    report_to_proto,
)
from services.rpc.status import from_rpc_error

CALL_TIMEOUT_S: Final = 15.0
CHUNK_TIMEOUT_S: Final = 120.0
EXCHANGE_TIMEOUT_S: Final = 5.0


async def data_of(begin: Callable[[], Any]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of the parts that a call streams. Raises the error of its status."""
    call = begin()
    try:
        async for part in call:
            yield part.data
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc) from exc
    finally:
        call.cancel()


class RegistryClient:
    """``channel`` returns the channel of a call that begins; its owner closes it.

    ``token`` is the internal token or an admin key.
    """

    def __init__(self, channel: Callable[[], grpc.aio.Channel], token: str) -> None:
        self._channel = channel
        self._metadata = auth_metadata(token)

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        """Return a version by digest or tag. The manifest has the digest that names the version.

        Raises NotFound, Unavailable, or IntegrityError when the response is not the requested version.
        """
        request = registry_pb2.GetVersionRequest(model=model, version=version)
        try:
            answer = await self._stub().GetVersion(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc
        record, manifest = record_from_proto(answer.version), manifest_from_proto(answer.version.manifest)
        if digest_of(manifest) != record.digest or (is_digest(version) and version != record.digest):
            raise IntegrityError(
                f"the registry's answer for {model} {version} has another digest", model=model
            )
        try:
            check_manifest(manifest)
        except InvalidInput as exc:
            raise IntegrityError(
                f"the registry's manifest of {model} is refused: {exc}", model=model
            ) from exc
        return record, manifest

    async def exchange_chunks(
        self, model: str, digest: str, report: ChunkReport, *, base_digest: str = ""
    ) -> ChunkOrders:
        """Return which chunks of a version to fetch next. Raises ModelNotFound, OverQuota, Unavailable."""
        request = report_to_proto(report, model=model, version_digest=digest, base_digest=base_digest)
        try:
            answer = await self._stub().ExchangeChunks(
                request, timeout=EXCHANGE_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc
        return orders_from_proto(answer)

    def download(self, digest: str, offset_bytes: int = 0, *, base: str = "") -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a chunk from an offset on, or of its delta from the chunk ``base``, unverified.

        Raises NotFound, Unavailable.
        """
        request = registry_pb2.DownloadChunkRequest(digest=digest, offset_bytes=offset_bytes, base=base)
        return data_of(
            lambda: self._stub().DownloadChunk(request, timeout=CHUNK_TIMEOUT_S, metadata=self._metadata)
        )

    def _stub(self) -> registry_pb2_grpc.RegistryServiceAsyncStub:
        return registry_pb2_grpc.RegistryServiceStub(self._channel())
