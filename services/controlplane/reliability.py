"""Quarantine and indicators in ControlPlaneService: converts messages.

``resources/quarantine.py`` and ``objectives/listing.py`` make every decision.
"""

from __future__ import annotations

from typing import Final

from fairway.mirror import Mirror, Pair
from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.objectives.warnings import SliPages
from services.controlplane.resources.quarantine import QuarantinedInputs
from services.controlplane.unimplemented import NotYetServed
from services.ports.poison.quarantine import Quarantined
from services.rpc.convert.inference import timestamp
from services.rpc.interceptors.access import caller


class ReliabilityMethods(NotYetServed):
    """Base of the servicer."""

    def __init__(self, quarantine: QuarantinedInputs, slis: SliPages) -> None:
        self._quarantine = quarantine
        self._slis = slis

    async def ListQuarantined(
        self, request: pb.ListQuarantinedRequest, context: object
    ) -> pb.ListQuarantinedResponse:
        page, token = await self._quarantine.page(
            model=request.model,
            version_digest=request.version_digest,
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListQuarantinedResponse(inputs=map(_input, page), next_page_token=token)

    async def DeleteQuarantined(
        self, request: pb.DeleteQuarantinedRequest, context: object
    ) -> pb.DeleteQuarantinedResponse:
        await self._quarantine.delete(
            request.version_digest, request.fingerprint, request_id=request.request_id
        )
        return pb.DeleteQuarantinedResponse()

    async def ListSlis(self, request: pb.ListSlisRequest, context: object) -> pb.ListSlisResponse:
        return await self._slis.page(request, forwarded=not caller())

    async def ListFinishedRequests(
        self, request: pb.ListFinishedRequestsRequest, context: object
    ) -> pb.ListFinishedRequestsResponse:
        return await self._slis.finished(request, forwarded=not caller())


_input: Final = Mirror(
    Quarantined,
    pb.QuarantinedInput,
    {"until_unix_s": Pair("expire_time", timestamp)},
).to_proto
