"""The placement planner: desired replicas to assignments of workers.

Level-triggered: the plan depends on the given states only, not on what changed. A placed replica stays unless
its worker has no lease, drains, or lacks a label that the deployment requires. A replica that has to move
stays until the deployment has its replicas READY elsewhere, so moving costs no capacity. If no other worker
can take it, it stays and the reason is returned. The same holds for a worker without a lease: a replacement
is placed at once, and if the worker returns first, its assignment and loaded versions are used again.

Memory: the minimum of a version is recorded once a worker has tried to load it. A replica is placed where
that much is free. If no worker has room, it replaces replicas of a lower priority: as few as make enough
room, and none if all of them would not suffice. A replica whose worker lacks memory for it moves to a worker
with memory. Idle deployments that may be at zero leave before any other, in a given order, and get no new
worker.

``ServingTerms`` travel with an assignment: what its versions are probed with, and their ITL target. The
target follows the objectives at once; the shapes stay those of the time when the version was assigned.

The change of a deployment to another version always leaves a version that serves. The new version is loaded
while the previous one serves. The previous version retires once the new one takes new requests
(``Deployment.serving_digest``), and is removed from its worker when all requests accepted for it have ended.
Where no worker has memory for both, the previous version is removed from one worker at a time, and only
while another worker serves the deployment. If none does, it stays.

An update in place loads nothing beside: the new version is placed where the previous one is, and takes its
engine over.

A node that is assigned to a tenant runs only deployments of that tenant, and these run on no other node
(``Host.admits``). What a node may no longer run is removed at once, whether or not it is READY elsewhere:
isolation goes before capacity.

An arm of a split is planned like a deployment
of its own, NAME@DIGEST, after all deployments: it evicts nothing, and runs in addition to the stable version,
or in its place where the route goes worker by worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.controlplane.policy.host import (
    MAX_VERSIONS_PER_WORKER,
    Host,
    arm_deployment,
    base_name,
    hosts_of,
    kv_share_of,
)
from services.controlplane.policy.memory import no_memory
from services.core.estimates.traffic_shapes import RequestShape
from services.core.fleet import replicas_in
from services.core.records import (
    AssignedVersion,
    Assignment,
    Deployment,
    InPlace,
    Node,
    Objective,
    VersionState,
    Worker,
)
from services.core.rollouts.routes import RevisedRoute

MAX_PREFETCHED: Final = 2  # versions that a worker holds without running them
_KEPT_FACTOR: Final = 2.0  # how much likelier a version must be to replace one that is prefetched
# RESTARTING counts: requests placed for a version that reloads soon wait for it.
_SERVES = (VersionState.READY, VersionState.RETIRING, VersionState.RESTARTING)


@dataclass(frozen=True, slots=True)
class ServingTerms:
    """``probes``: shapes of the model's traffic. ``itl_target_s`` 0: none is promised."""

    probes: tuple[RequestShape, ...] = ()
    itl_target_s: float = 0.0

    def of(self, version: AssignedVersion) -> AssignedVersion:
        """Return the version with these terms."""
        return replace(version, probes=self.probes, itl_target_s=self.itl_target_s)


NO_TERMS: Final = ServingTerms()


def serving_terms(
    objectives: Iterable[Objective], probes: Mapping[str, tuple[RequestShape, ...]]
) -> dict[str, ServingTerms]:
    """Return the terms by deployment. The tightest ITL target of any class holds: they share steps.

    An objective that only observes has no part in them.
    """
    targets: dict[str, float] = {}
    for one in objectives:
        if one.shapes_serving and one.itl.seconds > 0:
            targets[one.model] = min(one.itl.seconds, targets.get(one.model, one.itl.seconds))
    models = sorted({*targets, *probes})
    return {model: ServingTerms(probes.get(model, ()), targets.get(model, 0.0)) for model in models}


