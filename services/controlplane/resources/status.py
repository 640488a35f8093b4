"""The status of deployments and nodes: the operator's settings compared with the fleet's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.controlplane.fleet import Fleet, FleetSnapshot, Replica, readable, replicas_of, wanted_in
from services.controlplane.policy.assign import Unplaced, plan
from services.controlplane.resources.resources import Stored
from services.core.errors import DoesNotFit
from services.core.manifest import is_digest
from services.core.records import (
    ASSIGNMENTS,
    NODES,
    WORKERS,
    Assignment,
    Deployment,
    Node,
    Tag,
    VersionState,
    Worker,
    tag_key,
)

MAX_MESSAGE_CHARS: Final = 1024
# States whose message may be about limited service.
_EXPLAINED: Final = (VersionState.FAILED, VersionState.READY)


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment with its fleet state. ``message`` explains missing replicas, and what the READY ones do
    not serve.

    ``tag_digest``: the digest that its tag names now; empty when its version is a digest or the tag was
    deleted.
    """

    stored: Stored[Deployment]
    replicas: tuple[Replica, ...]
    message: str
    tag_digest: str = ""
    wanted_replicas: int = 0

    @property
    def ready(self) -> int:
        """Return how many replicas of its version serve, without those that an update replaces."""
        return sum(replica.ready and replica not in self.before for replica in self.replicas)

    @property
    def before(self) -> tuple[Replica, ...]:
        """Return the replicas that an update replaces."""
        digest = self.stored.record.version_digest
        return tuple(one for one in self.replicas if one.assigned.version_digest != digest)


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The progress of a node's drain. ``waiting_for``: per assigned version, why it stays."""

    assigned: int
    ending: int
    waiting_for: tuple[str, ...]

    @property
    def done(self) -> bool:
        return not self.assigned and not self.ending


@dataclass(frozen=True, slots=True)
class NodeView:
    """A worker as operators see it: their settings, and the worker's own report while it lives.

    ``drain`` is set while the operator or the worker itself drains it.
    """

    node: Node
    mod_revision: int
    worker: Worker | None
    incarnation: int
    drain: DrainProgress | None = None


def unplaced_in(fleet: Fleet, leaving: Sequence[str] = ()) -> dict[str, Unplaced]:
    """Return what the planner cannot place, by deployment: one plan for the whole fleet.

    ``leaving`` are the idle deployments that leave full workers.
    """
    actions = plan(
        fleet.deployments,
        fleet.workers,
        fleet.nodes,
        fleet.assignments,
        fleet.routes,
        engines=fleet.engines,
        groups=fleet.groups,
        leaving=leaving,
        beside=fleet.in_rollout,
    )
    return {action.deployment: action for action in actions if isinstance(action, Unplaced)}


def deployment_view(
    stored: Stored[Deployment], snapshot: FleetSnapshot, unplaced: Mapping[str, Unplaced]
) -> DeploymentView:
    """Join a deployment with its replicas, and with the planner's reason for those it cannot place."""
    name = stored.record.meta.name
    replicas = replicas_of(snapshot.fleet, name)
    parts = ["gateways apply it"] if stored.record.of_pack else []
    parts += [] if name not in unplaced else [unplaced_message(unplaced[name])]
    for replica in replicas:
        loaded = replica.loaded
        if loaded is not None and loaded.message and loaded.state in _EXPLAINED:
            parts.append(f"{replica.worker_id}: {loaded.message}")
    if not any(one.route.deployment == name for one in snapshot.fleet.routes):  # a rollout has its own status
        parts += _update_parts(stored.record, replicas, is_unplaced=name in unplaced)
    message = "; ".join(parts)[:MAX_MESSAGE_CHARS]
    return DeploymentView(
        stored,
        replicas,
        message,
        _tag_digest(stored.record, snapshot),
        wanted_in(snapshot.fleet, stored.record),
    )


def _update_parts(deployment: Deployment, replicas: Sequence[Replica], *, is_unplaced: bool) -> list[str]:
    """Return what serves during an update, and what an operator can do where the update is blocked."""
    digest, name = deployment.version_digest, deployment.meta.name
    serving = [one for one in replicas if one.assigned.version_digest != digest and one.ready]
    if not serving:
        return []
    versions = ", ".join(sorted({one.assigned.version_digest[:19] for one in serving}))
    parts = [f"{versions} serves on {len(serving)} workers until {digest[:19]} does"]
    short = {
        one.worker_id
        for one in replicas
        if one.assigned.version_digest == digest
        and one.loaded is not None
        and one.loaded.state is VersionState.FAILED
        and one.loaded.reason == DoesNotFit.reason
    }
    new = [one for one in replicas if one.assigned.version_digest == digest]
    is_stuck = len(serving) == 1 and len(short) == len(new)  # one worker serves, and none loads
    if is_stuck and (short or is_unplaced):
        parts.append(
            "no worker has memory for both and no other serves meanwhile, so nothing changes; to load it, "
            f"with a time without answers: `fairway deployments update {name} --replicas 0`, then "
            f"--replicas {deployment.replicas}"
        )
    return parts


