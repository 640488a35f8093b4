"""The rollout methods of ControlPlaneService: converts messages; ``resource.py`` makes every decision."""

from __future__ import annotations

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.rollouts.convert import (
    promotion_from_proto,
    rollout_from_proto,
    rollout_to_proto,
    stored_to_proto,
)
from services.controlplane.rollouts.resource import Rollouts
from services.controlplane.unimplemented import NotYetServed


class RolloutMethods(NotYetServed):
    """Base of the servicer."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def CreateRollout(
        self, request: pb.CreateRolloutRequest, context: object
    ) -> pb.CreateRolloutResponse:
        view = await self._rollouts.create(
            rollout_from_proto(request.rollout), request_id=request.request_id, dry_run=request.dry_run
        )
        return pb.CreateRolloutResponse(rollout=rollout_to_proto(view))

    async def GetRollout(self, request: pb.GetRolloutRequest, context: object) -> pb.GetRolloutResponse:
        return pb.GetRolloutResponse(rollout=rollout_to_proto(await self._rollouts.get(request.name)))

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: object) -> pb.ListRolloutsResponse:
        page, token = await self._rollouts.page(size=request.page_size, token=request.page_token)
        return pb.ListRolloutsResponse(
            rollouts=[stored_to_proto(one.record, one.etag) for one in page], next_page_token=token
        )

    async def PromoteRollout(
        self, request: pb.PromoteRolloutRequest, context: object
    ) -> pb.PromoteRolloutResponse:
        promotion = promotion_from_proto(request)
        view = await self._rollouts.promote(
            request.name, promotion, etag=request.etag, request_id=request.request_id
        )
        return pb.PromoteRolloutResponse(rollout=rollout_to_proto(view))

    async def PauseRollout(self, request: pb.PauseRolloutRequest, context: object) -> pb.PauseRolloutResponse:
        view = await self._rollouts.pause(request.name, etag=request.etag, request_id=request.request_id)
        return pb.PauseRolloutResponse(rollout=rollout_to_proto(view))

    async def ResumeRollout(
        self, request: pb.ResumeRolloutRequest, context: object
    ) -> pb.ResumeRolloutResponse:
        view = await self._rollouts.resume(request.name, etag=request.etag, request_id=request.request_id)
        return pb.ResumeRolloutResponse(rollout=rollout_to_proto(view))

    async def AbortRollout(self, request: pb.AbortRolloutRequest, context: object) -> pb.AbortRolloutResponse:
        view = await self._rollouts.abort(
            request.name, reason=request.reason, etag=request.etag, request_id=request.request_id
        )
        return pb.AbortRolloutResponse(rollout=rollout_to_proto(view))

    async def RevertRollout(
        self, request: pb.RevertRolloutRequest, context: object
    ) -> pb.RevertRolloutResponse:
        view = await self._rollouts.revert(
            request.name, reason=request.reason, etag=request.etag, request_id=request.request_id
        )
        return pb.RevertRolloutResponse(rollout=rollout_to_proto(view))
