"""The leader's decisions about replicas: read what the scheduler reports, decide, write what changed.

A decision is written under the leader's fence and only for the bounds that it was made for, so two control
planes never decide both. ``fleet_of`` reads it in place of the deployment's own number; the operator's record
is never written here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from services.controlplane.fleet import Fleet, FleetRecord, fleet_of, replicas_of
from services.controlplane.leading import repeat_while_leading
from services.controlplane.policy.host import Host
from services.controlplane.policy.memory import needs_of
from services.controlplane.scaling.policy.deployment import DeploymentScaler, Situation, replica_cost
from services.controlplane.scaling.policy.residency import Residency, Resident, leaving
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.controlplane.scaling.policy.shared_versions import SharedVersions, Sharer
from services.controlplane.scaling.policy.signals import LinesLeft, load_of, signalled, zones_of
from services.controlplane.telemetry import ScalingTelemetry
from services.core.batches import BatchRecord, OwnerRecord, owner_key
from services.core.errors import FairwayError
from services.core.estimates.pool_load import PoolLoad
from services.core.records import DEPLOYMENTS, SCALED, SHARED_NODES, Deployment, Node, Objective, dump
from services.core.scaling import Scaled
from services.ports.clock import Clock
from services.ports.store import Committed, Delete, ModRevisionIs, Put, Store
from services.runtime.fleet_state.informer import Informer, Versioned
from services.runtime.fleet_state.leadership import Leadership

log = structlog.get_logger()
PERIOD_S: Final = 1.0
WAKE_PERIOD_S: Final = 0.2  # period of the checks for requests held at zero
Loads = Callable[[], Awaitable[Mapping[str, PoolLoad]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one round decides from, for all deployments. ``loads`` None: no scheduler reports."""

    fleet: Fleet
    hosts: Sequence[Host]
    loads: Mapping[str, Mapping[str, PoolLoad]] | None  # loads by deployment and digest
    lines: LinesLeft

    def load_of(self, deployment: Deployment, burn_of: Callable[[Objective], float]) -> PoolLoad | None:
        """Return the load of all versions of a deployment, None while no scheduler reports."""
        if self.loads is None:
            return None
        name = deployment.meta.name
        load = load_of(deployment, self.loads.get(name, {}))
        burns = {one.priority: burn_of(one) for one in self.fleet.objectives if one.model == name}
        return signalled(load, self.lines.due(name, load.request_work), burns)


@dataclass(slots=True)
class _Term:
    """What the leader of one epoch has observed, by deployment."""

    epoch: int
    scalers: dict[str, DeploymentScaler] = field(default_factory=dict)
    residency: Residency = field(default_factory=Residency)
    shared: SharedVersions = field(default_factory=SharedVersions)


