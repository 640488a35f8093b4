"""What tenants were served survives the leader: told to a worker over gRPC, and back to the next leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamReportLinks
from services.adapters.links.reporter import Reporter
from services.adapters.links.scheduler_directory import LeaderAddress
from services.core.fleet import TenantCounter
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.runtime.clock import SystemClock
from services.runtime.secrets import Ticket, issue_ticket
from services.runtime.supervisor import Supervisor
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import Term, TermSettings
from services.worker.agent.report import WorkerIdentity, take_snapshot
from tests.integration.scheduler_fleet import (
    TICKET_KEY,
    TOKEN,
    SchedulerNode,
    StaticDirectory,
    granted,
    place_spec,
    placement_over_grpc,
)
from tests.support.waiting import until
from tests.unit.worker.bench import DIGEST, Bench, byte_level_tokenizer, new_bench

SETTINGS = TermSettings(queue=QueueLimits(predicted_output_tokens=32))
STANDARD = Priority.STANDARD
Hear = Callable[[Sequence[TenantCounter]], None]


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    found = Supervisor(SystemClock())
    yield found
    assert found.failures == ()
    await found.close()


def spec_of(tenant: str, number: int) -> PlaceSpec:
    """A placement of which the worker holds one at a time."""
    request_id = f"req_{tenant}_{number}"
    spec = place_spec(request_id, prompt_tokens=100, digest=DIGEST, queue_ttl_s=60.0)
    ticket = Ticket(tenant, request_id, int(SystemClock().unix_s()) + 600, 10**6, 16)
    return replace(spec, tenant_id=tenant, ticket=issue_ticket(TICKET_KEY, ticket))


def term_of(node: SchedulerNode) -> Term:
    assert node.service.term is not None
    return node.service.term


def counter(term: Term, tenant: str) -> float:
    account = term.queue.ledger.shares(DIGEST)[STANDARD].find(tenant)
    return 0.0 if account is None else account.settled


class Fleet:
    """Two schedulers, a gateway's link, and the production books and reporter of one worker."""

    def __init__(self, supervisor: Supervisor, hear: Callable[[Bench], Hear]) -> None:
        self.nodes = [SchedulerNode(supervisor, SETTINGS) for _ in range(2)]
        self.directory = StaticDirectory()
        self.bench = new_bench(byte_level_tokenizer())
        self.told: list[float] = []
        host, clock, keep = self.bench.host, SystemClock(), hear(self.bench)

        def on_counters(counters: Sequence[TenantCounter]) -> None:
            keep(counters)
            self.told += [counter.virtual_tokens for counter in counters]

        self.reporter = Reporter(
            StreamReportLinks(GrpcStreams(TOKEN), self.directory),
            clock,
            supervisor,
            lambda whole: take_snapshot(host, WorkerIdentity("w1", "h:1"), whole=whole),
            on_leader=host.on_leader,
            on_counters=on_counters,
            rng=Random(2),
        )
        host.changed = self.reporter.changed
        self.placement = placement_over_grpc(self.directory, "g1", clock, supervisor, Random(1))

    async def lead(self, index: int, epoch: int) -> Term:
        await self.nodes[index].start()
        self.nodes[index].election.turn(epoch)
        self.directory.turn(LeaderAddress(f"s{index}", self.nodes[index].address, epoch))
        await until(lambda: self.bench.host.grants.epoch == epoch)
        return term_of(self.nodes[index])

    async def close(self) -> None:
        await self.placement.close()
        await self.reporter.close()
        await self.nodes[1].stop()


async def first_under_the_next_leader(supervisor: Supervisor, hear: Callable[[Bench], Hear]) -> str:
    """Return which tenant is placed first after a failover: ``ahead`` asked first and had most of the
    service, ``behind`` asked next; ``new`` was never seen before."""
    fleet = Fleet(supervisor, hear)
    host, key = fleet.bench.host, (DIGEST, STANDARD)
    host.close_version(DIGEST, True)
    fleet.reporter.start()
    term = await fleet.lead(0, 11)
    waiting: dict[str, asyncio.Future[object]] = {}

    async def ask(tenant: str, term: Term, total: int) -> None:
        waiting[tenant] = asyncio.ensure_future(granted(fleet.placement, spec_of(tenant, total)))
        await until(lambda: len(term.queue) == total)

    await ask("ahead", term, 1)
    await ask("behind", term, 2)
    for tenant, tokens in (("behind", 20_000), ("ahead", 50_000)):
        host.tally.add_output((tenant, *key), tokens)
        fleet.reporter.changed()
        await until(lambda tenant=tenant, tokens=tokens: counter(term, tenant) == 2.0 * tokens)  # type: ignore[misc]
    host.tally.add_output(("behind", *key), 1)  # its answer tells of where all stand now
    await until(lambda: counter(term, "behind") == 40_002.0)
    await until(lambda: 40_002.0 in fleet.told)

    await fleet.nodes[0].stop()
    after = await fleet.lead(1, 12)
    await until(lambda: len(after.queue) == 2)
    await ask("new", after, 3)
    host.close_version(DIGEST, False)
    done, _ = await asyncio.wait(waiting.values(), timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
    after.check_integrity()
    first = [tenant for tenant, task in waiting.items() if task in done]
    for task in waiting.values():
        task.cancel()
    await asyncio.wait(waiting.values(), timeout=5.0)
    await fleet.close()
    assert len(first) == 1, "the worker holds one at a time"
    return first[0]


@pytest.mark.timeout(120)
async def test_who_was_served_least_goes_first_under_the_next_leader(supervisor: Supervisor) -> None:
    first = await first_under_the_next_leader(supervisor, lambda bench: bench.host.counters.store)
    assert first == "behind"


@pytest.mark.timeout(120)
async def test_a_worker_that_keeps_no_counters_is_seen(supervisor: Supervisor) -> None:
    first = await first_under_the_next_leader(supervisor, lambda _: lambda _counters: None)
    assert first == "ahead", "planted: nobody knows, and the first arrival goes first"
