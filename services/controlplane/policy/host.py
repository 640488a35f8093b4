"""One worker during planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.controlplane.policy.memory import LOWEST, MemoryView, needs_of
from services.core.errors import IsolationUnavailable
from services.core.records import (
    SHARED_NODES,
    AssignedVersion,
    Assignment,
    Deployment,
    Node,
    VersionState,
    Worker,
)
from services.core.rollouts.routes import ModelRoute, RouteArm

MAX_VERSIONS_PER_WORKER: Final = 16


def arm_deployment(deployment: Deployment, arm: RouteArm) -> Deployment:
    """Return the wish for an arm of a split as a deployment NAME@DIGEST."""
    name = f"{deployment.meta.name}@{arm.version_digest}"
    meta, replicas = replace(deployment.meta, name=name), arm.replicas if deployment.replicas else 0
    return replace(deployment, meta=meta, version_digest=arm.version_digest, replicas=replicas)


def kv_share_of(split: ModelRoute | None, version_digest: str) -> int:
    """Return a version's part of the arms' KV on a worker that runs it: its traffic there. 0 without a
    split."""
    arms = () if split is None else split.arms
    arm = next((one for one in arms if one.version_digest == version_digest), None)
    return 0 if arm is None or len(arms) < 2 else arm.kv_bp // max(1, arm.replicas)


def base_name(name: str) -> str:
    """Return the deployment of a wish: its own name, or that before the arm's digest."""
    return name.partition("@")[0]


@dataclass(slots=True)
class Host:
    """A worker and its planned assignment."""

    worker: Worker
    # Whether it has a lease; a worker that is not live has only an assignment.
    live: bool
    node: Node
    # Its current assignment, None without one.
    stored: tuple[AssignedVersion, ...] | None
    # The minimum memory of a version in bytes, by digest.
    needs: Mapping[str, int]
    # The planned version, by deployment; that of an arm by NAME@DIGEST.
    held: dict[str, AssignedVersion] = field(default_factory=dict)
    # The versions that an update replaces, by deployment.
    before: dict[str, tuple[AssignedVersion, ...]] = field(default_factory=dict)
    # The causes of the changes.
    reasons: list[str] = field(default_factory=list)
    # What a version computes, by digest, as far as it is known.
    engines: Mapping[str, str] = field(default_factory=dict)
    # The node group of each tenant, by name.
    groups: Mapping[str, str] = field(default_factory=dict)
    # The group that its assignment has.
    stored_group: str = SHARED_NODES
    # The versions that it fetches without running them, by its current assignment.
    stored_prefetch: tuple[AssignedVersion, ...] = ()
    # The versions whose files it holds for a revert, by its current assignment and as planned.
    stored_pinned: tuple[AssignedVersion, ...] = ()
    pinned: tuple[AssignedVersion, ...] = ()
    # The end of its node that its assignment has.
    stored_ends_unix_s: float = 0.0
    # The ranks of idle deployments, below those of priorities, by name: the lowest leaves first.
    idle_ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaving(self) -> bool:
        return not self.live or self.node.draining or self.worker.draining

    @property
    def group(self) -> str:
        """Its node group. A worker without a lease, whose slice is unknown, keeps the group that it had."""
        return self.node.group(self.worker.slice) if self.live else self.stored_group

    @property
    def assigned(self) -> tuple[AssignedVersion, ...]:
        """The planned assignment, in stored order."""
        versions = (*self.held.values(), *(one for several in self.before.values() for one in several))
        return tuple(sorted(versions, key=lambda one: (one.deployment, one.retiring, one.version_digest)))

    @property
    def memory(self) -> MemoryView:
        return MemoryView(self.worker, self.assigned, self.needs, self.engines, self.idle_ranks)

    @property
    def full(self) -> bool:
        return len(self.assigned) >= MAX_VERSIONS_PER_WORKER

    @property
    def idle(self) -> tuple[AssignedVersion, ...]:
        """Versions of idle deployments, the first to leave first."""
        found = [one for one in self.assigned if one.deployment in self.idle_ranks]
        return tuple(sorted(found, key=lambda one: self.idle_ranks[one.deployment]))

    def loss(self, version: AssignedVersion) -> int:
        """Return the highest rank that leaves for a version that is placed here; ``LOWEST`` if none does."""
        crowded = self.memory.loss(version) if version.version_digest in self.needs else LOWEST
        return max(crowded, self.idle_ranks[self.idle[0].deployment]) if self.full and self.idle else crowded

    def rejection(self, deployment: Deployment) -> str:
        """Return the reason against a replica of the deployment's version here, empty if it may be placed."""
        if deployment.meta.name in self.held:
            return "has_a_replica"
        if self.node.draining or self.worker.draining:
            return "draining"
        if self.node.cordoned:
            return "cordoned"
        if not self.admits(deployment):
            return self._other_group(deployment)
        if not self.matches(deployment.node_selector):
            return "lacks_a_label"
        if deployment.devices > self.worker.devices:
            return f"too_few_devices: has {self.worker.devices} of {deployment.devices}"
        if self.full and not self.idle:
            return "full"
        return ""

    def admits(self, deployment: Deployment) -> bool:
        """Whether it belongs to the nodes that may run the deployment. No node runs those of an unknown
        tenant."""
        wanted = self.groups.get(deployment.tenant) if deployment.tenant else SHARED_NODES
        return self.group == wanted

    def _other_group(self, deployment: Deployment) -> str:
        mine = self.group or "shared"
        if not deployment.tenant:
            return f"assigned_to_a_tenant: is {mine}"
        wanted = self.groups.get(deployment.tenant, f"unknown: there is no tenant {deployment.tenant}")
        return f"{IsolationUnavailable.reason}: is {mine}, the deployment's nodes are {wanted or 'shared'}"

    def matches(self, selector: Mapping[str, str]) -> bool:
        return all(self.worker.labels.get(key) == value for key, value in selector.items())

    def suits(self, deployment: Deployment) -> bool:
        """Whether the worker has the labels and devices that the deployment requires, and is of its group."""
        return (
            self.admits(deployment)
            and self.matches(deployment.node_selector)
            and deployment.devices <= self.worker.devices
        )

    def ready(self, version: AssignedVersion) -> bool:
        loaded = self.worker.loaded(version)
        return loaded is not None and loaded.state is VersionState.READY

    def evict(self, version: AssignedVersion, why: str) -> None:
        """Remove a version, wherever it is held."""
        if version in self.before.get(version.deployment, ()):
            self.remove_before(version, why)
        for name in [name for name, held in self.held.items() if held == version]:
            self.remove(name, why)

    def remove(self, name: str, why: str) -> None:
        del self.held[name]
        self.reasons.append(f"{name}: {why}")

    def remove_before(self, version: AssignedVersion, why: str) -> None:
        name = version.deployment
        rest = tuple(one for one in self.before[name] if one != version)
        if rest:
            self.before[name] = rest
        else:
            del self.before[name]
        self.reasons.append(f"{name}: {why}")