class ScalingController:
    """Runs in every control plane; acts only while it leads.

    ``informer`` contains everything under the root by ``fleet.decode``. ``loads`` returns the load of each
    version, and raises FairwayError while no scheduler reports. ``burn_of`` returns how many times too fast
    an objective's budget is spent, ``batches`` those whose lines run or wait for their turn.
    """

    def __init__(
        self,
        store: Store,
        informer: Informer[FleetRecord | None],
        leadership: Leadership,
        clock: Clock,
        *,
        loads: Loads,
        burn_of: Callable[[Objective], float],
        batches: Callable[[], Iterable[BatchRecord]],
        tuning: ScalerTuning,
        telemetry: ScalingTelemetry,
    ) -> None:
        self._store = store
        self._informer = informer
        self._leadership = leadership
        self._clock = clock
        self._loads = loads
        self._burn_of = burn_of
        self._batches = batches
        self._tuning = tuning
        self._telemetry = telemetry
        self._term = _Term(0)
        self._next_s = -math.inf
        self._unobserved = ""  # message of the last failure to read loads, empty after a success

    async def run(self) -> None:
        """Decide every ``PERIOD_S`` while leading, until cancelled; survives a store outage.

        A request that is held at zero waits for at most ``WAKE_PERIOD_S``.
        """
        await repeat_while_leading(
            self._leadership, self._clock, self._look, each_s=WAKE_PERIOD_S, failed="scaling.store_lost"
        )

    async def _look(self, epoch: int) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_s or await self._held_at_zero():
            self._next_s = now_s + PERIOD_S
            await self.round(epoch)

    async def _held_at_zero(self) -> bool:
        """Return whether a request waits for a deployment at zero that may wake."""
        view, now_unix_s = self._informer.view, self._clock.unix_s()
        asleep = {
            held.record.deployment
            for held in view.values()
            if isinstance(held.record, Scaled)
            and not held.record.replicas
            and held.record.retry_unix_s <= now_unix_s
        }
        if not asleep:
            return False
        digests = {
            held.record.version_digest
            for held in view.values()
            if isinstance(held.record, Deployment) and held.record.meta.name in asleep
        }
        loads = await self._observed()
        return loads is not None and any(loads[digest].held for digest in digests & loads.keys())

    @property
    def leads(self) -> bool:
        return self._leadership.epoch is not None

    def scaler(self, deployment: str) -> DeploymentScaler | None:
        """Return what this leader observed of a deployment; None without a decision of it."""
        return self._led().get(deployment)

    def likely(self) -> Mapping[str, float]:
        """Return by deployment what a start of another replica costs its users; empty while not leading."""
        return {name: one.start_work for name, one in self._led().items()}

    def growth_variance(self) -> float:
        """Return the variance of the replicas by which the work of all grows while a replica starts."""
        return sum(one.growth_variance for one in self._led().values())

    def _led(self) -> Mapping[str, DeploymentScaler]:
        return self._term.scalers if self._leadership.epoch == self._term.epoch else {}

    @property
    def residency(self) -> Residency:
        """Which idle deployments leave full workers first, as this leader last observed."""
        return self._term.residency if self._leadership.epoch == self._term.epoch else Residency()

    async def round(self, epoch: int) -> None:
        """Decide once for every deployment with bounds."""
        if not self._informer.synced:
            return
        if self._term.epoch != epoch:
            self._term = _Term(epoch)
        view = self._informer.view
        scaled = [
            (held.record, held.mod_revision)
            for key, held in sorted(view.items())
            if isinstance(held.record, Deployment) and held.record.scaling is not None
        ]
        names = {deployment.meta.name for deployment, _ in scaled}
        for name in [name for name in self._term.scalers if name not in names]:
            del self._term.scalers[name]
        await self._drop_unwanted(view, names, epoch)
        if not scaled:
            self._term.residency = Residency()
            return
        loads = await self._observed()
        fleet = fleet_of(held.record for held in view.values())
        divided = None if loads is None else self._term.shared.divide(loads, sharers(fleet, names))
        seen = self._seen(fleet, divided)
        decided = [self._decide(deployment, view, seen, epoch) for deployment, _ in scaled]
        digests = {deployment.version_digest for deployment, _ in scaled}
        needs = {**self._term.residency.needs, **needs_of(fleet.workers)}
        self._term.residency = Residency(
            leaving(resident for _, resident in decided if resident is not None),
            {digest: size_bytes for digest, size_bytes in needs.items() if digest in digests},
        )
        self._telemetry.replicas((one.deployment, one.replicas) for one, _ in decided)
        for (decision, _), (_, revision) in zip(decided, scaled, strict=True):
            await self._write(decision, view.get(SCALED + decision.deployment), revision, epoch)

    def _decide(
        self,
        deployment: Deployment,
        view: Mapping[str, Versioned[Any]],
        seen: Seen,
        epoch: int,
    ) -> tuple[Scaled, Resident | None]:
        name, fleet = deployment.meta.name, seen.fleet
        scaler = self._term.scalers.setdefault(name, DeploymentScaler(self._tuning))
        held = view.get(SCALED + name)
        replicas = replicas_of(fleet, name)
        situation = Situation(
            deployment,
            None if held is None else held.record,
            {(one.worker_id, one.assigned.version_digest): one.loaded for one in replicas},
            seen.load_of(deployment, self._burn_of),
            epoch,
            self._clock.unix_s(),
            self._clock.monotonic_s(),
            replica_cost=replica_cost(deployment, fleet.workers),
            in_rollout=any(one.route.arms for one in fleet.routes if one.route.deployment == name),
            zones=zones_of(deployment, seen.hosts, {one.worker_id for one in replicas}),
            leaving=self._term.residency.leaving.get(name, ""),
        )
        decision = scaler.decide(situation)
        return decision, scaler.resident(situation, decision.replicas)

    def _seen(self, fleet: Fleet, loads: Mapping[str, Mapping[str, PoolLoad]] | None) -> Seen:
        nodes, lines = {one.worker_id: one for one in fleet.nodes}, LinesLeft()
        for batch in self._batches():
            lines.add(batch, self._clock.unix_s())
        hosts = [
            Host(one, True, nodes.get(one.worker_id, Node(one.worker_id)), None, {}, groups=fleet.groups)
            for one in fleet.workers
        ]
        return Seen(fleet, hosts, loads, lines)

    async def _observed(self) -> Mapping[str, PoolLoad] | None:
        try:
            loads = await self._loads()
        except FairwayError as error:
            if error.message != self._unobserved:
                log.info("scaling.unobserved", error=error.message)
            self._unobserved = error.message
            return None
        self._unobserved = ""
        return loads

    async def _write(
        self, decision: Scaled, held: Versioned[Any] | None, deployment_revision: int, epoch: int
    ) -> None:
        before = None if held is None else held.record
        if decision == before or self._leadership.epoch != epoch:
            return
        name = decision.deployment
        done = await self._store.commit(
            [Put(SCALED + name, dump(decision))],
            [
                self._leadership.fence(epoch),
                ModRevisionIs(SCALED + name, 0 if held is None else held.mod_revision),
                ModRevisionIs(DEPLOYMENTS + name, deployment_revision),
            ],
        )
        if isinstance(done, Committed):
            signal = decision.reasons[0].signal if decision.reasons else ""
            self._telemetry.decided(signal)
            log.info("scaling.decided", deployment=name, replicas=decision.replicas, signal=signal)
        else:  # deposed, or the view is old
            log.info("scaling.refused", deployment=name, epoch=epoch)

    async def _drop_unwanted(
        self, view: Mapping[str, Versioned[Any]], names: Iterable[str], epoch: int
    ) -> None:
        """Delete the decisions about deployments without bounds."""
        wanted = {SCALED + name for name in names}
        for key, held in view.items():
            if isinstance(held.record, Scaled) and key not in wanted:
                fence = self._leadership.fence(epoch)
                unchanged = ModRevisionIs(key, held.mod_revision)
                # An operator who gives it bounds at this moment finds no decision, and a new one is made.
                await self._store.commit([Delete(key)], [fence, unchanged])