def unplaced_message(unplaced: Unplaced) -> str:
    """Return how many replicas have no worker, and why, with the first figures of each reason."""
    counts: dict[str, int] = {}
    figures: dict[str, str] = {}
    for worker_id, why in unplaced.rejected:
        word, _, rest = why.partition(": ")
        counts[word] = counts.get(word, 0) + 1
        if rest:
            figures.setdefault(word, f" ({worker_id} {rest})")
    words = ", ".join(f"{count} {word}{figures.get(word, '')}" for word, count in sorted(counts.items()))
    return f"no worker for {unplaced.missing} replicas: {words or 'there is none'}"


def node_names(snapshot: FleetSnapshot) -> list[str]:
    """Return every worker that is live, has operator settings or has an assignment."""
    return sorted(
        {
            entry.key.removeprefix(prefix)
            for prefix in (NODES, WORKERS, ASSIGNMENTS)
            for entry in snapshot.under(prefix)
        }
    )


def node_view(name: str, snapshot: FleetSnapshot, unplaced: Mapping[str, Unplaced]) -> NodeView | None:
    """Return a node as of the snapshot, None for an unknown node.

    Unreadable records are ignored.
    """
    node, worker, assignment = (
        snapshot.entries.get(prefix + name) for prefix in (NODES, WORKERS, ASSIGNMENTS)
    )
    if node is None and worker is None and assignment is None:
        return None
    record = (readable(node, Node) if node is not None else None) or Node(name)
    loaded = readable(worker, Worker) if worker is not None else None
    assigned = (readable(assignment, Assignment) if assignment is not None else None) or Assignment(name)
    draining = record.draining or (loaded is not None and loaded.draining)
    return NodeView(
        record,
        0 if node is None else node.mod_revision,
        loaded,
        0 if worker is None else worker.create_revision,
        drain_of(assigned, loaded, snapshot.fleet, unplaced) if draining else None,
    )


def drain_of(
    assigned: Assignment, worker: Worker | None, fleet: Fleet, unplaced: Mapping[str, Unplaced]
) -> DrainProgress:
    """Return what prevents the end of a node's drain."""
    held = {version.version_digest for version in assigned.versions}
    ending = {version.version_digest for version in worker.versions} - held if worker is not None else set()
    waiting: list[str] = []
    for version in assigned.versions:
        if version.deployment in unplaced:
            why = unplaced_message(unplaced[version.deployment])
            waiting.append(
                f"{version.deployment}: {why}; {_room_for(version.deployment, assigned, fleet)}"[:512]
            )
            continue
        elsewhere = [
            f"{replica.worker_id} {'assigned' if replica.loaded is None else replica.loaded.state}"
            for replica in replicas_of(fleet, version.deployment)
            if replica.worker_id != assigned.worker_id
        ]
        waiting.append(f"{version.deployment}: until READY elsewhere: {', '.join(elsewhere)}"[:512])
    return DrainProgress(len(assigned.versions), len(ending), tuple(waiting))


def _room_for(name: str, assigned: Assignment, fleet: Fleet) -> str:
    """Return what lets a drain go on that no worker can take a replica from."""
    replicas = next((one.replicas for one in fleet.deployments if one.meta.name == name), 0)
    others = sum(one.worker_id != assigned.worker_id for one in replicas_of(fleet, name))
    scale = f", or `fairway deployments scale {name} {others}`" if 0 < others < replicas else ""
    return (
        f"it has {replicas} replicas, each on a worker of its own, and {others} are on other workers: "
        f"add a worker or uncordon one{scale}"
    )


def _tag_digest(deployment: Deployment, snapshot: FleetSnapshot) -> str:
    if is_digest(deployment.version):
        return ""
    entry = snapshot.entries.get(tag_key(deployment.model, deployment.version))
    tag = readable(entry, Tag) if entry is not None else None
    return "" if tag is None else tag.digest
