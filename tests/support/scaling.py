"""Scaling where nothing is decided."""

from __future__ import annotations

from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import NoLeader


class NoScaling:
    """``ScalingPages`` and ``LeadingScaling`` where no control plane leads."""

    async def page(
        self, request: pb.ListScalingRequest, *, forwarded: bool = False
    ) -> pb.ListScalingResponse:
        raise NoLeader("no control plane leads")