@dataclass(frozen=True, slots=True)
class PutAssignment:
    """Set the worker's assignment. ``reasons`` gives the cause of each change."""

    assignment: Assignment
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropAssignment:
    """Delete the assignment of a worker without a lease: all of it is READY elsewhere or not wanted."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A deployment that cannot have all its replicas now; ``rejected`` is (worker id, reason).

    A reason is a stable word, optionally followed by a colon and figures.
    """

    deployment: str
    missing: int
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """The version before a final rollout: its files stay on the workers, and it is warm until a time."""

    version_digest: str
    warm_until_unix_s: float


Action = PutAssignment | DropAssignment | Unplaced
_KEPT: Final[Mapping[str, KeptVersion]] = {}
_MEASURED: Final[Mapping[str, int]] = {}
_NONE: Final[Mapping[str, ServingTerms]] = {}
_UNKNOWN: Final[Mapping[str, str]] = {}
_UNLIKELY: Final[Mapping[str, float]] = {}


def plan(
    deployments: Sequence[Deployment],
    workers: Sequence[Worker],
    nodes: Sequence[Node],
    assignments: Sequence[Assignment],
    routes: Sequence[RevisedRoute] = (),
    *,
    estimates: Mapping[str, int] = _MEASURED,
    engines: Mapping[str, str] = _UNKNOWN,
    terms: Mapping[str, ServingTerms] = _NONE,
    groups: Mapping[str, str] = _UNKNOWN,
    likely: Mapping[str, float] = _UNLIKELY,
    leaving: Sequence[str] = (),
    kept: Mapping[str, KeptVersion] = _KEPT,
    beside: Collection[str] = (),
) -> tuple[Action, ...]:
    """Return the actions that move ``assignments`` towards the deployments' replicas. Deterministic.

    ``workers`` are the live ones. ``estimates`` has the memory of versions that none has measured.
    ``engines`` names what each version computes: versions with the same share the memory of one. ``terms``
    are by deployment; ``groups`` has the node group of each tenant. ``likely`` weighs the deployments that
    may need another replica soon: workers without one prefetch their versions. ``leaving`` are the idle
    deployments that may be at zero, the first to leave first. ``kept`` has, by deployment, the version that a
    revert would bring back. No version replaces another in place in the deployments ``beside``: those of open
    rollouts. After the actions are applied, another plan writes nothing until a state changes.
    Higher priority is placed first, then by name; no worker gets two replicas of one version. A route that is
    no split is ignored.
    """
    splits = {one.route.deployment: one for one in routes if not one.route.fault}
    deployments = [replace(one, in_place_s=None) if one.meta.name in beside else one for one in deployments]
    arms = [arm for deployment in deployments for arm in _arms(deployment, splits.get(deployment.meta.name))]
    hosts = hosts_of([*deployments, *arms], workers, nodes, assignments, estimates, engines, groups)
    ranks = {name: number - len(leaving) for number, name in enumerate(leaving)}
    for host in hosts:
        host.idle_ranks = ranks
    wanted = {deployment.meta.name: deployment for deployment in (*deployments, *arms)}
    _drop_unwanted(hosts, wanted)
    unplaced: list[Unplaced] = []
    order = sorted(
        wanted.values(),
        key=lambda d: (d.meta.name != base_name(d.meta.name), -d.priority.rank, d.meta.name),
    )
    for deployment in order:
        name = base_name(deployment.meta.name)
        split = splits.get(name)
        if split is not None and split.route.by_worker and name == deployment.meta.name:
            deployment = _yielding_to_arms(deployment, split, hosts)
        missing = _settle(deployment, hosts, split, terms.get(name, NO_TERMS), kept.get(name))
        if missing is not None:
            unplaced.append(missing)
    for host in hosts:
        host.pinned = _pinned(host, wanted, kept)
    warm = [(likely[one.meta.name], one) for one in deployments if one.meta.name in likely]
    writes = (_write(host, _prefetch(host, warm)) for host in hosts)
    return (*(write for write in writes if write is not None), *unplaced)


