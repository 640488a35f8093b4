"""A store, two schedulers, a gateway and a worker over the simulated network, with production services."""

from __future__ import annotations

from collections.abc import Coroutine
from random import Random
from typing import Any, Final

from services.adapters.links.leader_streams import StreamPlacementLinks, StreamReportLinks
from services.adapters.links.muxed_placement import MuxedPlacement
from services.adapters.links.reporter import Reporter
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.memory.store import MemoryStore
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.generation import GenerationSpec, OutputLimits, PlaceSpec, Prompt, Sampling, StartSpec
from services.core.records import Leader, Priority, dump, leader_key
from services.runtime.fleet_state.leadership import Election
from services.runtime.secrets import Ticket, issue_ticket
from services.scheduler.service import SchedulerService
from services.scheduler.term import Term, TermSettings
from simulator.kernel.links.scheduler import serve_scheduler
from simulator.kernel.links.store_link import SimStore, StoreServer
from simulator.kernel.links.streams import SimStreams
from simulator.kernel.loop import Limits, VirtualTimeLoop
from simulator.kernel.network import Network
from simulator.kernel.process import UNIX_START_S, Process

KEY: Final = b"k" * 32
DIGEST: Final = "sha256:" + "a" * 64
WORKER_ADDRESS: Final = "worker:1"


class SmallFleet:
    """Processes by name; what they run is rebuilt when they restart."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = Random(seed)
        self.loop = VirtualTimeLoop(Limits(virtual_s=600.0, instant_callbacks=200_000))
        self.network = Network(self.loop, self.rng)
        self.processes: dict[str, Process] = {}
        self.log: list[tuple[float, str]] = []
        self.services: dict[str, SchedulerService] = {}
        self.kv_blocks = 64
        self.kv_blocks_reserved = 0
        self.heard_epochs: list[int] = []
        self.reports = 0
        self.whole_reports = 0

    def build(self) -> None:
        """Start everything; inside the loop."""
        store_process = self.process("store")
        self.memory = MemoryStore(store_process.clock)
        self.serve_store()
        for name in ("scheduler-0", "scheduler-1"):
            self.process(name)
            self.start_scheduler(name)
        self.reporter: Reporter = self.process("worker").run(self._build_reporter)
        self.placement: MuxedPlacement = self.process("gateway").run(self._build_placement)

    def process(self, name: str) -> Process:
        self.processes[name] = made = Process(name, self.loop, self.rng)
        return made

    def note(self, what: str) -> None:
        self.log.append((self.loop.now_s, what))

    def restart(self, name: str) -> Process:
        self.processes[name] = made = self.processes[name].restart()
        return made

    def serve_store(self) -> None:
        process = self.processes["store"]
        process.run(StoreServer, process, self.network, self.memory)

    def store(self, name: str) -> SimStore:
        return SimStore(self.processes[name], self.network)

    def start_scheduler(self, name: str) -> None:
        self.processes[name].run(self._build_scheduler, name)

    def run(self, main: Coroutine[Any, Any, Any]) -> None:
        """Return when ``main``, which finds the fleet started, has ended."""

        async def whole() -> None:
            self.build()
            await main

        try:
            self.loop.run_until_complete(whole())
        finally:
            self.loop.close()

    @property
    def leaders(self) -> list[str]:
        return [name for name, service in self.services.items() if service.term is not None]

    @property
    def term(self) -> Term:
        """The term of the one that leads."""
        (name,) = self.leaders
        term = self.services[name].term
        assert term is not None
        return term

    def place(self, number: int, queue_ttl_s: float = 20.0) -> Coroutine[Any, Any, Any]:
        request_id = f"req_{number}"
        unix_s = self.processes["gateway"].clock.unix_s()
        return self.placement.place(
            PlaceSpec(
                request_id=request_id,
                choice=0,
                tenant_id="acme",
                priority=Priority.STANDARD,
                model="sim",
                version_digest=DIGEST,
                route_revision=1,
                prompt_tokens=32,
                max_output_tokens=32,
                arrival_unix_us=round(unix_s * 1e6),
                queue_ttl_s=queue_ttl_s,
                ticket=issue_ticket(KEY, Ticket("acme", request_id, int(UNIX_START_S) + 3600, 10**6, 16)),
            )
        )

    def _build_scheduler(self, name: str) -> None:
        process = self.processes[name]
        address = f"{name}:1"
        service = SchedulerService(KEY, TermSettings(), process.clock, process.rng)
        record = dump(Leader(leader_id=process.ids.request_id(), address=address))
        election = Election(
            self.store(name), leader_key("scheduler"), record, 3, process.clock, rng=process.rng
        )
        process.spawn("election", election.run())
        process.spawn("scheduler", service.run(election))
        serve_scheduler(process, self.network, address, service)
        self.services[name] = service

    def _directory(self, name: str) -> SchedulerDirectory:
        process = self.processes[name]
        directory = SchedulerDirectory(self.store(name), process.clock)
        process.spawn("directory", directory.run())
        return directory

    def _build_placement(self) -> MuxedPlacement:
        process = self.processes["gateway"]
        links = StreamPlacementLinks(
            SimStreams(process, self.network), self._directory("gateway"), "gateway-1"
        )
        return MuxedPlacement(links, process.clock, process.supervisor, process.rng)

    def _build_reporter(self) -> Reporter:
        process = self.processes["worker"]
        reporter = Reporter(
            StreamReportLinks(SimStreams(process, self.network), self._directory("worker")),
            process.clock,
            process.supervisor,
            self.snapshot,
            on_leader=self.heard_epochs.append,
            rng=process.rng,
        )
        reporter.start()
        return reporter

    def snapshot(self, whole: bool) -> ReportSnapshot:
        self.reports += 1
        self.whole_reports += whole
        pool = PoolSnapshot(DIGEST, self.kv_blocks, self.kv_blocks_reserved, 16, 0, 0, 64, 1024)
        epoch = self.heard_epochs[-1] if self.heard_epochs else 0
        return ReportSnapshot("w1", 100, WORKER_ADDRESS, pools=(pool,), epoch=epoch)


def start_spec(grant: Any, number: int) -> StartSpec:
    generation = GenerationSpec(
        request_id=f"req_{number}",
        model="sim",
        version_digest=DIGEST,
        route_revision=1,
        prompt=Prompt((1, 2, 3)),
        sampling=Sampling(seed=number),
        limits=OutputLimits(8),
    )
    return StartSpec(generation, 0, "acme", grant, initial_credit_tokens=8)
