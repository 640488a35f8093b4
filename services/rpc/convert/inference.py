"""Core values of a generation as messages of fairway.v1."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import common_pb2
from services.core.errors import InvalidInput
from services.core.generation import (
    Constraint,
    ConstraintKind,
    FinishReason,
    StageClock,
    TokenLogprobs,
    Usage,
)
from services.core.records import Priority

FINISH_REASONS: Final = numbers_of(FinishReason, common_pb2.FinishReason)
FINISH_REASONS_BACK: Final = {number: reason for reason, number in FINISH_REASONS.items()}
PRIORITIES: Final = numbers_of(Priority, common_pb2.Priority)
# Keyed by number, as in message fields.
PRIORITY_OF: Final[Mapping[int, Priority]] = {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.STANDARD,
    **{number: priority for priority, number in PRIORITIES.items()},
}


PRIORITY: Final = enum_pair("priority", PRIORITIES, Priority.STANDARD)
TENANT: Final = Pair("tenant_id")
DIGEST: Final = Pair("version_digest")

usage: Final = Mirror(
    Usage,
    common_pb2.Usage,
    {"device_s": Pair("device_us", lambda device_s: round(device_s * 1e6), lambda us: us / 1e6)},
).to_proto
stage_clock: Final = Mirror(StageClock, common_pb2.StageClock).to_proto
LOGPROBS: Final = Mirror(TokenLogprobs, common_pb2.TokenLogprobs)


def token_logprobs(values: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return list(map(LOGPROBS.to_proto, values))


def constraint_to_proto(constraint: Constraint) -> common_pb2.Constraint:
    if constraint.kind is ConstraintKind.CHOICE:
        return common_pb2.Constraint(choice=common_pb2.Choices(texts=json.loads(constraint.source)))
    message = common_pb2.Constraint()
    setattr(message, constraint.kind.value, constraint.source)
    return message


def constraint_from_proto(message: common_pb2.Constraint) -> Constraint:
    """Return the constraint. Raises InvalidInput for one without content."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidInput("the constraint has no kind", field="sampling.constraint")
    if kind == "choice":
        if not message.choice.texts:
            raise InvalidInput("choice is empty", field="sampling.constraint.choice")
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(message.choice.texts), ensure_ascii=False))
    source: str = getattr(message, kind)
    if not source:
        raise InvalidInput(f"{kind} is empty", field=f"sampling.constraint.{kind}")
    return Constraint(ConstraintKind(kind), source)


def timestamp(unix_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMicroseconds(round(unix_s * 1_000_000))
    return found
