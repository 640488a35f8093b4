"""Resources as messages of the control plane's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from fairway.mirror import Mirror, Pair
from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.resources.budgets import BudgetView
from services.controlplane.resources.objectives import ObjectiveView
from services.controlplane.resources.resources import Stored
from services.controlplane.resources.status import DeploymentView, DrainProgress, NodeView
from services.controlplane.rollouts import convert as convert_rollout
from services.controlplane.rollouts.records import Rollout
from services.controlplane.watcher import ResourceChange, ResourceKind
from services.core.aliases import Alias
from services.core.records import ApiKey, Tag, Tenant, TenantKeyring, VersionRecord
from services.rpc.convert import controlplane as convert
from services.rpc.convert.inference import timestamp

M = TypeVar("M", bound=Message)
_DRAIN: Final = Mirror(
    DrainProgress,
    pb.DrainProgress,
    {"assigned": Pair("assigned_versions"), "ending": Pair("ending_versions")},
)


_SPENT: Final = Mirror(BudgetView, pb.Budget, apart=("stored",))


def _stored(mirror: Mirror[Any, M], stored: Stored[Any], **more: Any) -> M:
    return convert.resource_to_proto(mirror, stored.record, stored.etag, **more)


def tenant_message(stored: Stored[Tenant], ring: TenantKeyring | None = None) -> pb.Tenant:
    return _stored(convert.TENANT, stored, data_key=None if ring is None else _data_key(ring))


def _data_key(ring: TenantKeyring) -> pb.DataKeyStatus:
    status = pb.DataKeyStatus(generations=len(ring.generations))
    if ring.erase_unix_s:
        status.erase_time.CopyFrom(timestamp(ring.erase_unix_s))
    if ring.collect_unix_s:
        status.collect_time.CopyFrom(timestamp(ring.collect_unix_s))
    if ring.generations:
        status.wrapper = ring.generations[0].wrapper
        status.create_time.CopyFrom(timestamp(ring.generations[0].create_unix_s))
    return status


def key_message(stored: Stored[ApiKey]) -> pb.Key:
    return _stored(convert.KEY, stored)


def deployment_message(view: DeploymentView) -> pb.Deployment:
    status = pb.DeploymentStatus(
        assigned_replicas=len(view.replicas) - len(view.before),
        ready_replicas=view.ready,
        message=view.message,
        replicas=[
            convert.replica_to_proto(
                replica.worker_id, replica.loaded, version_digest=replica.assigned.version_digest
            )
            for replica in view.replicas
        ],
        tag_digest=view.tag_digest,
        wanted_replicas=view.wanted_replicas,
    )
    return _stored(convert.DEPLOYMENT, view.stored, status=status)


def alias_message(stored: Stored[Alias]) -> pb.Alias:
    return _stored(convert.ALIAS, stored)


def budget_message(view: BudgetView) -> pb.Budget:
    return _stored(convert.BUDGET, view.stored, **_SPENT.as_fields(view))


def objective_message(view: ObjectiveView, warnings: Sequence[str] = ()) -> pb.Objective:
    status = None if view.status is None else convert.OBJECTIVE_STATUS.to_proto(view.status)
    return _stored(convert.OBJECTIVE, view.stored, status=status, warnings=warnings)


def node_message(view: NodeView) -> pb.Node:
    drain = None if view.drain is None else _DRAIN.to_proto(view.drain, done=view.drain.done)
    return convert.node_to_proto(view.node, str(view.mod_revision), view.worker, view.incarnation, drain)


def change_message(change: ResourceChange) -> pb.ResourceChange:
    found, view = pb.ResourceChange(deleted=change.view is None), change.view
    match view:
        case None:
            _name_deleted(found, change)
        case DeploymentView():
            found.deployment.CopyFrom(deployment_message(view))
        case NodeView():
            found.node.CopyFrom(node_message(view))
        case BudgetView():
            found.budget.CopyFrom(budget_message(view))
        case ObjectiveView():
            found.objective.CopyFrom(objective_message(view))
        case VersionRecord():
            found.model_version.CopyFrom(convert.model_version_to_proto(view))
        case Tag():
            found.model_tag.CopyFrom(convert.model_tag_to_proto(view))
        case Stored(record=Tenant()):
            found.tenant.CopyFrom(_stored(convert.TENANT, view))
        case Stored(record=Alias()):
            found.alias.CopyFrom(_stored(convert.ALIAS, view))
        case Stored(record=ApiKey()):
            found.key.CopyFrom(_stored(convert.KEY, view))
        case Stored(record=Rollout() as rollout):
            found.rollout.CopyFrom(convert_rollout.stored_to_proto(rollout, view.etag))
    return found


def _name_deleted(found: pb.ResourceChange, change: ResourceChange) -> None:
    model, _, rest = change.name.partition("/")
    match change.kind:
        case ResourceKind.MODEL_VERSION:
            found.model_version.model, found.model_version.version_digest = model, rest
        case ResourceKind.MODEL_TAG:
            found.model_tag.model, found.model_tag.tag = model, rest
        case kind:  # names the field of its resource
            getattr(found, kind).metadata.name = change.name
