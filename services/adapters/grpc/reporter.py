"""Report links over gRPC: one Report stream to the leading scheduler."""

from __future__ import annotations

from fairway.v1 import scheduler_pb2
from services.adapters.grpc.streams import Call, GrpcLink, GrpcLinks, first_epoch
from services.adapters.links.reporter import ReportLink
from services.core.fleet import ReportSnapshot
from services.ports.report_stream import ReportAnswer
from services.rpc.convert.scheduler import counters_from_proto, report_to_proto


class GrpcReportLinks(GrpcLinks):
    """Implements ``ReportLinks`` over Report streams."""

    async def open(self) -> ReportLink:
        stub = await self._stub()
        call: Call = stub.Report(metadata=self._metadata)
        return _GrpcReportLink(call, await first_epoch(call), self._silence_s)


class _GrpcReportLink(GrpcLink):
    async def send(self, number: int, report: ReportSnapshot) -> None:
        await self._write(report_to_proto(report, number, full=number == 1))

    async def receive(self) -> ReportAnswer:
        response: scheduler_pb2.ReportResponse = await self._read()
        return ReportAnswer(
            response.leadership.epoch, response.report, counters_from_proto(response.counters)
        )
