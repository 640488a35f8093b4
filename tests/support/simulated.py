"""The contract suites over the simulator: each check with the simulated implementation, on virtual time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any, Final, TypeVar, cast

import pytest

from services.ports.streams import WorkerStreams
from services.rpc.methods import EXECUTE
from services.runtime.clock import SystemClock
from services.scheduler.service import SchedulerService
from services.scheduler.term import TermSettings
from services.worker.agent.agent import WorkerAgent
from services.worker.servicer import WorkerServicer
from simulator.kernel.links.scheduler import serve_scheduler
from simulator.kernel.links.streams import serve_stream
from simulator.kernel.loop import Limits, VirtualTimeLoop
from simulator.kernel.network import Network
from simulator.kernel.process import UNIX_START_S, Process, Skew
from tests.integration.scheduler_fleet import TICKET_KEY
from tests.support.election import StaticElection

Check = Callable[..., Coroutine[Any, Any, None]]
R = TypeVar("R")

_LIMITS: Final = Limits(virtual_s=600.0, instant_callbacks=200_000)


class World:
    """A loop on virtual time, a network, and the processes that a suite's implementation needs."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop(_LIMITS)
        self._rng = Random(1)
        self.network = Network(self.loop, self._rng)
        self.processes: list[Process] = []

    def process(self, name: str) -> Process:
        """Return a new process whose wall clock shows the machine's time: the suites sign tickets by it."""
        ahead_s = SystemClock().unix_s() - UNIX_START_S - self.loop.now_s
        process = Process(name, self.loop, self._rng, skew=Skew(unix_offset_s=ahead_s))
        self.processes.append(process)
        return process


def serve_sequences(process: Process, network: Network, address: str, streams: WorkerStreams) -> None:
    """Serve gateways at the address with the production servicer of a worker that has no agent."""
    servicer = WorkerServicer(streams, cast(WorkerAgent, None), process.clock)
    serve_stream(process, network, address, EXECUTE, servicer.serve_gateway)


class SimulatedScheduler:
    """What ``SchedulerNode`` is over gRPC. The test decides when it leads."""

    def __init__(self, world: World, settings: TermSettings | None = None) -> None:
        self.address = "scheduler:1"
        self.election = StaticElection()
        self._process = world.process("scheduler")
        self._network = world.network
        settings = settings if settings is not None else TermSettings()
        self.service = SchedulerService(TICKET_KEY, settings, self._process.clock, Random(1))

    async def start(self) -> None:
        serve_scheduler(self._process, self._network, self.address, self.service)
        self._process.spawn("scheduler", self.service.run(self.election))

    async def stop(self) -> None:
        """As abrupt as a killed process is for its clients."""
        self._process.crash()


def checks_of(suite: Mapping[str, object], fixture: str = "rig") -> list[Any]:
    """Return the checks of a suite's module that need nothing but the fixture, with their parameters."""
    found: list[Any] = []
    for name, check in suite.items():
        if name.startswith("test_") and inspect.iscoroutinefunction(check):
            names = [each for each in inspect.signature(check).parameters if each != fixture]
            marks = [mark for mark in getattr(check, "pytestmark", ()) if mark.args and mark.args[0] in names]
            assert len(marks) == len(names) <= 1, f"{name} takes what is not known here"
            for value in marks[0].args[1] if marks else ():
                bound = functools.partial(check, **{names[0]: value})
                found.append(pytest.param(bound, id=f"{name}-{value}"))
            if not marks:
                found.append(pytest.param(check, id=name))
    assert found, "no check was found"
    return found


def simulate(check: Check, build: Callable[[World], AbstractAsyncContextManager[R]]) -> None:
    """Run one check over what ``build`` makes of a new world. No task of its processes may have failed."""
    world = World()

    async def main() -> None:
        async with build(world) as rig:
            await check(rig)

    with world.loop as loop:
        loop.run_until_complete(main())
        failures = [failure for process in world.processes for failure in process.supervisor.failures]
    assert not failures
