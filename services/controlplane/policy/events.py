"""Fleet events, from the difference of two states of the store. Pure.

A state maps store keys to records. The same two states give the same events in the same order, so two control
planes that see the same revision record the same events. Times, progress and constantly moving figures make
no events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from services.controlplane.rollouts.records import UNDONE, Rollout
from services.core.records import (
    ASSIGNMENTS,
    BUDGETS,
    DEPLOYMENTS,
    GATEWAYS,
    KEYS,
    LEADERS,
    MODELS,
    NODE_ORDERS,
    NODES,
    OBJECTIVES,
    QUARANTINE,
    ROLLOUTS,
    SCALED,
    TENANTS,
    WORKERS,
    ApiKey,
    AssignedVersion,
    Assignment,
    Budget,
    Deployment,
    EventKind,
    Gateway,
    Leader,
    LoadedVersion,
    Node,
    Objective,
    Tag,
    Tenant,
    VersionRecord,
    VersionState,
    Worker,
)
from services.core.scaling import NodeOrder, OrderState, Scaled
from services.ports.poison.quarantine import Quarantined

Observed = (
    Tenant
    | ApiKey
    | Budget
    | Objective
    | Deployment
    | Node
    | Worker
    | Gateway
    | Assignment
    | Leader
    | Tag
    | VersionRecord
    | Rollout
    | Quarantined
    | Scaled
    | NodeOrder
)
State = Mapping[str, Observed]
T = TypeVar("T")
MAX_MESSAGE_CHARS: Final = 512
_KINDS: Final[Mapping[str, type[Observed]]] = {
    TENANTS: Tenant,
    KEYS: ApiKey,
    BUDGETS: Budget,
    OBJECTIVES: Objective,
    DEPLOYMENTS: Deployment,
    SCALED: Scaled,
    NODE_ORDERS: NodeOrder,
    NODES: Node,
    WORKERS: Worker,
    GATEWAYS: Gateway,
    ASSIGNMENTS: Assignment,
    LEADERS: Leader,
    ROLLOUTS: Rollout,
    QUARANTINE: Quarantined,
}
_CALM: Final = (VersionState.READY, VersionState.RETIRING, VersionState.DRAINING)


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """``reason`` is stable; ``warning`` marks events that need an operator's attention."""

    kind: EventKind
    resource: str
    reason: str
    message: str
    warning: bool = False


def kind_of(key: str) -> type[Observed] | None:
    """Return the record type stored under a key, None for a key without events."""
    for prefix, kind in _KINDS.items():
        if key.startswith(prefix):
            return kind
    if key.startswith(MODELS):
        return Tag if "/tags/" in key else VersionRecord
    return None


def events_between(before: State, after: State, changed: tuple[str, ...]) -> tuple[FleetEvent, ...]:
    """Return the events of the change from ``before`` to ``after``; ``changed`` are the keys that differ."""
    found: list[FleetEvent] = []
    for key in sorted(changed):
        found += _of_key(key, before.get(key), after.get(key))
    for name in sorted({name for key in changed if (name := _node_of(key))}):
        if not _drained(before, name) and _drained(after, name):
            message = "nothing is assigned to it and nothing runs on it"
            found.append(FleetEvent(EventKind.NODE, name, "NODE_DRAINED", message))
    return tuple(replace(one, message=one.message[:MAX_MESSAGE_CHARS]) for one in found)


def _of_key(key: str, before: Observed | None, after: Observed | None) -> Iterator[FleetEvent]:
    record = after if after is not None else before
    match record:
        case Tenant():
            yield from _tenant(_as(before, Tenant), _as(after, Tenant))
        case ApiKey():
            yield from _api_key(_as(before, ApiKey), _as(after, ApiKey))
        case Budget():
            yield from _budget(_as(before, Budget), _as(after, Budget))
        case Objective():
            yield from _objective(_as(before, Objective), _as(after, Objective))
        case Deployment():
            yield from _deployment(_as(before, Deployment), _as(after, Deployment))
        case Scaled():
            yield from _scaled(_as(before, Scaled), _as(after, Scaled))
        case NodeOrder() if after is not None:
            yield from _node_order(_as(before, NodeOrder), record)
        case Node():
            yield from _node(record.worker_id, _as(before, Node), _as(after, Node))
        case Worker():
            yield from _worker(record.worker_id, _as(before, Worker), _as(after, Worker))
        case Gateway() if after is None:
            message = "it stopped, or its lease has ended"
            yield FleetEvent(
                EventKind.PROCESS, f"gateway {record.address}", "GATEWAY_LEFT", message, warning=True
            )
        case Gateway() if before is None:
            yield FleetEvent(EventKind.PROCESS, f"gateway {record.address}", "GATEWAY_JOINED", "it serves")
        case Assignment():
            yield from _assignment(record.worker_id, _as(before, Assignment), _as(after, Assignment))
        case Leader():
            role = key.removeprefix(LEADERS)
            yield from _leader(role, _as(before, Leader), _as(after, Leader))
        case Tag():
            yield from _tag(_as(before, Tag), _as(after, Tag))
        case Rollout():
            yield from _rollout(_as(before, Rollout), _as(after, Rollout))
        case Quarantined():
            yield from _quarantined(_as(before, Quarantined), _as(after, Quarantined))
        case VersionRecord() if before is None:
            message = f"version {record.digest} of {record.size_bytes} bytes"
            yield FleetEvent(EventKind.MODEL, record.model, "VERSION_REGISTERED", message)
        case VersionRecord() if after is None:
            yield FleetEvent(EventKind.MODEL, record.model, "VERSION_REMOVED", f"version {record.digest}")
        case _:
            return


