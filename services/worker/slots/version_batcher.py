"""The batcher of one fixed-cost version on this worker: its processes, its rows, its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import structs

from services.core.errors import DoesNotFit, FairwayError
from services.worker.batcher.charges import RowCharges
from services.worker.batcher.driver import Batcher, BatcherContext
from services.worker.batcher.policy.isolation import RunPlace
from services.worker.batcher.policy.window import DerivedWindow, FixedWindow
from services.worker.batcher.telemetry import BatcherTelemetry
from services.worker.engine_protocol import BatchRaised, BatchRan, EngineConfig, Ready
from services.worker.policy.lifecycle import VersionPhase
from services.worker.policy.probes import plan_row_probe
from services.worker.slots.engine_process import Crashed, EngineEvents, EngineExit, RunningEngine, Stopped
from services.worker.slots.version_engine import SlotContext, TookTooMuch
from services.worker.slots.version_memory import VersionMemory
from services.worker.slots.version_probe import ProbeContext, ProbeFailed, RowProbe

if TYPE_CHECKING:
    from services.worker.slots.version_slot import VersionSlot

log = structlog.get_logger()

_SUFFIX: Final = "/search"  # suffix of its name in the memory ledger


class SacrificialProcess:
    """The process in which suspects run, so that they end none that serves. Implements ``driver.Sacrifice``.

    It exists while a failed batch is searched, holds memory of its own in the ledger, and starts again when a
    suspect ended it. If the memory does not suffice for it and the serving process, or it does not load,
    the batcher searches in the serving one.
    """

    def __init__(
        self,
        version_digest: str,
        context: SlotContext,
        memory: VersionMemory,
        *,
        batcher: Callable[[], Batcher | None],
    ) -> None:
        """``memory`` is the serving process's. ``batcher`` returns the batcher that receives the events."""
        self._digest = version_digest
        self._context = context
        self._memory = memory
        self._batcher = batcher
        self._config: EngineConfig | None = None
        self._process: RunningEngine | None = None
        self._starting = self._ready = self._stopping = False

    def use(self, config: EngineConfig) -> None:
        """Start processes with the serving process's configuration from now on."""
        self._config = config

    def start(self) -> None:
        if not self._starting and self._process is None:
            self._starting = True
            self._context.supervisor.spawn(f"sacrifice-{self._digest[:19]}", self._start())

    def stop(self) -> None:
        if self._process is not None and not self._stopping:
            self._stopping = True
            self._context.supervisor.spawn(f"stop-sacrifice-{self._digest[:19]}", self._process.stop())

    async def ended(self) -> None:
        """Return once no process runs."""
        if self._process is not None:
            await self._process.stop()

    async def _start(self) -> None:
        try:
            assert self._config is not None, "no serving process was started"
            self._take_memory(self._config)
            self._ready = self._stopping = False
            events = EngineEvents(on_ready=self._on_ready, on_batch=self._on_batch, on_exit=self._on_exit)
            self._process = self._context.launch(self._config, events)
            await self._process.start()
        except FairwayError as error:
            self._process = None
            self._release()
            self._give_up(error.message)
        finally:
            self._starting = False

    def _take_memory(self, config: EngineConfig) -> None:
        """Raises DoesNotFit if the serving process then would not fit."""
        if not config.memory_bytes:
            return
        ledger, memory = self._context.ledger, self._memory
        serving_bytes = 0 if memory.granted is not None else memory.weight_bytes + config.kv_memory_bytes
        if ledger.free_bytes < serving_bytes + memory.weight_bytes + config.kv_memory_bytes:
            raise DoesNotFit("the memory does not suffice for a second process of the version")
        ledger.grant(
            self._digest + _SUFFIX,
            weight_bytes=memory.weight_bytes,
            kv_bytes=config.kv_memory_bytes,
            min_kv_bytes=config.kv_memory_bytes,
            label="the search of a failed batch",
        )

    def _on_ready(self, event: Ready) -> None:
        batcher, process = self._batcher(), self._process
        self._ready = True
        if batcher is not None and process is not None:
            batcher.attach(RunPlace.SACRIFICIAL, process)

    def _on_batch(self, event: BatchRan | BatchRaised) -> None:
        if (batcher := self._batcher()) is not None:
            batcher.on_batch(RunPlace.SACRIFICIAL, event)

    def _on_exit(self, exit_: EngineExit) -> None:
        self._process = None
        self._release()
        batcher = self._batcher()
        if batcher is None:
            return
        if not self._ready and not isinstance(exit_, Stopped):
            reason = exit_.message if isinstance(exit_, Crashed) else exit_.reason
            self._give_up(f"the sacrificial process did not load: {reason}")
        batcher.detach(RunPlace.SACRIFICIAL, exit_)

    def _give_up(self, reason: str) -> None:
        if (batcher := self._batcher()) is not None:
            batcher.search_in_serving(reason)

    def _release(self) -> None:
        self._context.ledger.release(self._digest + _SUFFIX)


