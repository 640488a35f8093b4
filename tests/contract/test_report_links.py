"""What every ``ReportLinks`` does, over gRPC and over the simulated network: a
worker's reports arrive in order and as they were meant, and the leader's answers come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamReportLinks
from services.adapters.links.reporter import ReportLink, ReportLinks
from services.adapters.links.scheduler_directory import LeaderAddress
from services.core.errors import Conflict, FairwayError, NoLeader
from services.core.fleet import PoolSnapshot, ReportSnapshot, SequenceUsage, TenantCounter, TenantTokens
from services.core.generation import Grant
from services.core.records import Priority
from services.ports.clock import Clock
from services.ports.streams import ReportAnswer
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.scheduler.term import Term
from simulator.kernel.links.streams import SimStreams
from tests.integration.scheduler_fleet import DIGEST, TOKEN, FakeWorker, SchedulerNode, StaticDirectory
from tests.support.simulated import Check, SimulatedScheduler, World, checks_of, simulate
from tests.support.waiting import until

POOL = PoolSnapshot(
    digest=DIGEST,
    kv_blocks_total=64,
    kv_blocks_reserved=5,
    block_size=16,
    running=1,
    waiting=1,
    max_sequences=8,
    max_model_len=1024,
    queued_prefill_tokens=7,
    prefix_added=(11, 12),
)


@dataclass
class Rig:
    """``links`` are the worker's, ``supervisor`` and ``clock`` too."""

    node: SchedulerNode | SimulatedScheduler
    directory: StaticDirectory
    links: ReportLinks
    clock: Clock
    supervisor: Supervisor
    opened: list[ReportLink] = field(default_factory=list)

    @property
    def term(self) -> Term:
        assert self.node.service.term is not None
        return self.node.service.term

    async def lead(self, epoch: int | None) -> None:
        self.node.election.turn(epoch)
        self.directory.turn(None if epoch is None else LeaderAddress("s1", self.node.address, epoch))
        await until(lambda: (self.node.service.term and self.node.service.term.epoch) == epoch)

    async def open(self) -> ReportLink:
        link = await self.links.open()
        self.opened.append(link)
        return link

    async def close(self) -> None:
        for link in self.opened:
            await link.close()
            await link.close()
        await self.node.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    node, directory = SchedulerNode(supervisor), StaticDirectory()
    await node.start()
    rig = Rig(node, directory, StreamReportLinks(GrpcStreams(TOKEN), directory), clock, supervisor)
    yield rig
    await rig.close()
    assert supervisor.failures == ()
    await supervisor.close()


@asynccontextmanager
async def simulated(world: World) -> AsyncIterator[Rig]:
    node, directory, worker = SimulatedScheduler(world), StaticDirectory(), world.process("worker")
    await node.start()
    links = StreamReportLinks(SimStreams(worker, world.network), directory)
    rig = Rig(node, directory, links, worker.clock, worker.supervisor)
    yield rig
    await rig.close()


def report(*, epoch: int, **changes: object) -> ReportSnapshot:
    return ReportSnapshot("w1", 100, "w1:1", pools=(POOL,), epoch=epoch, **changes)  # type: ignore[arg-type]


async def answered(link: ReportLink, number: int) -> list[ReportAnswer]:
    """Return the answers up to the one to this report."""
    answers: list[ReportAnswer] = []
    async with asyncio.timeout(10.0):
        while not answers or answers[-1].report < number:
            answers.append(await link.receive())
    return answers


async def ended(link: ReportLink) -> FairwayError:
    """Return what ended the link."""
    async with asyncio.timeout(10.0):
        with pytest.raises(FairwayError) as caught:
            while True:
                await link.receive()
    return caught.value


async def test_no_link_opens_while_nobody_leads(rig: Rig) -> None:
    async with asyncio.timeout(10.0):
        with pytest.raises(NoLeader):
            await rig.open()


async def test_a_link_is_its_leaders(rig: Rig) -> None:
    await rig.lead(7)
    assert (await rig.open()).epoch == 7
    await rig.lead(8)
    assert (await rig.open()).epoch == 8


async def test_a_report_arrives_as_it_was_meant(rig: Rig) -> None:
    await rig.lead(7)
    link = await rig.open()
    await link.send(1, report(epoch=7, zone="z1", device_type="nvidia-a10", cost_per_hour=1.5))
    (answer,) = [one for one in await answered(link, 1) if one.report]
    assert (answer.epoch, answer.report) == (7, 1)
    (worker,) = rig.term.fleet.states
    assert (worker.worker_id, worker.incarnation, worker.address, worker.zone) == ("w1", 100, "w1:1", "z1")
    assert (worker.device_type, worker.cost_per_hour, worker.draining) == ("nvidia-a10", 1.5, False)
    assert worker.pools == {DIGEST: POOL}
    assert rig.term.fleet.candidates(DIGEST)["w1"].kv_tokens_room == (64 - 5) * 16


