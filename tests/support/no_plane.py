"""What answers operators' queries where no control plane leads."""

from __future__ import annotations

from typing import Any

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.timelines.join import unknown
from services.core.errors import NoLeader


class NoPlane:
    """``LeadingPlane``, and each of the servicer's protocols that answers from what the leader has.

    A timeline is collected without a leader too: no request is known.
    """

    async def _refuse(self, *request: object, forwarded: bool = False) -> Any:
        raise NoLeader("no control plane leads")

    ask = page = finished = diagnose = save_baseline = _refuse

    async def get(self, request: pb.GetTimelineRequest, *, forwarded: bool = False) -> pb.GetTimelineResponse:
        raise unknown(request.request_name)
