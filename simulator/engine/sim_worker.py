"""A worker's process around simulated engines: everything but the engine is the production agent's.

Its host, tables, grants, reports, registration and record are the production ones, over the simulated
network. One engine serves each version that it is given; a crashed one is started again as ``version_slot``
does, after a pause and the loading time of the cost model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.adapters.links.reporter import Reporter
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.core.fleet import ReportSnapshot
from services.core.records import WORKERS, LoadedVersion, VersionState, Worker, dump
from services.ports.clock import Clock
from services.ports.worker_stream import WorkerStreams
from services.runtime.fleet_state.registration import Registration
from services.worker import engine_protocol as wire
from services.worker.agent.agent import PAUSE_S
from services.worker.agent.report import ReportIdentity, take_snapshot
from services.worker.kv.pool import PoolLimits
from services.worker.policy.engine_silence import ABANDON_STEPS
from services.worker.policy.lifecycle import backoff_s
from services.worker.slots.engine_process import EngineTimeouts
from services.worker.streams.fallback import FallbackAdmission
from services.worker.streams.host import SequenceHost
from services.worker.streams.sequences import SequenceTable
from services.worker.text.detokenizer import Vocabulary
from simulator.engine.sim_engine import SimEngine, SimEngineSpec
from simulator.engine.sim_executor import OutputLength
from simulator.kernel.links.links import SimReportLinks, SimStore, serve_worker
from simulator.kernel.network import Network
from simulator.kernel.process import Process

CALM_S: Final = 60.0  # an engine that ran so long starts its count of crashes anew


@dataclass(frozen=True, slots=True)
class SimVersion:
    """A version that a worker has loaded. ``restart_s`` overrides the loading time of its cost model."""

    deployment: str
    model: str
    version_digest: str
    engine: SimEngineSpec
    restart_s: float | None = None

    @property
    def load_s(self) -> float:
        return self.engine.cost.load_s if self.restart_s is None else self.restart_s


@dataclass(frozen=True, slots=True)
class SimWorkerSpec:
    """``sweep_s``: between two deadline checks; a real agent checks more often, which would cost events."""

    worker_id: str
    address: str
    versions: tuple[SimVersion, ...]
    zone: str = ""
    device_type: str = ""
    cost_per_hour: float = 0.0
    lease_ttl_s: int = 5
    sweep_s: float = 0.25
    slow_reader_s: float = 30.0


class SimSlot:
    """One version on a worker: its engine, its table, and its restart after a crash."""

    def __init__(
        self,
        version: SimVersion,
        *,
        process: Process,
        host: SequenceHost,
        vocabulary: Vocabulary,
        output_length: OutputLength | None,
        changed: Callable[[], None],
        slow_reader_s: float,
    ) -> None:
        self.version = version
        self.restarts = 0
        self.engine: SimEngine | None = None
        self.table: SequenceTable | None = None
        self._process = process
        self._host = host
        self._vocabulary = vocabulary
        self._output_length = output_length
        self._changed = changed
        self._slow_reader_s = slow_reader_s
        self._slow_factor = 1.0
        self._failures = 0
        self._last_message_s = self._ready_s = 0.0
        self._context = process.context()

    def load(self) -> None:
        """Serve from now on."""
        spec, clock = self.version.engine, self._process.clock
        engine = SimEngine(
            spec,
            clock=clock,
            call_at=self._call_at,
            tell=self._on_message,
            output_length=self._output_length,
        )
        engine.slow(self._slow_factor)
        self.engine = engine
        self.table = SequenceTable(
            self.version.version_digest,
            limits=PoolLimits(
                spec.blocks, spec.block_size, spec.context_tokens, spec.max_sequences, spec.full_step_s
            ),
            vocabulary=self._vocabulary,
            send=engine.send,
            clock=clock,
            tally=self._host.tally,
            changed=self._host.note_change,
            slow_reader_s=self._slow_reader_s,
        )
        self._last_message_s = self._ready_s = clock.monotonic_s()
        engine.start()
        self._host.add(self.table)
        self._changed()

    def crash(self) -> None:
        """The engine's process ends: its sequences are lost here, and it is started again."""
        engine, table, clock = self.engine, self.table, self._process.clock
        if engine is None or table is None:
            return
        engine.crash()
        self.engine, self.table = None, None
        self._host.remove(table)
        self.restarts += 1
        self._failures = 1 if clock.monotonic_s() - self._ready_s > CALM_S else self._failures + 1
        pause_s = backoff_s(self._failures, first_s=0.5, most_s=30.0)
        self._call_at(clock.monotonic_s() + pause_s + self.version.load_s, self.load)
        self._changed()

    def slow(self, factor: float) -> None:
        self._slow_factor = factor
        if self.engine is not None:
            self.engine.slow(factor)

    def look(self, now_s: float) -> None:
        """Kill an engine that is silent for longer than its limit."""
        limit_s = max(EngineTimeouts().silence_s, 2 * ABANDON_STEPS * self.version.engine.full_step_s)
        if self.engine is not None and now_s - self._last_message_s > limit_s:
            self.crash()

    def reset_silence(self) -> None:
        self._last_message_s = self._process.clock.monotonic_s()

    def record(self) -> LoadedVersion:
        """Return what is published of it."""
        version, spec = self.version, self.version.engine
        state = VersionState.READY if self.engine is not None else VersionState.RESTARTING
        return LoadedVersion(
            deployment=version.deployment,
            model=version.model,
            version_digest=version.version_digest,
            state=state,
            progress_ratio=1.0,
            kv_blocks_total=spec.blocks,
            block_size=spec.block_size,
            max_model_len=spec.context_tokens,
            engine_restarts=self.restarts,
        )

    def check_integrity(self) -> None:
        if self.engine is not None:
            self.engine.check_integrity()

    def _on_message(self, event: wire.Stepped | wire.EngineHeartbeat | wire.Resized) -> None:
        table = self.table
        if table is None:
            return
        self._last_message_s = self._process.clock.monotonic_s()
        match event:
            case wire.Stepped():
                table.on_stepped(event)
            case wire.EngineHeartbeat():
                table.on_heartbeat(event)
            case wire.Resized(blocks):
                table.resize(blocks)

    def _call_at(self, when_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        process = self._process
        return process.loop.at(process.global_s(when_s), call, context=self._context)


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
        self.process = process
        clock, rng = process.clock, process.rng
        self._clock: Clock = clock
        store = SimStore(process, network)
        self._directory = SchedulerDirectory(store, clock, rng=rng)
        if host is None:
            host = SequenceHost(changed=_ignore, fallback=FallbackAdmission(clock))
        self.host = host
        self.reporter = Reporter(
            SimReportLinks(process, network, self._directory),
            clock,
            process.supervisor,
            self._snapshot,
            on_leader=self.host.on_leader,
            on_counters=self.host.counters.hear,
            rng=rng,
        )
        self.host.changed = self.reporter.changed
        self._reported = ReportIdentity(
            worker_id=spec.worker_id,
            address=spec.address,
            zone=spec.zone,
            device_type=spec.device_type,
            cost_per_hour=spec.cost_per_hour,
        )
        self.slots = {
            version.version_digest: SimSlot(
                version,
                process=process,
                host=self.host,
                vocabulary=vocabulary,
                output_length=output_length,
                changed=self._publish,
                slow_reader_s=spec.slow_reader_s,
            )
            for version in spec.versions
        }
        self.registration = Registration(
            store,
            WORKERS + spec.worker_id,
            dump(self._record()),
            clock,
            ttl_s=spec.lease_ttl_s,
            rng=rng,
        )
        serve_worker(process, network, spec.address, streams or self.host)

    def start(self) -> None:
        """Load every version and begin to register, report and sweep."""
        for slot in self.slots.values():
            slot.load()
        supervisor = self.process.supervisor
        supervisor.spawn("registration", self.registration.run())
        supervisor.spawn("directory", self._directory.run())
        supervisor.spawn("sweep", self._sweep_forever())
        self.reporter.start()

    async def drain(self, timeout_s: float) -> int:
        """Take no new sequences from now on; return how many still ran when ``timeout_s`` had passed."""
        self.host.draining = True
        self.host.note_change()
        self._publish()
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self.host.running and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(self.spec.sweep_s)
        return self.host.running

    # --- faults, inside the process -------------------------------------------------------------------

    def slow(self, factor: float) -> None:
        """Every step of its engines takes ``factor`` times as long; 1.0 heals it."""
        for slot in self.slots.values():
            slot.slow(factor)

    def crash_engine(self) -> None:
        """Every engine process ends; the agent starts them again."""
        for slot in self.slots.values():
            slot.crash()

    def hang_engine(self) -> None:
        """No engine sends or computes anything until ``unhang_engine``, or until the agent kills it."""
        for slot in self.slots.values():
            if slot.engine is not None:
                slot.engine.hang()

    def unhang_engine(self) -> None:
        for slot in self.slots.values():
            if slot.engine is not None:
                slot.engine.unhang()

    def check_integrity(self) -> None:
        """Raise AssertionError when the accounting of the host or of an engine is wrong."""
        self.host.check_integrity()
        for slot in self.slots.values():
            slot.check_integrity()

    # --- inside -----------------------------------------------------------------------------------------

    async def _sweep_forever(self) -> None:
        """As the agent's: end what is overdue, follow the registration, look after the engines."""
        swept_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(self.spec.sweep_s)
            now_s = self._clock.monotonic_s()
            if now_s - swept_s > PAUSE_S:
                self.host.reset_silence()
                for slot in self.slots.values():
                    slot.reset_silence()
            swept_s = now_s
            self.host.sweep(now_s)
            for slot in self.slots.values():
                slot.look(now_s)
            self._follow_incarnation()

    def _follow_incarnation(self) -> None:
        incarnation = self.registration.incarnation
        if incarnation is not None and incarnation != self.host.grants.incarnation:
            self.host.grants.registered(incarnation)
            self.host.note_change()

    def _snapshot(self, whole: bool) -> ReportSnapshot:
        return take_snapshot(self.host, self._reported, whole=whole)

    def _publish(self) -> None:
        self.registration.update(dump(self._record()))

    def _record(self) -> Worker:
        spec = self.spec
        return Worker(
            worker_id=spec.worker_id,
            address=spec.address,
            zone=spec.zone,
            device=spec.device_type or "simulated",
            draining=self.host.draining,
            versions=tuple(slot.record() for slot in self.slots.values()),
        )


def _ignore() -> None:
    """Placeholder callback until the reporter is constructed."""
