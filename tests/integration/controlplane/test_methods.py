"""Every method of the service is served, or says that it is not."""

from __future__ import annotations

import pytest

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.controlplane.servicer import ControlPlaneServicer
from services.core.errors import Unimplemented
from tests.integration.controlplane.plane import Plane


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ListAuditEvents", pb.ListAuditEventsRequest()),
    ],
)
async def test_what_is_not_there_yet_says_so(plane: Plane, method: str, request_: object) -> None:
    with pytest.raises(Unimplemented, match="not served yet"):
        await plane.call(method, request_)


async def test_every_method_is_served_or_says_that_it_is_not(plane: Plane) -> None:
    """No method falls through to the generated base, which would be an internal error."""
    base = controlplane_pb2_grpc.ControlPlaneServiceServicer
    for method in pb.DESCRIPTOR.services_by_name["ControlPlaneService"].methods:
        assert getattr(ControlPlaneServicer, method.name) is not getattr(base, method.name), method.name
