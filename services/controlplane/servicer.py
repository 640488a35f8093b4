"""ControlPlaneService on the wire: converts, and leaves every decision to ``service.py``."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Final

import grpc

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.resources import Stored
from services.controlplane.service import ControlPlaneService, DeploymentView, NodeView
from services.controlplane.unimplemented import NotYetServed
from services.controlplane.watcher import Change, watch_resources
from services.core.errors import InvalidInput
from services.core.records import DEPLOYMENTS, KEYS, NODES, TENANTS, ApiKey, Deployment, Meta, Node, Tenant
from services.ports.store import Store
from services.rpc import convert_controlplane as convert

Context = grpc.aio.ServicerContext[Any, Any]

_WATCHED: Final = {
    pb.RESOURCE_KIND_TENANT: TENANTS,
    pb.RESOURCE_KIND_KEY: KEYS,
    pb.RESOURCE_KIND_DEPLOYMENT: DEPLOYMENTS,
    pb.RESOURCE_KIND_NODE: NODES,
}


class ControlPlaneServicer(NotYetServed):
    def __init__(self, service: ControlPlaneService, store: Store) -> None:
        """``store`` is the one of the service: WatchResources follows it."""
        self._service = service
        self._store = store

    async def CreateTenant(
        self, request: pb.CreateTenantRequest, context: Context
    ) -> pb.CreateTenantResponse:
        tenant = convert.tenant_from_proto(request.tenant)
        stored = await self._service.create_tenant(tenant, request_id=request.request_id)
        return pb.CreateTenantResponse(tenant=_tenant(stored))

    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.GetTenantResponse:
        return pb.GetTenantResponse(tenant=_tenant(await self._service.get_tenant(request.name)))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsResponse:
        page, token = await self._service.list_tenants(size=request.page_size, token=request.page_token)
        return pb.ListTenantsResponse(tenants=[_tenant(stored) for stored in page], next_page_token=token)

    async def UpdateTenant(
        self, request: pb.UpdateTenantRequest, context: Context
    ) -> pb.UpdateTenantResponse:
        tenant = convert.tenant_from_proto(request.tenant)
        stored = await self._service.update_tenant(
            tenant, etag=request.tenant.metadata.etag, request_id=request.request_id
        )
        return pb.UpdateTenantResponse(tenant=_tenant(stored))

    async def DeleteTenant(
        self, request: pb.DeleteTenantRequest, context: Context
    ) -> pb.DeleteTenantResponse:
        await self._service.delete_tenant(request.name, etag=request.etag)
        return pb.DeleteTenantResponse()

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        key = convert.key_from_proto(request.key)
        stored, text = await self._service.create_key(key, request_id=request.request_id)
        return pb.CreateKeyResponse(key=_key(stored), secret=text)

    async def GetKey(self, request: pb.GetKeyRequest, context: Context) -> pb.GetKeyResponse:
        return pb.GetKeyResponse(key=_key(await self._service.get_key(request.name)))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        page, token = await self._service.list_keys(size=request.page_size, token=request.page_token)
        return pb.ListKeysResponse(keys=[_key(stored) for stored in page], next_page_token=token)

    async def UpdateKey(self, request: pb.UpdateKeyRequest, context: Context) -> pb.UpdateKeyResponse:
        stored = await self._service.update_key(
            convert.key_from_proto(request.key),
            etag=request.key.metadata.etag,
            request_id=request.request_id,
        )
        return pb.UpdateKeyResponse(key=_key(stored))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, context: Context) -> pb.DeleteKeyResponse:
        await self._service.delete_key(request.name, etag=request.etag)
        return pb.DeleteKeyResponse()

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        grace_s = request.grace.seconds + request.grace.nanos / 1e9
        stored, text = await self._service.rotate_key(request.name, grace_s=grace_s)
        return pb.RotateKeyResponse(key=_key(stored), secret=text)

    async def CreateDeployment(
        self, request: pb.CreateDeploymentRequest, context: Context
    ) -> pb.CreateDeploymentResponse:
        deployment = convert.deployment_from_proto(request.deployment)
        view = await self._service.create_deployment(deployment, request_id=request.request_id)
        return pb.CreateDeploymentResponse(deployment=_deployment(view))

    async def GetDeployment(
        self, request: pb.GetDeploymentRequest, context: Context
    ) -> pb.GetDeploymentResponse:
        view = await self._service.get_deployment(request.name)
        return pb.GetDeploymentResponse(deployment=_deployment(view))

    async def ListDeployments(
        self, request: pb.ListDeploymentsRequest, context: Context
    ) -> pb.ListDeploymentsResponse:
        page, token = await self._service.list_deployments(size=request.page_size, token=request.page_token)
        return pb.ListDeploymentsResponse(
            deployments=[_deployment(view) for view in page], next_page_token=token
        )

    async def UpdateDeployment(
        self, request: pb.UpdateDeploymentRequest, context: Context
    ) -> pb.UpdateDeploymentResponse:
        deployment = convert.deployment_from_proto(request.deployment)
        view = await self._service.update_deployment(
            deployment, etag=request.deployment.metadata.etag, request_id=request.request_id
        )
        return pb.UpdateDeploymentResponse(deployment=_deployment(view))

    async def DeleteDeployment(
        self, request: pb.DeleteDeploymentRequest, context: Context
    ) -> pb.DeleteDeploymentResponse:
        await self._service.delete_deployment(request.name, etag=request.etag)
        return pb.DeleteDeploymentResponse()

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.GetNodeResponse:
        return pb.GetNodeResponse(node=_node(await self._service.get_node(request.name)))

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        page, token = await self._service.list_nodes(size=request.page_size, token=request.page_token)
        return pb.ListNodesResponse(nodes=[_node(view) for view in page], next_page_token=token)

    async def CordonNode(self, request: pb.CordonNodeRequest, context: Context) -> pb.CordonNodeResponse:
        return pb.CordonNodeResponse(node=_node(await self._service.cordon(request.name)))

    async def UncordonNode(
        self, request: pb.UncordonNodeRequest, context: Context
    ) -> pb.UncordonNodeResponse:
        return pb.UncordonNodeResponse(node=_node(await self._service.uncordon(request.name)))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.DrainNodeResponse:
        return pb.DrainNodeResponse(node=_node(await self._service.drain(request.name)))

    async def WatchResources(  # type: ignore[override]  # a coroutine that writes: STYLE.md, 16
        self, request: pb.WatchResourcesRequest, context: Context
    ) -> None:
        """No kinds: all that can be watched. Nodes and deployments come without what workers report."""
        for kind in request.kinds:
            if kind not in _WATCHED:
                raise InvalidInput(f"{pb.ResourceKind.Name(kind)} cannot be watched", field="kinds")
        prefixes = [_WATCHED[kind] for kind in request.kinds] or list(_WATCHED.values())
        async with aclosing(watch_resources(self._store, prefixes, request.after_revision)) as batches:
            async for batch in batches:
                await context.write(
                    pb.WatchResourcesResponse(
                        revision=batch.revision,
                        changes=[_change(change) for change in batch.changes],
                        snapshot_end=batch.snapshot_end,
                    )
                )


def _tenant(stored: Stored[Tenant]) -> pb.Tenant:
    return convert.tenant_to_proto(stored.record, stored.etag)


def _key(stored: Stored[ApiKey]) -> pb.Key:
    return convert.key_to_proto(stored.record, stored.etag)


def _deployment(view: DeploymentView) -> pb.Deployment:
    status = pb.DeploymentStatus(
        assigned_replicas=len(view.replicas),
        ready_replicas=view.ready,
        message=view.message,
        replicas=[convert.replica_to_proto(replica.worker_id, replica.loaded) for replica in view.replicas],
    )
    return convert.deployment_to_proto(view.stored.record, view.stored.etag, status)


def _node(view: NodeView) -> pb.Node:
    return convert.node_to_proto(view.node, str(view.mod_revision), view.worker, view.incarnation)


def _change(change: Change) -> pb.ResourceChange:
    record, etag = change.record, str(change.mod_revision)
    found = pb.ResourceChange(deleted=record is None)
    if change.prefix == TENANTS:
        tenant = record if isinstance(record, Tenant) else Tenant(Meta(change.name))
        found.tenant.CopyFrom(convert.tenant_to_proto(tenant, etag))
    elif isinstance(record, ApiKey):
        found.key.CopyFrom(convert.key_to_proto(record, etag))
    elif isinstance(record, Deployment):
        found.deployment.CopyFrom(convert.deployment_to_proto(record, etag))
    elif isinstance(record, Node):
        found.node.CopyFrom(convert.node_to_proto(record, etag, None, 0))
    elif change.prefix == KEYS:
        found.key.metadata.name = change.name
    elif change.prefix == DEPLOYMENTS:
        found.deployment.metadata.name = change.name
    else:
        found.node.metadata.name = change.name
    return found
