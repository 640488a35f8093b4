"""The load of a deployment: what schedulers report, deadlines of batches, burn rates, and zones. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from services.controlplane.policy.host import Host
from services.controlplane.scaling.policy.scaler import Zone
from services.core.batches import BatchRecord
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import Deployment, Priority

_BIN_S: Final = 60.0  # deadlines within it are one, the earliest


def merged(loads: Iterable[PoolLoad]) -> PoolLoad:
    """Return the load of several versions as one: the first's rate and request, the sum of the rest."""
    found = list(loads)
    if not found:
        return PoolLoad(())
    classes: dict[Priority, ClassLoad] = {}
    for one in (one for load in found for one in load.classes):
        other = classes.get(one.priority, ClassLoad(one.priority))
        classes[one.priority] = ClassLoad(
            one.priority,
            min(one.target_s, other.target_s),
            one.waiting + other.waiting,
            one.arrived + other.arrived,
        )
    return replace(
        found[0],
        classes=tuple(classes.values()),
        rate=next((one.rate for one in found if one.rate), None),
        held=sum(one.held for one in found),
        running=sum(one.running for one in found),
    )


def load_of(deployment: Deployment, loads: Mapping[str, PoolLoad]) -> PoolLoad:
    """Return the load of several versions, by digest, as one; the one that the deployment gets is first."""
    return merged(loads[one] for one in sorted(loads, key=lambda one: one != deployment.version_digest))


@dataclass(slots=True)
class LinesLeft:
    """Lines of batches that wait for their results, by deployment: (seconds left, lines, work of one)."""

    _parts: defaultdict[str, list[tuple[float, float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, batch: BatchRecord, unix_s: float) -> None:
        work = batch.work / batch.next_line if batch.next_line else 0.0
        left_s = _BIN_S * ((batch.expire_unix_s - unix_s) // _BIN_S)
        for deployment in batch.models if left_s > 0.0 else ():
            if lines := batch.lines_left(deployment):
                self._parts[deployment].append((left_s, lines, work))

    def due(self, deployment: str, request_work: float) -> tuple[tuple[float, float], ...] | None:
        """Return (seconds left, work) by deadline, None without any. A line of a batch without results takes
        ``request_work``."""
        found: dict[float, float] = {}
        for left_s, lines, work in self._parts.get(deployment, ()):
            found[left_s] = found.get(left_s, 0.0) + lines * (work or request_work)
        return tuple(sorted(found.items())) or None


def signalled(
    load: PoolLoad, due: tuple[tuple[float, float], ...] | None, burns: Mapping[Priority, float]
) -> PoolLoad:
    """Return a scheduler's load with burn rates and the deadlines of lines, which are of the lowest class."""
    classes = {one.priority: replace(one, burn_ratio=burns.get(one.priority, 0.0)) for one in load.classes}
    if due is not None:
        found = classes.get(Priority.BATCH, ClassLoad(Priority.BATCH))
        classes[Priority.BATCH] = replace(found, due=due)
    return replace(load, classes=tuple(classes.values()))


def zones_of(deployment: Deployment, hosts: Iterable[Host], taken: Collection[str]) -> tuple[Zone, ...]:
    """Return the zones with a live node that may get a replica, by name, each with the dearest one's price.

    ``taken``: the workers that have a replica.
    """
    found: dict[str, Zone] = {}
    for host in hosts:
        worker = host.worker
        if not worker.zone or host.leaving or host.node.cordoned or not host.suits(deployment):
            continue
        zone = found.get(worker.zone, Zone(worker.zone))
        found[worker.zone] = Zone(
            worker.zone,
            zone.replicas + (worker.worker_id in taken),
            max(zone.price, worker.cost_per_hour),
        )
    return tuple(found[name] for name in sorted(found))
