"""Rows of fixed-cost models between the wire and the core, both ways."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from fairway.mirror import Mirror, Pair
from fairway.v1 import common_pb2, worker_pb2
from services.core.fixed_cost.rows import BatchWindow, RawTensor, RowEnd, RowSpec
from services.rpc.convert.inference import PRIORITY, seconds_of
from services.rpc.status import by_reason

ENGINE_LOST: Final = "ENGINE_LOST"
MOST_WAITED_MS: Final = 86_400_000  # the bound of the message
TENSOR: Final = Mirror(RawTensor, common_pb2.Tensor)
WINDOW: Final = Mirror(BatchWindow, common_pb2.BatchWindow)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _in_us(name: str) -> Pair:
    return Pair(name, _microseconds, lambda us: us / 1e6)


def _target_ms(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds else 0


def _waited_ms(seconds: float) -> int:
    return min(MOST_WAITED_MS, max(0, round(seconds * 1000)))


_ROW: Final = Mirror(
    RowSpec,
    worker_pb2.StartRow,
    {
        "inputs": TENSOR.each("inputs"),
        "priority": PRIORITY,
        "time_left_s": Pair(
            "time_left",
            lambda seconds: None if seconds <= 0 else _duration(seconds),
            seconds_of,
        ),
        "transport_s": _in_us("transport_us"),
        "target_s": Pair("target_ms", _target_ms, lambda ms: ms / 1000),
        "waited_s": Pair("waited_ms", _waited_ms, lambda ms: ms / 1000),
        "tenant_weight": Pair("tenant_weight", read=lambda weight: weight or 1.0),
    },
)


def _duration(seconds: float) -> Duration:
    whole, nanos = divmod(max(1, round(seconds * 1e9)), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


_END: Final = Mirror(
    RowEnd,
    worker_pb2.RowFinished,
    {
        "outputs": TENSOR.each("outputs"),
        "device_s": _in_us("device_us"),
        "wait_s": _in_us("wait_us"),
        "window": WINDOW.one("window", unset=True),
        "stay_s": _in_us("stay_us"),
    },
    apart=("error", "lost", "worker_id"),
)
row_from_proto: Final = _ROW.from_proto


def row_to_proto(handle: int, spec: RowSpec) -> worker_pb2.StartRow:
    return _ROW.to_proto(spec, handle=handle)


def row_end_to_proto(handle: int, end: RowEnd) -> worker_pb2.RowFinished:
    """A lost row has the reason ENGINE_LOST, which is no error of the tree."""
    message = _END.to_proto(end, handle=handle)
    if end.lost:
        message.error_reason = ENGINE_LOST
    elif end.error is not None:
        message.error_reason, message.error_message = end.error.reason, end.error.message
        if (deaths := end.error.metadata.get("deaths")) is not None:
            message.deaths = int(deaths)
    return message


def row_end_from_proto(message: worker_pb2.RowFinished) -> RowEnd:
    reason = message.error_reason
    lost = reason == ENGINE_LOST
    error = by_reason(reason, message.error_message) if reason and not lost else None
    if error is not None and message.HasField("deaths"):
        error.metadata["deaths"] = str(message.deaths)
    return _END.from_proto(message, error=error, lost=lost)
