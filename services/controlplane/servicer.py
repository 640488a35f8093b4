"""ControlPlaneService on the wire: converts messages; ``service.py`` makes every decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, Protocol

import grpc

from fairway.mirror import Mirror, Pair
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.grpc.leader_calls import GrpcQueues
from services.controlplane.audit_reads import AuditReader
from services.controlplane.diagnosis.listing import for_tenant
from services.controlplane.event_log import Filter, page_of_events, watch_events
from services.controlplane.messages import (
    alias_message,
    budget_message,
    change_message,
    deployment_message,
    key_message,
    node_message,
    objective_message,
    tenant_message,
)
from services.controlplane.objectives.servicer import SliPages, warnings_of
from services.controlplane.resources.resources import Stored
from services.controlplane.rollouts.convert import (
    promotion_from_proto,
    rollout_from_proto,
    rollout_to_proto,
    stored_to_proto,
)
from services.controlplane.service import ControlPlaneService
from services.controlplane.watcher import (
    Name,
    ResourceChange,
    ResourceChanges,
    ResourceKind,
    View,
    watch_resources,
)
from services.core.errors import InvalidInput, PermissionDenied
from services.core.generation import Principal
from services.core.paging import page_of
from services.core.records import Budget, Objective
from services.ports.poison.quarantine import Quarantined
from services.ports.store import Store
from services.rpc.bounded_writes import BoundedWrites
from services.rpc.convert import controlplane as convert
from services.rpc.convert.inference import seconds_of, timestamp
from services.rpc.interceptors.access import caller, may_call
from services.runtime.identity import caller_tenant, principal
from services.runtime.ids import request_id_of

Context = grpc.aio.ServicerContext[Any, Any]

_UNREAD_S: Final = 30.0  # a watch ends when its client reads nothing for this long
_PER_MESSAGE: Final = 500
_WATCHED: Final = {
    pb.RESOURCE_KIND_TENANT: (ResourceKind.TENANT,),
    pb.RESOURCE_KIND_KEY: (ResourceKind.KEY,),
    pb.RESOURCE_KIND_DEPLOYMENT: (ResourceKind.DEPLOYMENT,),
    pb.RESOURCE_KIND_ROLLOUT: (ResourceKind.ROLLOUT,),
    pb.RESOURCE_KIND_NODE: (ResourceKind.NODE,),
    pb.RESOURCE_KIND_BUDGET: (ResourceKind.BUDGET,),
    pb.RESOURCE_KIND_OBJECTIVE: (ResourceKind.OBJECTIVE,),
    pb.RESOURCE_KIND_ALIAS: (ResourceKind.ALIAS,),
    pb.RESOURCE_KIND_MODEL: (ResourceKind.MODEL_VERSION, ResourceKind.MODEL_TAG),
}
# The method that reads a kind; the others are the fleet's, which whoever may watch may read.
_READ_BY: Final = {
    pb.RESOURCE_KIND_TENANT: "ListTenants",
    pb.RESOURCE_KIND_KEY: "ListKeys",
    pb.RESOURCE_KIND_BUDGET: "ListBudgets",
}
_METHODS: Final = pb.DESCRIPTOR.services_by_name["ControlPlaneService"].methods_by_name
_input: Final = Mirror(
    Quarantined,
    pb.QuarantinedInput,
    {"until_unix_s": Pair("expire_time", timestamp)},
).to_proto


class UsagePages(Protocol):
    """``usage.listing.UsageListing``."""

    async def page(self, request: pb.ListUsageRequest, *, forwarded: bool) -> pb.ListUsageResponse: ...


class ScalingPages(Protocol):
    """``scaling.servicer.ScalingListing``."""

    async def page(self, request: pb.ListScalingRequest, *, forwarded: bool) -> pb.ListScalingResponse: ...


class DiagnosedLatencies(Protocol):
    """``diagnosis.listing.Diagnoses``."""

    async def diagnose(
        self, request: pb.DiagnoseLatencyRequest, *, forwarded: bool
    ) -> pb.DiagnoseLatencyResponse: ...

    async def save_baseline(
        self, request: pb.SaveLatencyBaselineRequest, *, forwarded: bool
    ) -> pb.SaveLatencyBaselineResponse: ...


class ControlPlaneServicer(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    def __init__(
        self,
        service: ControlPlaneService,
        store: Store,
        scheduler: GrpcQueues,
        usage: UsagePages,
        slis: SliPages,
        scaling: ScalingPages,
        diagnoses: DiagnosedLatencies,
        *,
        audit: AuditReader,
        require_current: Callable[[Principal], None],
    ) -> None:
        """``store`` is the service's own: watches and events follow it.

        ``require_current`` raises once the caller's key is no longer valid; the watch then ends.
        """
        self._service = service
        self._store = store
        self._scheduler = scheduler
        self._usage = usage
        self._slis = slis
        self._scaling = scaling
        self._diagnoses = diagnoses
        self._audit = audit
        self._require_current = require_current

    async def GetCaller(self, request: pb.GetCallerRequest, context: Context) -> pb.GetCallerResponse:
        return convert.CALLER.to_proto(principal())

    async def CreateTenant(
        self, request: pb.CreateTenantRequest, context: Context
    ) -> pb.CreateTenantResponse:
        tenant = convert.tenant_from_proto(request.tenant)
        stored = await self._service.accounts.create_tenant(tenant, request_id=request.request_id)
        return pb.CreateTenantResponse(tenant=tenant_message(stored))

    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.GetTenantResponse:
        stored = await self._service.accounts.get_tenant(request.name)
        ring = await self._service.accounts.tenant_keyring(request.name)
        return pb.GetTenantResponse(tenant=tenant_message(stored, ring))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsResponse:
        page, token = await self._service.accounts.list_tenants(
            size=request.page_size, token=request.page_token
        )
        return pb.ListTenantsResponse(
            tenants=[tenant_message(stored) for stored in page], next_page_token=token
        )

    async def UpdateTenant(
        self, request: pb.UpdateTenantRequest, context: Context
    ) -> pb.UpdateTenantResponse:
        tenant = convert.tenant_from_proto(request.tenant)
        stored = await self._service.accounts.update_tenant(
            tenant, etag=request.tenant.metadata.etag, request_id=request.request_id
        )
        return pb.UpdateTenantResponse(tenant=tenant_message(stored))

    async def DeleteTenant(
        self, request: pb.DeleteTenantRequest, context: Context
    ) -> pb.DeleteTenantResponse:
        await self._service.accounts.delete_tenant(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.DeleteTenantResponse()

    async def EraseTenant(self, request: pb.EraseTenantRequest, context: Context) -> pb.EraseTenantResponse:
        stored = await self._service.accounts.erase_tenant(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.EraseTenantResponse(tenant=tenant_message(stored))

    async def RotateTenantKey(
        self, request: pb.RotateTenantKeyRequest, context: Context
    ) -> pb.RotateTenantKeyResponse:
        await self._service.accounts.rotate_tenant_key(request.name, request_id=request.request_id)
        return pb.RotateTenantKeyResponse()

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        key = convert.key_from_proto(request.key)
        stored, text = await self._service.accounts.create_key(key, request_id=request.request_id)
        return pb.CreateKeyResponse(key=key_message(stored), secret=text)

    async def GetKey(self, request: pb.GetKeyRequest, context: Context) -> pb.GetKeyResponse:
        return pb.GetKeyResponse(key=key_message(await self._service.accounts.get_key(request.name)))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        page, token = await self._service.accounts.list_keys(size=request.page_size, token=request.page_token)
        return pb.ListKeysResponse(keys=[key_message(stored) for stored in page], next_page_token=token)

    async def UpdateKey(self, request: pb.UpdateKeyRequest, context: Context) -> pb.UpdateKeyResponse:
        stored = await self._service.accounts.update_key(
            convert.key_from_proto(request.key),
            etag=request.key.metadata.etag,
            request_id=request.request_id,
        )
        return pb.UpdateKeyResponse(key=key_message(stored))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, context: Context) -> pb.DeleteKeyResponse:
        await self._service.accounts.delete_key(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.DeleteKeyResponse()

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        grace_s = seconds_of(request.grace)
        stored, text = await self._service.accounts.rotate_key(
            request.name, grace_s=grace_s, etag=request.etag, request_id=request.request_id
        )
        return pb.RotateKeyResponse(key=key_message(stored), secret=text)

    async def CreateDeployment(
        self, request: pb.CreateDeploymentRequest, context: Context
    ) -> pb.CreateDeploymentResponse:
        deployment = convert.deployment_from_proto(request.deployment)
        view = await self._service.deployments.create(deployment, request_id=request.request_id)
        return pb.CreateDeploymentResponse(deployment=deployment_message(view))

    async def GetDeployment(
        self, request: pb.GetDeploymentRequest, context: Context
    ) -> pb.GetDeploymentResponse:
        view = await self._service.deployments.get(request.name)
        return pb.GetDeploymentResponse(deployment=deployment_message(view))

    async def ListDeployments(
        self, request: pb.ListDeploymentsRequest, context: Context
    ) -> pb.ListDeploymentsResponse:
        page, token = await self._service.deployments.page(size=request.page_size, token=request.page_token)
        return pb.ListDeploymentsResponse(
            deployments=[deployment_message(view) for view in page], next_page_token=token
        )

    async def UpdateDeployment(
        self, request: pb.UpdateDeploymentRequest, context: Context
    ) -> pb.UpdateDeploymentResponse:
        deployment = convert.deployment_from_proto(request.deployment)
        view = await self._service.deployments.update(
            deployment, etag=request.deployment.metadata.etag, request_id=request.request_id
        )
        return pb.UpdateDeploymentResponse(deployment=deployment_message(view))

    async def ListDeploymentRevisions(
        self, request: pb.ListDeploymentRevisionsRequest, context: Context
    ) -> pb.ListDeploymentRevisionsResponse:
        found = await self._service.deployments.history(request.name)
        page, token = page_of(
            found, lambda one: one[0], size=request.page_size, token=request.page_token, descending=True
        )
        return pb.ListDeploymentRevisionsResponse(
            revisions=[
                pb.DeploymentRevision(
                    name=name,
                    time=timestamp(one.time_unix_s),
                    cause=one.cause,
                    deployment=convert.DEPLOYMENT.to_proto(one.deployment, status=pb.DeploymentStatus()),
                )
                for name, one in page
            ],
            next_page_token=token,
        )

    async def DeleteDeployment(
        self, request: pb.DeleteDeploymentRequest, context: Context
    ) -> pb.DeleteDeploymentResponse:
        await self._service.deployments.delete(request.name, etag=request.etag, request_id=request.request_id)
        return pb.DeleteDeploymentResponse()

    async def CreateBudget(
        self, request: pb.CreateBudgetRequest, context: Context
    ) -> pb.CreateBudgetResponse:
        budget = convert.budget_from_proto(request.budget)
        view = await self._service.budgets.create(budget, request_id=request.request_id)
        return pb.CreateBudgetResponse(budget=budget_message(view))

    async def GetBudget(self, request: pb.GetBudgetRequest, context: Context) -> pb.GetBudgetResponse:
        return pb.GetBudgetResponse(budget=budget_message(await self._service.budgets.get(request.name)))

    async def ListBudgets(self, request: pb.ListBudgetsRequest, context: Context) -> pb.ListBudgetsResponse:
        page, token = await self._service.budgets.page(size=request.page_size, token=request.page_token)
        return pb.ListBudgetsResponse(budgets=[budget_message(view) for view in page], next_page_token=token)

    async def UpdateBudget(
        self, request: pb.UpdateBudgetRequest, context: Context
    ) -> pb.UpdateBudgetResponse:
        view = await self._service.budgets.update(
            convert.budget_from_proto(request.budget),
            etag=request.budget.metadata.etag,
            request_id=request.request_id,
        )
        return pb.UpdateBudgetResponse(budget=budget_message(view))

    async def DeleteBudget(
        self, request: pb.DeleteBudgetRequest, context: Context
    ) -> pb.DeleteBudgetResponse:
        await self._service.budgets.delete(request.name, etag=request.etag, request_id=request.request_id)
        return pb.DeleteBudgetResponse()

    async def CreateObjective(
        self, request: pb.CreateObjectiveRequest, context: Context
    ) -> pb.CreateObjectiveResponse:
        objective = convert.objective_from_proto(request.objective)
        view = await self._service.objectives.create(objective, request_id=request.request_id)
        warnings = await warnings_of(objective, self._slis)
        return pb.CreateObjectiveResponse(objective=objective_message(view, warnings))

    async def GetObjective(
        self, request: pb.GetObjectiveRequest, context: Context
    ) -> pb.GetObjectiveResponse:
        return pb.GetObjectiveResponse(
            objective=objective_message(await self._service.objectives.get(request.name))
        )

    async def ListObjectives(
        self, request: pb.ListObjectivesRequest, context: Context
    ) -> pb.ListObjectivesResponse:
        page, token = await self._service.objectives.page(size=request.page_size, token=request.page_token)
        return pb.ListObjectivesResponse(objectives=map(objective_message, page), next_page_token=token)

    async def UpdateObjective(
        self, request: pb.UpdateObjectiveRequest, context: Context
    ) -> pb.UpdateObjectiveResponse:
        objective = convert.objective_from_proto(request.objective)
        view = await self._service.objectives.update(
            objective,
            etag=request.objective.metadata.etag,
            request_id=request.request_id,
        )
        warnings = await warnings_of(objective, self._slis)
        return pb.UpdateObjectiveResponse(objective=objective_message(view, warnings))

    async def DeleteObjective(
        self, request: pb.DeleteObjectiveRequest, context: Context
    ) -> pb.DeleteObjectiveResponse:
        await self._service.objectives.delete(request.name, etag=request.etag, request_id=request.request_id)
        return pb.DeleteObjectiveResponse()

    async def CreateAlias(self, request: pb.CreateAliasRequest, context: Context) -> pb.CreateAliasResponse:
        stored = await self._service.aliases.create(
            convert.ALIAS.from_proto(request.alias), request_id=request.request_id
        )
        return pb.CreateAliasResponse(alias=alias_message(stored))

    async def GetAlias(self, request: pb.GetAliasRequest, context: Context) -> pb.GetAliasResponse:
        return pb.GetAliasResponse(alias=alias_message(await self._service.aliases.get(request.name)))

    async def ListAliases(self, request: pb.ListAliasesRequest, context: Context) -> pb.ListAliasesResponse:
        page, token = await self._service.aliases.page(size=request.page_size, token=request.page_token)
        return pb.ListAliasesResponse(aliases=map(alias_message, page), next_page_token=token)

    async def UpdateAlias(self, request: pb.UpdateAliasRequest, context: Context) -> pb.UpdateAliasResponse:
        stored = await self._service.aliases.update(
            convert.ALIAS.from_proto(request.alias),
            etag=request.alias.metadata.etag,
            request_id=request.request_id,
        )
        return pb.UpdateAliasResponse(alias=alias_message(stored))

    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Context) -> pb.DeleteAliasResponse:
        await self._service.aliases.delete(request.name, etag=request.etag, request_id=request.request_id)
        return pb.DeleteAliasResponse()

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.GetNodeResponse:
        return pb.GetNodeResponse(node=node_message(await self._service.nodes.get(request.name)))

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        page, token = await self._service.nodes.page(size=request.page_size, token=request.page_token)
        return pb.ListNodesResponse(nodes=[node_message(view) for view in page], next_page_token=token)

    async def CordonNode(self, request: pb.CordonNodeRequest, context: Context) -> pb.CordonNodeResponse:
        view = await self._service.nodes.cordon(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.CordonNodeResponse(node=node_message(view))

    async def UncordonNode(
        self, request: pb.UncordonNodeRequest, context: Context
    ) -> pb.UncordonNodeResponse:
        view = await self._service.nodes.uncordon(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.UncordonNodeResponse(node=node_message(view))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.DrainNodeResponse:
        view = await self._service.nodes.drain(
            request.name,
            ends_in_s=seconds_of(request.ends_in),
            etag=request.etag,
            request_id=request.request_id,
        )
        return pb.DrainNodeResponse(node=node_message(view))

    async def AssignNode(self, request: pb.AssignNodeRequest, context: Context) -> pb.AssignNodeResponse:
        view = await self._service.nodes.assign(
            request.name, request.tenant, etag=request.etag, request_id=request.request_id
        )
        return pb.AssignNodeResponse(node=node_message(view))

    async def DeleteNode(self, request: pb.DeleteNodeRequest, context: Context) -> pb.DeleteNodeResponse:
        await self._service.nodes.delete(request.name, etag=request.etag, request_id=request.request_id)
        return pb.DeleteNodeResponse()

    async def CreateRollout(
        self, request: pb.CreateRolloutRequest, context: Context
    ) -> pb.CreateRolloutResponse:
        view = await self._service.rollouts.create(
            rollout_from_proto(request.rollout), request_id=request.request_id, dry_run=request.dry_run
        )
        return pb.CreateRolloutResponse(rollout=rollout_to_proto(view))

    async def GetRollout(self, request: pb.GetRolloutRequest, context: Context) -> pb.GetRolloutResponse:
        return pb.GetRolloutResponse(rollout=rollout_to_proto(await self._service.rollouts.get(request.name)))

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, context: Context
    ) -> pb.ListRolloutsResponse:
        page, token = await self._service.rollouts.page(size=request.page_size, token=request.page_token)
        return pb.ListRolloutsResponse(
            rollouts=[stored_to_proto(one.record, one.etag) for one in page], next_page_token=token
        )

    async def PromoteRollout(
        self, request: pb.PromoteRolloutRequest, context: Context
    ) -> pb.PromoteRolloutResponse:
        promotion = promotion_from_proto(request)
        view = await self._service.rollouts.promote(
            request.name, promotion, etag=request.etag, request_id=request.request_id
        )
        return pb.PromoteRolloutResponse(rollout=rollout_to_proto(view))

    async def PauseRollout(
        self, request: pb.PauseRolloutRequest, context: Context
    ) -> pb.PauseRolloutResponse:
        view = await self._service.rollouts.pause(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.PauseRolloutResponse(rollout=rollout_to_proto(view))

    async def ResumeRollout(
        self, request: pb.ResumeRolloutRequest, context: Context
    ) -> pb.ResumeRolloutResponse:
        view = await self._service.rollouts.resume(
            request.name, etag=request.etag, request_id=request.request_id
        )
        return pb.ResumeRolloutResponse(rollout=rollout_to_proto(view))

    async def AbortRollout(
        self, request: pb.AbortRolloutRequest, context: Context
    ) -> pb.AbortRolloutResponse:
        view = await self._service.rollouts.abort(
            request.name, reason=request.reason, etag=request.etag, request_id=request.request_id
        )
        return pb.AbortRolloutResponse(rollout=rollout_to_proto(view))

    async def RevertRollout(
        self, request: pb.RevertRolloutRequest, context: Context
    ) -> pb.RevertRolloutResponse:
        view = await self._service.rollouts.revert(
            request.name, reason=request.reason, etag=request.etag, request_id=request.request_id
        )
        return pb.RevertRolloutResponse(rollout=rollout_to_proto(view))

    async def ListQuarantined(
        self, request: pb.ListQuarantinedRequest, context: Context
    ) -> pb.ListQuarantinedResponse:
        page, token = await self._service.quarantine.page(
            model=request.model,
            version_digest=request.version_digest,
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListQuarantinedResponse(inputs=map(_input, page), next_page_token=token)

    async def DeleteQuarantined(
        self, request: pb.DeleteQuarantinedRequest, context: Context
    ) -> pb.DeleteQuarantinedResponse:
        await self._service.quarantine.delete(
            request.version_digest, request.fingerprint, request_id=request.request_id
        )
        return pb.DeleteQuarantinedResponse()

    async def ListSlis(self, request: pb.ListSlisRequest, context: Context) -> pb.ListSlisResponse:
        return await self._slis.page(request, forwarded=not caller())

    async def ListFinishedRequests(
        self, request: pb.ListFinishedRequestsRequest, context: Context
    ) -> pb.ListFinishedRequestsResponse:
        return await self._slis.finished(request, forwarded=not caller())

    async def DiagnoseLatency(
        self, request: pb.DiagnoseLatencyRequest, context: Context
    ) -> pb.DiagnoseLatencyResponse:
        if tenant := caller_tenant():
            if request.tenant not in ("", tenant):
                return pb.DiagnoseLatencyResponse()  # the answer for a tenant that does not exist
            request.tenant = tenant
        found = await self._diagnoses.diagnose(request, forwarded=not caller())
        return for_tenant(found, tenant) if tenant else found

    async def SaveLatencyBaseline(
        self, request: pb.SaveLatencyBaselineRequest, context: Context
    ) -> pb.SaveLatencyBaselineResponse:
        return await self._diagnoses.save_baseline(request, forwarded=not caller())

    async def ListAuditEvents(
        self, request: pb.ListAuditEventsRequest, context: Context
    ) -> pb.ListAuditEventsResponse:
        return await self._audit.page(request)

    async def ExportAuditLog(  # type: ignore[override]  # writes: grpc.aio leaves a suspended generator open
        self, request: pb.ExportAuditLogRequest, context: Context
    ) -> None:
        with BoundedWrites(context, _UNREAD_S) as stream:
            async with aclosing(self._audit.export()) as objects:
                async for each in objects:
                    self._require_current(principal())
                    await stream.write(each)

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Context) -> pb.ListQueuesResponse:
        page, names = await asyncio.gather(
            self._scheduler.page(size=request.page_size, token=request.page_token, tenant=request.tenant),
            self._service.deployments.names_by_version(),
        )
        return pb.ListQueuesResponse(
            queues=[
                pb.Queue(pool=pool, deployments=names.get(pool.version_digest, ())) for pool in page.pools
            ],
            next_page_token=page.next_page_token,
            leader_id=page.leadership.leader_id,
            leader_epoch=page.leadership.epoch,
        )

    async def ListScaling(self, request: pb.ListScalingRequest, context: Context) -> pb.ListScalingResponse:
        return await self._scaling.page(request, forwarded=not caller())

    async def ExplainPlacement(
        self, request: pb.ExplainPlacementRequest, context: Context
    ) -> pb.ExplainPlacementResponse:
        found = await self._scheduler.explain(request_id_of(request.request_id))
        return pb.ExplainPlacementResponse(
            decisions=found.decisions,
            rows=found.rows,
            since=found.since,
            leader_id=found.leadership.leader_id,
            leader_epoch=found.leadership.epoch,
        )

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        page = await self._scheduler.workers(size=request.page_size, token=request.page_token)
        return pb.ListWorkersResponse(
            workers=page.reporters,
            next_page_token=page.next_page_token,
            leader_id=page.leadership.leader_id,
            leader_epoch=page.leadership.epoch,
        )

    async def ListUsage(self, request: pb.ListUsageRequest, context: Context) -> pb.ListUsageResponse:
        if tenant := caller_tenant():
            if request.tenant not in ("", tenant):
                return pb.ListUsageResponse()  # the answer for a tenant that does not exist
            request.tenant = tenant
        return await self._usage.page(request, forwarded=not caller())

    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsResponse:
        kinds = _readable(request.kinds, convert.KINDS.values())
        wanted = Filter(convert.event_kinds(kinds), request.resource)
        page, token = await page_of_events(
            self._store, wanted, size=request.page_size, token=request.page_token
        )
        return pb.ListEventsResponse(
            events=[convert.event_to_proto(event.name, event.record) for event in page], next_page_token=token
        )

    async def WatchEvents(  # type: ignore[override]  # writes: grpc.aio leaves a suspended generator open
        self, request: pb.WatchEventsRequest, context: Context
    ) -> None:
        kinds = _readable(request.kinds, convert.KINDS.values())
        wanted = Filter(convert.event_kinds(kinds), request.resource)
        batches = watch_events(
            self._store, wanted, newest=request.newest, after_revision=request.after_revision
        )
        with BoundedWrites(context, _UNREAD_S) as stream:
            async with aclosing(batches):
                async for revision, events in batches:
                    self._require_current(principal())
                    messages = [convert.event_to_proto(event.name, event.record) for event in events]
                    await stream.write(pb.WatchEventsResponse(revision=revision, events=messages))

    async def WatchResources(  # type: ignore[override]  # writes: grpc.aio leaves a suspended generator open
        self, request: pb.WatchResourcesRequest, context: Context
    ) -> None:
        """Without kinds, the watch covers every kind that can be watched and that the caller may read."""
        for kind in request.kinds:
            if kind not in _WATCHED:
                raise InvalidInput(f"{pb.ResourceKind.Name(kind)} cannot be watched", field="kinds")
        kinds = {one for kind in _readable(request.kinds, _WATCHED) for one in _WATCHED[kind]}
        batches = watch_resources(self._store, kinds, request.after_revision)
        with BoundedWrites(context, _UNREAD_S) as stream:
            async with aclosing(batches):
                async for batch in batches:
                    self._require_current(principal())
                    await self._write(stream, batch)

    async def _write(self, stream: BoundedWrites, batch: ResourceChanges) -> None:
        """Write a batch in messages of bounded size; only the last one carries the revision."""
        chunks = [
            batch.changes[at : at + _PER_MESSAGE] for at in range(0, len(batch.changes), _PER_MESSAGE)
        ] or [()]
        for number, chunk in enumerate(chunks, 1):
            last = number == len(chunks)
            await stream.write(
                pb.WatchResourcesResponse(
                    revision=batch.revision if last else 0,
                    changes=[change_message(change) for change in await self._with_amounts(chunk)],
                    snapshot_end=batch.snapshot_end and last,
                )
            )

    async def _with_amounts(self, changes: Sequence[ResourceChange]) -> list[ResourceChange]:
        """Return the changes; budgets with what was spent, objectives with what was measured."""
        stored = [one.view for one in changes if isinstance(one.view, Stored)]
        budgets = [one for one in stored if isinstance(one.record, Budget)]
        objectives = [one for one in stored if isinstance(one.record, Objective)]
        views: dict[Name, View] = {}
        for budget in await self._service.budgets.views(budgets):
            views[ResourceKind.BUDGET, budget.stored.record.meta.name] = budget
        for objective in await self._service.objectives.views(objectives):
            views[ResourceKind.OBJECTIVE, objective.stored.record.meta.name] = objective
        return [replace(one, view=views.get((one.kind, one.name), one.view)) for one in changes]


def _readable(
    asked: Sequence[pb.ResourceKind.ValueType], every: Iterable[pb.ResourceKind.ValueType]
) -> list[pb.ResourceKind.ValueType]:
    """Return the kinds asked for, or those of all that the caller may read. Raises PermissionDenied."""
    who = principal()
    hidden = {kind for kind, method in _READ_BY.items() if not may_call(who, _METHODS[method])}
    for kind in hidden.intersection(asked):
        raise PermissionDenied(
            f"the role {who.role} may not read {pb.ResourceKind.Name(kind)}", role=who.role
        )
    return list(asked) or [kind for kind in every if kind not in hidden]