def advancing(
    batches: Mapping[str, Versioned[BatchRecord]], owners: Mapping[str, Versioned[OwnerRecord]]
) -> Iterator[BatchRecord]:
    """Yield the batches that are not stalled: more replicas do not help lines that are only refused."""
    for held in batches.values():
        owner = owners.get(owner_key(held.record.tenant, held.record.batch_id))
        if owner is None or not owner.record.stalled:
            yield held.record


def sharers(fleet: Fleet, scaled: Collection[str]) -> dict[str, list[Sharer]]:
    """Return the deployments that the load of each version is divided between, by digest.

    A ``scaled`` one shares the versions that it gets, has or tries.
    """
    found: dict[str, list[Sharer]] = {}
    for one in fleet.deployments:
        name, digests = one.meta.name, {one.version_digest: None}
        if name in scaled:
            digests |= dict.fromkeys(
                replica.assigned.version_digest for replica in replicas_of(fleet, name)
            ) | dict.fromkeys(
                arm.version_digest
                for each in fleet.routes
                if each.route.deployment == name
                for arm in each.route.arms
            )
        most = one.scaling.max_replicas if one.scaling is not None else one.replicas
        group = fleet.groups.get(one.tenant, one.tenant) if one.tenant else SHARED_NODES
        for digest in digests:
            found.setdefault(digest, []).append(Sharer(name, group, one.replicas, most))
    return found
