"""Indicators as operators list them: filters, the window, quantiles, pages, and who leads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.objectives.servicer import SliListing
from services.core.errors import InvalidInput, NoLeader
from services.core.records import LoadedVersion, Priority, VersionState, Worker
from services.runtime.supervisor import Supervisor
from tests.support.clocks import QuickClock
from tests.support.no_plane import NoPlane
from tests.support.slis import DIGEST, Measurements, key_of, sums_of

# In the middle of ten minutes.
UNIX_S = 1_800_000_300.0


@dataclass
class Rig:
    clock: QuickClock = field(default_factory=lambda: QuickClock(UNIX_S))

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.clock)
        self.measured = Measurements(self.clock)
        self.workers: list[Worker] = []
        self.listing = SliListing(self.measured.store, NoPlane(), workers=lambda: self.workers)

    async def list(self, **fields: object) -> list[pb.SliSummary]:
        request = pb.ListSlisRequest(**fields)  # type: ignore[arg-type]
        return list((await self.listing.page(request, forwarded=False)).slis)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    found = Rig()
    await found.measured.start(found.supervisor)
    yield found
    await found.supervisor.close()


async def test_counts_and_quantiles_of_a_series(rig: Rig) -> None:
    latencies = [0.1] * 90 + [1.0] * 8 + [5.0] * 2
    sums = sums_of(
        latencies,
        [0.02] * 9 + [0.2],
        requests=103,
        errors=3,
        started=100,
        broken=2,
        poisoned=1,
        output_tokens=500,
    )
    sums.device_s = 1.5
    rig.measured.report(key_of(), sums)
    rig.measured.report(key_of(), sums_of(requests=1, errors=1))
    (one,) = await rig.list()
    assert (one.model, one.tenant, one.zone, one.priority) == ("chat", "acme", "a", 2)
    assert (one.requests, one.errors, one.started, one.broken, one.poisoned) == (104, 4, 100, 2, 1)
    assert (one.output_tokens, one.device_s) == (500, 1.5)
    found = [one.ttft_p50_s, one.ttft_p95_s, one.ttft_p99_s, one.itl_p50_s, one.itl_p95_s]
    assert found == pytest.approx([0.1, 1.0, 5.0, 0.02, 0.2], rel=0.021)


async def test_tokens_cost_the_device_time_at_the_mean_price_of_the_version(rig: Rig) -> None:
    sums = sums_of(requests=1, tokens=2000, prompt_tokens=1500, cached_tokens=500)
    sums.device_s = 36.0
    sums.total.add(4.0)
    rig.measured.report(key_of(), sums)
    (one,) = await rig.list()
    assert not one.HasField("cost_per_1k_tokens"), "no worker states a price"
    assert (one.tokens, one.prompt_tokens, one.cached_tokens) == (2000, 1500, 500)
    assert one.total_p95_s == pytest.approx(4.0, rel=0.021)

    def worker(digest: str, price: float) -> Worker:
        loaded = LoadedVersion("chat", "m", digest, VersionState.READY)
        return Worker("w", "a:1", versions=(loaded,), cost_per_hour=price)

    rig.workers = [worker(DIGEST, 2.0), worker(DIGEST, 4.0), worker(DIGEST, 0.0), worker("sha256:x", 90.0)]
    (one,) = await rig.list()
    assert one.cost_per_1k_tokens == pytest.approx(36.0 / 3600 * 3.0 / 2)


async def test_without_a_token_there_is_no_latency(rig: Rig) -> None:
    rig.measured.report(key_of(digest=""), sums_of(requests=1, errors=1))
    (one,) = await rig.list()
    assert not one.HasField("ttft_p50_s")
    assert not one.HasField("itl_p95_s")


async def test_filters_select_series(rig: Rig) -> None:
    keys = {
        "model": key_of(model="big"),
        "tenant": key_of(tenant="other"),
        "priority": key_of(priority=Priority.BATCH),
        "zone": key_of(zone="b"),
    }
    for count, key in enumerate((*keys.values(), key_of()), 1):
        rig.measured.report(key, sums_of(requests=count))
    values = {"model": "big", "tenant": "other", "priority": common_pb2.PRIORITY_BATCH, "zone": "b"}
    for count, name in enumerate(keys, 1):
        assert [one.requests for one in await rig.list(**{name: values[name]})] == [count]
    standard = await rig.list(priority=common_pb2.PRIORITY_STANDARD, model="chat", tenant="acme", zone="a")
    assert [one.requests for one in standard] == [5]
    assert await rig.list(tenant="nobody") == []


async def test_the_window_reaches_back_to_the_start_of_ten_minutes(rig: Rig) -> None:
    for age_s, requests in ((0.0, 1), (700.0, 10)):
        rig.measured.report(key_of(), sums_of(requests=requests), age_s=age_s)
    assert [one.requests for one in await rig.list(window=Duration(seconds=200))] == [1]
    assert [one.requests for one in await rig.list(window=Duration(seconds=400))] == [11]
    rig.clock.now_s += 3000.0
    rig.measured.report(key_of(), sums_of(requests=100))
    assert [one.requests for one in await rig.list()] == [111], "an hour is kept whole"
    rig.clock.now_s += 3600.0
    assert [one.requests for one in await rig.list()] == [100], "without a report too"
    rig.clock.now_s += 3600.0
    assert await rig.list() == []


async def test_pages_hold_every_series_once(rig: Rig) -> None:
    for number in range(25):
        rig.measured.report(key_of(tenant=f"t{number:02}", zone="z" * 64), sums_of(requests=number))
    found: list[pb.SliSummary] = []
    token = ""
    while True:
        request = pb.ListSlisRequest(page_size=10, page_token=token)
        page = await rig.listing.page(request, forwarded=False)
        found += page.slis
        token = page.next_page_token
        if not token:
            break
    assert [(one.tenant, one.requests) for one in found] == [(f"t{n:02}", n) for n in range(25)]
    with pytest.raises(InvalidInput):
        await rig.listing.page(pb.ListSlisRequest(page_token="?"), forwarded=False)


async def test_a_standby_forwards_and_answers_no_forwarded_query(rig: Rig) -> None:
    rig.measured.election.turn(None)
    with pytest.raises(NoLeader, match="no control plane leads"):
        await rig.list()
    with pytest.raises(NoLeader, match="does not lead"):
        await rig.listing.page(pb.ListSlisRequest(), forwarded=True)
