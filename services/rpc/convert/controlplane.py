"""Control plane resources between the wire and the core. Server-set fields are not read from requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import controlplane_pb2 as pb
from services.core.aliases import Alias, AliasSize, Capability
from services.core.errors import InvalidInput
from services.core.generation import Principal
from services.core.limits import Price, UsageLimits
from services.core.records import (
    ApiKey,
    Budget,
    BurnAlert,
    Degrade,
    Deployment,
    EventKind,
    EventRecord,
    IsolationTier,
    KeyRole,
    LatencyTarget,
    LoadedVersion,
    Meta,
    Node,
    Objective,
    ObjectiveStatus,
    Priority,
    Sli,
    SliStatus,
    Tag,
    Tenant,
    TrainingConsent,
    VersionRecord,
    Worker,
)
from services.core.scaling import Scaled, Scaling, ScalingReason
from services.rpc.convert.inference import PRIORITIES, PRIORITY, duration_of, seconds_of, timestamp
from services.rpc.convert.worker import LOADED, VERSION_STATES

M = TypeVar("M", bound=Message)
_ROLES: Final = numbers_of(KeyRole, pb.KeyRole)
_ROLE_OF: Final = {number: role for role, number in _ROLES.items()}
KINDS: Final = numbers_of(EventKind, pb.ResourceKind)
_KINDS_BACK: Final = {number: kind for kind, number in KINDS.items()}


def _role(number: int) -> KeyRole:
    if number not in _ROLE_OF:
        raise InvalidInput(f"a key needs a role: {', '.join(KeyRole)}", field="key.role")
    return _ROLE_OF[number]


_META: Final = Mirror(
    Meta,
    pb.Metadata,
    {
        "create_unix_s": Pair("create_time", timestamp, unread=True),
        "update_unix_s": Pair("update_time", timestamp, unread=True),
    },
)
META: Final = _META.one("metadata")
_MOST_S: Final = {"max_timeout_s": Pair("max_timeout", duration_of, seconds_of, unset=True)}
_CONSENT: Final = Mirror(
    TrainingConsent,
    pb.TrainingConsent,
    {
        "recorded_by": Pair("recorded_by", unread=True),
        "record_unix_s": Pair("record_time", timestamp, unread=True),
    },
)
_LIMITS: Final = Mirror(UsageLimits, pb.Limits, _MOST_S)
TENANT: Final = Mirror(
    Tenant,
    pb.Tenant,
    {
        "meta": META,
        "weight": Pair("weight", zero=True),
        "max_priority": enum_pair("max_priority", PRIORITIES, Priority.STANDARD),
        "degrade": Mirror(Degrade, pb.DegradePolicy).one("degrade", unset=True),
        **_MOST_S,
        "isolation": enum_pair("isolation", numbers_of(IsolationTier, pb.Isolation), IsolationTier.PACKED),
        "user_limits": _LIMITS.one("user_limits", unset=True),
        "retention_s": Pair("retention", duration_of, seconds_of, unset=True),
        "training_consent": _CONSENT.one("training_consent", unset=True),
    },
)
KEY: Final = Mirror(
    ApiKey,
    pb.Key,
    {
        "meta": META,
        "role": Pair("role", _ROLES.__getitem__, _role),
        "expire_unix_s": Pair("expire_time", timestamp, seconds_of, unset=True),
        "limits": _LIMITS.one("limits", unset=True),
    },
    apart=("secret_hash", "previous_secret_hash", "previous_expire_unix_s"),
)
CALLER: Final = Mirror(
    Principal,
    pb.GetCallerResponse,
    {
        "key_id": Pair("key"),
        "role": Pair("role", _ROLES.__getitem__, _role),
        "tenant_id": Pair("tenant"),
        "expire_unix_s": Pair("expire_time", timestamp, seconds_of, unset=True),
    },
    apart=("models", "secret_hash"),
)
SCALING: Final = Mirror(
    Scaling,
    pb.Scaling,
    {
        "idle_s": Pair("idle", duration_of, seconds_of, unset=True),
        "override_until_unix_s": Pair("override_until", timestamp, seconds_of, unset=True),
    },
)
DEPLOYMENT: Final = Mirror(
    Deployment,
    pb.Deployment,
    {
        "meta": META,
        "version_digest": Pair("version_digest", unread=True),
        "priority": PRIORITY,
        "tensor_parallel": Pair("tensor_parallel", zero=True),
        "pipeline_parallel": Pair("pipeline_parallel", zero=True),
        "price": Mirror(Price, pb.Price).one("price", unset=True),
        "scaling": SCALING.one("scaling", unset=True),
        "in_place_s": Pair("in_place", duration_of, seconds_of, unset=True),
    },
    apart=("revision",),
)
REASON: Final = Mirror(ScalingReason, pb.ScalingReason)
SCALED: Final = Mirror(
    Scaled,
    pb.DeploymentScaling,
    {
        "reasons": REASON.each("reasons"),
        "decided_unix_s": Pair("decide_time", timestamp, unset=True, unread=True),
        "start_s": Pair("start", duration_of, unread=True),
        "retry_unix_s": Pair("retry_time", timestamp, unset=True, unread=True),
    },
    apart=("rate",),
)
BUDGET: Final = Mirror(Budget, pb.Budget, {"meta": META, "currency": Pair("currency", zero=True)})
_TARGET: Final = Mirror(LatencyTarget, pb.LatencyTarget, {"quantile": Pair("quantile", zero=True)})


def _target(name: str) -> Pair:
    return Pair(name, lambda target: _TARGET.to_proto(target) if target.seconds else None, _TARGET.from_proto)


OBJECTIVE: Final = Mirror(
    Objective,
    pb.Objective,
    {"meta": META, "priority": PRIORITY, **{name: _target(name) for name in ("ttft", "itl", "total")}},
)
_CAPABILITIES: Final = numbers_of(Capability, pb.Capability)
_CAPABILITY_OF: Final = {number: one for one, number in _CAPABILITIES.items()}


def _capabilities(numbers: Iterable[int]) -> tuple[Capability, ...]:
    found = [_CAPABILITY_OF.get(number) for number in numbers]
    if None in found:
        raise InvalidInput(
            f"a capability is one of {', '.join(Capability)}", field="alias.sizes.capabilities"
        )
    return tuple(one for one in found if one is not None)


_SIZE: Final = Mirror(
    AliasSize,
    pb.AliasSize,
    {
        "capabilities": Pair(
            "capabilities", lambda found: [_CAPABILITIES[one] for one in found], _capabilities
        )
    },
)
ALIAS: Final = Mirror(Alias, pb.Alias, {"meta": META, "sizes": _SIZE.each("sizes")})
_SLI_STATUS: Final = Mirror(
    SliStatus,
    pb.SliStatus,
    {
        "sli": enum_pair("sli", numbers_of(Sli, pb.Sli)),
        "alert": enum_pair("alert", numbers_of(BurnAlert, pb.BurnAlert)),
    },
)
OBJECTIVE_STATUS: Final = Mirror(
    ObjectiveStatus,
    pb.ObjectiveStatus,
    {"slis": _SLI_STATUS.each("slis"), "unix_s": Pair("time", timestamp, seconds_of)},
    apart=("create_revision",),
)
_EVENT: Final = Mirror(
    EventRecord,
    pb.Event,
    {
        "time_unix_s": Pair("time", timestamp, seconds_of),
        "kind": enum_pair("kind", KINDS),
        "warning": Pair(
            "severity",
            lambda warning: pb.EVENT_SEVERITY_WARNING if warning else pb.EVENT_SEVERITY_INFO,
            lambda number: number == pb.EVENT_SEVERITY_WARNING,
        ),
    },
)
_VERSION: Final = Mirror(
    VersionRecord,
    pb.ModelVersion,
    {"digest": Pair("version_digest"), "create_unix_s": Pair("create_time", timestamp, seconds_of)},
    apart=("computation", "engine_problems", "base_model", "base_digest", "kind"),
)
_TAG: Final = Mirror(Tag, pb.ModelTag, {"digest": Pair("version_digest")})
_WORKER: Final = Mirror(
    Worker,
    pb.Node,
    {"versions": LOADED.each("versions")},
    apart=("worker_id", "labels", "draining"),
)
tenant_from_proto: Final = TENANT.from_proto
budget_from_proto: Final = BUDGET.from_proto
objective_from_proto: Final = OBJECTIVE.from_proto
model_version_to_proto: Final = _VERSION.to_proto
model_tag_to_proto: Final = _TAG.to_proto


def key_from_proto(message: pb.Key) -> ApiKey:
    """Return a key without its hash. Raises InvalidInput for a key without a role."""
    return KEY.from_proto(message, secret_hash="")


def deployment_from_proto(message: pb.Deployment) -> Deployment:
    """Return the requested deployment; ``version_digest`` is empty until the version is resolved."""
    return DEPLOYMENT.from_proto(message, version_digest="")


def resource_to_proto(mirror: Mirror[Any, M], record: object, etag: str, **more: Any) -> M:
    """Return the message of a stored resource, without what is secret."""
    message: Any = mirror.to_proto(record, **more)
    message.metadata.etag = etag
    return message  # type: ignore[no-any-return]


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
        capabilities=loaded.capabilities,
    )


def node_to_proto(
    node: Node, etag: str, worker: Worker | None, incarnation: int, drain: pb.DrainProgress | None = None
) -> pb.Node:
    """Return a node. If its worker is not alive, it has no address and no versions."""
    return pb.Node(
        metadata=pb.Metadata(name=node.worker_id, etag=etag, labels={} if worker is None else worker.labels),
        incarnation=incarnation,
        cordoned=node.cordoned,
        draining=node.draining or (worker is not None and worker.draining),
        state=pb.NODE_STATE_LOST if worker is None else pb.NODE_STATE_LIVE,
        drain=drain,
        tenant=node.tenant,
        end_time=timestamp(node.ends_unix_s) if node.ends_unix_s else None,
        **({} if worker is None else _WORKER.as_fields(worker)),
    )


def event_to_proto(name: str, record: EventRecord) -> pb.Event:
    return _EVENT.to_proto(record, name=name)


def event_kinds(kinds: Iterable[pb.ResourceKind.ValueType]) -> frozenset[EventKind]:
    """Return the kinds of events. Raises InvalidInput for an invalid one."""
    found: set[EventKind] = set()
    for kind in kinds:
        if kind not in _KINDS_BACK:
            raise InvalidInput(f"there are no events of {pb.ResourceKind.Name(kind)}", field="kinds")
        found.add(_KINDS_BACK[kind])
    return frozenset(found)
