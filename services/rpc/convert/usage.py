"""Usage events between the wire, the outbox's files, the ledger's segments and the core."""

from __future__ import annotations

from fairway.v1 import usage_pb2 as pb
from services.core.errors import InvalidInput
from services.core.generation import Usage
from services.core.usage import DeviceInterval, RequestUsage, SequenceDeviceUse, UsageEvent, implausible


def event_to_proto(event: UsageEvent) -> pb.UsageEvent:
    match event:
        case RequestUsage():
            return pb.UsageEvent(request=_request_to(event))
        case SequenceDeviceUse():
            return pb.UsageEvent(sequence=sequence_to_proto(event))
        case DeviceInterval():
            return pb.UsageEvent(device=_device_to(event))


def event_from_proto(message: pb.UsageEvent) -> UsageEvent:
    """Return the event. Raises InvalidInput for a message without one, or whose fields contradict another."""
    kind = message.WhichOneof("event")
    match kind:
        case "request":
            event: UsageEvent = _request_from(message.request)
        case "sequence":
            event = sequence_from_proto(message.sequence)
        case "device":
            event = _device_from(message.device)
        case _:
            raise InvalidInput("a usage event has no content", field="events")
    if (found := implausible(event)) is not None:
        field, why = f"events.{kind}.{found[0]}", found[1]
        raise InvalidInput(f"{field} {why}", field=field)
    return event


def tokens_to_proto(usage: Usage) -> pb.TokenCounts:
    return pb.TokenCounts(prompt=usage.prompt_tokens, cached=usage.cached_tokens, output=usage.output_tokens)


def tokens_from_proto(message: pb.TokenCounts) -> Usage:
    return Usage(message.prompt, message.output, message.cached)


def sequence_to_proto(use: SequenceDeviceUse) -> pb.SequenceUse:
    return pb.SequenceUse(
        request_id=use.request_id,
        choice=use.choice,
        tenant=use.tenant,
        model=use.model,
        version_digest=use.version_digest,
        worker_id=use.worker_id,
        device_type=use.device_type,
        cost_per_hour=use.cost_per_hour,
        ended_unix_ms=_ms(use.ended_unix_s),
        tokens=tokens_to_proto(use.usage),
        device_s=use.device_s,
    )


def sequence_from_proto(message: pb.SequenceUse) -> SequenceDeviceUse:
    return SequenceDeviceUse(
        request_id=message.request_id,
        choice=message.choice,
        tenant=message.tenant,
        model=message.model,
        version_digest=message.version_digest,
        worker_id=message.worker_id,
        device_type=message.device_type,
        cost_per_hour=message.cost_per_hour,
        ended_unix_s=message.ended_unix_ms / 1000,
        usage=tokens_from_proto(message.tokens),
        device_s=message.device_s,
    )


def _request_to(event: RequestUsage) -> pb.SettledRequest:
    return pb.SettledRequest(
        request_id=event.request_id,
        tenant=event.tenant,
        key_id=event.key_id,
        user=event.user,
        model=event.model,
        version_digest=event.version_digest,
        ended_unix_ms=_ms(event.ended_unix_s),
        tokens=tokens_to_proto(event.usage),
        list_micros=event.list_micros,
        labels=event.labels,
    )


def _request_from(message: pb.SettledRequest) -> RequestUsage:
    return RequestUsage(
        request_id=message.request_id,
        tenant=message.tenant,
        key_id=message.key_id,
        user=message.user,
        model=message.model,
        version_digest=message.version_digest,
        ended_unix_s=message.ended_unix_ms / 1000,
        usage=tokens_from_proto(message.tokens),
        list_micros=message.list_micros,
        labels=dict(message.labels),
    )


def _device_to(event: DeviceInterval) -> pb.DeviceTime:
    return pb.DeviceTime(
        worker_id=event.worker_id,
        device_type=event.device_type,
        cost_per_hour=event.cost_per_hour,
        began_unix_ms=_ms(event.began_unix_s),
        ended_unix_ms=_ms(event.ended_unix_s),
        busy_s=event.busy_s,
        attributed_s=event.attributed_s,
    )


def _device_from(message: pb.DeviceTime) -> DeviceInterval:
    return DeviceInterval(
        worker_id=message.worker_id,
        device_type=message.device_type,
        cost_per_hour=message.cost_per_hour,
        began_unix_s=message.began_unix_ms / 1000,
        ended_unix_s=message.ended_unix_ms / 1000,
        busy_s=message.busy_s,
        attributed_s=message.attributed_s,
    )


def _ms(unix_s: float) -> int:
    return max(0, round(unix_s * 1000))
