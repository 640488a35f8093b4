"""What an objective that shapes serving does to requests, for the operator who lets it."""

from __future__ import annotations

from typing import Protocol

from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import FairwayError
from services.core.records import Objective
from services.rpc.convert.inference import PRIORITIES


class SliPages(Protocol):
    """``objectives.listing.SliListing``."""

    async def page(self, request: pb.ListSlisRequest, *, forwarded: bool) -> pb.ListSlisResponse: ...

    async def finished(
        self, request: pb.ListFinishedRequestsRequest, *, forwarded: bool
    ) -> pb.ListFinishedRequestsResponse: ...


async def warnings_of(objective: Objective, slis: SliPages) -> list[str]:
    """Return the warnings; none for an objective that only observes."""
    found, target_s = list[str](), objective.ttft.seconds
    whose = f"{objective.priority} requests of {objective.model}"
    if not objective.shapes_serving:
        return found
    if target_s:
        found.append(
            f"{whose} are refused when their predicted wait exceeds {target_s:g} s, in place of the target "
            "of the class; what waits is shed at 1.5 times that, and pressure and degrading follow it"
        )
        usual_s = await _usual_ttft_s(objective, slis)
        if usual_s is not None and target_s < usual_s:
            found.append(
                f"half of the {whose} of the last hour had their first token after {usual_s:.3g} s or more: "
                f"with {target_s:g} s almost every one that has to wait at all is refused"
            )
    if objective.itl.seconds:
        found.append(f"prefill on the workers of {objective.model} is paced for {objective.itl.seconds:g} s")
    return found


async def _usual_ttft_s(objective: Objective, slis: SliPages) -> float | None:
    """Return the median of the series with the lowest one, None without any or without a leader."""
    request = pb.ListSlisRequest(
        model=objective.model, priority=PRIORITIES[objective.priority], page_size=1000
    )
    try:
        page = await slis.page(request, forwarded=False)
    except FairwayError:
        return None
    return min((one.ttft_p50_s for one in page.slis if one.HasField("ttft_p50_s")), default=None)
