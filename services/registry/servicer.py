"""RegistryService over gRPC: converts messages and delegates every decision to ``service.py``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Final

import grpc

from fairway.formats.signatures import policy_from_proto, policy_to_proto
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc
from services.core.errors import InvalidInput
from services.registry.service import RegistryService
from services.rpc.bounded_writes import BoundedWrites
from services.rpc.convert.registry import (
    manifest_from_proto,
    orders_to_proto,
    report_from_proto,
    version_to_proto,
)
from services.rpc.peers import PeerRules
from services.runtime.identity import principal

Context = grpc.aio.ServicerContext[Any, Any]

_UNREAD_S: Final = 30.0


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, service: RegistryService, *, unread_s: float = _UNREAD_S) -> None:
        """A download that is not read for ``unread_s`` ends; its reader can resume from its offset."""
        self._service = service
        self.unread_s = unread_s

    async def FindMissingChunks(
        self, request: pb.FindMissingChunksRequest, context: Context
    ) -> pb.FindMissingChunksResponse:
        return pb.FindMissingChunksResponse(digests=await self._service.find_missing(request.digests))

    async def UploadChunk(
        self, request_iterator: AsyncIterator[pb.UploadChunkRequest], context: Context
    ) -> pb.UploadChunkResponse:
        parts = aiter(request_iterator)
        first = await anext(parts, pb.UploadChunkRequest())
        if not first.HasField("header"):
            raise InvalidInput("the first message of an upload is its header", field="header")
        header = first.header
        await self._service.upload(header.digest, header.size_bytes, _data(parts))
        return pb.UploadChunkResponse(digest=header.digest)

    async def DownloadChunk(  # type: ignore[override]  # a coroutine that writes: STYLE.md, 16
        self, request: pb.DownloadChunkRequest, context: Context
    ) -> None:
        with BoundedWrites(context, self.unread_s) as stream:
            pieces = self._service.download(request.digest, request.offset_bytes, base=request.base)
            async with aclosing(pieces):
                async for piece in pieces:
                    await stream.write(pb.DownloadChunkResponse(data=piece))

    async def ExchangeChunks(
        self, request: pb.ExchangeChunksRequest, context: Context
    ) -> pb.ExchangeChunksResponse:
        report = report_from_proto(request)
        base, who = request.base_digest, PeerRules.identity(context)
        orders = await self._service.tracker.exchange(
            request.model, request.version_digest, report, base_digest=base, reporter=who
        )
        return orders_to_proto(orders)

    async def CreateVersion(
        self, request: pb.CreateVersionRequest, context: Context
    ) -> pb.CreateVersionResponse:
        manifest = manifest_from_proto(request.manifest)
        record, created = await self._service.create_version(
            request.model,
            manifest,
            publisher=principal().key_id,
            for_another_engine=request.for_another_engine,
        )
        return pb.CreateVersionResponse(version=version_to_proto(record, manifest), created=created)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        record, manifest = await self._service.get_version(request.model, request.version)
        tags = await self._service.tags(request.model)
        named = [tag for tag, digest in tags.items() if digest == record.digest]
        signatures = await self._service.signatures.of(record.model, record.digest)
        return pb.GetVersionResponse(version=version_to_proto(record, manifest, named, signatures))

    async def ListVersions(
        self, request: pb.ListVersionsRequest, context: Context
    ) -> pb.ListVersionsResponse:
        """Return versions without their manifests, which can have megabytes each; GetVersion returns
        manifests."""
        records, token = await self._service.list_versions(
            request.model, size=request.page_size, token=request.page_token
        )
        tags = await self._service.tags(request.model)
        versions = [
            version_to_proto(record, None, [tag for tag, digest in tags.items() if digest == record.digest])
            for record in records
        ]
        return pb.ListVersionsResponse(versions=versions, next_page_token=token)

    async def ListRegisteredModels(
        self, request: pb.ListRegisteredModelsRequest, context: Context
    ) -> pb.ListRegisteredModelsResponse:
        models, token = await self._service.list_models(size=request.page_size, token=request.page_token)
        return pb.ListRegisteredModelsResponse(
            models=[pb.RegisteredModel(name=m.name, tags=m.tags, versions=m.versions) for m in models],
            next_page_token=token,
        )

    async def SetTag(self, request: pb.SetTagRequest, context: Context) -> pb.SetTagResponse:
        revision = await self._service.set_tag(
            request.model, request.tag, request.digest, etag=request.etag, request_id=request.request_id
        )
        return pb.SetTagResponse(revision=revision)

    async def DeleteTag(self, request: pb.DeleteTagRequest, context: Context) -> pb.DeleteTagResponse:
        await self._service.delete_tag(
            request.model, request.tag, etag=request.etag, request_id=request.request_id
        )
        return pb.DeleteTagResponse()

    async def AddSignature(
        self, request: pb.AddSignatureRequest, context: Context
    ) -> pb.AddSignatureResponse:
        added = await self._service.signatures.add(request.model, request.digest, request.bundle)
        return pb.AddSignatureResponse(added=added)

    async def GetSignerPolicy(
        self, request: pb.GetSignerPolicyRequest, context: Context
    ) -> pb.GetSignerPolicyResponse:
        policy, etag = await self._service.signatures.policy(request.model)
        return pb.GetSignerPolicyResponse(policy=policy_to_proto(policy), etag=etag)

    async def UpdateSignerPolicy(
        self, request: pb.UpdateSignerPolicyRequest, context: Context
    ) -> pb.UpdateSignerPolicyResponse:
        policy = policy_from_proto(request.policy)
        etag = await self._service.signatures.update_policy(
            policy, etag=request.etag, request_id=request.request_id
        )
        return pb.UpdateSignerPolicyResponse(etag=etag)

    async def DeleteVersion(
        self, request: pb.DeleteVersionRequest, context: Context
    ) -> pb.DeleteVersionResponse:
        await self._service.delete_version(request.model, request.digest, request_id=request.request_id)
        return pb.DeleteVersionResponse()

    async def CollectGarbage(
        self, request: pb.CollectGarbageRequest, context: Context
    ) -> pb.CollectGarbageResponse:
        collected = await self._service.collect_garbage(
            min_age_s=request.min_age.ToTimedelta().total_seconds(), dry_run=request.dry_run
        )
        return pb.CollectGarbageResponse(**asdict(collected))


async def _data(parts: AsyncIterator[pb.UploadChunkRequest]) -> AsyncIterator[bytes]:
    async for part in parts:
        if part.WhichOneof("part") != "data" or not part.data:
            raise InvalidInput("after its header an upload has data only", field="data")
        yield part.data
