"""Which worker runs which deployment: desired replicas to assignments.

Level-triggered: the answer depends on the states given, never on what changed. What is placed stays
placed unless its worker is gone, drains, or lacks a label that the deployment asks for. A replica that
has to move stays until the deployment has its replicas READY elsewhere, so moving costs no capacity;
where nothing else can take it, it stays and the reason is returned. That goes for a worker that is gone
too: a replacement is placed at once, and should the worker come back first, it finds its assignment and
what it has loaded is of use.

Memory: what a version needs at least is known once a worker has tried it. A replica goes where that is free;
where nothing has room, it takes the place of replicas of a lower priority, as few as make enough room, and
of none when all of them would not. A replica that its worker has no memory for moves to one that has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.controlplane.policy.memory import MemoryView, needs_of, no_memory
from services.core.records import AssignedVersion, Assignment, Deployment, Node, VersionState, Worker

MAX_VERSIONS_PER_WORKER: Final = 16


@dataclass(frozen=True, slots=True)
class PutAssignment:
    """Make this what the worker is to run. ``reasons`` says, per change, why."""

    assignment: Assignment
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropAssignment:
    """Forget the assignment of a worker whose lease is gone: all of it is READY elsewhere or not wanted."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A deployment that cannot have all its replicas now; ``rejected`` is (worker id, why not).

    A why is a stable word, after which a colon and figures may follow.
    """

    deployment: str
    missing: int
    rejected: tuple[tuple[str, str], ...]


Action = PutAssignment | DropAssignment | Unplaced


@dataclass(slots=True)
class _Host:
    """One worker while a plan is made. ``held`` maps deployment name to what is assigned.

    One that is not ``live`` has an assignment and no lease.
    """

    worker: Worker
    live: bool
    node: Node
    before: tuple[AssignedVersion, ...] | None
    needs: Mapping[str, int]
    held: dict[str, AssignedVersion] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def leaving(self) -> bool:
        return not self.live or self.node.draining or self.worker.draining

    @property
    def memory(self) -> MemoryView:
        return MemoryView(self.worker, tuple(self.held.values()), self.needs)

    def ready(self, wanted: AssignedVersion) -> bool:
        return any(
            loaded.deployment == wanted.deployment
            and loaded.version_digest == wanted.version_digest
            and loaded.state is VersionState.READY
            for loaded in self.worker.versions
        )


def plan(
    deployments: Sequence[Deployment],
    workers: Sequence[Worker],
    nodes: Sequence[Node],
    assignments: Sequence[Assignment],
) -> tuple[Action, ...]:
    """Return what moves ``assignments`` towards the deployments' replicas. Same values, same answer.

    ``workers`` are the live ones. Applying the actions and planning again gives no write until a state
    changes. Higher priority is placed first, then by name; no worker gets two replicas of one deployment.
    """
    hosts = _hosts(workers, nodes, assignments)
    wanted = {deployment.meta.name: deployment for deployment in deployments}
    _drop_unwanted(hosts, wanted)
    unplaced: list[Unplaced] = []
    for deployment in sorted(deployments, key=lambda d: (-d.priority.rank, d.meta.name)):
        missing = _settle(deployment, hosts)
        if missing is not None:
            unplaced.append(missing)
    writes = (_write(host) for host in hosts)
    return (*(write for write in writes if write is not None), *unplaced)


def rejection(deployment: Deployment, worker: Worker, node: Node, held: Iterable[str]) -> str:
    """Return why the worker may not get a replica it does not have, empty when it may."""
    names = frozenset(held)
    if deployment.meta.name in names:
        return "has_a_replica"
    if node.draining or worker.draining:
        return "draining"
    if node.cordoned:
        return "cordoned"
    if not _matches(deployment.node_selector, worker):
        return "lacks_a_label"
    if len(names) >= MAX_VERSIONS_PER_WORKER:
        return "full"
    return ""


def _matches(selector: Mapping[str, str], worker: Worker) -> bool:
    return all(worker.labels.get(key) == value for key, value in selector.items())


def _hosts(
    workers: Sequence[Worker], nodes: Sequence[Node], assignments: Sequence[Assignment]
) -> tuple[_Host, ...]:
    by_node = {node.worker_id: node for node in nodes}
    by_worker = {assignment.worker_id: assignment for assignment in assignments}
    needs = needs_of(workers)
    live = {worker.worker_id: worker for worker in workers}
    hosts: list[_Host] = []
    for worker_id in sorted({*live, *by_worker}):
        worker = live.get(worker_id, Worker(worker_id, address=""))
        assigned = by_worker.get(worker_id)
        node = by_node.get(worker_id, Node(worker_id))
        before = None if assigned is None else assigned.versions
        held = {version.deployment: version for version in before or ()}
        hosts.append(_Host(worker, worker_id in live, node, before, needs, held))
    return tuple(hosts)


def _drop_unwanted(hosts: Sequence[_Host], wanted: Mapping[str, Deployment]) -> None:
    for host in hosts:
        for name in [name for name in host.held if name not in wanted]:
            del host.held[name]
            host.reasons.append(f"{name}: deployment deleted")


def _settle(deployment: Deployment, hosts: Sequence[_Host]) -> Unplaced | None:
    """Give one deployment its replicas. Returns what is missing when no worker can take it."""
    name = deployment.meta.name
    version = _version_of(deployment)
    for host in hosts:
        if name in host.held and host.held[name] != version:
            same = host.held[name].version_digest == version.version_digest
            host.held[name] = version
            host.reasons.append(f"{name}: {'other settings' if same else 'other version'}")
    _leave_starved(deployment, hosts)
    placed = [host for host in hosts if name in host.held]
    moving = [host for host in placed if host.leaving or not _matches(deployment.node_selector, host.worker)]
    staying = [host for host in placed if host not in moving]
    while len(staying) > deployment.replicas:
        surplus = max(staying, key=lambda host: _surplus_rank(host, version, staying))
        staying.remove(surplus)
        _remove(surplus, name, "surplus")
    rejected: tuple[tuple[str, str], ...] = ()
    while len(staying) < deployment.replicas:
        choice = _choose(deployment, hosts, staying)
        if not isinstance(choice, _Host):
            rejected = choice
            break
        choice.held[name] = version
        choice.reasons.append(f"{name}: placed")
        staying.append(choice)
    for host in staying:
        _make_room(host, version)
    missing = deployment.replicas - len(staying)
    moving.sort(key=lambda host: not host.live)  # of those that may serve on, the live ones
    _let_go(moving, name, keep=missing + sum(not host.ready(version) for host in staying))
    return Unplaced(name, missing, rejected) if missing else None


def _version_of(deployment: Deployment) -> AssignedVersion:
    return AssignedVersion(
        deployment.meta.name,
        deployment.model,
        deployment.version_digest,
        deployment.executor,
        deployment.priority,
    )


def _leave_starved(deployment: Deployment, hosts: Sequence[_Host]) -> None:
    """Take replicas off workers without memory for them, as many as others have room for.

    Such a replica serves nobody, so it need not wait for its replacement.
    """
    version = _version_of(deployment)
    name, digest, rank = version.deployment, version.version_digest, version.priority.rank
    starved = [host for host in hosts if name in host.held and host.live and host.memory.starved(digest)]
    if not starved:
        return
    roomy = sum(
        not rejection(deployment, host.worker, host.node, host.held)
        and host.memory.free_bytes(but=digest, rank=rank) >= host.memory.needed_bytes(version)
        for host in hosts
        if host.live
    )
    for host in starved[: max(0, roomy)]:
        if host.memory.needed_bytes(version) > host.memory.free_bytes(but=digest, rank=rank):
            _remove(host, name, "no memory")  # else its worker is about to load it


def _make_room(host: _Host, version: AssignedVersion) -> None:
    """Take away what has to yield so that the worker can load this version."""
    if version.version_digest not in host.needs:
        return
    for digest, size_bytes in host.memory.yielding(version):
        for name in [name for name, held in host.held.items() if held.version_digest == digest]:
            _remove(host, name, f"yields {size_bytes // 2**20} MiB to {version.deployment}")


def _let_go(moving: Sequence[_Host], name: str, *, keep: int) -> None:
    """Remove the replicas that move, all but as many as are not READY elsewhere yet."""
    for host in moving[keep:]:
        _remove(host, name, "moved")


def _remove(host: _Host, name: str, why: str) -> None:
    del host.held[name]
    host.reasons.append(f"{name}: {why}")


def _choose(
    deployment: Deployment, hosts: Sequence[_Host], staying: Sequence[_Host]
) -> _Host | tuple[tuple[str, str], ...]:
    """Return the eligible worker in the zone with the fewest replicas, then the least loaded.

    One where a lower priority has to yield is the last choice.
    """
    version = _version_of(deployment)
    rejected: list[tuple[str, str]] = []
    ranking: list[tuple[bool, int, int, str]] = []
    by_id: dict[str, _Host] = {}
    for host in hosts:
        if not host.live:
            continue
        worker_id = host.worker.worker_id
        why = rejection(deployment, host.worker, host.node, host.held)
        crowded = False
        if not why and version.version_digest in host.needs:
            memory = host.memory
            why = no_memory(memory, version)
            free_bytes = memory.free_bytes(but=version.version_digest, rank=version.priority.rank)
            crowded = free_bytes < memory.needed_bytes(version)
        if why:
            rejected.append((worker_id, why))
            continue
        by_id[worker_id] = host
        ranking.append((crowded, _in_zone(staying, host.worker.zone), len(host.held), worker_id))
    return by_id[min(ranking)[3]] if ranking else tuple(rejected)


def _in_zone(hosts: Sequence[_Host], zone: str) -> int:
    return sum(host.worker.zone == zone for host in hosts)


def _surplus_rank(
    host: _Host, version: AssignedVersion, staying: Sequence[_Host]
) -> tuple[bool, bool, int, int, str]:
    """Order in which replicas are given up, largest first: not READY, cordoned, crowded zone, loaded."""
    worker = host.worker
    return (
        not host.ready(version),
        host.node.cordoned,
        _in_zone(staying, worker.zone),
        len(host.held),
        worker.worker_id,
    )


def _write(host: _Host) -> PutAssignment | DropAssignment | None:
    after = tuple(host.held[name] for name in sorted(host.held))
    if not host.live and not after:
        return DropAssignment(host.worker.worker_id)
    if after == (host.before or ()):
        return None
    return PutAssignment(Assignment(host.worker.worker_id, after), tuple(host.reasons))
