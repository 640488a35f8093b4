"""Reports between services with numbers near 2^63, NaN, infinities: refused by name, or harmless."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fairway.v1 import scheduler_pb2, slis_pb2, usage_pb2
from services.adapters.memory.store import MemoryStore
from services.controlplane.objectives.policy.book import SliBook
from services.controlplane.objectives.store import book_from_bytes, book_to_message, snapshot_to_bytes
from services.controlplane.resources.deployments import Deployments
from services.controlplane.usage.codec import checkpoint_to_bytes, hour_to_bytes, segment_to_bytes
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import LedgerBook, Segment, UsageReport, new_parts
from services.controlplane.usage.servicer import ListPrices, UsageServicer
from services.core.errors import InvalidInput
from services.core.generation import Usage
from services.core.limits import Price
from services.core.records import Deployment, Meta, VersionRecord, dump, version_key
from services.ports.store import Put
from services.rpc import bounds
from services.rpc.convert.scheduler import report_from_proto as snapshot_from_proto
from services.rpc.convert.slis import report_from_proto
from services.rpc.convert.usage import event_from_proto
from services.rpc.message_size import limits_of
from services.runtime.clock import SystemClock

DIGEST = "sha256:" + "1" * 64
REALS = (math.nan, math.inf, -math.inf, -1.0, 1e300, 1e18)
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1, 2**63, 2**63 - 1, 2**62),
}


def filled(message: Message) -> Message:
    """Return the message with one element in every field, at every depth."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            value = getattr(message, field.name)
            filled(value.add() if field.is_repeated else value)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            text: Any = b"x" if field.type == FieldDescriptor.TYPE_BYTES else "x"
            _put(message, field, text)
        elif field.cpp_type != FieldDescriptor.CPPTYPE_ENUM:
            _put(message, field, 1)
    return message


def _put(message: Message, field: Any, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name)[:] = [value]
    else:
        setattr(message, field.name, value)


def numbers(message: Message) -> Iterator[tuple[Message, Any]]:
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else [value]:
                yield from numbers(each)
        elif field.cpp_type in _FLOATS or field.cpp_type in _BITS:
            yield message, field


def usage_request(kind: str) -> usage_pb2.ReportUsageRequest:
    event = usage_pb2.UsageEvent()
    filled(getattr(event, kind))
    return usage_pb2.ReportUsageRequest(source="src", first=2, lost_until=1, events=[event])


def apply_usage(request: usage_pb2.ReportUsageRequest) -> None:
    """Book the request as a ledger does, and store everything that is stored of it."""
    events = tuple(map(event_from_proto, request.events))
    report = UsageReport(request.source, request.first, events, request.lost_until)
    book = LedgerBook()
    for number in range(1, 30):
        batches, (last,) = new_parts([report], book)
        assert last < 2**63
        book.apply(Segment(number, "w", 1e9, batches))
        segment_to_bytes(Segment(number, "w", 1e9, batches))
        book.sources.clear()
    for hour, lines in book.sums.hours.items():
        assert hour < 2**63
        hour_to_bytes(lines)
    checkpoint_to_bytes(book.seal(), {})


def apply_slis(request: slis_pb2.ReportSlisRequest) -> None:
    book = SliBook()
    reports = [report_from_proto(one) for one in request.reports]
    for _ in range(30):
        last = book.apply(request.source, request.first, request.oldest, reports, {}, now_s=1e9)
        assert last < 2**63
        book.sources.clear()
    book_from_bytes(snapshot_to_bytes(book_to_message(book, 1)))
    for interval in book.intervals.values():
        for sums in interval.values():
            for sketch in (sums.itl, *sums.ttft.values()):
                assert math.isfinite(sketch.quantile(0.99) or 0.0)
                assert math.isfinite(sketch.total)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "request": (lambda: usage_request("request"), apply_usage),
    "sequence": (lambda: usage_request("sequence"), apply_usage),
    "device": (lambda: usage_request("device"), apply_usage),
    "slis": (lambda: filled(slis_pb2.ReportSlisRequest()), apply_slis),
    "worker": (lambda: filled(scheduler_pb2.ReportRequest()), snapshot_from_proto),
}


@pytest.mark.parametrize("case", CASES)
def test_an_extreme_number_is_refused_by_name_or_does_no_harm(case: str) -> None:
    make, apply = CASES[case]
    count = len(list(numbers(make())))
    assert count > 3
    refused: list[tuple[str, InvalidInput]] = []
    for index in range(count):
        for value in (*REALS, *(bit for bits in _BITS.values() for bit in bits)):
            message = make()
            holder, field = list(numbers(message))[index]
            if field.cpp_type in _FLOATS:
                _put(holder, field, float(value))
            elif isinstance(value, float) or not _fits(field, value):
                continue
            else:
                _put(holder, field, value)
            try:
                bounds.check(message)
                apply(message)
            except InvalidInput as error:
                refused.append((field.name, error))
            else:  # what is summed and stored is refused long before a sum can overflow
                assert case == "worker" or abs(value) < 2**60 or field.name == "session_bits", field.name
    assert refused
    assert all(name in error.metadata["field"] or name in error.message for name, error in refused)


