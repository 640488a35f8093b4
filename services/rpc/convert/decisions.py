"""Placement decisions, workers and queues as messages of fairway.v1."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.mirror import Mirror, Pair
from fairway.v1 import scheduler_pb2 as pb
from services.core.decisions import FilterRejections, FleetWorker, PlacementDecision, RankedWorker, WorkerPool
from services.core.queues import ClassWait, PoolQueue, QueueShare
from services.rpc.convert.inference import PRIORITY
from services.rpc.convert.scheduler import counters_to_proto

_MAX_DURATION_S: Final = 1e9


def timestamp(unix_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMilliseconds(round(unix_s * 1000))
    return found


def _duration(seconds: float | None) -> Duration | None:
    """Return the duration, clamped so that one worker's bad number does not fail the response."""
    if seconds is None:
        return None
    found = Duration()
    found.FromMicroseconds(round(max(0.0, min(seconds, _MAX_DURATION_S)) * 1e6))
    return found


def _scores(parts: tuple[tuple[str, float], ...]) -> list[pb.ScorePart]:
    return [pb.ScorePart(scorer=name, value=value) for name, value in parts]


_RANKED: Final = Mirror(
    RankedWorker,
    pb.RankedWorker,
    {
        "predicted_ttft_s": Pair("predicted_ttft", _duration),
        "kv_tokens_room": Pair("kv_tokens_room", lambda tokens: max(0, tokens)),
        "parts": Pair("parts", _scores),
    },
)
decision_to_proto: Final = Mirror(
    PlacementDecision,
    pb.PlacementDecision,
    {
        "priority": PRIORITY,
        "queued_unix_s": Pair("queued_time", timestamp),
        "wait_s": Pair("wait", _duration),
        "ranked": _RANKED.each("ranked"),
        "rejections": Mirror(FilterRejections, pb.FilterRejections).each("rejections"),
    },
).to_proto

_POOL: Final = Mirror(
    WorkerPool,
    pb.ReporterPool,
    {
        "measured_step_s": Pair("measured_step", _duration),
        "predicted_step_s": Pair("predicted_step", _duration),
    },
)
worker_to_proto: Final = Mirror(
    FleetWorker,
    pb.Reporter,
    {"silent_s": Pair("last_report", _duration), "pools": _POOL.each("pools")},
).to_proto

_SHARE: Final = Mirror(
    QueueShare, pb.QueueShare, {"priority": PRIORITY, "oldest_wait_s": Pair("oldest_wait", _duration)}
)
_WAIT: Final = Mirror(
    ClassWait,
    pb.ClassWait,
    {"priority": PRIORITY, "predicted_wait_s": Pair("predicted_wait", _duration)},
)
pool_to_proto: Final = Mirror(
    PoolQueue,
    pb.PoolQueue,
    {
        "oldest_wait_s": Pair("oldest_wait", _duration),
        "predicted_wait_s": Pair("predicted_wait", _duration),
        "shares": _SHARE.each("shares"),
        "counters": Pair("counters", counters_to_proto),
        "waits": _WAIT.each("waits"),
    },
).to_proto
