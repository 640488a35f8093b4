"""Inputs in quarantine, and what gateways measured, as operators list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from fairway.client.admin.calls import Service
from fairway.v1 import common_pb2, slis_pb2
from fairway.v1 import controlplane_pb2 as cp

_SLIS_PAGE: Final = 250


class Quarantine:
    """The inputs that every gateway refuses, because each ended the engines that computed it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self,
        *,
        model: str = "",
        version_digest: str = "",
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.QuarantinedInput]:
        """Return the inputs of one deployment, of one version, or all, by version and fingerprint."""
        return await self._service.pages(
            "ListQuarantined",
            "inputs",
            limit=limit,
            timeout_s=timeout_s,
            model=model,
            version_digest=version_digest,
        )

    async def lift(self, version_digest: str, fingerprint: str, *, timeout_s: float | None = None) -> None:
        """Return once the input may run again. Gateways follow within moments. Raises NotFound."""
        await self._service.change(
            "DeleteQuarantined", timeout_s=timeout_s, version_digest=version_digest, fingerprint=fingerprint
        )


class Slis:
    """Service level indicators of the last hour, from the leading control plane."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self,
        *,
        model: str = "",
        tenant: str = "",
        priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_UNSPECIFIED,
        zone: str = "",
        window_s: float = 3600.0,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.SliSummary]:
        """Return what was measured per deployment, version, tenant, class and zone, sorted by them.

        The start of the window is moved back to a multiple of ten minutes. Raises Unavailable without a
        leader.
        """
        window = Duration()
        window.FromMicroseconds(round(window_s * 1e6))
        return await self._service.pages(
            "ListSlis",
            "slis",
            limit=limit,
            timeout_s=timeout_s,
            page_size=_SLIS_PAGE,
            model=model,
            tenant=tenant,
            priority=priority,
            zone=zone,
            window=window,
        )

    async def requests(
        self,
        *,
        slow: bool = False,
        failed: bool = False,
        tenant: str = "",
        model: str = "",
        request_id: str = "",
        limit: int = 100,
        timeout_s: float | None = None,
    ) -> Sequence[slis_pb2.FinishedRequest]:
        """Return requests that ended lately: the slowest first, or the last to end first.

        Not all are kept: of each gateway the slowest and some that failed. ``request_id``: as in an answer.
        Raises Unavailable without a leader.
        """
        found: cp.ListFinishedRequestsResponse = await self._service.call(
            "ListFinishedRequests",
            timeout_s=timeout_s,
            slow=slow,
            failed=failed,
            tenant=tenant,
            model=model,
            request_name=request_id,
            limit=limit,
        )
        return found.requests
