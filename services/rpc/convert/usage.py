"""Usage events between the wire, the outbox's files, the ledger's segments and the core."""

from __future__ import annotations

from typing import Final

from fairway.mirror import Mirror, Pair
from fairway.v1 import usage_pb2 as pb
from services.core.errors import InvalidInput
from services.core.generation import Usage
from services.core.usage import (
    DeviceInterval,
    RequestUsage,
    Residence,
    SequenceDeviceUse,
    UsageEvent,
    implausible,
)


def _ms(unix_s: float) -> int:
    return max(0, round(unix_s * 1000))


def _moment(name: str) -> Pair:
    return Pair(name, _ms, lambda ms: ms / 1000)


TOKENS: Final = Mirror(
    Usage,
    pb.TokenCounts,
    {
        "prompt_tokens": Pair("prompt"),
        "output_tokens": Pair("output"),
        "cached_tokens": Pair("cached"),
    },
    apart=("device_s",),
)
_ENDED: Final = {"ended_unix_s": _moment("ended_unix_ms")}
SEQUENCE: Final = Mirror(SequenceDeviceUse, pb.SequenceUse, {**_ENDED, "usage": TOKENS.one("tokens")})
_REQUEST: Final = Mirror(
    RequestUsage, pb.SettledRequest, {**_ENDED, "usage": TOKENS.one("tokens")}, apart=("budgeted",)
)
_DEVICE: Final = Mirror(
    DeviceInterval,
    pb.DeviceTime,
    {
        **_ENDED,
        "began_unix_s": _moment("began_unix_ms"),
        "residents": Mirror(Residence, pb.Residence).each("residents"),
    },
)


def event_to_proto(event: UsageEvent) -> pb.UsageEvent:
    match event:
        case RequestUsage():
            return pb.UsageEvent(request=_REQUEST.to_proto(event))
        case SequenceDeviceUse():
            return pb.UsageEvent(sequence=SEQUENCE.to_proto(event))
        case DeviceInterval():
            return pb.UsageEvent(device=_DEVICE.to_proto(event))


def event_from_proto(message: pb.UsageEvent) -> UsageEvent:
    """Return the event. Raises InvalidInput for a message without one, or whose fields contradict another."""
    kind = message.WhichOneof("event")
    match kind:
        case "request":
            event: UsageEvent = _REQUEST.from_proto(message.request)
        case "sequence":
            event = SEQUENCE.from_proto(message.sequence)
        case "device":
            event = _DEVICE.from_proto(message.device)
        case _:
            raise InvalidInput("a usage event has no content", field="events")
    if (found := implausible(event)) is not None:
        field, why = f"events.{kind}.{found[0]}", found[1]
        raise InvalidInput(f"{field} {why}", field=field)
    return event
