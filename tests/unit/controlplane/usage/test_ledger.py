"""The ledger over a store in memory: queries, checkpoints, the settler, and what they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import replace

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import usage_pb2
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import UsageReport
from services.controlplane.usage.servicer import UsageListing
from services.controlplane.usage.settler import UNMATCHED_S, UsageSettler
from services.core.errors import InvalidInput, NoLeader, NotFound
from services.core.generation import Usage
from services.core.limits import Price
from services.core.rollouts.routes import SHADOW_TENANT
from services.core.usage import DeviceInterval, UsageEvent
from tests.support.clocks import QuickClock
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane
from tests.support.usage_ledgers import (
    DAY_S,
    UNIX_S,
    booked,
    ledger_of,
    request_usage,
    sequence_use,
    until_leading,
)


@dataclass
class Rig:
    store: MemoryLedger = field(default_factory=MemoryLedger)
    clock: QuickClock = field(default_factory=lambda: QuickClock(UNIX_S))
    election: StaticElection = field(default_factory=lambda: StaticElection(1))
    sent: int = 0

    def __post_init__(self) -> None:
        self.ledger: UsageLedger = ledger_of(self.store, self.clock, self.election)
        self.listing = UsageListing(self.ledger, NoPlane(), self.clock)
        self.task = asyncio.ensure_future(self.ledger.run())

    async def send(self, *events: UsageEvent) -> None:
        first, self.sent = self.sent + 1, self.sent + len(events)
        assert await self.ledger.report(UsageReport("source", first, events)) == self.sent

    async def list(self, **fields: object) -> list[pb.UsageRecord]:
        request = pb.ListUsageRequest(**fields)  # type: ignore[arg-type]
        return list((await self.listing.page(request, forwarded=False)).records)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    found = Rig()
    await until_leading(found.ledger)
    yield found
    found.task.cancel()
    with suppress(asyncio.CancelledError):
        await found.task


def stamp(unix_s: float) -> Timestamp:
    return Timestamp(seconds=int(unix_s))


async def test_records_are_filtered_and_grouped(rig: Rig) -> None:
    lab = {"cost-centre": "lab"}
    await rig.send(
        replace(request_usage("a"), user="ann", labels=lab),
        replace(request_usage("b"), user="bob", labels=lab),
        replace(request_usage("c"), tenant="other", model="big"),
    )
    dimension = [pb.USAGE_DIMENSION_TENANT]
    assert {(one.tenant, one.requests) for one in await rig.list(group_by=dimension)} == {
        ("acme", 2),
        ("other", 1),
    }
    (one,) = await rig.list(tenant="acme", labels=lab, group_by_labels=["cost-centre"])
    assert (one.requests, dict(one.labels), one.tenant) == (2, lab, "")
    assert (one.prompt_tokens, one.cached_tokens, one.output_tokens) == (200, 80, 40)
    assert one.list_cost_micros == 1000
    assert one.source == usage_pb2.USAGE_SOURCE_GATEWAY
    for name, value in (("user", "ann"), ("key", "a"), ("model", "big")):
        (one,) = await rig.list(**{name: value})
        assert one.requests == 1
    assert await rig.list(tenant="nobody") == []


async def test_hours_days_and_ranges(rig: Rig) -> None:
    await rig.send(*(request_usage(f"r{age}", ended_unix_s=UNIX_S - 3600 * age) for age in range(30)))
    since = stamp(UNIX_S - 2 * DAY_S)
    hours = await rig.list(start_time=since, granularity=pb.USAGE_GRANULARITY_HOUR)
    assert [one.requests for one in hours] == [1] * 30
    days = await rig.list(start_time=since, granularity=pb.USAGE_GRANULARITY_DAY)
    assert sum(one.requests for one in days) == 30
    assert all(one.hour.seconds % DAY_S == 0 for one in days)
    (one,) = await rig.list(start_time=stamp(UNIX_S - 7200), end_time=stamp(UNIX_S))
    assert one.requests == 3 if int(UNIX_S) % 3600 else 2
    with pytest.raises(InvalidInput):
        await rig.list(start_time=stamp(UNIX_S - 100 * DAY_S))
    with pytest.raises(InvalidInput):
        await rig.list(start_time=stamp(UNIX_S - 3600), end_time=stamp(UNIX_S - 7200))


async def test_pages_hold_every_record_once(rig: Rig) -> None:
    await rig.send(*(request_usage(f"r{number}") for number in range(25)))
    keys: list[str] = []
    token = ""
    while True:
        request = pb.ListUsageRequest(page_size=10, page_token=token, group_by=[pb.USAGE_DIMENSION_KEY])
        page = await rig.listing.page(request, forwarded=False)
        keys += [record.key for record in page.records]
        token = page.next_page_token
        if not token:
            break
    assert sorted(keys) == sorted(f"r{number}" for number in range(25))


async def test_the_same_is_read_from_checkpoints_as_from_memory(rig: Rig) -> None:
    await rig.send(request_usage("a"), sequence_use("a"))
    await rig.ledger.checkpoint()
    await rig.send(request_usage("b"), sequence_use("b"))
    expected = dict.fromkeys("ab", (1, 20, 2_000_000))
    assert await booked(rig.ledger) == expected
    rig.clock.now_s += 700
    await rig.ledger.checkpoint()
    rig.clock.now_s += 700
    await rig.send(request_usage("c"))
    await rig.ledger.checkpoint()  # deletes what the last one covers
    segments = [name for name in rig.store.objects if name.startswith("segments/")]
    assert segments == ["segments/0000000000000003"]
    assert len([name for name in rig.store.objects if name.startswith("hours/")]) == 2
    assert await booked(rig.ledger) == {**expected, "c": (1, 20, 0)}
    again = Rig(rig.store, rig.clock)
    await until_leading(again.ledger)
    assert await booked(again.ledger) == {**expected, "c": (1, 20, 0)}
    again.task.cancel()


async def test_checkpoints_at_once_lose_nothing(rig: Rig) -> None:
    names = [f"r{number}" for number in range(30)]
    calls: list[asyncio.Future[None]] = []
    for name in names:
        await rig.send(request_usage(name), sequence_use(name))
        calls += [asyncio.ensure_future(rig.ledger.checkpoint()) for _ in range(2)]
    await asyncio.gather(*calls)
    expected = dict.fromkeys(names, (1, 20, 2_000_000))
    assert await booked(rig.ledger) == expected
    again = Rig(rig.store, rig.clock)
    await until_leading(again.ledger)
    assert await booked(again.ledger) == expected
    again.task.cancel()


async def test_hours_older_than_the_retention_are_dropped(rig: Rig) -> None:
    await rig.send(request_usage("old", ended_unix_s=UNIX_S - 401 * DAY_S), request_usage("new"))
    await rig.ledger.checkpoint()
    hours = [name for name in rig.store.objects if name.startswith("hours/")]
    assert len(hours) == 1


async def test_future_ends_are_booked_now(rig: Rig) -> None:
    await rig.send(
        request_usage("a", ended_unix_s=UNIX_S + 5 * DAY_S),
        DeviceInterval("w", "cpu", 1.0, UNIX_S - 10, UNIX_S + 9000, 0.0, 0.0),
    )
    assert {one.hour.seconds // 3600 for one in await rig.list(granularity=pb.USAGE_GRANULARITY_HOUR)} == {
        int(UNIX_S // 3600)
    }


async def test_a_gap_is_not_stored_until_the_source_gives_it_up(rig: Rig) -> None:
    events = (request_usage("c"),)
    assert await rig.ledger.report(UsageReport("s", 3, events)) == 0
    assert await booked(rig.ledger) == {}
    assert await rig.ledger.report(UsageReport("s", 3, events, lost_until=2)) == 3
    assert await rig.ledger.report(UsageReport("s", 1, (request_usage("a"),))) == 3
    assert await booked(rig.ledger) == {"c": (1, 20, 0)}


async def test_a_standby_refuses_reports_and_forwards_queries(rig: Rig) -> None:
    rig.election.turn(None)
    with pytest.raises(NoLeader):
        await rig.ledger.report(UsageReport("s", 1, (request_usage("a"),)))
    with pytest.raises(NoLeader, match="no control plane leads"):
        await rig.list()
    with pytest.raises(NoLeader, match="does not lead"):
        await rig.listing.page(pb.ListUsageRequest(), forwarded=True)


class Reservations:
    """The limiter's part, with a journal. ``lapsed``: reservations per tenant that wait for settlement."""

    def __init__(self) -> None:
        self.checkpoints: list[tuple[str, str, Usage]] = []
        self.lapsed: dict[str, int] = {}
        self.settled: list[str] = []

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        self.checkpoints.append((tenant_id, request_id, usage))

    async def settle_lapsed(self, tenant_id: str) -> int:
        count = min(2, self.lapsed.get(tenant_id, 0))
        self.lapsed[tenant_id] = self.lapsed.get(tenant_id, 0) - count
        self.settled += [tenant_id] * count
        return count


