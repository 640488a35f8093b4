"""UsageService on the wire: reports of gateways and workers."""

from __future__ import annotations

from typing import Any

import grpc

from fairway.v1 import usage_pb2 as pb
from fairway.v1 import usage_pb2_grpc
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import UsageReport
from services.controlplane.usage.prices import ListPrices
from services.rpc.convert.usage import event_from_proto


class UsageServicer(usage_pb2_grpc.UsageServiceServicer):
    def __init__(self, ledger: UsageLedger, prices: ListPrices) -> None:
        self._ledger = ledger
        self._prices = prices

    async def ReportUsage(
        self, request: pb.ReportUsageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReportUsageResponse:
        events = tuple(map(event_from_proto, request.events))
        await self._prices.check(events)
        report = UsageReport(request.source, request.first, events, request.lost_until, request.apart)
        return pb.ReportUsageResponse(last=await self._ledger.report(report))
