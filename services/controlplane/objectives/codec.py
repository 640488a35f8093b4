"""The stored snapshot of all sums."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from fairway.v1 import slis_pb2 as pb
from services.adapters.frames import MAX_FRAME_BYTES, opened, sealed
from services.controlplane.objectives.policy.book import BurnKey, SliBook, SliSource, StepSums
from services.controlplane.objectives.policy.burn import BurnRings, EventCounts
from services.core.arms import ArmKey, GateWindow, SliSums
from services.core.errors import IntegrityError
from services.core.records import Sli
from services.rpc.convert.inference import PRIORITIES, PRIORITY_OF
from services.rpc.convert.slis import (
    clusters_to_proto,
    series_from_proto,
    series_to_proto,
    shapes_from_proto,
    shapes_to_proto,
    windows_from_proto,
)

_SLIS = tuple(Sli)


def book_to_message(book: SliBook, number: int) -> pb.SliSnapshot:
    message = pb.SliSnapshot(
        number=number, shapes=shapes_to_proto(book.shapes), shapes_number=book.shapes_number
    )
    for name, source in book.sources.items():
        message.sources.add(name=name, last=source.last, seen_unix_ms=round(source.seen_s * 1000))
    for at, series in book.intervals.items():
        message.intervals.add(number=at, series=(series_to_proto(*one) for one in series.items()))
    for key, rings in book.burns.items():
        message.burns.add(
            model=key.arm.model,
            version_digest=key.arm.version_digest,
            priority=PRIORITIES[key.priority],
            rings=(_ring_to(ring) for ring in rings.rings),
        )
    for window, step in book.steps.items():
        message.windows.add(
            model=window.model,
            step=window.step,
            seen_unix_ms=round(step.seen_s * 1000),
            began_unix_ms=round(step.began_s * 1000),
            clusters=clusters_to_proto({window: book.arms_of(window)}),
        )
    return message


def snapshot_to_bytes(message: pb.SliSnapshot) -> bytes:
    data = message.SerializeToString()
    return sealed([data[at : at + MAX_FRAME_BYTES] for at in range(0, len(data), MAX_FRAME_BYTES)])


def book_from_bytes(data: bytes) -> SliBook:
    """Raises IntegrityError."""
    found, message = opened(data), pb.SliSnapshot()
    try:
        if not found.damage:
            message.ParseFromString(b"".join(found.blocks))
            return _book_from(message)
        problem = found.damage
    except (DecodeError, KeyError, IndexError) as error:  # only one without checksums
        problem = repr(error)
    raise IntegrityError(f"the snapshot of service level indicators is damaged: {problem}")


def _book_from(message: pb.SliSnapshot) -> SliBook:
    book = SliBook(message.number)
    book.sources = {one.name: SliSource(one.last, one.seen_unix_ms / 1000) for one in message.sources}
    book.intervals = {one.number: dict(map(series_from_proto, one.series)) for one in message.intervals}
    for burn in message.burns:
        key = BurnKey(ArmKey(burn.model, burn.version_digest), PRIORITY_OF[burn.priority])
        book.burns[key] = BurnRings([_ring_from(ring.bins) for ring in burn.rings])
    for one in message.windows:
        window = GateWindow(one.model, one.step)
        arms: dict[str, dict[int, SliSums]] = {
            digest: dict(arm.clusters)
            for digest, arm in windows_from_proto(one.clusters).get(window, {}).items()
        }
        book.steps[window] = StepSums(arms, one.seen_unix_ms / 1000, one.began_unix_ms / 1000)
    book.shapes, book.shapes_number = shapes_from_proto(message.shapes), message.shapes_number
    return book


def _ring_to(ring: dict[int, dict[Sli, EventCounts]]) -> pb.SliSnapshot.Ring:
    message = pb.SliSnapshot.Ring()
    for number, counts in ring.items():
        found = (counts.get(sli, EventCounts()) for sli in _SLIS)
        message.bins.add(number=number, counts=(one for each in found for one in (each.events, each.bad)))
    return message


def _ring_from(bins: Iterable[pb.SliSnapshot.Bin]) -> dict[int, dict[Sli, EventCounts]]:
    return {
        one.number: {
            sli: EventCounts(one.counts[2 * at], one.counts[2 * at + 1])
            for at, sli in enumerate(_SLIS)
            if one.counts[2 * at]
        }
        for one in bins
    }
