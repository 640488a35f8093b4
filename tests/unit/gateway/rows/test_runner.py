"""Rows that wait for slots, on a clock turned by hand: early rejection, and what a worker is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from services.core.errors import DeadlineUnmeetable, Overloaded, QueueFull, ShareExceeded
from services.core.fixed_cost.rows import RowEnd, RowSpec, RowsRequest
from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotReturn
from services.core.records import Priority
from services.gateway.rows.leases import GatewayLeases
from services.gateway.rows.runner import LeasedRows, RowExplanations, RowLimits
from services.ports.worker import RowSink
from services.runtime.supervisor import Supervisor
from tests.support.clocks import HandClock

SLOTS = 10
TURN_S = 0.01  # of ten rows: 1,000 rows per second


class OneWorker:
    """Implements ``RowClient`` and ``SlotClient``: rows stay until ``turn`` ends them."""

    def __init__(self) -> None:
        self.specs: list[RowSpec] = []
        self.sinks: list[RowSink] = []

    def start_row(self, address: str, spec: RowSpec, sink: RowSink) -> OneWorker:
        self.specs.append(spec)
        self.sinks.append(sink)
        return self

    def cancel(self) -> None: ...

    def demand(self, wanted: SlotDemand) -> None: ...

    def slots_returned(self, found: SlotReturn) -> None: ...


class Gateway:
    """A runner with ten leased slots."""

    def __init__(self) -> None:
        self.clock, self.worker = HandClock(), OneWorker()
        self.supervisor, self.explanations = Supervisor(self.clock), RowExplanations()
        self.leases = GatewayLeases(self.clock)
        self.runner = LeasedRows(
            self.worker,
            self.worker,
            self.leases,
            self.clock,
            self.supervisor,
            RowLimits(max_rows=20_000),
            explanations=self.explanations,
        )
        self.leases.on_leases([SlotLease("w1", "w1:1", 1, 1, "d", "acme", SLOTS, 1e9, 1)])
        self.tasks: list[asyncio.Task[tuple[RowEnd, ...]]] = []

    async def send(
        self, rows: int, within_s: float, priority: Priority = Priority.STANDARD, target_s: float = 0.0
    ) -> asyncio.Task[tuple[RowEnd, ...]]:
        """Return the task of a request that waits, or was refused."""
        now_s = self.clock.now_s
        request = RowsRequest(
            f"r{len(self.tasks)}",
            "acme",
            "m",
            "d",
            ((),) * rows,
            priority,
            deadline_s=now_s + within_s,
            target_s=target_s,
            received_s=now_s - 0.25,
            tenant_weight=3.0,
        )
        task = asyncio.ensure_future(self.runner.run(request))
        self.tasks.append(task)
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def turn(self, seconds: float) -> None:
        """Let all slots end every 10 ms."""
        for _ in range(round(seconds / TURN_S)):
            self.clock.now_s += TURN_S
            ended, self.worker.sinks = self.worker.sinks, []
            for sink in ended:
                sink.on_row_ended(RowEnd())
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    found = Gateway()
    yield found
    for task in found.tasks:
        task.cancel()
    await asyncio.gather(*found.tasks, return_exceptions=True)
    assert not found.runner.rows
    await found.runner.close()
    await found.supervisor.close()


async def test_behind_a_long_queue_a_near_deadline_is_refused_at_once(gateway: Gateway) -> None:
    await gateway.send(8000, 60.0, Priority.INTERACTIVE)
    await gateway.turn(1.5)
    now_s, rows = gateway.clock.now_s, gateway.runner.rows
    refused = await gateway.send(1, 1.0)
    assert refused.done()
    assert gateway.clock.now_s == now_s
    assert gateway.runner.rows == rows
    with pytest.raises(DeadlineUnmeetable, match="6490 rows are ahead") as error:
        refused.result()
    assert error.value.retry_after_s == pytest.approx(5.5, abs=0.3)


async def test_a_request_that_meets_its_deadline_is_answered(gateway: Gateway) -> None:
    await gateway.send(8000, 60.0, Priority.INTERACTIVE)
    await gateway.turn(1.5)
    behind = await gateway.send(10, 7.0)
    first = await gateway.send(10, 1.0, Priority.INTERACTIVE)  # by its deadline it goes before the others
    assert not behind.done()
    await gateway.turn(0.03)
    assert len(first.result()) == 10
    await gateway.turn(6.6)
    assert len(behind.result()) == 10


async def test_nothing_is_refused_before_ends_were_observed(gateway: Gateway) -> None:
    await gateway.send(8000, 60.0, Priority.INTERACTIVE)
    assert not (await gateway.send(1, 1.0)).done()
    await gateway.turn(0.5)
    assert not (await gateway.send(1, 1.0)).done()


async def test_what_was_observed_ends_with_the_queue(gateway: Gateway) -> None:
    await gateway.send(3000, 60.0, Priority.INTERACTIVE)
    await gateway.turn(3.1)
    assert not gateway.runner.rows
    await gateway.send(3000, 60.0, Priority.INTERACTIVE)
    assert not (await gateway.send(1, 1.0)).done()


async def test_rows_of_another_tenant_are_not_ahead(gateway: Gateway) -> None:
    await gateway.send(8000, 60.0, Priority.INTERACTIVE)
    await gateway.turn(1.5)
    request = RowsRequest(
        "other", "beta", "m", "d", ((),), Priority.BATCH, deadline_s=gateway.clock.now_s + 1
    )
    task = asyncio.ensure_future(gateway.runner.run(request))
    gateway.tasks.append(task)
    await asyncio.sleep(0)
    assert not task.done()


async def test_a_row_carries_its_weight_its_target_and_how_much_of_it_passed(gateway: Gateway) -> None:
    await gateway.send(15, 60.0, target_s=0.5)
    await gateway.turn(TURN_S)
    specs = gateway.worker.specs
    assert {(spec.target_s, spec.tenant_weight) for spec in specs} == {(0.5, 3.0)}
    assert [spec.waited_s for spec in specs] == pytest.approx([0.25] * 10 + [0.26] * 5)
    await gateway.turn(TURN_S)
    explained = gateway.explanations.find("r0")
    assert explained is not None
    assert explained.target_s == 0.5
    await gateway.send(1, 60.0)
    assert (specs[-1].target_s, specs[-1].waited_s) == (0.0, 0.0)


MOST = 20_000


async def enter(
    gateway: Gateway, tenant: str, rows: int, priority: Priority
) -> asyncio.Task[tuple[RowEnd, ...]]:
    """Return the task of a tenant's request that waits, or was refused."""
    request = RowsRequest(
        f"{tenant}{len(gateway.tasks)}", tenant, "m", "d", ((),) * rows, priority, deadline_s=1e9
    )
    task = asyncio.ensure_future(gateway.runner.run(request))
    gateway.tasks.append(task)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_a_full_gateway_sheds_the_newest_batch_rows_for_interactive_ones(gateway: Gateway) -> None:
    older = await enter(gateway, "b1", 9_000, Priority.BATCH)
    standard = await enter(gateway, "s1", 2_000, Priority.STANDARD)
    newer = [await enter(gateway, "b2", 4_500, Priority.BATCH) for _ in range(2)]
    assert gateway.runner.rows == MOST
    urgent = await enter(gateway, "i1", 10, Priority.INTERACTIVE)
    assert [task.done() for task in (older, standard, newer[0], newer[1], urgent)] == [0, 0, 0, 1, 0]
    with pytest.raises(Overloaded, match="rows of the class interactive need the room") as shed:
        newer[1].result()
    assert shed.value.retry_after_s == 2.0
    assert gateway.runner.rows == MOST - 4_500 + 10


