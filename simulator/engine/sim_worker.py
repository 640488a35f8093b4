"""A worker's process around simulated engines.

Its agent, slots, host, tables, grants, reports, registration and record are the production ones, over the
simulated network. Engines, files and the links to other processes are simulated. ``SimEngines`` launches
engines in place of processes. A version's first engine in a life is ready after ``first_load_s``, by default
at once; one that is started again takes the loading time of its cost model.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from services.adapters.links.leader_streams import StreamReportLinks
from services.adapters.links.reporter import Reporter
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.core.records import AssignedVersion, Assignment
from services.ports.streams import WorkerStreams
from services.rpc.methods import EXECUTE
from services.worker import engine_protocol as wire
from services.worker.agent.agent import PAUSE_S, WorkerAgent
from services.worker.agent.report import WorkerIdentity
from services.worker.detokenizer import Vocabulary
from services.worker.policy.engine_failures import ABANDON_STEPS, STEP_FAILED, cause_of
from services.worker.servicer import WorkerServicer
from services.worker.slots.engine_process import (
    Crashed,
    EngineEvents,
    EngineExit,
    EngineTimeouts,
    RunningEngine,
    Stopped,
)
from services.worker.slots.engine_settings import EngineSettings
from services.worker.streams.admission import FallbackAdmission
from services.worker.streams.host import SequenceHost
from simulator.engine.poison import EngineEnding, Poison
from simulator.engine.sim_batches import SimBatchRun, SimRowVersion
from simulator.engine.sim_engine import SimEngine, SimEngineSpec
from simulator.engine.sim_executor import OutputLength
from simulator.kernel.links.store_link import SimStore
from simulator.kernel.links.streams import SimStreams, serve_stream
from simulator.kernel.network import Network
from simulator.kernel.process import Process

_CHECK_S: Final = 1.0  # interval of checks for a silent engine
_SIGKILL: Final = -9
_LOAD_FAILED: Final = 1
_EXITS: Final = {
    EngineEnding.RAISES: STEP_FAILED,
    EngineEnding.SIGNALS: -signal.SIGSEGV,
    EngineEnding.KILLED: _SIGKILL,
}


@dataclass(frozen=True, slots=True)
class SimVersion:
    """A version that a worker runs. ``restart_s`` overrides the loading time of its cost model.

    ``loads``: whether its engines become ready; otherwise they end instead.
    """

    deployment: str
    model: str
    version_digest: str
    engine: SimEngineSpec
    restart_s: float | None = None
    first_load_s: float = 0.0
    loads: bool = True

    @property
    def load_s(self) -> float:
        return self.engine.cost.load_s if self.restart_s is None else self.restart_s


@dataclass(frozen=True, slots=True)
class SimWorkerSpec:
    """``sweep_s``: between two deadline checks; a real agent checks more often, which would cost events."""

    worker_id: str
    address: str
    versions: tuple[SimVersion | SimRowVersion, ...]
    zone: str = ""
    device_type: str = ""
    cost_per_hour: float = 0.0
    lease_ttl_s: int = 5
    sweep_s: float = 0.25
    slow_reader_s: float = 30.0

    @property
    def assignment(self) -> Assignment:
        """What the control plane assigns to it."""
        return Assignment(
            self.worker_id,
            tuple(
                AssignedVersion(
                    version.deployment,
                    version.model,
                    version.version_digest,
                    executor="null" if isinstance(version, SimVersion) else "torch",
                )
                for version in self.versions
            ),
        )


class SimFiles:
    """Implements ``LocalFiles``: files that are there. The folder's name is the version's digest."""

    def __init__(self, version: SimVersion | SimRowVersion, vocabulary: Vocabulary) -> None:
        self._version = version
        self._vocabulary = vocabulary
        self.folder: Path | None = None
        self.template_fault = ""

    async def fetch(self, progress: Callable[[float], None], *, spare: bool = False) -> None:
        self.folder = Path(self._version.version_digest)

    async def checked(self, progress: Callable[[float], None]) -> None:
        self.folder = Path(self._version.version_digest)

    def lost(self) -> bool:
        return False

    def unpin(self) -> None:
        self.folder = None

    async def kind(self) -> str:
        return "causal-lm" if isinstance(self._version, SimVersion) else "fixed-cost"

    async def computation(self, folder: Path) -> str:
        return ""

    async def parts(self, folder: Path) -> dict[str, str]:
        return {}

    async def adapter_bytes(self, folder: Path, bytes_per_value: int) -> int:
        return 0

    async def vocabulary(self, folder: Path) -> Vocabulary:
        return self._vocabulary

    async def weight_bytes(self, folder: Path, bytes_per_value: int) -> int:
        return 0

    async def limited(self, config: wire.EngineConfig, folder: Path) -> wire.EngineConfig:
        assert isinstance(self._version, SimVersion), "it has an engine"
        return msgspec.structs.replace(config, max_sequences=self._version.engine.max_sequences)


class SimEngineRun:
    """Implements ``RunningEngine`` with a simulated engine."""

    def __init__(self, version: SimVersion, events: EngineEvents, engines: SimEngines, load_s: float) -> None:
        self.version = version
        self.engine: SimEngine | None = None
        self._events = events
        self._engines = engines
        self._load_s = load_s
        self._process = engines.process
        self._over = False
        self._last_message_s = self._checked_s = self._process.clock.monotonic_s()

    @property
    def pid(self) -> int:
        return 0

    @property
    def silent_s(self) -> float:
        ready = self.engine is not None
        return self._process.clock.monotonic_s() - self._last_message_s if ready else 0.0

    @property
    def members(self) -> tuple[int, ...]:
        return () if self.engine is None else self.engine.members

    async def start(self) -> None:
        self._process.call_later(self._load_s, self._ready)

    def send(self, command: wire.Command) -> bool:
        return self.engine is not None and self.engine.send(command)

    async def stop(self) -> None:
        self._end(Stopped())

    def kill(self, reason: str) -> None:
        self.crash(reason)

    def crash(self, message: str, code: int = _SIGKILL) -> None:
        """The engine's process ends, by default killed. It has no effect once it has ended."""
        self._end(Crashed(code, message, cause_of(code), self.members))

    def _ready(self) -> None:
        if self._over:
            return
        if not self.version.loads:
            self.crash("its weights do not load", _LOAD_FAILED)
            return
        spec, process = self.version.engine, self._process
        self.engine = SimEngine(
            spec,
            clock=process.clock,
            call_at=self._call_at,
            report=self._on_message,
            output_length=self._engines.output_length,
            ends=self._ends_soon,
        )
        self.engine.slow(self._engines.slow_factor)
        self.engine.start()
        self._last_message_s = self._checked_s = process.clock.monotonic_s()
        self._events.on_ready(
            wire.Ready(
                kv_blocks_total=spec.blocks,
                block_size=spec.block_size,
                max_model_len=spec.context_tokens,
                vocab_size=spec.vocab_size,
                kv_bytes_per_block=0,
                weight_bytes=0,
                full_step_s=spec.full_step_s,
            )
        )
        process.call_later(_CHECK_S, self._check)

    def _ends_soon(self, poison: Poison) -> None:
        self._process.call_soon(self._end_by, poison)

    def _end_by(self, poison: Poison) -> None:
        self._engines.died(poison)
        if poison.ending is not EngineEnding.HANGS:  # The worker finds a hanging engine by its silence.
            self.crash(f"its step ended it: {poison.ending.name}", _EXITS[poison.ending])

    def _end(self, exit_: EngineExit) -> None:
        if self._over:
            return
        self._over = True
        if self.engine is not None:
            self.engine.crash()
        self._engines.runs.pop(self.version.version_digest, None)
        self._events.on_exit(exit_)

    def _check(self) -> None:
        """Kill an engine that is silent for longer than its limit."""
        if self._over:
            return
        now_s = self._process.clock.monotonic_s()
        if now_s - self._checked_s > _CHECK_S + PAUSE_S:  # this process was suspended
            self._last_message_s = now_s
        self._checked_s = now_s
        limit_s = max(EngineTimeouts().silence_s, 2 * ABANDON_STEPS * self.version.engine.full_step_s)
        if now_s - self._last_message_s > limit_s:
            self.crash("no message")
        else:
            self._process.call_later(_CHECK_S, self._check)

    def _on_message(self, event: wire.Stepped | wire.EngineHeartbeat | wire.Resized) -> None:
        self._last_message_s = self._process.clock.monotonic_s()
        match event:
            case wire.Stepped():
                self._events.on_stepped(event)
            case wire.EngineHeartbeat():
                self._events.on_heartbeat(event)
            case wire.Resized():
                self._events.on_resized(event)

    def _call_at(self, when_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        process = self._process
        return process.loop.at(process.global_s(when_s), call, context=self._engines.context)


class SimEngines:
    """Implements ``EngineLauncher``: the engines of one life of a worker, and the faults that befall them."""

    def __init__(
        self,
        process: Process,
        versions: Mapping[str, SimVersion | SimRowVersion],
        output_length: OutputLength | None,
    ) -> None:
        self.process = process
        self.context = process.context()
        self.output_length = output_length
        self.slow_factor = 1.0
        self.runs: dict[str, SimEngineRun] = {}
        self.batches: dict[SimBatchRun, None] = {}  # processes of fixed-cost versions, the oldest first
        self.died: Callable[[Poison], None] = lambda _poison: None
        self._versions = versions
        self._launched: set[str] = set()

    def __call__(self, config: wire.EngineConfig, events: EngineEvents) -> RunningEngine:
        version = self._versions[config.model_dir]
        if isinstance(version, SimRowVersion):
            ended = self.batches.pop
            made = SimBatchRun(
                version, events, self.process, slow_factor=lambda: self.slow_factor, ended=ended
            )
            self.batches[made] = None
            return made
        load_s = version.load_s if config.model_dir in self._launched else version.first_load_s
        self._launched.add(config.model_dir)
        run = self.runs[config.model_dir] = SimEngineRun(version, events, self, load_s)
        return run

    def slow(self, factor: float) -> None:
        """Every step takes ``factor`` times as long; 1.0 heals it."""
        self.slow_factor = factor
        for engine in self.running():
            engine.slow(factor)

    def crash(self) -> None:
        """Every engine process ends; the agent starts them again."""
        for run in list(self.runs.values()):
            run.crash("killed by the simulation")
        for process in list(self.batches):
            process.crash("killed by the simulation")

    def hang(self) -> None:
        """No engine process makes progress; batches of fixed-cost versions never end."""
        for engine in self.running():
            engine.hang()
        for run in self.batches:
            run.hang()

    def unhang(self) -> None:
        """The engines go on."""
        for engine in self.running():
            engine.unhang()

    def running(self) -> list[SimEngine]:
        """Return the engines that are loaded."""
        return [run.engine for run in self.runs.values() if run.engine is not None]


class SimWorker:
    """One life of a worker. Built inside its process; ``start`` begins what runs in it.

    ``host`` is the production host, or another that a test puts in its place; ``streams`` is what gateways
    reach, by default the host itself. ``output_length`` is the model's output length without a limit.
    """

    def __init__(
        self,
        spec: SimWorkerSpec,
        process: Process,
        network: Network,
        *,
        vocabulary: Vocabulary,
        output_length: OutputLength | None = None,
        host: SequenceHost | None = None,
        streams: WorkerStreams | None = None,
    ) -> None:
        self.spec = spec
        self._process = process
        clock, rng = process.clock, process.rng
        store = SimStore(process, network)
        self._directory = SchedulerDirectory(store, clock, rng=rng)
        if host is None:
            host = SequenceHost(changed=_ignore, fallback=FallbackAdmission(clock))
        self.host = host
        versions = {version.version_digest: version for version in spec.versions}
        self.engines = SimEngines(process, versions, output_length)
        self.agent = WorkerAgent(
            WorkerIdentity(
                spec.worker_id,
                spec.address,
                zone=spec.zone,
                device=spec.device_type or "simulated",
                lease_ttl_s=spec.lease_ttl_s,
                device_type=spec.device_type,
                cost_per_hour=spec.cost_per_hour,
            ),
            settings=EngineSettings(slow_reader_s=spec.slow_reader_s),
            host=host,
            store=store,
            files=lambda version: SimFiles(versions[version.version_digest], vocabulary),
            launch=self.engines,
            clock=clock,
            supervisor=process.supervisor,
            rng=rng,
            sweep_s=spec.sweep_s,
        )
        self.reporter = Reporter(
            StreamReportLinks(SimStreams(process, network), self._directory),
            clock,
            process.supervisor,
            self.agent.take_snapshot,
            on_leader=self.agent.on_leader,
            on_counters=self.agent.on_counters,
            rng=rng,
        )
        host.changed = self.reporter.changed
        servicer = WorkerServicer(streams or host, self.agent, clock)
        serve_stream(process, network, spec.address, EXECUTE, servicer.serve_gateway)

    def start(self) -> None:
        """Begin to register, run versions, report and sweep."""
        supervisor = self._process.supervisor
        supervisor.spawn("directory", self._directory.run())
        supervisor.spawn("agent", self.agent.run())
        self.reporter.start()

    async def drain(self, timeout_s: float) -> int:
        """Take no new sequences from now on; return how many still ran when ``timeout_s`` had passed."""
        return await self.agent.drain(timeout_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when the accounting of the agent or of an engine is wrong."""
        self.agent.check_integrity()
        for engine in self.engines.running():
            engine.check_integrity()


def _ignore() -> None:
    """Placeholder callback until the reporter is constructed."""
