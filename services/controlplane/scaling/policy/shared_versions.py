"""Divides the load of a version between the deployments that share it.

A request counts for the deployment that it names. One at zero whose nodes run the version for another
deployment needs none: what serves its requests is scaled for them. Rows name no deployment, and are divided
by the most replicas of each. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import Priority

_Class = tuple[str, Priority]  # deployment and class


@dataclass(frozen=True, slots=True)
class Sharer:
    """A deployment of a version, and the group of nodes that run it."""

    deployment: str
    node_group: str
    replicas: int  # replicas that it is to have now
    most: int


@dataclass(slots=True)
class _Counts:
    """Work that arrived, as one reporter counted it by named deployment, and what each was given of it."""

    reporter: int
    reported: dict[_Class, float] = field(default_factory=dict)
    given: dict[_Class, float] = field(default_factory=dict)
    targets_s: dict[_Class, float] = field(default_factory=dict)  # targets of what was given


class SharedVersions:
    """Counts arrivals by deployment, so that none counts twice when a deployment reaches or leaves zero."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def divide(
        self, loads: Mapping[str, PoolLoad], sharers: Mapping[str, Sequence[Sharer]]
    ) -> dict[str, dict[str, PoolLoad]]:
        """Return by deployment the loads of its versions, by digest, from the loads of whole pools."""
        found: dict[str, dict[str, PoolLoad]] = {}
        kept: dict[str, _Counts] = {}
        for digest, several in sharers.items():
            if (load := loads.get(digest)) is None:
                continue
            counts = self._counts.get(digest)
            if counts is None or counts.reporter != load.reporter:
                counts = _Counts(load.reporter)
            kept[digest] = counts
            for name, one in _divided(load, several, counts).items():
                found.setdefault(name, {})[digest] = one
        self._counts = kept
        return found


def _divided(load: PoolLoad, sharers: Sequence[Sharer], counts: _Counts) -> dict[str, PoolLoad]:
    waiting: dict[_Class, float] = {}
    for one in load.classes:
        source = one.deployment, one.priority
        arrived = max(0.0, one.arrived - counts.reported.get(source, 0.0))
        counts.reported[source] = one.arrived
        for name, ratio in _receivers(one.deployment, sharers).items():
            key = name, one.priority
            counts.given[key] = counts.given.get(key, 0.0) + arrived * ratio
            counts.targets_s[key] = one.target_s
            waiting[key] = waiting.get(key, 0.0) + one.waiting * ratio
    classes = [
        (
            name,
            ClassLoad(priority, counts.targets_s[name, priority], waiting.get((name, priority), 0.0), given),
        )
        for (name, priority), given in counts.given.items()
    ]
    return {
        sharer.deployment: replace(
            load,
            classes=tuple(one for name, one in classes if name == sharer.deployment),
            held=_held(load, sharer, sharers),
            running=_running(load, sharer, sharers),
            groups=(),
        )
        for sharer in sharers
    }


def _receivers(deployment: str, sharers: Sequence[Sharer]) -> dict[str, float]:
    """Return the parts of a deployment's work that each is scaled for. They sum to 1."""
    own = next((one for one in sharers if one.deployment == deployment), None)
    peers = [one for one in sharers if own is None or one.node_group == own.node_group]
    serving = [one for one in peers if one.replicas]
    several = [own] if own is not None and (own.replicas or not serving) else serving or peers
    total = sum(max(1, one.most) for one in several)
    return {one.deployment: max(1, one.most) / total for one in several}


def _held(load: PoolLoad, sharer: Sharer, sharers: Iterable[Sharer]) -> int:
    if not load.groups:
        return load.held  # a scheduler of an earlier release
    others = {one.deployment for one in sharers} - {sharer.deployment}
    mine = [one for one in load.groups if one.node_group == sharer.node_group]
    return sum(one.held for one in mine if one.deployment not in others)


def _running(load: PoolLoad, sharer: Sharer, sharers: Iterable[Sharer]) -> int:
    """Return what runs on its nodes. Of several that serve there one is not idle, which is enough for all."""
    peers = (one.deployment for one in sharers if one.replicas and one.node_group == sharer.node_group)
    if sharer.deployment != min(peers, default=sharer.deployment):
        return 0
    return sum(one.running for one in load.groups if one.node_group == sharer.node_group)
