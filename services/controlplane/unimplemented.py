"""Methods of ControlPlaneService that this release does not serve, each with an explaining message."""

from __future__ import annotations

from typing import NoReturn

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.core.errors import Unimplemented


def _refuse(what: str, instead: str) -> NoReturn:
    raise Unimplemented(f"{what} are not served yet: {instead}", feature=what)


_ROLLOUTS = "update a deployment's version instead, which moves all its replicas"
_AUDIT = "read the control plane's log instead, which has every change"


class NotYetServed(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Base of the servicer: rollouts and audit answer UNIMPLEMENTED."""

    async def CreateRollout(
        self, request: pb.CreateRolloutRequest, context: object
    ) -> pb.CreateRolloutResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def GetRollout(self, request: pb.GetRolloutRequest, context: object) -> pb.GetRolloutResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: object) -> pb.ListRolloutsResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def PromoteRollout(
        self, request: pb.PromoteRolloutRequest, context: object
    ) -> pb.PromoteRolloutResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def PauseRollout(self, request: pb.PauseRolloutRequest, context: object) -> pb.PauseRolloutResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def ResumeRollout(
        self, request: pb.ResumeRolloutRequest, context: object
    ) -> pb.ResumeRolloutResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def AbortRollout(self, request: pb.AbortRolloutRequest, context: object) -> pb.AbortRolloutResponse:
        _refuse("rollouts", _ROLLOUTS)

    async def ListAuditEvents(
        self, request: pb.ListAuditEventsRequest, context: object
    ) -> pb.ListAuditEventsResponse:
        _refuse("audit events", _AUDIT)