def _drop_unwanted(hosts: Sequence[Host], wanted: Mapping[str, Deployment]) -> None:
    for host in hosts:
        for name in [name for name in host.held if name not in wanted]:
            host.remove(name, "deployment deleted")
        for name in [name for name in host.held if not host.admits(wanted[name])]:
            host.remove(name, "the node is of another group")
        for name in [name for name in host.before if name in wanted and not host.admits(wanted[name])]:
            for version in host.before[name]:
                host.remove_before(version, "the node is of another group")


def _arms(deployment: Deployment, split: RevisedRoute | None) -> list[Deployment]:
    """Return the wishes for the open arms of a deployment's split that are not its own version."""
    arms = split.route.arms if split is not None else ()
    return [
        arm_deployment(deployment, arm)
        for arm in arms
        if not arm.closed and arm.version_digest != deployment.version_digest
    ]


def _yielding_to_arms(deployment: Deployment, split: RevisedRoute, hosts: Sequence[Host]) -> Deployment:
    """Return the wish for the stable version of a split whose arms take its workers.

    It leaves one worker at a time: the next only when every arm that has a worker is READY there.
    """
    name = deployment.meta.name
    present = sum(name in host.held and not host.leaving for host in hosts)
    arms = [
        host.ready(version)
        for host in hosts
        for held, version in host.held.items()
        if held != name and base_name(held) == name
    ]
    least = present - 1 if all(arms) else present
    return replace(deployment, replicas=max(split.route.stable.replicas, least))


def _settle(
    deployment: Deployment,
    hosts: Sequence[Host],
    split: RevisedRoute | None,
    terms: ServingTerms,
    kept: KeptVersion | None,
) -> Unplaced | None:
    """Place the replicas of one deployment. Returns the shortage when no worker can take a replica."""
    name = deployment.meta.name
    version = terms.of(_version_of(deployment))
    is_arm = name != version.deployment
    route = None if split is None else split.route
    version = replace(version, kv_share=kv_share_of(route, version.version_digest))
    if split is None and not is_arm and deployment.in_place_s is not None:
        version = replace(version, in_place=InPlace(deployment.in_place_s, deployment.revision + 1))
        _place_in_place(deployment, version, hosts)
    if not is_arm:
        retire_previous(deployment, version, hosts, split, kept)
    for host in hosts:
        if name in host.held and host.held[name] != version:
            host.held[name] = version
            host.reasons.append(f"{name}: other settings")
    _remove_starved(deployment, hosts)
    placed = [host for host in hosts if name in host.held]
    moving = [host for host in placed if host.leaving or not host.suits(deployment)]
    staying = [host for host in placed if host not in moving]
    while len(staying) > deployment.replicas:
        surplus = max(staying, key=lambda host: _surplus_rank(host, version, staying))
        staying.remove(surplus)
        surplus.remove(name, "surplus")
    idle = any(name in host.idle_ranks for host in hosts)
    wanted = min(deployment.replicas, len(staying)) if idle else deployment.replicas
    rejected: tuple[tuple[str, str], ...] = ()
    alone = split is not None and split.route.by_worker
    while len(staying) < wanted:
        choice = _choose(deployment, hosts, staying, alone=alone)
        if not isinstance(choice, Host):
            rejected = choice
            break
        choice.held[name] = version
        choice.reasons.append(f"{name}: placed")
        staying.append(choice)
    missing = wanted - len(staying)
    if not is_arm and not idle:
        for host in staying:
            _evict_for(host, version)
        missing = free_memory_for_update(deployment, version, hosts, missing)
    moving.sort(key=lambda host: not host.live)  # prefer live workers among those that keep serving
    _remove_moving(moving, name, keep=missing + sum(not host.ready(version) for host in staying))
    return Unplaced(name, missing, rejected) if missing else None


def _place_in_place(deployment: Deployment, version: AssignedVersion, hosts: Sequence[Host]) -> None:
    """Place a version where the one before is, in whose engine it replaces the weights: that needs no
    memory."""
    name = deployment.meta.name
    for host in hosts:
        before = host.before.get(name, ())
        serving = next((one.version_digest for one in before if not one.retiring), "")
        if not serving:
            continue
        shared = host.engines.get(serving) or serving
        host.engines = {**host.engines, serving: shared, version.version_digest: shared}
        placed = sum(name in one.held for one in hosts)
        if host.live and placed < deployment.replicas and not host.rejection(deployment):
            host.held[name] = version
            host.reasons.append(f"{name}: placed in the engine of the version before")