def _rollout(before: Rollout | None, after: Rollout | None) -> Iterator[FleetEvent]:
    kind = EventKind.ROLLOUT
    if after is None:
        return
    name = after.meta.name
    if before is None:
        message = f"{after.strategy} of {after.deployment} from {after.stable_version}"
        yield FleetEvent(kind, name, "ROLLOUT_CREATED", message)
    known = () if before is None else before.history
    for one in after.history:
        if one not in known:
            warning = after.phase in UNDONE
            yield FleetEvent(kind, name, f"ROLLOUT_{one.what}", one.message, warning=warning)


def _as(record: Observed | None, kind: type[T]) -> T | None:
    return record if isinstance(record, kind) else None


def _tenant(before: Tenant | None, after: Tenant | None) -> Iterator[FleetEvent]:
    kind = EventKind.TENANT
    if after is None:
        assert before is not None
        yield FleetEvent(kind, before.meta.name, "TENANT_DELETED", "tenant deleted")
    elif before is None:
        yield FleetEvent(kind, after.meta.name, "TENANT_CREATED", "tenant created")
    elif before.disabled != after.disabled:
        word = "disabled" if after.disabled else "enabled"
        yield FleetEvent(kind, after.meta.name, f"TENANT_{word.upper()}", f"tenant {word}")
    elif replace(before, meta=after.meta, safety_pack=after.safety_pack) != after:
        yield FleetEvent(kind, after.meta.name, "TENANT_UPDATED", "limits or name changed")
    had = "" if before is None else before.safety_pack
    if after is not None and after.safety_pack != had:
        message = f"obeys the safety pack {after.safety_pack!r}, before {had!r}"
        yield FleetEvent(kind, after.meta.name, "SAFETY_PACK_ASSIGNED", message)


def _api_key(before: ApiKey | None, after: ApiKey | None) -> Iterator[FleetEvent]:
    kind = EventKind.KEY
    if after is None:
        assert before is not None
        yield FleetEvent(kind, before.meta.name, "KEY_DELETED", _owner(before))
    elif before is None:
        yield FleetEvent(kind, after.meta.name, "KEY_CREATED", _owner(after))
    elif before.secret_hash != after.secret_hash:
        yield FleetEvent(kind, after.meta.name, "KEY_ROTATED", _owner(after))
    elif replace(before, meta=after.meta) != after:
        yield FleetEvent(
            kind, after.meta.name, "KEY_UPDATED", f"models, limits or expiry changed; {_owner(after)}"
        )


def _owner(key: ApiKey) -> str:
    return f"{key.role} key of tenant {key.tenant}" if key.tenant else f"{key.role} key"


def _budget(before: Budget | None, after: Budget | None) -> Iterator[FleetEvent]:
    budget = after or before
    assert budget is not None
    of = f"key {budget.key}" if budget.key else f"user {budget.user}" if budget.user else "all requests"
    message = f"of tenant {budget.tenant}, {of}"
    if after is None:
        yield FleetEvent(EventKind.BUDGET, budget.meta.name, "BUDGET_DELETED", message)
    elif before is None:
        yield FleetEvent(EventKind.BUDGET, budget.meta.name, "BUDGET_CREATED", message)
    elif replace(before, meta=after.meta) != after:
        yield FleetEvent(EventKind.BUDGET, budget.meta.name, "BUDGET_UPDATED", f"limits changed; {message}")


def _objective(before: Objective | None, after: Objective | None) -> Iterator[FleetEvent]:
    objective = after or before
    assert objective is not None
    kind, name = EventKind.OBJECTIVE, objective.meta.name
    message = f"for {objective.priority} requests of {objective.model}"
    if after is None:
        yield FleetEvent(kind, name, "OBJECTIVE_DELETED", message)
    elif before is None:
        yield FleetEvent(kind, name, "OBJECTIVE_CREATED", message)
    elif replace(before, meta=after.meta) != after:
        yield FleetEvent(kind, name, "OBJECTIVE_UPDATED", f"promises changed; {message}")


