"""SliService on the wire: reports of gateways."""

from __future__ import annotations

from typing import Any

import grpc

from fairway.v1 import slis_pb2 as pb
from fairway.v1 import slis_pb2_grpc
from services.controlplane.objectives.store import SliStore
from services.rpc.convert.slis import report_from_proto


class SliServicer(slis_pb2_grpc.SliServiceServicer):
    def __init__(self, store: SliStore) -> None:
        self._store = store

    async def ReportSlis(
        self, request: pb.ReportSlisRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReportSlisResponse:
        reports = tuple(map(report_from_proto, request.reports))
        receipt = self._store.report(request.source, request.first, request.oldest, reports)
        return pb.ReportSlisResponse(last=receipt.last, durable=receipt.durable)
