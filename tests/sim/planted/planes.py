"""Control planes, and gateways and workers under a rollout, with a bug each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from services.controlplane.objectives.policy.gates import GateReport, Verdict
from services.controlplane.rollouts.controller import RolloutController
from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.generation import NotAdmittedReason, StartSpec
from services.core.rollouts.routes import WHOLE_BP, ModelRoute, RouteArm, SplitCaller
from services.gateway.splits import Splits
from services.ports.store import (
    Committed,
    Condition,
    ConditionFailed,
    CreateRevisionIs,
    ModRevisionIs,
    Operation,
    Store,
)
from services.ports.worker import RunningSequence, SequenceSink, WorkerClient
from services.runtime.fleet_state.informer import Versioned
from services.runtime.fleet_state.leadership import Election
from services.runtime.idempotent_writes import WriteSet
from services.worker.streams.host import SequenceHost
from simulator.fleet.nodes.gateway_node import GatewayNode
from simulator.fleet.nodes.plane_node import PlaneNode
from simulator.fleet.nodes.worker_node import WorkerNode
from simulator.fleet.rollout_watch import RolloutListener, SignedStore
from simulator.fleet.spec import VERSION_DIGEST
from simulator.kernel.network import Network
from simulator.rollouts.seeds import CANDIDATE


class LeadsForEver(PlaneNode):
    """Believes for the rest of its life that it leads. The store rejects its writes."""

    def make_election(self, record: bytes, ttl_s: int) -> Election:
        election = super().make_election(record, ttl_s)
        election.__class__ = _NeverOver
        return election


class WritesUnfenced(LeadsForEver):
    """Leads for ever, and its writes require no epoch."""

    def make_store(self, network: Network, watch: RolloutListener) -> Store:
        return _Unfenced(self.process, network, watch)


class WritesTheRouteApart(PlaneNode):
    """Writes the route in a transaction of its own."""

    def make_controller(self) -> RolloutController:
        controller = super().make_controller()
        controller.__class__ = _InTwoWrites
        return controller


class WritesWhatItReadBefore(PlaneNode):
    """Writes a state late, whatever the store has by then."""

    def make_controller(self) -> RolloutController:
        controller = super().make_controller()
        controller.__class__ = _Late
        return controller


class JudgesNothing(PlaneNode):
    """Passes every gate and counts no crash."""

    def make_controller(self) -> RolloutController:
        controller = super().make_controller()
        controller.__class__ = _Lenient
        return controller


class PromotesAtOnce(PlaneNode):
    """Judges the soak and completes it whatever the verdict, as if it were no gate."""

    def make_controller(self) -> RolloutController:
        controller = super().make_controller()
        controller.__class__ = _Unjudged
        return controller


class TrustsOldRoutes(GatewayNode):
    """Follows its view of the routes, however old it is."""

    def make_splits(self) -> Splits:
        return Splits(self.routes, max_age_s=float("inf"))


class DrawsEachRequest(GatewayNode):
    """Draws the arm of each request, whatever its session had before."""

    def make_splits(self) -> Splits:
        return _Drawing(self.routes)


class MissesAborts(GatewayNode):
    """Keeps the last split in which the candidate had traffic, and expects a replica of it."""

    def make_splits(self) -> Splits:
        return _Missing(self.routes)


class MissesCutovers(GatewayNode):
    """Keeps the first split that it reads, and sends to its stable version."""

    def make_splits(self) -> Splits:
        return _Frozen(self.routes)


class MissesReverts(GatewayNode):
    """Keeps the split of a final candidate, and sends to it."""

    def make_splits(self) -> Splits:
        return _FrozenOnceFinal(self.routes)


class SwapsVersions(GatewayNode):
    """Starts one sequence in three on the other version, where a worker has it."""

    def make_workers(self, workers: WorkerClient) -> WorkerClient:
        return _Swapping(super().make_workers(workers))


class StartsTheWithdrawn(WorkerNode):
    """Starts requests of an aborted version, by whichever route they were resolved."""

    def make_host(self) -> SequenceHost:
        host = super().make_host()
        host.__class__ = _Unfencing
        return host


class _NeverOver(Election):
    @property
    def epoch(self) -> int | None:
        self._first = self._epoch or getattr(self, "_first", None)
        return self._first


class _Unfenced(SignedStore):
    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        kept = [one for one in conditions if not isinstance(one, CreateRevisionIs)]
        return await super().commit(operations, kept)


class _InTwoWrites(RolloutController):
    async def _write(self, rollout: Rollout, writes: WriteSet) -> None:
        if writes.operations:
            await self._store.commit(writes.operations, writes.conditions)
        await super()._write(rollout, WriteSet())


class _Late(RolloutController):
    async def _write(self, rollout: Rollout, writes: WriteSet) -> None:
        await self._clock.sleep(2.0)
        kept = [one for one in writes.conditions if not isinstance(one, ModRevisionIs)]
        await super()._write(rollout, WriteSet(kept, writes.operations))


class _Lenient(RolloutController):
    def reports(self, rollout: Rollout, route: ModelRoute | None) -> dict[str, GateReport]:
        found = super().reports(rollout, route)
        return {name: replace(report, verdict=Verdict.PASS) for name, report in found.items()}


class _Unjudged(RolloutController):
    def reports(self, rollout: Rollout, route: ModelRoute | None) -> dict[str, GateReport]:
        found = super().reports(rollout, route)
        if rollout.phase is not RolloutPhase.SOAKING:
            return found
        return {name: replace(report, verdict=Verdict.INCONCLUSIVE) for name, report in found.items()}


class _Drawing(Splits):
    def choose(
        self, route: ModelRoute, caller: SplitCaller | None, *, serves: Callable[[str], bool]
    ) -> RouteArm:
        if caller is not None:
            rng = self.__dict__.setdefault("rng", Random(1))
            caller = replace(caller, session_key=str(rng.random()))
        return super().choose(route, caller, serves=serves)


class _Missing(Splits):
    def of(self, model: str) -> Versioned[ModelRoute] | None:
        found = super().of(model)
        if found is not None and any(arm.weight_bp for arm in found.record.arms[1:]):
            self.__dict__["last"] = found
        return self.__dict__.get("last", found)

    def choose(
        self, route: ModelRoute, caller: SplitCaller | None, *, serves: Callable[[str], bool]
    ) -> RouteArm:
        return super().choose(route, caller, serves=lambda digest: True)


class _Frozen(Splits):
    def of(self, model: str) -> Versioned[ModelRoute] | None:
        if (found := super().of(model)) is not None:
            self.__dict__.setdefault("first", found)
        return self.__dict__.get("first", found)

    def choose(
        self, route: ModelRoute, caller: SplitCaller | None, *, serves: Callable[[str], bool]
    ) -> RouteArm:
        return route.stable


class _FrozenOnceFinal(_Missing):
    def of(self, model: str) -> Versioned[ModelRoute] | None:
        found = Splits.of(self, model)
        if found is not None and any(arm.weight_bp == WHOLE_BP for arm in found.record.arms[1:]):
            self.__dict__["last"] = found
        return self.__dict__.get("last", found)


class _Swapping:
    def __init__(self, workers: WorkerClient) -> None:
        self._workers = workers
        self._starts = 0

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        self._starts += 1
        if self._starts % 3 == 0:
            other = VERSION_DIGEST if spec.grant.version_digest == CANDIDATE else CANDIDATE
            grant: Any = replace(spec.grant, version_digest=other)
            spec = replace(spec, grant=grant, generation=replace(spec.generation, version_digest=other))
        return self._workers.start(spec, sink)


class _Unfencing(SequenceHost):
    def _refusal(self, spec: StartSpec) -> NotAdmittedReason | None:
        digest = spec.grant.version_digest
        withdrawals, self.withdrawals = self.withdrawals, {}
        closed = digest in self._closed_to
        self._closed_to.discard(digest)
        try:
            return super()._refusal(spec)
        finally:
            self.withdrawals = withdrawals
            if closed:
                self._closed_to.add(digest)
