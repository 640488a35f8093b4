"""The streams between services: their paths and messages."""

from __future__ import annotations

from typing import Final

from fairway.v1 import scheduler_pb2, worker_pb2
from services.ports.streams import StreamMethod

EXECUTE: Final = StreamMethod(
    "/fairway.v1.WorkerService/Execute", worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse
)
FOLLOW: Final = StreamMethod(
    "/fairway.v1.FollowerService/Follow", worker_pb2.FollowRequest, worker_pb2.FollowResponse
)
CONNECT: Final = StreamMethod(
    "/fairway.v1.SchedulerService/Connect", scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse
)
REPORT: Final = StreamMethod(
    "/fairway.v1.SchedulerService/Report", scheduler_pb2.ReportRequest, scheduler_pb2.ReportResponse
)
