"""Usage and cost, as operators list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from fairway.client.admin.calls import Service
from fairway.v1 import controlplane_pb2 as cp


class UsageRecords:
    """What was used and what it cost, from the leading control plane."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self,
        *,
        tenant: str = "",
        key: str = "",
        user: str = "",
        model: str = "",
        labels: Mapping[str, str] | None = None,
        group_by: Sequence[cp.UsageDimension.ValueType] = (),
        group_by_labels: Sequence[str] = (),
        granularity: cp.UsageGranularity.ValueType = cp.USAGE_GRANULARITY_UNSPECIFIED,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.UsageRecord]:
        """Return the records of whole hours from ``start_time``, by default of today (UTC), to ``end_time``.

        Dimensions that are not in ``group_by`` are summed. Raises Unavailable without a leader.
        """
        return await self._service.pages(
            "ListUsage",
            "records",
            quick=False,  # a standby waits for a leader, which reads the ledger
            limit=limit,
            timeout_s=timeout_s,
            tenant=tenant,
            key=key,
            user=user,
            model=model,
            labels=labels or {},
            group_by=group_by,
            group_by_labels=group_by_labels,
            granularity=granularity,
            start_time=start_time,
            end_time=end_time,
        )
