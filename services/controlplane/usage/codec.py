"""The ledger's objects as bytes: segments, checkpoints and hours.

Each is a sealed object whose blocks are parts of one message. What cannot be read or booked is left out, and
named in ``Read.damage``; the rest is returned. A segment has its number of events and its sources' last ones
at both ends, so that what one damaged place costs is counted, and no source is asked for it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import structlog
from google.protobuf.message import DecodeError, Message
from msgspec.structs import replace

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import usage_pb2 as pb
from services.adapters.frames import opened, sealed
from services.controlplane.usage.policy.book import Charge, LedgerBook, Segment, SourceEvents, StoredSource
from services.controlplane.usage.policy.joins import Open
from services.controlplane.usage.policy.lines import Amounts, Line, Lines, Source
from services.core.errors import InvalidInput
from services.core.usage import UsageEvent
from services.rpc import bounds
from services.rpc.convert.usage import SEQUENCE, TOKENS, event_from_proto, event_to_proto

SOURCES: Final = numbers_of(Source, pb.UsageSource)
M = TypeVar("M", bound=Message)
T = TypeVar("T")
# Of a block: few enough that little is lost with it. An event has below 9 KiB, the sequences of an open
# request below 600 KiB.
_EVENTS: Final = 16
_BLOCK_BYTES: Final = 4096
_MAX_CHARGE: Final = 2**60
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """An object that was read. ``damage`` states what was left out and why; empty: nothing. ``lost`` counts
    events of a segment that were left out; None: nothing that was read has their number."""

    value: T
    damage: str = ""
    lost: int | None = 0


def segment_to_bytes(segment: Segment) -> bytes:
    head = pb.UsageSegment(
        number=segment.number,
        writer=segment.writer,
        booked_unix_ms=_ms(segment.booked_s),
        events=sum(len(batch.events) for batch in segment.batches),
    )
    lasts = {batch.source: batch.last for batch in segment.batches}
    ends = [pb.UsageSegment.Last(source=source, last=last) for source, last in lasts.items()]
    head.lasts.extend(ends[:_EVENTS])
    about = [_encoded(head), *_blocks(pb.UsageSegment, "lasts", ends[_EVENTS:])]
    charged = map(_CHARGE.to_proto, segment.charges)
    batches = [part for batch in segment.batches for part in _batches_to(batch)]
    return sealed(
        [
            *about,
            *(_encoded(pb.UsageSegment(batches=[batch])) for batch in batches),
            *_blocks(pb.UsageSegment, "charged", charged),
            *about,
        ]
    )


def segment_from_bytes(data: bytes, number: int) -> Read[Segment]:
    """Return what can be booked of the segment that is stored under this number."""
    message, problems = _parsed(pb.UsageSegment, data)
    if message.number not in (number, 0):
        message, problems = pb.UsageSegment(), [f"it is segment {message.number}", *problems]
    batches = [
        SourceEvents(
            batch.source,
            batch.last,
            tuple(
                _kept(
                    batch.events,
                    _checked_event,
                    problems,
                    f"source {batch.source}, events up to {batch.last}",
                )
            ),
        )
        for batch in message.batches
    ]
    charges = tuple(_kept(message.charged, _checked_charge, problems, "charge"))
    lost: int | None = 0
    if problems:
        lost = None
        if message.HasField("events"):
            lost = message.events - sum(len(batch.events) for batch in batches)
    read_lasts = {batch.source: batch.last for batch in batches}
    lasts = {each.source: each.last for each in message.lasts}
    batches += [SourceEvents(*each, ()) for each in lasts.items() if read_lasts.get(each[0], 0) < each[1]]
    segment = Segment(number, message.writer, message.booked_unix_ms / 1000, tuple(batches), charges)
    return Read(segment, "; ".join(problems), lost)


def hour_to_bytes(lines: Lines) -> bytes:
    rows = [
        pb.UsageRow(line=_LINE.to_proto(line), amounts=_amounts_to(amounts))
        for line, amounts in lines.items()
    ]
    return sealed(list(_blocks(pb.UsageHour, "rows", rows)))


def hour_from_bytes(data: bytes) -> Read[Lines]:
    """Return the lines that can be read."""
    message, problems = _parsed(pb.UsageHour, data)
    rows = _kept(
        message.rows,
        lambda row: (_LINE.from_proto(row.line), _AMOUNTS.from_proto(row.amounts)),
        problems,
        "row",
    )
    return Read(dict(rows), "; ".join(problems))


def checkpoint_to_bytes(book: LedgerBook, hours: Mapping[int, int]) -> bytes:
    """Encode the state without its sums, which are in the objects of the hours."""
    requests = book.requests
    head = pb.UsageCheckpoint(
        through=book.number, booked_unix_ms=_ms(book.booked_s), closed_unix_ms=_ms(requests.closed_s)
    )
    sources = [
        pb.UsageCheckpoint.Source(name=name, last=stored.last, booked_unix_ms=_ms(stored.booked_s))
        for name, stored in book.sources.items()
    ]
    objects = [
        pb.UsageCheckpoint.HourObject(hour=hour, through=through) for hour, through in sorted(hours.items())
    ]
    waiting = (
        _OPEN.to_proto(each, request_id=request_id)
        for found in (requests.settled, requests.waiting)
        for request_id, each in found.items()
    )
    return sealed(
        [
            _encoded(head),
            *_blocks(pb.UsageCheckpoint, "sources", sources),
            *_blocks(pb.UsageCheckpoint, "hours", objects),
            *_blocks(pb.UsageCheckpoint, "open", waiting),
        ]
    )


def book_from_bytes(data: bytes, number: int) -> Read[LedgerBook]:
    """Return what can be read of the state up to the segment with this number."""
    message, problems = _parsed(pb.UsageCheckpoint, data)
    if message.through not in (number, 0):
        message, problems = pb.UsageCheckpoint(), [f"it ends with {message.through}", *problems]
    book = LedgerBook(number, message.booked_unix_ms / 1000)
    book.sources = {one.name: StoredSource(one.last, one.booked_unix_ms / 1000) for one in message.sources}
    book.hours = {one.hour: one.through for one in message.hours}
    book.requests.closed_s = message.closed_unix_ms / 1000
    lines: dict[Line, Line] = {}
    for request_id, found in _kept(
        message.open, lambda one: (one.request_id, _open_from(one, lines)), problems, "open request"
    ):
        requests = book.requests.waiting if found.sequences else book.requests.settled
        requests[request_id] = found
    return Read(book, "; ".join(problems))


def _batches_to(batch: SourceEvents) -> Iterator[pb.UsageBatch]:
    """Yield the batch in parts, each with the number of its own last event."""
    events, last = batch.events, batch.last
    for start in range(0, max(len(events), 1), _EVENTS):
        part = events[start : start + _EVENTS]
        number = last - max(0, len(events) - start - _EVENTS)
        yield pb.UsageBatch(source=batch.source, last=number, events=map(event_to_proto, part))


def _checked_event(message: pb.UsageEvent) -> UsageEvent:
    bounds.check(message)
    return event_from_proto(message)


def _checked_charge(message: pb.ChargedRequest) -> Charge:
    charge = _CHARGE.from_proto(message)
    if max(charge.list_micros, charge.usage.prompt_tokens, charge.usage.output_tokens) > _MAX_CHARGE:
        raise InvalidInput("its amounts are beyond any request's")
    return charge


def _kept(messages: Iterable[Any], decode: Callable[[Any], T], problems: list[str], what: str) -> Iterator[T]:
    """Yield what can be decoded; add to the problems what cannot."""
    for index, message in enumerate(messages):
        try:
            yield decode(message)
        except InvalidInput as error:
            problems.append(f"{what}, number {index} of its block: {error.message}")
        except (KeyError, ValueError) as error:  # only in an object without checksums
            problems.append(f"{what}, number {index}: {error!r}")


def _blocks(kind: Callable[..., Message], field: str, items: Iterable[Message]) -> Iterator[bytes]:
    """Yield messages of that kind that have the items in one of their fields."""
    block: list[Message] = []
    size_bytes = 0
    for item in items:
        if block and size_bytes + item.ByteSize() > _BLOCK_BYTES:
            yield _encoded(kind(**{field: block}))
            block, size_bytes = [], 0
        block.append(item)
        size_bytes += item.ByteSize()
    if block:
        yield _encoded(kind(**{field: block}))


def _encoded(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _open_from(message: pb.OpenRequest, lines: dict[Line, Line]) -> Open:
    found = _OPEN.from_proto(message)
    return found if found.line is None else replace(found, line=lines.setdefault(found.line, found.line))


def _amounts_to(amounts: Amounts) -> pb.UsageAmounts:
    if amounts != (fitting := amounts.bounded()):
        log.error("usage.sum_too_large", amounts=repr(amounts))
        amounts = fitting
    return _AMOUNTS.to_proto(amounts)


def _parsed(kind: Callable[[], M], data: bytes) -> tuple[M, list[str]]:
    """Return the message of the blocks that can be read, and what is damaged."""
    found, message = opened(data), kind()
    problems = [found.damage] if found.damage else []
    for block in found.blocks:
        try:
            message.MergeFromString(block)
        except DecodeError:
            problems.append("a block is malformed")
            if not found.sealed:
                message = kind()
    return message, problems


def _ms(unix_s: float) -> int:
    return round(unix_s * 1000)


def _moment(name: str) -> Pair:
    return Pair(name, _ms, lambda ms: ms / 1000)


_LINE: Final = Mirror(
    Line,
    pb.UsageLine,
    {
        "labels": Pair("labels", dict, lambda labels: tuple(sorted(labels.items()))),
        "source": enum_pair("source", SOURCES),
    },
)
_CHARGE: Final = Mirror(Charge, pb.ChargedRequest, {"usage": TOKENS.one("tokens")})
_AMOUNTS: Final = Mirror(Amounts, pb.UsageAmounts)
_OPEN: Final = Mirror(
    Open,
    pb.OpenRequest,
    {
        "reported_s": _moment("booked_unix_ms"),
        "ended_s": _moment("ended_unix_ms"),
        "line": _LINE.one("line", unset=True),
        "booked": Pair("amounts", _amounts_to, _AMOUNTS.from_proto),
        "sequences": SEQUENCE.each("sequences"),
        "charged": TOKENS.one("charged", unset=True),
    },
)