@pytest.mark.parametrize("seed", range(4))
def test_several_extremes_at_once_do_no_harm(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for make, apply in CASES.values():
        for _ in range(150):
            message = make()
            for holder, field in rng.sample(list(numbers(message)), 2):
                if field.cpp_type in _FLOATS:
                    _put(holder, field, rng.choice((*REALS, 1e6, 1e9, 1e12)))
                else:
                    _put(holder, field, rng.choice([*_BITS[field.cpp_type], 1, 10**9 % 2**31]))
            try:
                bounds.check(message)
                apply(message)
            except InvalidInput:
                refused += 1
    assert refused


def _fits(field: Any, value: int) -> bool:
    bits = _BITS[field.cpp_type]
    return min(bits) <= value <= max(bits)


def test_a_charge_above_the_price_of_its_tokens_is_refused() -> None:
    request = usage_request("request")
    request.events[0].request.tokens.CopyFrom(usage_pb2.TokenCounts(prompt=10, output=5))
    request.events[0].request.list_micros = 15 * 10**6
    event_from_proto(request.events[0])
    request.events[0].request.list_micros += 1
    with pytest.raises(InvalidInput, match="list_micros"):
        event_from_proto(request.events[0])


@pytest.mark.parametrize("name", ["prompt", "cached", "output"])
def test_more_tokens_than_a_request_can_have_are_refused(name: str) -> None:
    """The output of 128 choices of 2^20 tokens is the most."""
    request = usage_request("request")
    setattr(request.events[0].request.tokens, name, 2**27)
    bounds.check(request)
    setattr(request.events[0].request.tokens, name, 2**27 + 1)
    with pytest.raises(InvalidInput, match=f"events.*tokens.{name}"):
        bounds.check(request)


class TakesAll:
    """A ledger that stores everything."""

    async def report(self, report: UsageReport) -> int:
        return report.first + len(report.events) - 1


async def reported(
    servicer: UsageServicer, model: str, tokens: tuple[int, int, int], micros: int
) -> InvalidInput | None:
    """Return why a report of one request is refused; None for one that is taken."""
    request = usage_pb2.ReportUsageRequest(source="src", first=1)
    event = request.events.add().request
    event.MergeFrom(usage_pb2.SettledRequest(request_id="r", tenant="t", model=model, list_micros=micros))
    event.tokens.MergeFrom(usage_pb2.TokenCounts(prompt=tokens[0], cached=tokens[1], output=tokens[2]))
    try:
        await servicer.ReportUsage(request, cast(Any, None))
    except InvalidInput as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(6))
async def test_a_charge_is_bound_by_the_highest_price_that_its_deployment_had(seed: int) -> None:
    rng, store, clock = random.Random(seed), MemoryStore(SystemClock()), SystemClock()
    deployments = Deployments(store, clock)
    await store.commit([Put(version_key("m", DIGEST), dump(VersionRecord("m", DIGEST, 1, 0.0)))])
    servicer = UsageServicer(cast(UsageLedger, TakesAll()), ListPrices(store))
    prices: dict[str, list[Price]] = {"chat": [], "gone": []}
    for name, found in prices.items():
        for number in range(4):
            price = Price(rng.randrange(100, 10**7), rng.randrange(100), rng.randrange(10**7))
            found.append(price)
            wanted = Deployment(Meta(name), "m", DIGEST, "", replicas=0, price=price)
            await (deployments.update(wanted) if number else deployments.create(wanted))
            tokens = (rng.randrange(1, 2**20), rng.randrange(2**20), rng.randrange(2**20))
            usage = Usage(tokens[0], tokens[2], min(tokens[:2]))
            for each in found:  # also one that was lowered or raised since
                assert await reported(servicer, name, tokens, each.cost_micros(usage)) is None
    await deployments.delete("gone")
    for name, found in prices.items():
        most = Price(max(one.input_micros for one in found), 0, max(one.output_micros for one in found))
        for one_servicer in (servicer, UsageServicer(cast(UsageLedger, TakesAll()), ListPrices(store))):
            micros = most.cost_micros(Usage(1000, 500))
            assert await reported(one_servicer, name, (1000, 0, 500), micros) is None
            error = await reported(one_servicer, name, (1000, 0, 500), micros + 1)
            assert error is not None
            assert error.metadata["field"] == "events.request.list_micros"
            assert name in error.message
    # One that no deployment was ever named costs at most what the dearest does.
    dearest = prices["chat"][-1]
    micros = Price(dearest.input_micros).cost_micros(Usage(1000, 0))
    assert await reported(servicer, "unknown", (1000, 0, 0), micros) is None
    assert await reported(servicer, "unknown", (1000, 0, 0), micros + 1) is not None


async def test_what_costs_nothing_is_taken_without_any_deployment() -> None:
    servicer = UsageServicer(cast(UsageLedger, TakesAll()), ListPrices(MemoryStore(SystemClock())))
    assert await reported(servicer, "chat", (10, 0, 5), 0) is None
    assert await reported(servicer, "chat", (10**8, 0, 10**8), 10**14) is not None


def test_an_outboxs_report_is_below_what_a_control_plane_takes() -> None:
    method = usage_pb2.DESCRIPTOR.services_by_name["UsageService"].methods_by_name["ReportUsage"]
    assert limits_of(method).max_bytes >= 4 * 1024**2 + 2000 * 16