def _version_of(deployment: Deployment) -> AssignedVersion:
    return AssignedVersion(
        base_name(deployment.meta.name),
        deployment.model,
        deployment.version_digest,
        deployment.executor,
        deployment.priority,
        tensor_parallel=deployment.tensor_parallel,
        pipeline_parallel=deployment.pipeline_parallel,
        owner=deployment.owner,
    )


def _remove_starved(deployment: Deployment, hosts: Sequence[Host]) -> None:
    """Take replicas off workers without memory for them, as many as other workers have room for.

    Such a replica serves no requests, so it need not wait for its replacement.
    """
    version = _version_of(deployment)
    name, digest, rank = deployment.meta.name, version.version_digest, version.priority.rank
    starved = [host for host in hosts if name in host.held and host.live and host.memory.starved(digest)]
    if not starved:
        return
    roomy = sum(
        not host.rejection(deployment)
        and host.memory.free_bytes(but=digest, rank=rank) >= host.memory.needed_bytes(version)
        for host in hosts
        if host.live
    )
    for host in starved[: max(0, roomy)]:
        if host.memory.needed_bytes(version) > host.memory.free_bytes(but=digest, rank=rank):
            host.remove(name, "no memory")  # the worker would otherwise load it


def _evict_for(host: Host, version: AssignedVersion) -> None:
    """Evict idle replicas and those of lower priority so that the worker can load this version."""
    for one in host.idle[: max(0, len(host.assigned) - MAX_VERSIONS_PER_WORKER)]:
        host.evict(one, f"leaves its place to {version.deployment}")
    if version.version_digest not in host.needs:
        return
    for digest, size_bytes in host.memory.evictions_for(version):
        why = f"yields {size_bytes // 2**20} MiB to {version.deployment}"
        evicted = [one for one in host.assigned if one.version_digest == digest]
        for one in evicted:
            host.evict(one, why)


def _remove_moving(moving: Sequence[Host], name: str, *, keep: int) -> None:
    """Remove the moving replicas, except as many as are not yet READY elsewhere."""
    for host in moving[keep:]:
        host.remove(name, "moved")


def _choose(
    deployment: Deployment, hosts: Sequence[Host], staying: Sequence[Host], *, alone: bool = False
) -> Host | tuple[tuple[str, str], ...]:
    """Return the eligible worker in the zone with the fewest replicas, then the least loaded.

    First come workers whose engine the version joins; last, those that have to evict idle deployments or a
    lower priority, the least worth first. Among equals, those that have prefetched the version.
    ``alone``: none with another version of the deployment is eligible.
    """
    version = _version_of(deployment)
    rejected: list[tuple[str, str]] = []
    ranking: list[tuple[int, bool, int, bool, int, str]] = []
    by_id: dict[str, Host] = {}
    for host in hosts:
        if not host.live:
            continue
        worker_id = host.worker.worker_id
        why = host.rejection(deployment)
        if not why and alone and any(base_name(held) == version.deployment for held in host.held):
            why = "has_another_version"
        if not why and version.version_digest in host.needs:
            why = no_memory(host.memory, version)
        if why:
            rejected.append((worker_id, why))
            continue
        by_id[worker_id] = host
        new = not host.memory.joins(version)
        cold = version.version_digest not in host.worker.prefetched
        in_zone = _in_zone(staying, host.worker.zone)
        ranking.append((host.loss(version), new, in_zone, cold, len(host.assigned), worker_id))
    return by_id[min(ranking)[-1]] if ranking else tuple(rejected)


def _in_zone(hosts: Sequence[Host], zone: str) -> int:
    return sum(host.worker.zone == zone for host in hosts)


