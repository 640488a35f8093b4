"""Control plane resources between the wire and the core. Server-set fields are not read from requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import InvalidInput
from services.core.limits import Price, UsageLimits
from services.core.records import (
    ApiKey,
    Budget,
    Degrade,
    Deployment,
    EventKind,
    EventRecord,
    KeyRole,
    LatencyTarget,
    LoadedVersion,
    Meta,
    Node,
    Objective,
    ObjectiveStatus,
    Tag,
    Tenant,
    VersionRecord,
    Worker,
)
from services.rpc.convert.inference import PRIORITIES, PRIORITY_OF, timestamp
from services.rpc.convert.times import duration_of, seconds_of
from services.rpc.convert.worker import VERSION_STATES, version_to_proto

_ROLES: Final = {pb.KEY_ROLE_TENANT: KeyRole.TENANT, pb.KEY_ROLE_ADMIN: KeyRole.ADMIN}
_ROLES_OUT: Final = {KeyRole.TENANT: pb.KEY_ROLE_TENANT, KeyRole.ADMIN: pb.KEY_ROLE_ADMIN}
KINDS: Final = {kind: pb.ResourceKind.Value(f"RESOURCE_KIND_{kind.name}") for kind in EventKind}
_KINDS_BACK: Final = {number: kind for kind, number in KINDS.items()}


def tenant_from_proto(message: pb.Tenant) -> Tenant:
    return Tenant(
        meta=_meta_from(message.metadata),
        display_name=message.display_name,
        requests_per_minute=message.requests_per_minute,
        max_concurrency=message.max_concurrency,
        tokens_per_minute=message.tokens_per_minute,
        weight=message.weight or 1.0,
        max_priority=PRIORITY_OF[message.max_priority],
        disabled=message.disabled,
        degrade=Degrade(message.degrade.max_output_tokens, dict(message.degrade.smaller_models)),
        committed_tokens_per_minute=message.committed_tokens_per_minute,
        input_tokens_per_minute=message.input_tokens_per_minute,
        output_tokens_per_minute=message.output_tokens_per_minute,
        max_context_tokens=message.max_context_tokens,
        max_output_tokens=message.max_output_tokens,
        max_timeout_s=seconds_of(message.max_timeout),
        user_limits=_limits_from(message.user_limits),
    )


def tenant_to_proto(tenant: Tenant, etag: str) -> pb.Tenant:
    return pb.Tenant(
        metadata=_meta_to(tenant.meta, etag),
        display_name=tenant.display_name,
        requests_per_minute=tenant.requests_per_minute,
        max_concurrency=tenant.max_concurrency,
        tokens_per_minute=tenant.tokens_per_minute,
        weight=tenant.weight,
        max_priority=PRIORITIES[tenant.max_priority],
        disabled=tenant.disabled,
        degrade=pb.DegradePolicy(
            max_output_tokens=tenant.degrade.max_output_tokens, smaller_models=tenant.degrade.smaller_models
        )
        if tenant.degrade != Degrade()
        else None,
        committed_tokens_per_minute=tenant.committed_tokens_per_minute,
        input_tokens_per_minute=tenant.input_tokens_per_minute,
        output_tokens_per_minute=tenant.output_tokens_per_minute,
        max_context_tokens=tenant.max_context_tokens,
        max_output_tokens=tenant.max_output_tokens,
        max_timeout=duration_of(tenant.max_timeout_s) if tenant.max_timeout_s else None,
        user_limits=_limits_to(tenant.user_limits),
    )


def key_from_proto(message: pb.Key) -> ApiKey:
    """Return a key without its hash. Raises InvalidInput for a key without a role."""
    if message.role not in _ROLES:
        raise InvalidInput("a key needs a role: tenant or admin", field="key.role")
    return ApiKey(
        meta=_meta_from(message.metadata),
        role=_ROLES[message.role],
        secret_hash="",
        tenant=message.tenant,
        models=tuple(message.models),
        expire_unix_s=seconds_of(message.expire_time) if message.HasField("expire_time") else 0.0,
        limits=_limits_from(message.limits),
    )


def key_to_proto(key: ApiKey, etag: str) -> pb.Key:
    """Return a key for operators, without secret and hash."""
    return pb.Key(
        metadata=_meta_to(key.meta, etag),
        role=_ROLES_OUT[key.role],
        tenant=key.tenant,
        expire_time=timestamp(key.expire_unix_s) if key.expire_unix_s else None,
        models=key.models,
        limits=_limits_to(key.limits),
    )


def deployment_from_proto(message: pb.Deployment) -> Deployment:
    """Return the requested deployment; ``version_digest`` is empty until the version is resolved."""
    return Deployment(
        meta=_meta_from(message.metadata),
        model=message.model,
        version=message.version,
        version_digest="",
        replicas=message.replicas,
        node_selector=dict(message.node_selector),
        priority=PRIORITY_OF[message.priority],
        executor=message.executor or "torch",
        price=Price(message.price.input_micros, message.price.cached_micros, message.price.output_micros),
        output_form=message.output_form,
    )


def deployment_to_proto(
    deployment: Deployment, etag: str, status: pb.DeploymentStatus | None = None
) -> pb.Deployment:
    return pb.Deployment(
        metadata=_meta_to(deployment.meta, etag),
        model=deployment.model,
        version=deployment.version,
        replicas=deployment.replicas,
        node_selector=deployment.node_selector,
        priority=PRIORITIES[deployment.priority],
        version_digest=deployment.version_digest,
        status=status,
        executor=deployment.executor,
        price=_price_to(deployment.price),
        output_form=deployment.output_form,
    )


def budget_from_proto(message: pb.Budget) -> Budget:
    return Budget(
        meta=_meta_from(message.metadata),
        tenant=message.tenant,
        key=message.key,
        user=message.user,
        limit_micros=message.limit_micros,
        day_limit_micros=message.day_limit_micros,
        currency=message.currency or "USD",
    )


def budget_to_proto(
    budget: Budget, etag: str, amounts: tuple[int | None, int | None, int | None], message: str
) -> pb.Budget:
    """Return a budget. ``amounts``: spent and reserved in the month, spent on the day; None: unknown."""
    spent, reserved, day_spent = amounts
    return pb.Budget(
        metadata=_meta_to(budget.meta, etag),
        tenant=budget.tenant,
        key=budget.key,
        user=budget.user,
        limit_micros=budget.limit_micros,
        day_limit_micros=budget.day_limit_micros,
        currency=budget.currency,
        spent_micros=spent,
        reserved_micros=reserved,
        day_spent_micros=day_spent,
        message=message,
    )


def objective_from_proto(message: pb.Objective) -> Objective:
    return Objective(
        meta=_meta_from(message.metadata),
        model=message.model,
        priority=PRIORITY_OF[message.priority],
        availability=message.availability,
        completion=message.completion,
        ttft=_target_from(message.ttft),
        itl=_target_from(message.itl),
        shapes_serving=message.shapes_serving,
    )


def objective_to_proto(objective: Objective, etag: str, status: ObjectiveStatus | None) -> pb.Objective:
    """Return an objective. ``status``: what was measured, None: nothing yet."""
    return pb.Objective(
        metadata=_meta_to(objective.meta, etag),
        model=objective.model,
        priority=PRIORITIES[objective.priority],
        availability=objective.availability,
        completion=objective.completion,
        ttft=_target_to(objective.ttft),
        itl=_target_to(objective.itl),
        status=None if status is None else _objective_status_to(status),
        shapes_serving=objective.shapes_serving,
    )


def _objective_status_to(status: ObjectiveStatus) -> pb.ObjectiveStatus:
    slis = [
        pb.SliStatus(
            sli=pb.Sli.Value(f"SLI_{one.sli.name}"),
            budget_left_ratio=one.budget_left_ratio,
            events=one.events,
            bad_events=one.bad_events,
            alert=pb.BurnAlert.Value(f"BURN_ALERT_{one.alert.name}"),
            burn_rates=one.burn_rates,
        )
        for one in status.slis
    ]
    return pb.ObjectiveStatus(slis=slis, time=timestamp(status.unix_s))


def _target_from(message: pb.LatencyTarget) -> LatencyTarget:
    return LatencyTarget(message.seconds, message.quantile or LatencyTarget().quantile)


def _target_to(target: LatencyTarget) -> pb.LatencyTarget | None:
    return pb.LatencyTarget(seconds=target.seconds, quantile=target.quantile) if target.seconds else None


def replica_to_proto(
    worker_id: str, loaded: LoadedVersion | None, *, version_digest: str
) -> pb.ReplicaStatus:
    """Return one replica. Its state is unspecified until a worker has reported it."""
    if loaded is None:
        return pb.ReplicaStatus(worker_id=worker_id, message="assigned", version_digest=version_digest)
    return pb.ReplicaStatus(
        worker_id=worker_id,
        version_digest=version_digest,
        state=VERSION_STATES[loaded.state],
        message=loaded.message,
        progress_ratio=loaded.progress_ratio,
        reason=loaded.reason,
        failed_attempts=loaded.failed_attempts,
        retry_time=timestamp(loaded.retry_unix_s) if loaded.retry_unix_s else None,
    )


def node_to_proto(
    node: Node, etag: str, worker: Worker | None, incarnation: int, drain: pb.DrainProgress | None = None
) -> pb.Node:
    """Return a node. If its worker is not alive, it has no address and no versions."""
    found = pb.Node(
        metadata=pb.Metadata(name=node.worker_id, etag=etag),
        incarnation=incarnation,
        cordoned=node.cordoned,
        draining=node.draining,
        state=pb.NODE_STATE_LOST if worker is None else pb.NODE_STATE_LIVE,
        drain=drain,
    )
    if worker is not None:
        found.metadata.labels.update(worker.labels)
        found.address = worker.address
        found.draining = node.draining or worker.draining
        found.device = worker.device
        found.memory_bytes = worker.memory_bytes
        found.memory_free_bytes = worker.memory_free_bytes
        found.zone = worker.zone
        found.versions.extend(map(version_to_proto, worker.versions))
    return found


def event_to_proto(name: str, record: EventRecord) -> pb.Event:
    return pb.Event(
        name=name,
        time=timestamp(record.time_unix_s),
        kind=KINDS[record.kind],
        resource=record.resource,
        reason=record.reason,
        severity=pb.EVENT_SEVERITY_WARNING if record.warning else pb.EVENT_SEVERITY_INFO,
        message=record.message,
    )


def event_kinds(kinds: Iterable[pb.ResourceKind.ValueType]) -> frozenset[EventKind]:
    """Return the kinds of events. Raises InvalidInput for an invalid one."""
    found: set[EventKind] = set()
    for kind in kinds:
        if kind not in _KINDS_BACK:
            raise InvalidInput(f"there are no events of {pb.ResourceKind.Name(kind)}", field="kinds")
        found.add(_KINDS_BACK[kind])
    return frozenset(found)


def model_version_to_proto(version: VersionRecord) -> pb.ModelVersion:
    return pb.ModelVersion(
        model=version.model,
        version_digest=version.digest,
        size_bytes=version.size_bytes,
        create_time=timestamp(version.create_unix_s),
    )


def model_tag_to_proto(tag: Tag) -> pb.ModelTag:
    return pb.ModelTag(model=tag.model, tag=tag.tag, version_digest=tag.digest)


def _meta_from(message: pb.Metadata) -> Meta:
    return Meta(message.name, dict(message.labels))


def _meta_to(meta: Meta, etag: str) -> pb.Metadata:
    return pb.Metadata(
        name=meta.name,
        etag=etag,
        create_time=timestamp(meta.create_unix_s),
        update_time=timestamp(meta.update_unix_s),
        labels=meta.labels,
    )


def _limits_from(message: pb.Limits) -> UsageLimits:
    return UsageLimits(
        message.requests_per_minute,
        message.max_concurrency,
        message.tokens_per_minute,
        message.input_tokens_per_minute,
        message.output_tokens_per_minute,
        message.max_context_tokens,
        message.max_output_tokens,
        seconds_of(message.max_timeout),
    )


def _limits_to(limits: UsageLimits) -> pb.Limits | None:
    """Return None for no limit at all, like a resource that was written without limits."""
    if limits == UsageLimits():
        return None
    return pb.Limits(
        requests_per_minute=limits.requests_per_minute,
        max_concurrency=limits.max_concurrency,
        tokens_per_minute=limits.tokens_per_minute,
        input_tokens_per_minute=limits.input_tokens_per_minute,
        output_tokens_per_minute=limits.output_tokens_per_minute,
        max_context_tokens=limits.max_context_tokens,
        max_output_tokens=limits.max_output_tokens,
        max_timeout=duration_of(limits.max_timeout_s) if limits.max_timeout_s else None,
    )


def _price_to(price: Price) -> pb.Price | None:
    if price == Price():
        return None
    return pb.Price(
        input_micros=price.input_micros, cached_micros=price.cached_micros, output_micros=price.output_micros
    )
