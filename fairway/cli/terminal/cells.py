"""Cells of the tables: enums, times and digests in a readable form."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.cli.terminal.durations import show_span
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp


def enum_name(name_of: Callable[[Any], str], number: int, prefix: str) -> str:
    """Return the name of an enum's value without its prefix, in lower case; "" when it is unspecified."""
    try:
        name = name_of(number)
    except ValueError:
        return str(number)  # a value of a newer server
    found = name.removeprefix(prefix).lower()
    return "" if found == "unspecified" else found


def priority(number: int) -> str:
    return enum_name(common_pb2.Priority.Name, number, "PRIORITY_")


def resource_kind(number: int) -> str:
    return enum_name(cp.ResourceKind.Name, number, "RESOURCE_KIND_")


def age(metadata: cp.Metadata) -> str:
    """Return the age of a resource, "" if its creation time is unknown."""
    if not metadata.HasField("create_time"):
        return ""
    return show_span(datetime.now(UTC).timestamp() - metadata.create_time.seconds)


def duration(value: Duration) -> str:
    return show_span(value.seconds + value.nanos / 1e9)


def moment(value: Timestamp) -> str:
    """Return a time in seconds, UTC."""
    return f"{value.ToDatetime(tzinfo=UTC):%Y-%m-%dT%H:%M:%SZ}"


def short_digest(digest: str) -> str:
    """Return the first digits of a digest, enough to distinguish the versions of one model."""
    return digest.removeprefix("sha256:")[:12]


def limit(count: int) -> str:
    return str(count) if count else "no limit"


def labels(found: cp.Metadata) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(found.labels.items()))
