"""Timelines for servers whose tests need none."""

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.timelines.join import unknown


class NoTimelines:
    """Implements ``controlplane.servicer.TimelineAnswers``."""

    async def get(self, request: pb.GetTimelineRequest, *, forwarded: bool = False) -> pb.GetTimelineResponse:
        raise unknown(request.request_name)