async def test_the_settler_charges_what_no_gateway_reported_once(rig: Rig) -> None:
    reservations = Reservations()
    settler = UsageSettler(
        rig.ledger, reservations, rig.clock, price_of=lambda model: Price(1_000_000, 0, 2_000_000)
    )
    await rig.send(sequence_use("lost"), sequence_use("fine"), request_usage("fine"))
    assert await settler.settle() == 0
    rig.clock.now_s += UNMATCHED_S
    assert await settler.settle() == 1
    assert reservations.checkpoints == [("acme", "lost", Usage(100, 20, 40))]
    assert await settler.settle() == 0
    assert await booked(rig.ledger) == {"fine": (1, 20, 2_000_000), "": (1, 20, 2_000_000)}
    (record,) = [one for one in await rig.list() if one.source == usage_pb2.USAGE_SOURCE_WORKER]
    assert record.list_cost_micros == 60 + 40
    reservations.lapsed = {"acme": 5}  # its lease ran out only now
    rig.clock.now_s += 60
    await settler.settle()
    assert reservations.settled == ["acme"] * 5
    await rig.send(request_usage("lost"))
    assert await booked(rig.ledger) == dict.fromkeys(("fine", "lost"), (1, 20, 2_000_000))


async def test_copies_for_a_shadow_version_have_no_price(rig: Rig) -> None:
    settler = UsageSettler(rig.ledger, Reservations(), rig.clock, price_of=lambda model: Price(9, 9, 9))
    await rig.send(sequence_use("copy", tenant=SHADOW_TENANT))
    rig.clock.now_s += UNMATCHED_S
    assert await settler.settle() == 1
    (record,) = await rig.list(group_by=[pb.USAGE_DIMENSION_TENANT])
    assert (record.tenant, record.list_cost_micros) == (SHADOW_TENANT, 0)
    assert record.measured_cost_micros > 0


async def test_an_hour_that_is_gone_is_not_found(rig: Rig) -> None:
    with pytest.raises(NotFound):
        await rig.ledger._log.hour(1, 1)