def _quarantined(before: Quarantined | None, after: Quarantined | None) -> Iterator[FleetEvent]:
    entry = after or before
    assert entry is not None
    where = f"input {entry.fingerprint} of {_short(entry.version_digest)}"
    if before is None:
        ended = f"ended {entry.deaths} engines" if entry.deaths else "raised an exception"
        message = f"{where} {ended} alone"
        yield FleetEvent(EventKind.DEPLOYMENT, entry.model, "INPUT_QUARANTINED", message, warning=True)
    elif after is None:
        message = f"{where} is admitted again: lifted, displaced, or its time is over"
        yield FleetEvent(EventKind.DEPLOYMENT, entry.model, "INPUT_RELEASED", message)


def _deployment(before: Deployment | None, after: Deployment | None) -> Iterator[FleetEvent]:
    kind = EventKind.DEPLOYMENT
    if after is None:
        assert before is not None
        yield FleetEvent(kind, before.meta.name, "DEPLOYMENT_DELETED", "deployment deleted")
        return
    name = after.meta.name
    if before is None:
        message = (
            f"{after.replicas} replicas of {after.model} {after.version}, {_short(after.version_digest)}"
        )
        yield FleetEvent(kind, name, "DEPLOYMENT_CREATED", message)
        return
    if before.version_digest != after.version_digest:
        message = f"{_short(before.version_digest)} to {_short(after.version_digest)}"
        yield FleetEvent(kind, name, "DEPLOYMENT_VERSION_CHANGED", message)
    if before.replicas != after.replicas:
        message = f"{before.replicas} to {after.replicas} replicas"
        yield FleetEvent(kind, name, "DEPLOYMENT_SCALED", message)
    same = replace(
        after,
        meta=before.meta,
        version=before.version,
        version_digest=before.version_digest,
        replicas=before.replicas,
    )
    if same != before:
        message = "selector, priority, price, executor, devices, scaling or output form changed"
        yield FleetEvent(kind, name, "DEPLOYMENT_UPDATED", message)


def _node_order(before: NodeOrder | None, after: NodeOrder) -> Iterator[FleetEvent]:
    kind, name = EventKind.NODE, after.node or after.order_id
    if before is None:
        what = " ".join(filter(None, ("a node", after.node_type, after.zone)))
        yield FleetEvent(kind, name, "NODE_ORDERED", f"{what} for {after.reason}, order {after.order_id}")
    elif before.state is not after.state and after.state is OrderState.FAILED:
        message = f"order {after.order_id}: {after.reason}"
        yield FleetEvent(kind, name, "NODE_ORDER_FAILED", message, warning=True)
    elif before.state is not after.state and after.state is OrderState.RELEASED:
        yield FleetEvent(kind, name, "NODE_RELEASED", f"nothing needed it, order {after.order_id}")


def _scaled(before: Scaled | None, after: Scaled | None) -> Iterator[FleetEvent]:
    if after is None:
        return
    kind, name = EventKind.DEPLOYMENT, after.deployment
    if after.failed_wakes > (0 if before is None else before.failed_wakes):
        message = f"start {after.failed_wakes} from zero failed: {after.failure}"
        yield FleetEvent(kind, name, "DEPLOYMENT_WAKE_FAILED", message, warning=True)
    elif before is not None and before.replicas != after.replicas:
        why = f": {after.reasons[0].signal}: {after.reasons[0].text}" if after.reasons else ""
        message = f"{before.replicas} to {after.replicas} replicas{why}"
        yield FleetEvent(kind, name, "DEPLOYMENT_SCALED", message)


def _node(name: str, before: Node | None, after: Node | None) -> Iterator[FleetEvent]:
    kind = EventKind.NODE
    if after is None:
        yield FleetEvent(kind, name, "NODE_DELETED", "forgotten by an operator")
        return
    old = before or Node(name)
    if after.draining and not old.draining:
        yield FleetEvent(kind, name, "NODE_DRAINING", "what it runs moves away")
    elif after.cordoned and not old.cordoned:
        yield FleetEvent(kind, name, "NODE_CORDONED", "it gets nothing new")
    elif old.cordoned and not after.cordoned:
        yield FleetEvent(kind, name, "NODE_UNCORDONED", "it may have work again")


