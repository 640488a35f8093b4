"""Control planes that scale, and gateways that hold requests, with a bug each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairway.v1 import inference_pb2
from services.controlplane.scaling.controller import ScalingController, Seen
from services.controlplane.scaling.nodes import NodeController
from services.controlplane.scaling.policy.residency import Resident
from services.core.errors import FairwayError
from services.core.records import ASSIGNMENTS, NODE_ORDERS, SCALED, Assignment, Deployment, dump
from services.core.scaling import Scaled
from services.gateway.catalog import Waking
from services.gateway.events import Handle, RequestSink
from services.ports.store import Committed, Condition, ConditionFailed, Listing, Operation, Put, Store
from services.runtime.fleet_state.informer import Versioned
from simulator.fleet.nodes.gateway_node import GatewayNode
from simulator.fleet.nodes.node_provider import RemoteNodes
from simulator.fleet.nodes.plane_node import PlaneNode
from simulator.fleet.rollout_watch import RolloutListener, SignedStore, WatchedCatalog
from simulator.fleet.spec import ScalingSpec
from simulator.kernel.network import Network
from tests.sim.planted.gateways import ForwardedSink

_EMPTY_FROM_S = 15.0


class DecidesTooMany(PlaneNode):
    """Decides one replica more than allowed, once all that are allowed are needed."""

    def make_scaling(self, spec: ScalingSpec) -> ScalingController:
        controller = super().make_scaling(spec)
        controller.__class__ = _TooMany
        return controller


class DecidesTooFew(PlaneNode):
    """Removes one of the least replicas, once there were more than two."""

    def make_scaling(self, spec: ScalingSpec) -> ScalingController:
        controller = super().make_scaling(spec)
        controller.__class__ = _TooFew
        return controller


class AssignsNothing(PlaneNode):
    """After a while, takes every version off its workers with each decision."""

    def make_store(self, network: Network, watch: RolloutListener) -> Store:
        return _Emptying(self.process, network, watch)


class ForgetsOrders(PlaneNode):
    """Does not read the orders that it made."""

    def make_nodes(self, spec: ScalingSpec, provider: RemoteNodes) -> NodeController:
        controller = super().make_nodes(spec, provider)
        store: Any = self.store
        store.__class__ = _WithoutOrders
        return controller


class ForgetsDeadlines(GatewayNode):
    """Runs every request without its deadline."""

    def submit(
        self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
    ) -> Handle:
        generation.ClearField("timeout")
        return super().submit(tenant, generation, sink, attempt=attempt)


class LosesErrors(GatewayNode):
    """Does not pass on why a request failed that was accepted."""

    def submit(
        self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
    ) -> Handle:
        return super().submit(tenant, generation, _Silent(sink), attempt=attempt)


class _Silent(ForwardedSink):
    def on_failed(self, error: FairwayError) -> None:
        return


class _Holding(WatchedCatalog):
    def waking(self, model: str) -> Waking | None:
        found = super().waking(model)
        return None if found is None else Waking(3600.0)


class HoldsForEver(GatewayNode):
    """Holds requests without a limit, also when the deployment cannot be started."""

    catalog_type = _Holding


class _TooMany(ScalingController):
    def _decide(
        self,
        deployment: Deployment,
        view: Mapping[str, Versioned[Any]],
        seen: Seen,
        epoch: int,
    ) -> tuple[Scaled, Resident | None]:
        found, resident = super()._decide(deployment, view, seen, epoch)
        assert deployment.scaling is not None
        more = found.replicas == deployment.scaling.max_replicas
        return replace(found, replicas=found.replicas + more), resident


class _TooFew(ScalingController):
    def _decide(
        self,
        deployment: Deployment,
        view: Mapping[str, Versioned[Any]],
        seen: Seen,
        epoch: int,
    ) -> tuple[Scaled, Resident | None]:
        found, resident = super()._decide(deployment, view, seen, epoch)
        grown = self.__dict__.setdefault("grown", found.replicas > 2) or found.replicas > 2
        self.__dict__["grown"] = grown
        assert deployment.scaling is not None
        fewer = grown and found.replicas == deployment.scaling.min_replicas
        return replace(found, replicas=found.replicas - fewer), resident


class _Emptying(SignedStore):
    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        if self._writer.loop.now_s > _EMPTY_FROM_S:
            operations = [_emptied(one) for one in operations]
            if any(one.key.startswith(SCALED) for one in operations):
                empty = (Put(f"{ASSIGNMENTS}worker-{number}", b"") for number in range(3))
                operations += [_emptied(one) for one in empty]
        return await super().commit(operations, conditions)


def _emptied(operation: Operation) -> Operation:
    if not isinstance(operation, Put) or not operation.key.startswith(ASSIGNMENTS):
        return operation
    return Put(operation.key, dump(Assignment(operation.key.removeprefix(ASSIGNMENTS))))


class _WithoutOrders(SignedStore):
    async def list(self, prefix: str) -> Listing:
        found = await super().list(prefix)
        return replace(found, entries=()) if prefix == NODE_ORDERS else found