async def test_reports_are_taken_over_in_order_and_the_answer_is_to_the_newest(rig: Rig) -> None:
    await rig.lead(7)
    link = await rig.open()
    for number in range(1, 40):
        await link.send(number, report(epoch=7, draining=number == 39))
    numbers = [answer.report for answer in await answered(link, 39)]
    assert numbers == sorted(numbers)
    assert len(numbers) < 39 + 10, "one answer may be to several"
    (worker,) = rig.term.fleet.states
    assert worker.draining


async def test_an_answer_brings_the_counters_of_tenants_that_were_told_of(rig: Rig) -> None:
    """What an earlier leader told the worker of them counts on."""
    await rig.lead(7)
    link = await rig.open()
    told = TenantCounter("acme", DIGEST, Priority.BATCH, 5000.0, 10.0)
    used = TenantTokens("acme", DIGEST, 100, 10, Priority.BATCH)
    await link.send(1, report(epoch=7, counters=(told,), tenants=(used,)))
    (counter,) = [counter for answer in await answered(link, 1) for counter in answer.counters]
    assert (counter.tenant, counter.digest, counter.priority) == ("acme", DIGEST, Priority.BATCH)
    assert (counter.virtual_tokens, counter.floor_tokens) == (5000.0, 10.0), "no weight of it is known yet"
    await link.send(2, report(epoch=7))
    assert [counter for answer in await answered(link, 2) for counter in answer.counters] == []


async def test_the_last_word_on_a_sequence_arrives(rig: Rig) -> None:
    await rig.lead(7)
    link = await rig.open()
    last = SequenceUsage("req_1", 0, "acme", DIGEST, 40, 8, ended=True, placed_alone=True)
    await link.send(1, report(epoch=7, usage=(last,)))
    await answered(link, 1)
    _, (decision,), _ = rig.node.service.explain("req_1")
    assert (decision.outcome, decision.worker_id, decision.prompt_tokens) == ("PLACED_ALONE", "w1", 40)


async def test_a_newer_link_of_the_worker_ends_the_one_before(rig: Rig) -> None:
    """Reports may come over both for a moment; those of the older one are refused."""
    await rig.lead(7)
    older = await rig.open()
    newer = await rig.open()
    await older.send(1, report(epoch=7))
    await answered(older, 1)
    await newer.send(1, report(epoch=7))
    await answered(newer, 1)
    await older.send(2, report(epoch=7, draining=True))
    assert isinstance(await ended(older), Conflict)
    await newer.send(2, report(epoch=7))
    await answered(newer, 2)
    (worker,) = rig.term.fleet.states
    assert not worker.draining


async def test_a_term_that_ends_ends_its_links(rig: Rig) -> None:
    await rig.lead(7)
    link = await rig.open()
    await link.send(1, report(epoch=7))
    await answered(link, 1)
    await rig.lead(None)
    assert isinstance(await ended(link), NoLeader)


async def test_a_link_that_was_closed_says_so_and_its_worker_gets_nothing(rig: Rig) -> None:
    await rig.lead(7)
    link = await rig.open()
    await link.send(1, report(epoch=7))
    await answered(link, 1)
    (worker,) = rig.term.fleet.states
    assert worker.connected
    await link.close()
    await link.close()
    with pytest.raises((FairwayError, asyncio.CancelledError)):
        await link.receive()
    await until(lambda: not worker.connected)
    assert not rig.term.fleet.candidates(DIGEST)["w1"].serving


async def test_the_wait_for_a_leader_is_bounded_and_ends_with_one(rig: Rig) -> None:
    async with asyncio.timeout(10.0):
        await rig.links.wait_leader_change(0.05)
        waiting = asyncio.ensure_future(rig.links.wait_leader_change(5.0))
        await rig.lead(7)
        await waiting


async def test_a_reporter_over_the_links_tells_each_leader_of_the_whole(rig: Rig) -> None:
    worker = FakeWorker("w1", kv_blocks=16)
    reporter = worker.reporting(rig.links, rig.clock, rig.supervisor)
    held = Grant("w1", "", 100, 7, 1, 4, 5.0, DIGEST)

    async def room_is(epoch: int, blocks: int) -> None:
        await until(lambda: worker.epoch == epoch and DIGEST in rig.term.fleet.versions)
        await until(lambda: rig.term.fleet.candidates(DIGEST)["w1"].kv_tokens_room == 16 * blocks)

    await rig.lead(7)
    await room_is(7, 16)
    assert worker.start(held)
    await room_is(7, 12)
    await rig.lead(8)
    await room_is(8, 12)
    worker.finish(held)
    await room_is(8, 16)
    await reporter.close()


@pytest.mark.parametrize("check", checks_of(globals()))
def test_over_the_simulated_network(check: Check) -> None:
    simulate(check, simulated)
