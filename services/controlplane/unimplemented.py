"""Methods of ControlPlaneService that this release does not serve, each with an explaining message."""

from __future__ import annotations

from typing import NoReturn

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.core.errors import Unimplemented


def _refuse(what: str, instead: str) -> NoReturn:
    raise Unimplemented(f"{what} are not served yet: {instead}", feature=what)


_AUDIT = "read the control plane's log instead, which has every change"


class NotYetServed(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Base of the servicer: audit answers UNIMPLEMENTED."""

    async def ListAuditEvents(
        self, request: pb.ListAuditEventsRequest, context: object
    ) -> pb.ListAuditEventsResponse:
        _refuse("audit events", _AUDIT)
