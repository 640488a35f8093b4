"""The PlacementClient port: over a real gRPC stream, in the scheduler's process and over the simulated
network, the same behaviour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.core.errors import (
    NoLeader,
    NoWorkerAvailable,
    PermissionDenied,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    TicketExpired,
)
from services.core.generation import Grant, PlaceSpec
from services.core.records import Priority
from services.runtime.clock import SystemClock
from services.runtime.secrets import Ticket, issue_ticket
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import TermSettings
from tests.contract.placement_rig import PlacementRig, placing, placing_simulated
from tests.integration.scheduler_fleet import DIGEST, TICKET_KEY, place_spec
from tests.support.simulated import Check, World, checks_of, simulate
from tests.support.waiting import until

# No grant lapses while a test waits for its room.
LIMITS = FleetLimits(grant_ttl_s=20.0)
SETTINGS = TermSettings(LIMITS, QueueLimits(predicted_output_tokens=32, max_per_pool=8))


class Rig(PlacementRig):
    async def place(self, spec: PlaceSpec) -> Grant:
        """Return what the leader grants."""
        grant = await self.placement.place(spec)
        assert isinstance(grant, Grant)
        return grant

    async def connected(self) -> None:
        """The leader has the gateway's stream and the worker's report."""
        self.placement.start()
        await until(lambda: self.placement.connected)
        await until(lambda: any(c.reporting for c in self.term.fleet.candidates(DIGEST).values()))

    @property
    def room_tokens(self) -> int:
        return self.term.fleet.candidates(DIGEST)["w1"].kv_tokens_room


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with placing(SETTINGS) as parts:
        yield Rig(**vars(parts))


@asynccontextmanager
async def simulated(world: World) -> AsyncIterator[Rig]:
    async with placing_simulated(world, SETTINGS) as parts:
        yield Rig(**vars(parts))


async def test_a_grant_names_the_worker_and_reserves_its_blocks(rig: Rig) -> None:
    rig.lead(5)
    grant = await rig.place(place_spec(prompt_tokens=40, max_output_tokens=1000 - 900))
    assert (grant.worker_id, grant.epoch, grant.incarnation, grant.sequence) == ("w1", 5, 100, 1)
    assert grant.kv_blocks == -(-(40 + 32) // 16)
    assert (grant.version_digest, grant.route_revision, grant.address) == (DIGEST, 7, "127.0.0.1:1")
    assert rig.worker.start(grant)


async def test_places_wait_for_room_in_order_of_class_and_arrival(rig: Rig) -> None:
    rig.lead(1)
    blocking = await rig.place(place_spec("req_0", prompt_tokens=200))
    assert rig.worker.start(blocking)
    order: list[str] = []

    async def ask(name: str, priority: Priority, arrival: int) -> None:
        spec = place_spec(name, prompt_tokens=150, priority=priority, arrival_unix_us=arrival)
        grant = await rig.place(spec)
        order.append(name)
        assert rig.worker.start(grant)
        rig.worker.finish(grant)

    now_us = round(SystemClock().unix_s() * 1e6)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask("batch", Priority.BATCH, now_us - 3_000_000))
        group.create_task(ask("late", Priority.STANDARD, now_us))
        group.create_task(ask("early", Priority.STANDARD, now_us - 2_000_000))
        group.create_task(ask("urgent", Priority.INTERACTIVE, now_us))
        await until(lambda: len(rig.term.queue) == 4)
        rig.worker.finish(blocking)
    assert order == ["urgent", "early", "late", "batch"]


async def test_cancelling_a_queued_place_drops_it(rig: Rig) -> None:
    rig.lead(1)
    blocking = await rig.place(place_spec("req_0", prompt_tokens=200))
    assert rig.worker.start(blocking)
    waiting = asyncio.ensure_future(rig.place(place_spec("req_1", prompt_tokens=200)))
    await until(lambda: len(rig.term.queue) == 1)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    await until(lambda: len(rig.term.queue) == 0)
    rig.worker.finish(blocking)
    await until(lambda: rig.room_tokens == 16 * 16)


async def test_giving_a_grant_back_returns_its_room_at_once(rig: Rig) -> None:
    rig.lead(1)
    grant = await rig.place(place_spec(prompt_tokens=200))
    assert rig.room_tokens == 16
    rig.placement.give_back(grant)
    await until(lambda: rig.room_tokens == 16 * 16, timeout_s=15.0)
    rig.placement.give_back(grant)  # a second time is without effect
    second = await rig.place(place_spec("req_2", prompt_tokens=200))
    assert second.sequence == grant.sequence + 1
    await asyncio.sleep(0.05)
    assert rig.room_tokens == 16


async def test_cancelling_before_the_answer_leaves_no_room_behind(rig: Rig) -> None:
    rig.lead(1)
    await rig.place(place_spec("req_0", prompt_tokens=1, max_output_tokens=1))
    for index in range(30):
        asking = asyncio.ensure_future(rig.place(place_spec(f"req_{index}", prompt_tokens=16)))
        for _ in range(index):  # at every stage between unsent, sent, granted and received
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))
        if not asking.cancelled():
            rig.placement.give_back(asking.result())
    await until(lambda: rig.room_tokens == 16 * 16 - 16)


async def test_the_queue_time_ends_with_what_is_missing(rig: Rig) -> None:
    rig.lead(1)
    await rig.connected()
    other = "sha256:" + "b" * 64
    with pytest.raises(NoWorkerAvailable, match="none has the version loaded") as missing:
        await rig.place(place_spec(digest=other, queue_ttl_s=0.5))
    assert missing.value.retry_after_s
    blocking = await rig.place(place_spec("req_0", prompt_tokens=200))
    assert rig.worker.start(blocking)
    with pytest.raises(QueueTimeout) as full:
        await rig.place(place_spec("req_1", prompt_tokens=200, queue_ttl_s=0.1))
    assert full.value.retry_after_s


async def test_what_can_never_fit_is_refused_at_once(rig: Rig) -> None:
    rig.lead(1)
    await rig.place(place_spec("req_0", prompt_tokens=1, max_output_tokens=1))
    with pytest.raises(PromptTooLong, match="256"):
        async with asyncio.timeout(25.0):
            await rig.place(place_spec(prompt_tokens=300, queue_ttl_s=30.0))


async def test_a_full_queue_refuses(rig: Rig) -> None:
    rig.lead(1)
    await rig.connected()
    waiting = [
        asyncio.ensure_future(
            rig.place(
                place_spec(
                    f"req_{n}", digest="sha256:" + "c" * 64, queue_ttl_s=30.0, tenant=f"tenant-{n // 4}"
                )
            )
        )
        for n in range(9)
    ]
    refused, queued = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in queued:
        task.cancel()
    await asyncio.wait(waiting)
    (full,) = [task.exception() for task in refused]  # tenants take turns, so it is the last of one of them
    assert isinstance(full, QueueFull)
    assert full.retry_after_s


async def test_a_forged_ticket_is_refused(rig: Rig) -> None:
    rig.lead(1)
    with pytest.raises(PermissionDenied):
        await rig.place(place_spec(key=b"x" * 32))


async def test_a_gateway_with_a_late_clock_is_told_so(rig: Rig) -> None:
    """Its clients did nothing wrong, and may try another."""
    rig.lead(1)
    signed = issue_ticket(TICKET_KEY, Ticket("acme", "req_1", int(SystemClock().unix_s()) - 7200, 140, 1))
    with pytest.raises(TicketExpired, match="clocks of the gateway") as late:
        await rig.place(replace(place_spec("req_1"), ticket=signed))
    assert late.value.retry_after_s == 1.0


async def test_a_ticket_of_another_request_is_refused(rig: Rig) -> None:
    rig.lead(1)
    mine = place_spec("req_1")
    with pytest.raises(PermissionDenied, match="another"):
        await rig.place(replace(mine, ticket=place_spec("req_2").ticket))
    with pytest.raises(PermissionDenied, match="another"):
        await rig.place(replace(mine, tenant_id="beta"))


@pytest.mark.parametrize(
    "more",
    [{"prompt_tokens": 41}, {"max_output_tokens": 101}, {"choice": 2}],
    ids=lambda more: next(iter(more)),
)
async def test_a_placement_needs_no_more_than_its_ticket_reserved(rig: Rig, more: dict[str, Any]) -> None:
    rig.lead(1)
    signed = issue_ticket(TICKET_KEY, Ticket("acme", "req_1", int(SystemClock().unix_s()) + 60, 140, 2))
    reserved = replace(place_spec("req_1", prompt_tokens=40, max_output_tokens=100), ticket=signed)
    with pytest.raises(PermissionDenied, match="for 2 choices of 140"):
        await rig.place(replace(reserved, **more))
    resumed = replace(reserved, choice=1, prompt_tokens=60, max_output_tokens=80)
    await rig.place(resumed)  # a choice that is placed again needs no more


async def test_without_a_leader_the_queue_time_ends_in_no_leader(rig: Rig) -> None:
    with pytest.raises(NoLeader):
        await rig.place(place_spec(queue_ttl_s=0.3))


async def test_pending_placements_are_bounded(rig: Rig) -> None:
    asking = [
        asyncio.ensure_future(rig.place(place_spec(f"req_{n}", queue_ttl_s=0.2, tenant=tenant)))
        for tenant, count in (("acme", 17), ("beta", 16), ("gamma", 1))
        for n in range(count)
    ]
    done, _ = await asyncio.wait(asking)
    kinds = sorted(type(task.exception()).__name__ for task in done)
    assert kinds == ["NoLeader"] * 32 + ["QueueFull", "ShareExceeded"]


async def test_a_new_leader_is_asked_again_with_everything_pending(rig: Rig) -> None:
    rig.lead(1)
    blocking = await rig.place(place_spec("req_0", prompt_tokens=200))
    assert rig.worker.start(blocking)
    waiting = [
        asyncio.ensure_future(
            rig.place(place_spec(f"req_{n}", prompt_tokens=16, queue_ttl_s=20, tenant=f"t{n % 2}"))
        )
        for n in range(1, 6)
    ]
    await until(lambda: len(rig.term.queue) == 5)
    rig.node.election.turn(None)
    rig.directory.turn(None)
    await until(lambda: rig.node.service.term is None)
    rig.worker.finish(blocking)
    rig.lead(2)
    grants: list[Grant] = await asyncio.gather(*waiting)
    assert {grant.epoch for grant in grants} == {2}
    assert sorted(grant.sequence for grant in grants) == [1, 2, 3, 4, 5]
    assert all(rig.worker.start(grant) for grant in grants)


async def test_a_grant_of_an_old_leader_is_not_given_back_to_the_new_one(rig: Rig) -> None:
    rig.lead(1)
    old = await rig.place(place_spec("req_0", prompt_tokens=200))
    rig.lead(2)
    await until(lambda: rig.placement.connected and rig.term.epoch == 2)
    new = await rig.place(place_spec("req_1", prompt_tokens=200))
    assert (new.epoch, new.sequence) == (2, old.sequence)
    rig.placement.give_back(old)
    await asyncio.sleep(0.1)
    assert rig.room_tokens == 16


@pytest.mark.parametrize("check", checks_of(globals()))
def test_over_the_simulated_network(check: Check) -> None:
    simulate(check, simulated)
