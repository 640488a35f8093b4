"""Text of values: time spans and moments (`90s`, `1h30m`, `2026-12-31T00:00:00Z`), enums and digests."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp

_UNITS_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_SHOWN: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_MAX_S: Final = 100 * 365 * 86400.0


def parse_span(text: str) -> float:
    """Return the seconds of `30`, `30s`, `1h30m` or `7d`. Raises ValueError with the expected form."""
    stripped = text.strip()
    parts = _PART.findall(stripped)
    if re.fullmatch(r"\d+(?:\.\d+)?", stripped):
        seconds = float(stripped)
    elif parts and "".join(number + unit for number, unit in parts) == stripped:
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    else:
        raise ValueError(f"{text!r} is not a time span; write it like 30s, 15m, 1h30m or 7d")
    if seconds > _MAX_S:
        raise ValueError(f"{text!r} is longer than a hundred years")
    return seconds


def parse_moment(text: str, *, now: datetime, past: bool) -> datetime:
    """Return the moment of a timestamp, or the moment a span before (``past``) or after ``now``.

    A timestamp without a zone is UTC. Raises ValueError with the expected form.
    """
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            span_s = parse_span(text)
        except ValueError as exc:
            raise ValueError(
                f"{text!r} is neither a span like 24h or 30d nor a time like 2027-01-31T12:00:00Z"
            ) from exc
        moment_s = now.timestamp() + (-span_s if past else span_s)
        return datetime.fromtimestamp(max(0.0, moment_s), UTC)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def show_span(seconds: float) -> str:
    """Return a span in its two largest units: `3d4h`, `5m10s`, `12s`; below ten seconds with one decimal."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    left = int(seconds)
    shown: list[str] = []
    for unit, size_s in _SHOWN:
        if (count := left // size_s) or (shown and unit):
            shown.append(f"{count}{unit}")
            left -= count * size_s
        if len(shown) == 2:
            break
    return "".join(part for part in shown if not part.startswith("0")) or "0s"


def show_bytes(count: int) -> str:
    """Return a size in the largest binary unit that leaves at least one: `1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def role_name(number: int) -> str:
    """Return the role of a key as `--role` names it."""
    return enum_name(cp.KeyRole.Name, number, "KEY_ROLE_").replace("_", "-")


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


def isolation(number: int) -> str:
    return enum_name(cp.Isolation.Name, number, "ISOLATION_")


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


MICROS: Final = 1_000_000
_MAX_MICROS: Final = 1_000_000_000 * MICROS
_AMOUNT: Final = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?")


def parse_money(text: str) -> int:
    """Return the millionths of `12`, `12.50` or `0.000001`. Raises ValueError with the expected form."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not an amount; write it like 12.50, with at most six decimals")
    micros = int(found[1]) * MICROS + int((found[2] or "").ljust(6, "0"))
    if micros > _MAX_MICROS:
        raise ValueError(f"{text!r} is above a billion")
    return micros


def show_money(micros: int) -> str:
    """Return an amount with two decimals, or as many as it has: `12.50`, `0.000001`."""
    whole, rest = divmod(micros, MICROS)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole}.{decimals}"
