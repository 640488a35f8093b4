"""ControlPlaneService on the wire: converts messages; ``service.py`` makes every decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message

from fairway.mirror import Mirror, Pair
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.grpc.leader_calls import GrpcQueues
from services.controlplane.audit_reads import AuditReader
from services.controlplane.diagnosis.listing import answer_for_tenant
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
from services.controlplane.timelines.join import visible_to
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
More = Callable[[Any], dict[str, Any]]  # arguments of a verb, of its request

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


class TimelineAnswers(Protocol):
    """``timelines.collector.Timelines``."""

    async def get(self, request: pb.GetTimelineRequest, *, forwarded: bool) -> pb.GetTimelineResponse: ...


class DiagnosedLatencies(Protocol):
    """``diagnosis.listing.Diagnoses``."""

    async def diagnose(
        self, request: pb.DiagnoseLatencyRequest, *, forwarded: bool
    ) -> pb.DiagnoseLatencyResponse: ...
    async def save_baseline(
        self, request: pb.SaveLatencyBaselineRequest, *, forwarded: bool
    ) -> pb.SaveLatencyBaselineResponse: ...


def _methods(
    kind: str,
    plural: str,
    message: Callable[[Any], Message],
    from_proto: Callable[[Any], Any] | None = None,
    *,
    acts: Mapping[str, More] | None = None,
) -> dict[str, Any]:
    """Return the methods of a kind of resource by name, without what a class defines itself.

    The service has what decides on it under ``plural``. With ``from_proto`` it is written as a whole.
    ``acts`` are its other verbs, each with what it takes besides its name and its etag.
    """
    field, items = kind.lower(), plural.lower()
    of = attrgetter(f"service.{items}")

    def answer(verb: str, found: Any) -> Any:
        return getattr(pb, f"{verb}{kind}Response")(**{field: message(found)})

    async def get(self: ControlPlaneServicer, request: Any, context: Context) -> Any:
        return answer("Get", await of(self).get(request.name))

    async def page(self: ControlPlaneServicer, request: Any, context: Context) -> Any:
        found, token = await of(self).page(size=request.page_size, token=request.page_token)
        messages = {items: map(message, found), "next_page_token": token}
        return getattr(pb, f"List{plural}Response")(**messages)

    async def delete(self: ControlPlaneServicer, request: Any, context: Context) -> Any:
        await of(self).delete(request.name, etag=request.etag, request_id=request.request_id)
        return getattr(pb, f"Delete{kind}Response")()

    def act(verb: str, more: More) -> Any:
        async def acted(self: ControlPlaneServicer, request: Any, context: Context) -> Any:
            run = getattr(of(self), verb.lower())
            guards = {"etag": request.etag, "request_id": request.request_id}
            return answer(verb, await run(request.name, **guards, **more(request)))

        return acted

    found = {f"Get{kind}": get, f"List{plural}": page, f"Delete{kind}": delete}
    found |= {f"{verb}{kind}": act(verb, more) for verb, more in (acts or {}).items()}
    if from_proto is None:
        return found
    written = from_proto

    async def create(self: ControlPlaneServicer, request: Any, context: Context) -> Any:
        view = await of(self).create(written(getattr(request, field)), request_id=request.request_id)
        return answer("Create", view)

    async def update(self: ControlPlaneServicer, request: Any, context: Context) -> Any:
        given = getattr(request, field)
        etag, request_id = given.metadata.etag, request.request_id
        view = await of(self).update(written(given), etag=etag, request_id=request_id)
        return answer("Update", view)

    return found | {f"Create{kind}": create, f"Update{kind}": update}


def _nothing(request: Any) -> dict[str, Any]:
    return {}


def _reason(request: Any) -> dict[str, Any]:
    return {"reason": request.reason}


_NODE_ACTS: Final = {
    "Cordon": _nothing,
    "Uncordon": _nothing,
    "Drain": lambda request: {"ends_in_s": seconds_of(request.ends_in)},
    "Assign": lambda request: {"tenant": request.tenant},
}
_ROLLOUT_ACTS: Final = {
    "Promote": lambda request: {"promotion": promotion_from_proto(request)},
    "Pause": _nothing,
    "Resume": _nothing,
    "Abort": _reason,
    "Revert": _reason,
}
_RESOURCES: Final = (
    _methods("Tenant", "Tenants", tenant_message, convert.tenant_from_proto, acts={"Erase": _nothing})
    | _methods("Key", "Keys", key_message, convert.key_from_proto)
    | _methods("Deployment", "Deployments", deployment_message, convert.deployment_from_proto)
    | _methods("Budget", "Budgets", budget_message, convert.budget_from_proto)
    | _methods("Alias", "Aliases", alias_message, convert.ALIAS.from_proto)
    | _methods("Objective", "Objectives", objective_message)
    | _methods("Node", "Nodes", node_message, acts=_NODE_ACTS)
    | _methods("Rollout", "Rollouts", rollout_to_proto, acts=_ROLLOUT_ACTS)
)


_Base: Any = controlplane_pb2_grpc.ControlPlaneServiceServicer


class ControlPlaneServicer(_Base):  # type: ignore[misc]  # its methods are those below and _RESOURCES
    def __init__(
        self,
        service: ControlPlaneService,
        store: Store,
        scheduler: GrpcQueues,
        usage: UsagePages,
        slis: SliPages,
        scaling: ScalingPages,
        timelines: TimelineAnswers,
        diagnoses: DiagnosedLatencies,
        *,
        audit: AuditReader,
        require_current: Callable[[Principal], None],
    ) -> None:
        """``store`` is the service's own: watches and events follow it.

        ``require_current`` raises once the caller's key is no longer valid; the watch then ends.
        """
        self.service = service
        self._store = store
        self._scheduler = scheduler
        self._usage = usage
        self._slis = slis
        self._scaling = scaling
        self._timelines = timelines
        self._diagnoses = diagnoses
        self._audit = audit
        self._require_current = require_current

    async def GetCaller(self, request: pb.GetCallerRequest, context: Context) -> pb.GetCallerResponse:
        return convert.CALLER.to_proto(principal())

    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.GetTenantResponse:
        stored = await self.service.tenants.get(request.name)
        ring = await self.service.tenants.keyring(request.name)
        return pb.GetTenantResponse(tenant=tenant_message(stored, ring))

    async def RotateTenantKey(
        self, request: pb.RotateTenantKeyRequest, context: Context
    ) -> pb.RotateTenantKeyResponse:
        await self.service.tenants.rotate_key(request.name, request_id=request.request_id)
        return pb.RotateTenantKeyResponse()

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        key = convert.key_from_proto(request.key)
        stored, text = await self.service.keys.create(key, request_id=request.request_id)
        return pb.CreateKeyResponse(key=key_message(stored), secret=text)

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        grace_s = seconds_of(request.grace)
        stored, text = await self.service.keys.rotate(
            request.name, grace_s=grace_s, etag=request.etag, request_id=request.request_id
        )
        return pb.RotateKeyResponse(key=key_message(stored), secret=text)

    async def ListDeploymentRevisions(
        self, request: pb.ListDeploymentRevisionsRequest, context: Context
    ) -> pb.ListDeploymentRevisionsResponse:
        found = await self.service.deployments.history(request.name)
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

    async def CreateObjective(
        self, request: pb.CreateObjectiveRequest, context: Context
    ) -> pb.CreateObjectiveResponse:
        objective = convert.objective_from_proto(request.objective)
        view = await self.service.objectives.create(objective, request_id=request.request_id)
        warnings = await warnings_of(objective, self._slis)
        return pb.CreateObjectiveResponse(objective=objective_message(view, warnings))

    async def UpdateObjective(
        self, request: pb.UpdateObjectiveRequest, context: Context
    ) -> pb.UpdateObjectiveResponse:
        objective = convert.objective_from_proto(request.objective)
        etag = request.objective.metadata.etag
        view = await self.service.objectives.update(objective, etag=etag, request_id=request.request_id)
        warnings = await warnings_of(objective, self._slis)
        return pb.UpdateObjectiveResponse(objective=objective_message(view, warnings))

    async def CreateRollout(
        self, request: pb.CreateRolloutRequest, context: Context
    ) -> pb.CreateRolloutResponse:
        view = await self.service.rollouts.create(
            rollout_from_proto(request.rollout), request_id=request.request_id, dry_run=request.dry_run
        )
        return pb.CreateRolloutResponse(rollout=rollout_to_proto(view))

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, context: Context
    ) -> pb.ListRolloutsResponse:
        page, token = await self.service.rollouts.page(size=request.page_size, token=request.page_token)
        return pb.ListRolloutsResponse(
            rollouts=[stored_to_proto(one.record, one.etag) for one in page], next_page_token=token
        )

    async def ListQuarantined(
        self, request: pb.ListQuarantinedRequest, context: Context
    ) -> pb.ListQuarantinedResponse:
        page, token = await self.service.quarantine.page(
            model=request.model,
            version_digest=request.version_digest,
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListQuarantinedResponse(inputs=map(_input, page), next_page_token=token)

    async def DeleteQuarantined(
        self, request: pb.DeleteQuarantinedRequest, context: Context
    ) -> pb.DeleteQuarantinedResponse:
        await self.service.quarantine.delete(
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
        answer = self._diagnoses.diagnose(request, forwarded=not caller())
        return await answer_for_tenant(answer, tenant) if tenant else await answer

    async def SaveLatencyBaseline(
        self, request: pb.SaveLatencyBaselineRequest, context: Context
    ) -> pb.SaveLatencyBaselineResponse:
        return await self._diagnoses.save_baseline(request, forwarded=not caller())

    async def ListAuditEvents(
        self, request: pb.ListAuditEventsRequest, context: Context
    ) -> pb.ListAuditEventsResponse:
        return await self._audit.page(request)

    async def ExportAuditLog(  # writes: grpc.aio leaves a suspended generator open
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
            self.service.deployments.names_by_version(),
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

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: Context) -> pb.GetTimelineResponse:
        found = await self._timelines.get(request, forwarded=not caller())
        tenant = caller_tenant()
        return visible_to(found, tenant) if tenant else found

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

    async def WatchEvents(  # writes: grpc.aio leaves a suspended generator open
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

    async def WatchResources(  # writes: grpc.aio leaves a suspended generator open
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
        for budget in await self.service.budgets.views(budgets):
            views[ResourceKind.BUDGET, budget.stored.record.meta.name] = budget
        for objective in await self.service.objectives.views(objectives):
            views[ResourceKind.OBJECTIVE, objective.stored.record.meta.name] = objective
        return [replace(one, view=views.get((one.kind, one.name), one.view)) for one in changes]


for _name in _RESOURCES.keys() & _METHODS.keys() - vars(ControlPlaneServicer).keys():
    setattr(ControlPlaneServicer, _name, _RESOURCES[_name])


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