def hosts_of(
    deployments: Sequence[Deployment],
    workers: Sequence[Worker],
    nodes: Sequence[Node],
    assignments: Sequence[Assignment],
    estimates: Mapping[str, int],
    engines: Mapping[str, str],
    groups: Mapping[str, str],
) -> tuple[Host, ...]:
    """Return every worker that is live or has an assignment, by id. ``deployments`` include those of arms.

    ``estimates`` has the memory of versions that no worker has measured, by digest. ``engines`` names what
    each computes. ``groups`` has the node group of each tenant.
    """
    wanted = {(base_name(one.meta.name), one.version_digest): one.meta.name for one in deployments}
    names = {base_name(one.meta.name) for one in deployments}
    by_node = {node.worker_id: node for node in nodes}
    by_worker = {assignment.worker_id: assignment for assignment in assignments}
    needs = {**estimates, **needs_of(workers)}
    # Versions with one computation need the same.
    by_engine = {engines[digest]: size_bytes for digest, size_bytes in needs.items() if digest in engines}
    for deployment in deployments:
        digest = deployment.version_digest
        if digest not in needs and engines.get(digest) in by_engine:
            needs[digest] = by_engine[engines[digest]]
    live = {worker.worker_id: worker for worker in workers}
    hosts: list[Host] = []
    for worker_id in sorted({*live, *by_worker}):
        worker = live.get(worker_id, Worker(worker_id, address=""))
        assigned = by_worker.get(worker_id)
        stored = None if assigned is None else assigned.versions
        host = Host(
            worker, worker_id in live, by_node.get(worker_id, Node(worker_id)), stored, needs, engines=engines
        )
        host.groups = groups
        if assigned is not None:
            host.stored_group, host.stored_prefetch = assigned.node_group, assigned.prefetch
            host.stored_pinned, host.stored_ends_unix_s = assigned.pinned, assigned.ends_unix_s
        for version in stored or ():
            name = version.deployment
            key = wanted.get((name, version.version_digest), "" if name in names else name)
            if key:
                host.held[key] = version
            else:
                host.before[name] = (*host.before.get(name, ()), version)
        hosts.append(host)
    return tuple(hosts)
