"""The change of a deployment to another version, always with a version that serves.

The new version is loaded while the previous one serves. The previous version retires once the new one takes
new requests (``Deployment.serving_digest``), and is removed from its worker when all requests accepted for it
have ended. Where no worker has memory for both, the previous version is removed from one worker at a time,
and only while another worker serves the deployment. If none does, it stays: an update never ends the only
version that serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.controlplane.policy.host import Host
from services.controlplane.policy.memory import no_memory
from services.core.fleet import replicas_in
from services.core.records import AssignedVersion, Deployment, VersionState
from services.core.rollouts.routes import RevisedRoute

# RESTARTING counts: requests placed for a version that reloads soon wait for it.
_SERVES = (VersionState.READY, VersionState.RETIRING, VersionState.RESTARTING)


def retire_previous(
    deployment: Deployment, version: AssignedVersion, hosts: Sequence[Host], split: RevisedRoute | None = None
) -> None:
    """Keep the previous version that takes new requests, and retire or drop the others.

    A previous version that served no requests when the update began is replaced in place. With a ``split``,
    gateways follow that, and its closed arms are previous versions that never serve again.
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
            least = split.revision if split is not None and old.version_digest in arms else 0
            kept = replace(
                old,
                priority=deployment.priority,
                least_route_revision=least,
                kv_share=0,
                itl_target_s=version.itl_target_s,
            )
            if not deployment.replicas:
                host.remove_before(old, "surplus")
            elif serving != old.version_digest and ready.get(serving):
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
