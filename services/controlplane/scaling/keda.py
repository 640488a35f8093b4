"""KEDA's external scaler: the replicas of a deployment as a metric, for an autoscaler that runs the nodes.

The metric is the number of replicas that the deployment is to have, with a target of one for each. Every
control plane answers, from its view of the stored decision.
"""

from __future__ import annotations

from typing import Any, Final

from fairway.keda import externalscaler_pb2 as pb
from fairway.keda import externalscaler_pb2_grpc
from services.controlplane.fleet import FleetRecord
from services.core.errors import InvalidInput, NotFound
from services.core.records import DEPLOYMENTS, SCALED, Deployment
from services.core.scaling import Scaled
from services.rpc.bounded_writes import BoundedWrites
from services.runtime.fleet_state.informer import Informer

METRIC: Final = "replicas"
_SYNC_S: Final = 5.0
_LOOK_S: Final = 30.0
_UNREAD_S: Final = 30.0  # a stream ends when its client reads nothing for this long


class KedaServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """``fleet`` contains everything under the root by ``fleet.decode``."""

    def __init__(self, fleet: Informer[FleetRecord | None]) -> None:
        self._fleet = fleet

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=await self._replicas(request) > 0)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Any) -> None:  # type: ignore[override]
        sent = None
        with BoundedWrites(context, _UNREAD_S) as writes:
            while True:
                active, revision = await self._replicas(request) > 0, self._fleet.revision
                if active != sent:
                    await writes.write(pb.IsActiveResponse(result=active))
                    sent = active
                await self._fleet.wait_changed(revision, _LOOK_S)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        await self._replicas(request)
        spec = pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        if request.metricName != METRIC:
            raise NotFound(f"the only metric is `{METRIC}`", name=request.metricName)
        wanted = await self._replicas(request.scaledObjectRef)
        value = pb.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=float(wanted))
        return pb.GetMetricsResponse(metricValues=[value])

    async def _replicas(self, request: pb.ScaledObjectRef) -> int:
        """Return what the deployment is to have. Raises InvalidInput, NotFound or StoreUnavailable."""
        name = request.scalerMetadata.get("deployment", "")
        if not name:
            raise InvalidInput(
                "name a deployment in the trigger's metadata: `deployment: NAME`", field="scalerMetadata"
            )
        await self._fleet.wait_synced(_SYNC_S)
        view = self._fleet.view
        held, decided = view.get(DEPLOYMENTS + name), view.get(SCALED + name)
        if held is None or not isinstance(held.record, Deployment):
            raise NotFound(f"there is no deployment {name}", name=name)
        scaled = None if decided is None else decided.record
        return held.record.scaled_by(scaled if isinstance(scaled, Scaled) else None).replicas