def _surplus_rank(
    host: Host, version: AssignedVersion, staying: Sequence[Host]
) -> tuple[bool, bool, int, int, str]:
    """Sort key of surplus replicas, removed largest first: not READY, cordoned, crowded zone, loaded."""
    worker = host.worker
    return (
        not host.ready(version),
        host.node.cordoned,
        _in_zone(staying, worker.zone),
        len(host.assigned),
        worker.worker_id,
    )


def _prefetch(host: Host, warm: Sequence[tuple[float, Deployment]]) -> tuple[AssignedVersion, ...]:
    """Return the likeliest versions of which it may get a replica and has none.

    One that it prefetches already stays unless another is clearly likelier, so that weights that move do not
    make workers fetch in turns.
    """
    if host.leaving or host.node.cordoned:
        return ()
    kept = {one.version_digest for one in host.stored_prefetch}
    found = {
        version.version_digest: (-weight * (_KEPT_FACTOR if was_kept else 1.0), not was_kept, version)
        for weight, deployment in warm
        if not host.rejection(deployment)
        for version in (_version_of(deployment),)
        for was_kept in (version.version_digest in kept,)
    }
    ranked = sorted(found.values(), key=lambda one: (one[0], one[1], one[2].deployment))
    return tuple(version for _, _, version in ranked[:MAX_PREFETCHED])


def _pinned(
    host: Host, wanted: Mapping[str, Deployment], kept: Mapping[str, KeptVersion]
) -> tuple[AssignedVersion, ...]:
    """Return the versions that a revert would bring back to a worker, as their deployments run here."""
    return tuple(
        replace(_version_of(wanted[name]), version_digest=kept[name].version_digest)
        for name in sorted(host.held)
        if name in kept
    )


def _write(host: Host, prefetch: tuple[AssignedVersion, ...]) -> PutAssignment | DropAssignment | None:
    after = host.assigned
    if not host.live and not after:
        return DropAssignment(host.worker.worker_id)
    node, ends_unix_s = host.worker.worker_id, host.node.ends_unix_s
    same = {*prefetch} == {*host.stored_prefetch} and host.pinned == host.stored_pinned
    same_node = (host.group, ends_unix_s) == (host.stored_group, host.stored_ends_unix_s)
    if after == (host.stored or ()) and same_node and same:
        return None
    if not same:
        files = ", ".join(one.deployment for one in (*prefetch, *host.pinned)) or "nothing"
        host.reasons.append(f"has the files of {files} beside")
    assignment = Assignment(node, after, host.group, prefetch, host.pinned, ends_unix_s)
    return PutAssignment(assignment, tuple(host.reasons))


def retire_previous(
    deployment: Deployment,
    version: AssignedVersion,
    hosts: Sequence[Host],
    split: RevisedRoute | None = None,
    revertible: KeptVersion | None = None,
) -> None:
    """Keep the previous version that takes new requests, and retire or drop the others.

    A previous version that served no requests when the update began is replaced in place. With a ``split``,
    gateways follow that, and its closed arms are previous versions that never serve again: their fence stays
    until they have left. The ``revertible`` one stays warm.
    """
    name = deployment.meta.name
    arms = {arm.version_digest: arm for arm in split.route.arms[1:]} if split is not None else {}
    ready, restarting = (
        {digest: count for digest, count in _replicas_in(state, name, hosts).items() if digest not in arms}
        for state in (VersionState.READY, VersionState.RESTARTING)
    )
    serving = deployment.serving_digest(ready, restarting)
    for host in hosts:
        for old in host.before.get(name, ()):
            loaded = host.worker.loaded(old)
            serves = loaded is not None and loaded.state in _SERVES
            closed = split is not None and old.version_digest in arms
            warm = revertible is not None and old.version_digest == revertible.version_digest
            kept = replace(
                old,
                priority=deployment.priority,
                least_route_revision=split.revision if split and closed else old.least_route_revision,
                successor_digest=deployment.version_digest if closed else old.successor_digest,
                warm_until_unix_s=revertible.warm_until_unix_s if revertible and warm else 0.0,
                kv_share=0,
                itl_target_s=version.itl_target_s,
            )
            if not deployment.replicas:
                host.remove_before(old, "surplus")
            elif serving != old.version_digest and (ready.get(serving) or kept.least_route_revision):
                stays = host.live and loaded is not None and (serves or old.retiring)
                if stays and not _serves_another(old, host):
                    # removed when its requests have ended
                    _keep(host, old, replace(kept, retiring=True), "replaced")
                else:
                    host.remove_before(old, "replaced")
            elif serves or old.served:
                _keep(
                    host, old, replace(kept, served=True, retiring=False), "serves until its successor does"
                )
            elif host.live:
                host.remove_before(old, "other version")
                host.held.setdefault(name, version)
        if host.live and host.leaving and name in host.before and _served_elsewhere(name, host, hosts):
            for old in host.before[name]:
                host.remove_before(old, "moved")


