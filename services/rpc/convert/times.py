"""Durations and moments of protobuf, in seconds."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def seconds_of(message: Duration | Timestamp) -> float:
    """Return a span in seconds, or a moment in seconds of Unix time."""
    return message.seconds + message.nanos / 1e9


def duration_of(seconds: float) -> Duration:
    found = Duration()
    found.FromMicroseconds(round(seconds * 1_000_000))
    return found