class VersionBatcher:
    """At most one serving process at a time, and a sacrificial one while a failed batch is searched.

    The rows stay while a serving process that ended by itself starts again.
    """

    def __init__(self, owner: VersionSlot, context: SlotContext, memory: VersionMemory) -> None:
        self._owner = owner
        self._context = context
        self.memory = memory
        self._process: RunningEngine | None = None
        self._started_s = self._loaded_s = self._ready_s = 0.0
        # Why it was stopped right after it loaded.
        self._unfit: TookTooMuch | ProbeFailed | None = None
        self._probe: RowProbe | None = None
        self._sacrifice = SacrificialProcess(
            owner.version.version_digest, context, memory, batcher=lambda: self.rows
        )
        self.rows: Batcher | None = None
        self.capabilities: frozenset[str] = frozenset()  # what the process promises

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """0: a batch is silent, and has a time limit of its own."""
        return 0.0

    async def start(self, config: EngineConfig) -> None:
        """Start a process; the owner is notified of the outcome. Raises FailedPrecondition."""
        events = EngineEvents(
            on_progress=self._owner.engine_progress,
            on_ready=partial(self._on_ready, config),
            on_batch=self._on_batch,
            on_exit=self._on_exit,
        )
        self._process = self._context.launch(config, events)
        self._started_s = self._context.clock.monotonic_s()
        try:
            await self._process.start()
        except BaseException:
            self._process = None
            self.memory.release()
            raise

    async def stop(self) -> None:
        """Return once no process runs and the memory is free. The rows are lost."""
        if self.rows is not None:
            self.rows.lose_all()
            self._context.host.remove_rows(self.rows)
        if self._probe is not None:
            self._probe.cancel()
        await self._sacrifice.ended()
        if self._process is not None:
            await self._process.stop()
        self.memory.release()

    def _on_ready(self, config: EngineConfig, event: Ready) -> None:
        process = self._process
        assert process is not None, "ready without a process"
        assert event.rows is not None, "ready without a fixed-cost model"
        if self._owner.phase is not VersionPhase.LOADING:  # it is being removed
            return
        try:
            self.memory.settle(event)
        except DoesNotFit as error:
            self._refuse(TookTooMuch(error.message), process)
            return
        self.memory.stay()
        self._loaded_s = self._context.clock.monotonic_s()
        self._owner.engine_loaded()
        if self._owner.probed:
            self._admit(config, event, process)
            return
        model, context = event.rows, self._context
        plan = plan_row_probe(
            self._owner.version.probes,
            model.inputs,
            model.costs,
            max_tokens=model.max_tokens,
            memory_bytes=event.kv_bytes_per_block,
        )
        ended = partial(self._on_probed, config, event, process)
        probe = ProbeContext(process.send, ended, context.clock, context.supervisor)
        self._probe = RowProbe(plan, probe)
        self._probe.begin()

    def _on_probed(
        self, config: EngineConfig, event: Ready, process: RunningEngine, failed: ProbeFailed | None
    ) -> None:
        self._probe = None
        if self._owner.phase is not VersionPhase.PROBING:  # it is being removed
            return
        if failed is None:
            self._admit(config, event, process)
        else:
            self._refuse(failed, process)

    def _refuse(self, why: TookTooMuch | ProbeFailed, process: RunningEngine) -> None:
        self._unfit = why
        self._context.supervisor.spawn(f"stop-{self._owner.version.version_digest[:19]}", process.stop())

    def _admit(self, config: EngineConfig, event: Ready, process: RunningEngine) -> None:
        self._sacrifice.use(structs.replace(config, kv_memory_bytes=event.kv_bytes_per_block))
        self.capabilities = event.capabilities
        if self.rows is None:
            self.rows = self._new_batcher(event)
            self._context.host.add_rows(self.rows)
        self._ready_s = self._context.clock.monotonic_s()
        self._owner.engine_ready()
        self.rows.attach(RunPlace.SERVING, process, load_s=self._loaded_s - self._started_s)

    def _new_batcher(self, event: Ready) -> Batcher:
        version, host, telemetry = self._owner.version, self._context.host, self._context.telemetry
        assert event.rows is not None, "ready without a fixed-cost model"
        window_s = self._context.settings.batch_window_s
        context = BatcherContext(
            clock=self._context.clock,
            call_later=asyncio.get_running_loop().call_later,
            changed=self._changed,
            draining=lambda: not host.takes(version.version_digest),
            charges=RowCharges(version.version_digest, version.deployment, host.tally, host.device),
            recorder=telemetry.recorder.engine(version.version_digest, version.deployment, rows=True),
            sacrifice=self._sacrifice,
            window=DerivedWindow() if window_s < 0 else FixedWindow(window_s),
            telemetry=BatcherTelemetry(telemetry.batches, version.deployment),
        )
        bound_bytes = event.kv_bytes_per_block
        return Batcher(version.version_digest, event.rows, memory_bytes=bound_bytes, context=context)

    def _changed(self) -> None:
        self._context.host.note_change()
        if self._owner.phase is VersionPhase.DRAINING and not self.rows:
            self._context.woke()

    def _on_batch(self, event: BatchRan | BatchRaised) -> None:
        if self._probe is not None:
            self._probe.on_batch(event)
        elif self.rows is not None:
            self.rows.on_batch(RunPlace.SERVING, event)

    def _on_exit(self, exit_: EngineExit) -> None:
        self._process, self.capabilities = None, frozenset()
        ran_s = 0.0
        if self.rows is not None:
            if self.rows.ready:
                ran_s = self._context.clock.monotonic_s() - self._ready_s
            self.rows.detach(RunPlace.SERVING, exit_)
            if not isinstance(exit_, Crashed):  # none follows soon
                self.rows.lose_all()
        unfit, self._unfit = self._unfit, None
        if self._probe is not None:
            unfit = self._probe.failure(exit_)
            self._probe = None
        self.memory.release()
        self._owner.engine_ended(exit_ if unfit is None else unfit, ran_s)