def free_memory_for_update(
    deployment: Deployment, version: AssignedVersion, hosts: Sequence[Host], missing: int
) -> int:
    """Remove the previous version from one worker without memory for both, if another worker serves.

    ``missing`` replicas have no worker. Returns how many then have none.
    """
    name = deployment.meta.name
    if any(_is_coming(version, host) for host in hosts):
        return missing
    for host in sorted(hosts, key=lambda each: name not in each.held):
        before = host.before.get(name, ())
        if not host.live or not before or not _is_short(deployment, version, host, missing):
            continue
        if any(old.retiring for old in before):
            continue  # removed when the requests accepted for it have ended
        states = [loaded.state for old in before if (loaded := host.worker.loaded(old)) is not None]
        if any(state in _SERVES for state in states) and not _served_elsewhere(name, host, hosts):
            continue
        for old in before:
            host.remove_before(old, f"makes way for {version.version_digest[:19]}")
        if name not in host.held:
            host.held[name] = version
            missing -= 1
        return missing
    return missing


def _replicas_in(state: VersionState, name: str, hosts: Sequence[Host]) -> Mapping[str, int]:
    """Return, by version digest, how many replicas of a deployment are in a state on workers that stay."""
    return replicas_in(state, (host.worker for host in hosts if host.live)).get(name, {})


def _keep(host: Host, old: AssignedVersion, kept: AssignedVersion, why: str) -> None:
    if kept != old:
        name = old.deployment
        host.before[name] = tuple(kept if one == old else one for one in host.before[name])
        host.reasons.append(f"{name}: {why}")


def _serves_another(old: AssignedVersion, host: Host) -> bool:
    """Whether another deployment uses the same version on the worker: then nothing is unloaded."""
    return any(
        one.version_digest == old.version_digest and one.deployment != old.deployment and not one.retiring
        for one in host.assigned
    )


def _is_coming(version: AssignedVersion, host: Host) -> bool:
    """Whether a worker has only the new version, and will serve it."""
    name = version.deployment
    if host.leaving or name not in host.held or name in host.before or host.ready(version):
        return False
    return not (host.memory.starved(version.version_digest) and no_memory(host.memory, version))


def _is_short(deployment: Deployment, version: AssignedVersion, host: Host, missing: int) -> bool:
    """Whether the worker lacks memory for the new version, and has it without the previous one."""
    name, digest = version.deployment, version.version_digest
    if name in host.held:
        short = host.memory.starved(digest)
    else:
        short = missing > 0 and digest in host.needs and not host.rejection(deployment)
    if not short or host.leaving:
        return False
    held = [one for one in host.assigned if one.deployment != name] + [version]
    replacing = replace(host.memory, held=tuple(held))
    beside = replace(host.memory, held=(*held, *host.before[name]))
    return bool(no_memory(beside, version)) and not no_memory(replacing, version)


def _served_elsewhere(name: str, host: Host, hosts: Sequence[Host]) -> bool:
    """Whether another worker that stays serves the deployment in a version that this worker has."""
    digests = {old.version_digest for old in host.before.get(name, ())}
    staying = [one for one in hosts if one is not host and not one.node.draining]
    others = _replicas_in(VersionState.READY, name, staying)
    return any(others.get(digest) for digest in digests)