def _worker(name: str, before: Worker | None, after: Worker | None) -> Iterator[FleetEvent]:
    kind = EventKind.NODE
    if after is None:
        assert before is not None
        if before.draining:
            yield FleetEvent(kind, name, "NODE_LEFT", "it drained and gave its lease back")
        else:
            yield FleetEvent(
                kind, name, "NODE_LOST", f"its lease at {before.address} has ended", warning=True
            )
        return
    if before is None:
        message = f"at {after.address}, {after.device}, {after.memory_bytes // 2**20} MiB for models"
        yield FleetEvent(kind, name, "NODE_JOINED", message)
    elif after.draining and not before.draining:
        yield FleetEvent(kind, name, "NODE_STOPPING", "it received a stop and drains")
    old = {(v.deployment, v.version_digest): v for v in before.versions} if before is not None else {}
    for version in after.versions:
        yield from _version(name, old.get((version.deployment, version.version_digest)), version)


def _version(worker_id: str, before: LoadedVersion | None, after: LoadedVersion) -> Iterator[FleetEvent]:
    kind, where = EventKind.DEPLOYMENT, f"{_short(after.version_digest)} on {worker_id}"
    state, old = after.state, None if before is None else before.state
    if before is not None and after.engine_restarts > before.engine_restarts:
        message = f"{where}: {after.message or 'the engine died'}; restart {after.engine_restarts}"
        yield FleetEvent(kind, after.deployment, "ENGINE_RESTARTED", message, warning=True)
    attempts = 0 if before is None else before.failed_attempts
    if state is VersionState.FAILED and (old is not state or after.failed_attempts > attempts):
        again = " and is tried again" if after.retry_unix_s else ""
        message = (
            f"{where}: attempt {max(1, after.failed_attempts)} failed{again}: {after.reason} {after.message}"
        )
        yield FleetEvent(kind, after.deployment, "VERSION_FAILED", message, warning=True)
    elif state is VersionState.READY and old not in _CALM:
        yield FleetEvent(
            kind, after.deployment, "VERSION_READY", f"{where}: {after.kv_blocks_total} KV blocks"
        )
    elif state in (VersionState.FETCHING, VersionState.LOADING) and old is not state:
        if not after.failed_attempts:
            yield FleetEvent(kind, after.deployment, f"VERSION_{state.upper()}", where)
    elif state is VersionState.RETIRING and old is VersionState.READY:
        yield FleetEvent(kind, after.deployment, "VERSION_RETIRING", where)
    elif state is VersionState.DRAINING and old in (VersionState.READY, VersionState.RETIRING):
        yield FleetEvent(kind, after.deployment, "VERSION_DRAINING", where)


def _assignment(worker_id: str, before: Assignment | None, after: Assignment | None) -> Iterator[FleetEvent]:
    old = _by_version(before)
    new = _by_version(after)
    for deployment, digest in sorted(new.keys() - old.keys()):
        message = f"{_short(digest)} to {worker_id}"
        yield FleetEvent(EventKind.DEPLOYMENT, deployment, "VERSION_ASSIGNED", message)
    for deployment, digest in sorted(old.keys() - new.keys()):
        message = f"{_short(digest)} from {worker_id}"
        yield FleetEvent(EventKind.DEPLOYMENT, deployment, "VERSION_UNASSIGNED", message)


def _by_version(assignment: Assignment | None) -> dict[tuple[str, str], AssignedVersion]:
    versions = () if assignment is None else assignment.versions
    return {(version.deployment, version.version_digest): version for version in versions}


def _leader(role: str, before: Leader | None, after: Leader | None) -> Iterator[FleetEvent]:
    if after is None:
        yield FleetEvent(EventKind.LEADER, role, "LEADER_GONE", "nobody leads", warning=True)
    elif before != after:
        yield FleetEvent(EventKind.LEADER, role, "LEADER_ELECTED", f"{after.leader_id} at {after.address}")


def _tag(before: Tag | None, after: Tag | None) -> Iterator[FleetEvent]:
    if after is None:
        assert before is not None
        yield FleetEvent(EventKind.MODEL, before.model, "TAG_DELETED", f"tag {before.tag}")
    elif before is None:
        yield FleetEvent(
            EventKind.MODEL, after.model, "TAG_CREATED", f"tag {after.tag} is {_short(after.digest)}"
        )
    elif before.digest != after.digest:
        message = f"tag {after.tag} from {_short(before.digest)} to {_short(after.digest)}"
        yield FleetEvent(EventKind.MODEL, after.model, "TAG_MOVED", message)


def _node_of(key: str) -> str:
    for prefix in (NODES, WORKERS, ASSIGNMENTS):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return ""


def _drained(state: State, name: str) -> bool:
    """Whether an operator drains the node and nothing is left on it."""
    node, worker, assigned = (state.get(prefix + name) for prefix in (NODES, WORKERS, ASSIGNMENTS))
    if not isinstance(node, Node) or not node.draining:
        return False
    return not (isinstance(assigned, Assignment) and assigned.versions) and not (
        isinstance(worker, Worker) and worker.versions
    )


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
