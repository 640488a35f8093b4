"""The ledger's objects as bytes: segments, checkpoints and hours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from fairway.v1 import usage_pb2 as pb
from services.controlplane.usage.policy.book import Charge, LedgerBook, Segment, SourceEvents, StoredSource
from services.controlplane.usage.policy.joins import Open
from services.controlplane.usage.policy.lines import Amounts, Line, Lines, Source
from services.core.errors import IntegrityError
from services.rpc.convert.usage import (
    event_from_proto,
    event_to_proto,
    sequence_from_proto,
    sequence_to_proto,
    tokens_from_proto,
    tokens_to_proto,
)

SOURCES: Final = {source: pb.UsageSource.Value(f"USAGE_SOURCE_{source.name}") for source in Source}
M = TypeVar("M", bound=Message)
_SOURCES_BACK: Final = {number: source for source, number in SOURCES.items()}


def segment_to_bytes(segment: Segment) -> bytes:
    message = pb.UsageSegment(
        number=segment.number,
        writer=segment.writer,
        booked_unix_ms=_ms(segment.booked_s),
        batches=[
            pb.UsageBatch(source=batch.source, last=batch.last, events=map(event_to_proto, batch.events))
            for batch in segment.batches
        ],
        charged=[
            pb.ChargedRequest(
                request_id=charge.request_id,
                tokens=tokens_to_proto(charge.usage),
                list_micros=charge.list_micros,
            )
            for charge in segment.charges
        ],
    )
    return message.SerializeToString(deterministic=True)


def segment_from_bytes(data: bytes) -> Segment:
    """Raises IntegrityError."""
    message = _parsed(pb.UsageSegment(), data)
    return Segment(
        number=message.number,
        writer=message.writer,
        booked_s=message.booked_unix_ms / 1000,
        batches=tuple(
            SourceEvents(batch.source, batch.last, tuple(map(event_from_proto, batch.events)))
            for batch in message.batches
        ),
        charges=tuple(
            Charge(one.request_id, tokens_from_proto(one.tokens), one.list_micros) for one in message.charged
        ),
    )


def hour_to_bytes(lines: Lines) -> bytes:
    rows = [pb.UsageRow(line=_line_to(line), amounts=_amounts_to(amounts)) for line, amounts in lines.items()]
    return pb.UsageHour(rows=rows).SerializeToString(deterministic=True)


def hour_from_bytes(data: bytes) -> Lines:
    """Raises IntegrityError."""
    rows = _parsed(pb.UsageHour(), data).rows
    return {_line_from(row.line): _amounts_from(row.amounts) for row in rows}


def checkpoint_to_bytes(book: LedgerBook, hours: Mapping[int, int]) -> bytes:
    """Encode the state without its sums, which are in the objects of the hours."""
    requests = book.requests
    message = pb.UsageCheckpoint(
        through=book.number, booked_unix_ms=_ms(book.booked_s), closed_unix_ms=_ms(requests.closed_s)
    )
    for name, stored in book.sources.items():
        message.sources.add(name=name, last=stored.last, booked_unix_ms=_ms(stored.booked_s))
    for hour, through in sorted(hours.items()):
        message.hours.add(hour=hour, through=through)
    for found in (requests.settled, requests.waiting):
        message.open.extend(_open_to(request_id, each) for request_id, each in found.items())
    return message.SerializeToString(deterministic=True)


def book_from_bytes(data: bytes) -> LedgerBook:
    """Raises IntegrityError."""
    message = _parsed(pb.UsageCheckpoint(), data)
    book = LedgerBook(message.through, message.booked_unix_ms / 1000)
    book.sources = {one.name: StoredSource(one.last, one.booked_unix_ms / 1000) for one in message.sources}
    book.hours = {one.hour: one.through for one in message.hours}
    book.requests.closed_s = message.closed_unix_ms / 1000
    lines: dict[Line, Line] = {}
    for one in message.open:
        found = _open_from(one, lines)
        requests = book.requests.waiting if found.sequences else book.requests.settled
        requests[one.request_id] = found
    return book


def _open_to(request_id: str, found: Open) -> pb.OpenRequest:
    return pb.OpenRequest(
        request_id=request_id,
        booked_unix_ms=_ms(found.reported_s),
        ended_unix_ms=_ms(found.ended_s),
        line=None if found.line is None else _line_to(found.line),
        amounts=_amounts_to(found.booked),
        sequences=map(sequence_to_proto, found.sequences),
        charged=None if found.charged is None else tokens_to_proto(found.charged),
    )


def _open_from(message: pb.OpenRequest, lines: dict[Line, Line]) -> Open:
    line = _line_from(message.line) if message.HasField("line") else None
    return Open(
        reported_s=message.booked_unix_ms / 1000,
        ended_s=message.ended_unix_ms / 1000,
        line=None if line is None else lines.setdefault(line, line),
        booked=_amounts_from(message.amounts),
        sequences=tuple(map(sequence_from_proto, message.sequences)),
        charged=tokens_from_proto(message.charged) if message.HasField("charged") else None,
    )


def _line_to(line: Line) -> pb.UsageLine:
    return pb.UsageLine(
        hour=line.hour,
        tenant=line.tenant,
        key_id=line.key_id,
        user=line.user,
        model=line.model,
        version_digest=line.version_digest,
        labels=dict(line.labels),
        source=SOURCES[line.source],
    )


def _line_from(message: pb.UsageLine) -> Line:
    return Line(
        hour=message.hour,
        tenant=message.tenant,
        key_id=message.key_id,
        user=message.user,
        model=message.model,
        version_digest=message.version_digest,
        labels=tuple(sorted(message.labels.items())),
        source=_SOURCES_BACK[message.source],
    )


def _amounts_to(amounts: Amounts) -> pb.UsageAmounts:
    return pb.UsageAmounts(
        requests=amounts.requests,
        prompt_tokens=amounts.prompt_tokens,
        cached_tokens=amounts.cached_tokens,
        output_tokens=amounts.output_tokens,
        device_us=amounts.device_us,
        list_micros=amounts.list_micros,
        measured_nanos=amounts.measured_nanos,
    )


def _amounts_from(message: pb.UsageAmounts) -> Amounts:
    return Amounts(
        message.requests,
        message.prompt_tokens,
        message.cached_tokens,
        message.output_tokens,
        message.device_us,
        message.list_micros,
        message.measured_nanos,
    )


def _parsed(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise IntegrityError("an object of the usage ledger is malformed") from error
    return message


def _ms(unix_s: float) -> int:
    return round(unix_s * 1000)
