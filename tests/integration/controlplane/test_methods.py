"""Every method of the service is served."""

from __future__ import annotations

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.controlplane.servicer import ControlPlaneServicer


async def test_every_method_is_served() -> None:
    """No method falls through to the generated base, which would be an internal error."""
    base = controlplane_pb2_grpc.ControlPlaneServiceServicer
    for method in pb.DESCRIPTOR.services_by_name["ControlPlaneService"].methods:
        assert getattr(ControlPlaneServicer, method.name) is not getattr(base, method.name), method.name
