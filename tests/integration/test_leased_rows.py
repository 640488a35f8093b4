"""Rows on leased slots over gRPC: gateways, a scheduler and workers with the production streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.core.errors import (
    DeadlineUnmeetable,
    IsolationUnavailable,
    NoWorkerAvailable,
    QueueFull,
    ShareExceeded,
)
from services.core.fixed_cost.explained import MAX_TRIPS
from services.core.fixed_cost.rows import RowEnd
from services.gateway.catalog import Waking
from services.gateway.rows.runner import RowLimits
from services.runtime.clock import SystemClock
from tests.integration.leased_rows import WINDOW, RowRig, row_rig, rows_request
from tests.support.waiting import until


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[RowRig]:
    async with row_rig() as found:
        yield found


def answers(ends: tuple[RowEnd, ...]) -> list[int]:
    """Return the numbers in the rows, as they came back."""
    for end in ends:
        assert end.error is None
    return [end.outputs[0].data[0] for end in ends]


async def served(rig: RowRig, *, workers: int = 1) -> None:
    """Return once the scheduler has so many workers."""
    term = rig.scheduler.service.term
    assert term is not None
    await until(lambda: term.fleet.workers_by_state["placed_on"] >= workers)


async def test_rows_run_on_leased_slots_and_return_in_order(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=16)
    gateway = rig.add_gateway()
    ends = await gateway.runner.run(rows_request(100))
    assert answers(ends) == list(range(100))
    assert worker.rows.most <= 16


async def test_a_tenant_waits_for_the_scheduler_once_and_slots_stay_a_while(rig: RowRig) -> None:
    await rig.add_worker(batch_s=0.001)
    gateway = rig.add_gateway()
    await served(rig)
    await gateway.runner.run(rows_request())
    numbers = [slots.lease.number for slots in gateway.leases.slots() if slots.lease.slots]
    for _ in range(20):
        request = rows_request()
        assert gateway.leases.choose(request.version_digest, request.tenant_id, ()) is not None
        await gateway.runner.run(request)
    assert [slots.lease.number for slots in gateway.leases.slots() if slots.lease.slots] == numbers


async def test_idle_slots_are_taken_back_and_returned(rig: RowRig) -> None:
    await rig.add_worker()
    gateway = rig.add_gateway()
    await gateway.runner.run(rows_request(4))
    term = rig.scheduler.service.term
    assert term is not None
    await until(lambda: term.slots.due_s() == float("inf"))
    assert not any(term.slots.by_kind().values())
    await until(lambda: not list(gateway.leases.slots()))


async def test_two_gateways_share_a_workers_slots(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=8, batch_s=0.002)
    one, two = rig.add_gateway(), rig.add_gateway()
    ends = await asyncio.gather(
        one.runner.run(rows_request(150, "acme")), two.runner.run(rows_request(150, "beta"))
    )
    assert [len(found) for found in ends] == [150, 150]
    assert worker.rows.most <= 8


async def test_rows_of_a_lost_worker_run_once_more_elsewhere(rig: RowRig) -> None:
    first, second = await rig.add_worker(), await rig.add_worker()
    gateway = rig.add_gateway()
    await served(rig, workers=2)
    first.rows.paused = second.rows.paused = True
    running = asyncio.create_task(gateway.runner.run(rows_request(8)))
    await until(lambda: len(first.rows) and len(second.rows))
    second.rows.paused = False
    await first.stop()
    assert answers(await running) == list(range(8))
    rig.workers.remove(first)


async def test_a_row_that_is_lost_twice_ends_alone(rig: RowRig) -> None:
    nodes = [await rig.add_worker(), await rig.add_worker()]
    gateway = rig.add_gateway()
    await served(rig, workers=2)
    for node in nodes:
        node.rows.paused = True
    running = asyncio.create_task(gateway.runner.run(rows_request(1)))
    for _ in range(2):
        await until(lambda: any(len(node.rows) for node in nodes))
        for node in nodes:
            node.rows.lose()
            node.host.changed()
    (end,) = await running
    assert end.error is not None
    assert end.error.reason == "STREAM_BROKEN"


async def test_cancelling_withdraws_what_waits_and_what_no_batch_contains(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=4)
    gateway = rig.add_gateway()
    worker.rows.paused = True
    running = asyncio.create_task(gateway.runner.run(rows_request(20)))
    await until(lambda: len(worker.rows) >= 3)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    await until(lambda: not len(worker.rows))
    assert gateway.runner.rows == 0


async def test_a_deadline_that_no_slot_can_meet_ends_the_request(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=2)
    gateway = rig.add_gateway()
    worker.rows.paused = True
    with pytest.raises(DeadlineUnmeetable):
        await gateway.runner.run(rows_request(10, deadline_s=SystemClock().monotonic_s() + 0.5))
    await until(lambda: not len(worker.rows))


async def test_rows_of_the_only_worker_run_once_more_there(rig: RowRig) -> None:
    worker = await rig.add_worker()
    gateway = rig.add_gateway()
    await served(rig)
    worker.rows.paused = True
    running = asyncio.create_task(gateway.runner.run(rows_request(3)))
    await until(lambda: len(worker.rows) == 3)
    worker.rows.paused = False
    worker.rows.lose()
    worker.host.changed()
    assert answers(await running) == [0, 1, 2]


async def test_a_version_that_no_worker_serves_is_refused(rig: RowRig) -> None:
    await rig.add_worker()
    gateway = rig.add_gateway(RowLimits(queue_ttl_s=0.5))
    with pytest.raises(NoWorkerAvailable):
        await gateway.runner.run(rows_request(digest="sha256:" + "b" * 64))


async def test_rows_of_a_deployment_at_zero_wait_for_the_first_replica(rig: RowRig) -> None:
    gateway = rig.add_gateway(RowLimits(queue_ttl_s=0.5), lambda _: Waking(30.0))
    running = asyncio.create_task(gateway.runner.run(rows_request(3)))
    await asyncio.sleep(1.0)
    await rig.add_worker()
    assert answers(await running) == [0, 1, 2]


async def test_rows_that_wait_end_with_the_reason_why_the_start_failed(rig: RowRig) -> None:
    failure = NoWorkerAvailable("echo could not be started: no tensor x")
    gateway = rig.add_gateway(RowLimits(queue_ttl_s=0.5), lambda _: Waking(30.0, failure))
    with pytest.raises(NoWorkerAvailable, match="no tensor x"):
        await gateway.runner.run(rows_request())


async def test_rows_are_bounded_for_a_tenant_and_in_all(rig: RowRig) -> None:
    gateway = rig.add_gateway(RowLimits(max_rows=20))
    with pytest.raises(ShareExceeded):
        await gateway.runner.run(rows_request(11))
    running = [asyncio.create_task(gateway.runner.run(rows_request(10, name))) for name in ("a", "b")]
    await until(lambda: gateway.runner.rows == 20)
    with pytest.raises(QueueFull):
        await gateway.runner.run(rows_request(1, "c"))
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_another_leader_leases_anew_and_rows_go_on(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=8, batch_s=0.003)
    gateway = rig.add_gateway()
    running = asyncio.create_task(gateway.runner.run(rows_request(250)))
    await until(lambda: worker.rows.started > 40)
    rig.lead(2)
    assert len(answers(await running)) == 250
    assert {slots.lease.epoch for slots in gateway.leases.slots() if slots.lease.slots} == {2}
    assert worker.rows.most <= 8


async def test_rows_run_without_a_leader_on_a_part_of_the_slots(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=16)
    gateway = rig.add_gateway()
    await gateway.runner.run(rows_request())
    await until(lambda: gateway.leases.is_served(rows_request().version_digest))
    rig.lead(None)
    await until(lambda: gateway.leases.is_alone)
    await until(lambda: gateway.leases.choose(rows_request().version_digest, "acme", ()) is None)
    worker.rows.most = 0
    assert answers(await gateway.runner.run(rows_request(40))) == list(range(40))
    assert worker.rows.most <= 4


async def test_the_leader_explains_a_request_by_the_gateway_that_ran_it(rig: RowRig) -> None:
    worker = await rig.add_worker(row_slots=4)
    one, other = rig.add_gateway(), rig.add_gateway()
    await served(rig)
    await other.runner.run(rows_request(1, "beta"))
    service = rig.scheduler.service
    assert await service.explain_rows("req_acme") == ()
    worker.rows.paused = True
    running = asyncio.create_task(one.runner.run(rows_request(20)))
    await until(lambda: len(worker.rows.live) == 4)
    worker.rows.lose()
    worker.rows.paused = False
    await running
    (found,) = await service.explain_rows("req_acme")
    assert (found.gateway_id, found.tenant, found.rows) == ("g0", "acme", 20)
    assert len(found.trips) == MAX_TRIPS
    lost = [trip for trip in found.trips if trip.outcome == "LOST"]
    assert len(lost) == 4
    for trip in found.trips:
        assert (trip.worker_id, trip.epoch, trip.lease_slots) == ("w0", 1, 4)
        assert trip.lease_number
        assert 0 <= trip.slot_wait_s <= found.took_s
        assert (trip.window, trip.batch_cause) == ((None, "") if trip in lost else (WINDOW, "idle"))


ACME = "dedicated/acme"


async def test_rows_whose_only_node_is_lost_are_refused_by_name_and_run_on_no_other(rig: RowRig) -> None:
    shared, own = await rig.add_worker(), await rig.add_worker(node_group=ACME)
    gateway = rig.add_gateway(RowLimits(queue_ttl_s=6.0))
    await served(rig, workers=2)
    asked = rows_request(4, node_group=ACME)
    assert answers(await gateway.runner.run(asked)) == [0, 1, 2, 3]
    assert own.rows.started == 4
    await asyncio.sleep(3.0)  # A leader refuses nobody before its workers had time to report.
    await own.stop()
    began_s = SystemClock().monotonic_s()
    with pytest.raises(IsolationUnavailable, match=ACME):
        # Rows that started before the loss was reported end alone, each with the same error.
        for end in await gateway.runner.run(asked):
            assert end.error is not None, "a row was answered by a node that is gone"
            raise end.error
    assert SystemClock().monotonic_s() - began_s < 5.5, "it waited for its time in the queue"
    with pytest.raises(IsolationUnavailable, match=ACME):
        await gateway.runner.run(rows_request(node_group=ACME, waits=True))
    assert SystemClock().monotonic_s() - began_s > 6.0
    assert answers(await gateway.runner.run(rows_request(2, "beta"))) == [0, 1]
    assert shared.rows.started == 2, "a row ran on a node of another group"


async def test_a_deadline_that_ends_before_the_leader_answers_names_no_node(rig: RowRig) -> None:
    gateway = rig.add_gateway()
    deadline_s = SystemClock().monotonic_s() + 0.2
    with pytest.raises(DeadlineUnmeetable):  # The leader is new, and refuses nobody yet.
        await gateway.runner.run(rows_request(node_group=ACME, waits=True, deadline_s=deadline_s))


async def test_rows_wait_for_a_node_of_their_group_as_the_tenant_chose(rig: RowRig) -> None:
    await rig.add_worker()
    gateway = rig.add_gateway()
    await served(rig)
    waits = asyncio.create_task(gateway.runner.run(rows_request(3, node_group=ACME, waits=True)))
    await asyncio.sleep(4.2)
    assert not waits.done()
    await rig.add_worker(node_group=ACME)
    assert answers(await waits) == [0, 1, 2]
