"""A gateway's placement client before a scheduler and a worker that reports to it, over each kind of link."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from services.adapters.links.leader_streams import StreamPlacementLinks, StreamReportLinks
from services.adapters.links.muxed_placement import MuxedPlacement, PlacementSettings
from services.adapters.links.reporter import Reporter
from services.adapters.links.scheduler_directory import LeaderAddress
from services.gateway.fallback import GatewayFallback
from services.ports.clock import Clock
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.scheduler.term import Term, TermSettings
from simulator.kernel.links.streams import SimStreams
from tests.integration.scheduler_fleet import FakeWorker, SchedulerNode, StaticDirectory, placement_over_grpc
from tests.support.simulated import SimulatedScheduler, World


@dataclass
class PlacementRig:
    """``clock`` is the gateway's."""

    node: SchedulerNode | SimulatedScheduler
    directory: StaticDirectory
    worker: FakeWorker
    placement: MuxedPlacement
    clock: Clock

    @property
    def term(self) -> Term:
        assert self.node.service.term is not None
        return self.node.service.term

    def lead(self, epoch: int | None) -> None:
        self.node.election.turn(epoch)
        self.directory.turn(None if epoch is None else LeaderAddress("s1", self.node.address, epoch))

    async def close(self, reporter: Reporter) -> None:
        """Stop everything: the books are right and nothing is pending."""
        await self.placement.close()
        await reporter.close()
        if self.node.service.term is not None:
            self.node.service.term.check_integrity()
        assert self.placement.pending == 0
        await self.node.stop()


@asynccontextmanager
async def placing(
    settings: TermSettings, fallback: GatewayFallback | None = None
) -> AsyncIterator[PlacementRig]:
    """Yield the parts, nobody leading yet. At the end the books are right and nothing is pending."""
    clock = SystemClock()
    supervisor = Supervisor(clock)
    node = SchedulerNode(supervisor, settings)
    await node.start()
    directory = StaticDirectory()
    worker = FakeWorker("w1", kv_blocks=16)
    common = ("g1", clock, supervisor, Random(3), PlacementSettings(max_pending=32))
    placement = placement_over_grpc(directory, *common, fallback=fallback)
    reporter = worker.reporter(directory, supervisor)
    rig = PlacementRig(node, directory, worker, placement, clock)
    yield rig
    await rig.close(reporter)
    assert supervisor.failures == ()
    await supervisor.close()


@asynccontextmanager
async def placing_simulated(
    world: World, settings: TermSettings, fallback: GatewayFallback | None = None
) -> AsyncIterator[PlacementRig]:
    """As ``placing``, over the simulated network."""
    node = SimulatedScheduler(world, settings)
    await node.start()
    directory = StaticDirectory()
    worker = FakeWorker("w1", kv_blocks=16)
    gateway, agent = world.process("gateway"), world.process("worker")
    placement = MuxedPlacement(
        StreamPlacementLinks(SimStreams(gateway, world.network), directory, "g1"),
        gateway.clock,
        gateway.supervisor,
        Random(3),
        PlacementSettings(max_pending=32),
        fallback=fallback,
    )
    links = StreamReportLinks(SimStreams(agent, world.network), directory)
    reporter = worker.reporting(links, agent.clock, agent.supervisor)
    rig = PlacementRig(node, directory, worker, placement, gateway.clock)
    yield rig
    await rig.close(reporter)
