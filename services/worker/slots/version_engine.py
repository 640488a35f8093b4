"""The engine of one version on this worker: its process, its sequences, its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from services.core.errors import DoesNotFit
from services.core.records import AssignedVersion
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor
from services.worker.agent.memory_ledger import MemoryLedger
from services.worker.engine_protocol import (
    EngineConfig,
    EngineHeartbeat,
    Pace,
    Progress,
    Ready,
    Resize,
    Resized,
    Stepped,
)
from services.worker.kv.pool import PoolLimits
from services.worker.policy.lifecycle import VersionPhase
from services.worker.policy.probes import EngineSpeed, plan_probe
from services.worker.slots.engine_process import (
    Crashed,
    EngineEvents,
    EngineExit,
    EngineLauncher,
    RunningEngine,
)
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_files import LocalFiles
from services.worker.slots.version_memory import VersionMemory
from services.worker.slots.version_probe import ProbeContext, ProbeFailed, PromptProbe
from services.worker.streams.charges import UsageAccounting
from services.worker.streams.host import SequenceHost
from services.worker.streams.sequences import SequenceTable
from services.worker.telemetry import WorkerTelemetry
from services.worker.text.detokenizer import Vocabulary

RESIZABLE: Final = (VersionPhase.READY, VersionPhase.RETIRING)
WITH_ENGINE: Final = (*RESIZABLE, VersionPhase.DRAINING)


@dataclass(frozen=True, slots=True)
class SlotContext:
    """What the slots of a worker share."""

    settings: EngineSettings  # of all engines
    host: SequenceHost  # admission and sequence tables
    ledger: MemoryLedger  # of the device's memory
    files: Callable[[AssignedVersion], LocalFiles]  # the files of a version
    launch: EngineLauncher  # makes the runs of engines
    clock: Clock  # time source
    supervisor: Supervisor  # owner of the slots' tasks
    # Called when a slot changed.
    woke: Callable[[], None]
    telemetry: WorkerTelemetry  # metrics of the worker


@dataclass(frozen=True, slots=True)
class TookTooMuch:
    """The engine took more memory than is free, and was stopped right after it loaded."""

    message: str


class Probe(Protocol):
    """A probe under way."""

    def cancel(self) -> None: ...

    def waits_for(self) -> str:
        """Return what the engine has not answered."""


class EngineOwner(Protocol):
    """The slot whose engine this is."""

    version: AssignedVersion
    phase: VersionPhase
    probed: bool  # the version has answered a probe here
    itl_target_s: float  # as its assignment has it at present

    def engine_progress(self, event: Progress) -> None: ...

    def engine_loaded(self) -> None: ...

    def engine_ready(self) -> None: ...

    def engine_ended(self, exit_: EngineExit | TookTooMuch | ProbeFailed, ran_s: float) -> None: ...


class VersionEngine:
    """At most one engine process at a time. The owner is notified when it is ready and when it ended."""

    def __init__(self, owner: EngineOwner, context: SlotContext, memory: VersionMemory) -> None:
        self._owner = owner
        self._context = context
        self._memory = memory
        self._process: RunningEngine | None = None
        self._vocabulary: Vocabulary | None = None  # of the engine that loads
        self._max_sequences = 0
        self._paced_s = 0.0  # the ITL target that the engine has
        self._ready_s = 0.0
        # Why it was stopped right after it loaded.
        self._unfit: TookTooMuch | ProbeFailed | None = None
        self._probe: PromptProbe | None = None
        self.table: SequenceTable | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """Time since the last message of the engine's step loop; 0 while no engine should run."""
        runs = self._owner.phase in WITH_ENGINE and self._process is not None
        return self._process.silent_s if runs and self._process is not None else 0.0

    async def start(self, config: EngineConfig, vocabulary: Vocabulary) -> None:
        """Start a process; the owner is notified of the outcome. Raises FailedPrecondition."""
        self._vocabulary = vocabulary
        self._max_sequences, self._paced_s = config.max_sequences, config.itl_target_s
        events = EngineEvents(
            on_progress=self._owner.engine_progress,
            on_ready=self._on_ready,
            on_stepped=self._on_stepped,
            on_heartbeat=self._on_heartbeat,
            on_resized=self._on_resized,
            on_exit=self._on_exit,
        )
        self._process = self._context.launch(config, events)
        await self._process.start()

    def resize(self, kv_blocks: int) -> None:
        """Change the size of the KV pool. Admission stops at a smaller size at once."""
        assert self._process is not None, "no engine to resize"
        assert self.table is not None, "no pool to resize"
        if kv_blocks < self.table.limits.kv_blocks_total:
            self.table.resize(kv_blocks)
        self._process.send(Resize(kv_blocks))

    def pace(self) -> None:
        """Give a loaded engine the ITL target of its owner."""
        target_s, process = self._owner.itl_target_s, self._process
        loaded = self.table is not None or self._probe is not None
        if process is not None and loaded and target_s != self._paced_s and process.send(Pace(target_s)):
            self._paced_s = target_s

    async def stop(self) -> None:
        """Return once no process runs."""
        if self._probe is not None:
            self._probe.cancel()
        if self._process is not None:
            await self._process.stop()

    def _on_ready(self, event: Ready) -> None:
        process, vocabulary, context = self._process, self._vocabulary, self._context
        assert process is not None, "ready without an engine"
        assert vocabulary is not None, "ready without a vocabulary"
        if self._owner.phase is not VersionPhase.LOADING:  # it is being removed
            return
        if not self._has_memory(event, process):
            return
        vocabulary.cover(event.vocab_size)
        self._owner.engine_loaded()
        if self._owner.probed:
            self._admit(event, process, 0)
            return
        shapes = self._owner.version.probes
        speed = EngineSpeed(context.settings.token_budget, event.full_step_s)
        plan = plan_probe(shapes, event, speed)
        probe = ProbeContext(
            process.send,
            partial(self._on_probed, event, process, plan.prompts),
            context.clock,
            context.supervisor,
        )
        self._probe = PromptProbe(plan, probe, vocab_size=event.vocab_size)
        self._probe.begin()

    def _on_probed(
        self, event: Ready, process: RunningEngine, prompts: int, failed: ProbeFailed | None
    ) -> None:
        self._probe = None
        if self._owner.phase is not VersionPhase.PROBING:  # it is being removed
            return
        if failed is None:
            self._admit(event, process, prompts)
        else:
            self._refuse(failed, process)

    def _refuse(self, why: TookTooMuch | ProbeFailed, process: RunningEngine) -> None:
        """Stop the engine; its owner is notified of ``why`` when it has ended."""
        self._unfit = why
        self._context.supervisor.spawn(f"stop-{self._owner.version.version_digest[:19]}", process.stop())

    def _admit(self, event: Ready, process: RunningEngine, handles: int) -> None:
        """Take sequences from now on. The probe used the first ``handles``."""
        vocabulary, context = self._vocabulary, self._context
        assert vocabulary is not None, "ready without a vocabulary"
        version = self._owner.version
        self.table = SequenceTable(
            version.version_digest,
            limits=PoolLimits(
                event.kv_blocks_total,
                event.block_size,
                event.max_model_len,
                self._max_sequences,
                event.full_step_s,
            ),
            vocabulary=vocabulary,
            send=process.send,
            members=lambda: process.members,
            clock=context.clock,
            charges=UsageAccounting(
                version.version_digest, context.host.tally, context.host.device, model=version.deployment
            ),
            changed=context.host.note_change,
            slow_reader_s=context.settings.slow_reader_s,
            telemetry=context.telemetry.version(version.deployment),
            used_handles=handles,
        )
        context.host.add(self.table)
        self._ready_s = context.clock.monotonic_s()
        self._owner.engine_ready()
        self.pace()  # the target may have changed while it loaded

    def _has_memory(self, event: Ready, process: RunningEngine) -> bool:
        """Record the memory that the engine took; stop an engine that took more than is free."""
        version = self._owner.version
        if version.executor == "null":
            return True
        try:
            self._memory.settle(event)
        except DoesNotFit as error:
            self._refuse(TookTooMuch(error.message), process)
            return False
        return True

    def _on_stepped(self, event: Stepped) -> None:
        if self._probe is not None:
            self._probe.on_stepped(event)
        elif self.table is not None:
            self.table.on_stepped(event)
            if self._owner.phase is VersionPhase.DRAINING and not len(self.table):
                self._context.woke()

    def _on_heartbeat(self, event: EngineHeartbeat) -> None:
        if self.table is not None:
            self.table.on_heartbeat(event)

    def _on_resized(self, event: Resized) -> None:
        if self.table is not None:
            self.table.on_resized(event)
            self._memory.resized(event.kv_blocks_total)
            self._context.woke()  # other versions may wait for the freed memory

    def _on_exit(self, exit_: EngineExit) -> None:
        self._process = None
        table, self.table = self.table, None
        ran_s = 0.0
        if table is not None:
            if isinstance(exit_, Crashed):
                self._context.host.remove(table, exit_.cause, exit_.members)
            else:
                self._context.host.remove(table)
            ran_s = self._context.clock.monotonic_s() - self._ready_s
        unfit, self._unfit = self._unfit, None
        if self._probe is not None:
            unfit = crashed_in(self._probe, exit_)
            self._probe = None
        self._owner.engine_ended(exit_ if unfit is None else unfit, ran_s)


def crashed_in(probe: Probe, exit_: EngineExit) -> ProbeFailed | None:
    """Return the failure of a probe whose engine ended by itself."""
    probe.cancel()
    if not isinstance(exit_, Crashed):
        return None
    return ProbeFailed("PROBE_CRASHED", f"{probe.waits_for()}: {exit_.message}", final=False)