async def test_no_row_is_shed_for_one_of_its_class_or_where_that_makes_no_room(gateway: Gateway) -> None:
    for tenant in ("b1", "b2"):
        await enter(gateway, tenant, 9_990, Priority.INTERACTIVE)
    await enter(gateway, "b3", 20, Priority.BATCH)
    for rows, priority in ((1, Priority.BATCH), (21, Priority.INTERACTIVE)):
        refused = await enter(gateway, "i1", rows, priority)
        with pytest.raises(QueueFull, match=r"20000 rows are pending"):
            refused.result()
    assert gateway.runner.rows == MOST


async def test_a_request_that_finds_no_room_beyond_its_share_sheds_nothing(gateway: Gateway) -> None:
    for tenant, rows in (("i1", 6_000), ("i2", 6_000), ("own", 7_000)):
        await enter(gateway, tenant, rows, Priority.INTERACTIVE)
    batch = await enter(gateway, "own", 1_000, Priority.BATCH)
    refused = await enter(gateway, "own", 3_000, Priority.INTERACTIVE)
    with pytest.raises(QueueFull):
        refused.result()
    assert not batch.done()
    assert gateway.runner.rows == MOST


async def test_at_its_share_a_tenant_sheds_rows_of_its_own(gateway: Gateway) -> None:
    other = await enter(gateway, "b1", 5_000, Priority.BATCH)
    own = await enter(gateway, "b2", 10_000, Priority.BATCH)
    assert not (await enter(gateway, "b2", 1, Priority.STANDARD)).done()
    assert not other.done()
    with pytest.raises(Overloaded):
        own.result()
    await enter(gateway, "b2", 9_999, Priority.STANDARD)
    refused = await enter(gateway, "b2", 1, Priority.STANDARD)
    with pytest.raises(ShareExceeded):
        refused.result()


@pytest.mark.parametrize("seed", range(10))
async def test_who_is_shed_is_always_of_a_lower_class_than_who_arrives(gateway: Gateway, seed: int) -> None:
    rng, waiting = Random(seed), dict[asyncio.Task[tuple[RowEnd, ...]], tuple[Priority, int]]()
    shed = refused = 0
    for _ in range(60):
        priority, rows = rng.choice(list(Priority)), rng.randint(1, 3_000)
        lower = sum(count for each, count in waiting.values() if each.rank < priority.rank)
        task = await enter(gateway, f"t{rng.randrange(8)}", rows, priority)
        ended = [each for each in waiting if each.done()]
        shed += len(ended)
        assert all(waiting[each][0].rank < priority.rank for each in ended)
        for each in ended:
            del waiting[each]
        if not task.done():
            waiting[task] = priority, rows
        elif isinstance(task.exception(), QueueFull):
            refused += 1
            assert not ended
            assert gateway.runner.rows + rows - lower > MOST
        assert gateway.runner.rows == sum(count for _, count in waiting.values()) <= MOST
    assert shed
    assert refused
