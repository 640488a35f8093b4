"""One assigned version on this worker: its files, its engine process, its sequences."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from services.core.errors import DoesNotFit, FairwayError, Unavailable
from services.core.records import AssignedVersion, LoadedVersion, VersionState
from services.ports.clock import Clock
from services.ports.text_check import TextCheck
from services.runtime.supervisor import Supervisor
from services.worker.agent.memory_ledger import MemoryLedger
from services.worker.engine_protocol import (
    EngineConfig,
    EngineHeartbeat,
    Progress,
    Ready,
    Resize,
    Resized,
    Stepped,
)
from services.worker.kv.pool import PoolLimits
from services.worker.policy.lifecycle import FINAL_REASONS, Slot, VersionPhase, backoff_s
from services.worker.slots.drafts import draft_of
from services.worker.slots.engine_limits import limited, read_limits
from services.worker.slots.engine_process import (
    Crashed,
    EngineEvents,
    EngineExit,
    EngineProcess,
    LoadRefused,
)
from services.worker.slots.engine_settings import EngineSettings, Executor
from services.worker.slots.version_memory import VersionMemory
from services.worker.slots.weight_size import weight_bytes
from services.worker.streams.host import SequenceHost
from services.worker.streams.sequences import SequenceTable
from services.worker.telemetry import WorkerTelemetry
from services.worker.text.detokenizer import Vocabulary, load_vocabulary

log = structlog.get_logger()

CHECK_COUNTS_S: Final = 10.0  # a start within this time after the check of its files needs no new check
CALM_S: Final = 60.0  # an engine that ran this long resets the count of crashes
PROGRESS_STEP: Final = 0.05
RESIZABLE: Final = (VersionPhase.READY, VersionPhase.RETIRING)
_WITH_ENGINE: Final = (*RESIZABLE, VersionPhase.DRAINING)
# The message of a version while its engine loads, by the phase that the engine reports.
_LOADING_STEPS: Final = {
    "import": "importing torch",
    "operators": "preparing operators, compiled once per machine",
    "weights": "loading weights",
    "profile": "measuring memory",
    "warm_up": "warming up",
}


class ModelSource(Protocol):
    """The source of a version's files; see ``adapters/model_files/cache.py``."""

    def fetch(
        self,
        model: str,
        digest: str,
        *,
        only: Callable[[str], bool] | None = None,
        progress: Callable[[float], None] | None = None,
        recheck: bool = False,
    ) -> Awaitable[Path]: ...

    async def max_context_tokens(self, model: str, digest: str) -> int: ...

    def pin(self, folder: Path) -> None: ...

    def unpin(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class SlotContext:
    """What the slots of a worker share."""

    settings: EngineSettings  # of all engines
    host: SequenceHost  # admission and sequence tables
    ledger: MemoryLedger  # of the device's memory
    files: ModelSource  # source of model files
    clock: Clock  # time source
    supervisor: Supervisor  # owner of the slots' tasks
    # Called when a slot changed.
    woke: Callable[[], None]
    telemetry: WorkerTelemetry  # metrics of the worker
    # Checks the files that gateways read of a version, before it is READY.
    texts: TextCheck | None = None


class VersionSlot:
    """State machine of one version. An action starts work and returns; a new phase and ``woke`` end it."""

    def __init__(self, version: AssignedVersion, context: SlotContext) -> None:
        self.version = version
        self.phase = VersionPhase.FETCHING
        self.message = ""
        self.progress_ratio = 0.0
        self.restarts = 0
        self.table: SequenceTable | None = None
        self.gone = False
        self._failed = False  # BROKEN for a reason that a restart does not fix
        self._reason = ""  # of the last failure, until READY
        self._context = context
        self.memory = VersionMemory(
            version.version_digest,
            version.deployment,
            ledger=context.ledger,
            wished_kv_bytes=context.settings.kv_memory_bytes,
        )
        self._kv_target: int | None = None  # bytes, from the last division of the device's memory
        self._memory_comes = False
        self._failures = 0
        self._too_large = ""  # why an engine was stopped right after it loaded
        self._retry_at_s = 0.0
        self._retry_unix_s = 0.0
        self._drain_until_s = 0.0
        self._idle_since_s = 0.0
        self._ready_s = 0.0
        self._phase_s = context.clock.monotonic_s()
        self._folder: Path | None = None
        self._checked_until_s = -math.inf  # until then one engine may start without a new check of the files
        self._vocabulary: Vocabulary | None = None
        self._template_fault = ""  # why gateways cannot serve chat with it
        self._max_sequences = 0
        self._engine: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def digest(self) -> str:
        return self.version.version_digest

    @property
    def engine_pid(self) -> int:
        return 0 if self._engine is None else self._engine.pid

    @property
    def silent_s(self) -> float:
        """Time since the last message of the engine's step loop; 0 while no engine should run."""
        return self._engine.silent_s if self.phase in _WITH_ENGINE and self._engine is not None else 0.0

    def observed(self) -> Slot:
        running = 0 if self.table is None else len(self.table)
        if running:
            self._idle_since_s = self._context.clock.monotonic_s()
        return Slot(
            version=self.version,
            phase=self.phase,
            running=running,
            has_files=self._folder is not None,
            retry_at_s=self._retry_at_s,
            drain_until_s=self._drain_until_s,
            idle_since_s=self._idle_since_s,
            granted_bytes=0 if (grant := self.memory.granted) is None else grant.bytes,
            unbooked=self.version.executor != "null" and grant is None,
            needed_bytes=self.memory.needed_bytes if self._reason == DoesNotFit.reason else 0,
            final=self._failed and self._reason in FINAL_REASONS,
            restarting=not self._failed and self._folder is not None,
        )

    def record(self, deployment: str) -> LoadedVersion:
        """Return the public record of this version for a deployment."""
        limits = None if self.table is None else self.table.limits
        grant = self.memory.granted
        broken = self.phase is VersionPhase.BROKEN and not self._expects_memory
        return LoadedVersion(
            deployment=deployment,
            model=self.version.model,
            version_digest=self.digest,
            state=self._state(),
            message=self._notice() if self.phase is VersionPhase.READY else self.message,
            progress_ratio=self.progress_ratio,
            kv_blocks_total=0 if limits is None else limits.kv_blocks_total,
            block_size=0 if limits is None else limits.block_size,
            max_model_len=0 if limits is None else limits.max_model_len,
            engine_restarts=self.restarts,
            reason=self._reason if broken else "",
            failed_attempts=0 if self.table is not None else self._failures,
            retry_unix_s=self._retry_unix_s if broken else 0.0,
            weight_bytes=0 if grant is None else grant.weight_bytes,
            working_bytes=0 if grant is None else grant.working_bytes,
            kv_bytes=0 if grant is None else grant.kv_bytes,
            needed_bytes=self.memory.needed_bytes,
            spare_bytes=self.memory.spare_bytes if self.phase in RESIZABLE else 0,
        )

    # --- actions --------------------------------------------------------------------------------

    def fetch(self) -> None:
        self._enter(VersionPhase.FETCHING)
        self._task = self._context.supervisor.spawn(f"fetch-{self.digest[:19]}", self._fetch())

    def load(self) -> None:
        assert self._folder is not None, "nothing to load"
        self._enter(VersionPhase.LOADING, self.message if self.restarts else "")
        self._task = self._context.supervisor.spawn(f"load-{self.digest[:19]}", self._load(self._folder))

    def share_memory(self, kv_bytes: int | None, *, comes: bool) -> None:
        """Resize towards the target KV size; None: no memory available, or its needs are unknown.

        ``comes``: it gets memory once leaving versions have released theirs.
        """
        self._kv_target = kv_bytes
        self._memory_comes = comes
        if self.phase not in RESIZABLE or kv_bytes is None or self.table is None or self._engine is None:
            return
        blocks = self.memory.aim(kv_bytes)
        if blocks is None:
            return
        if blocks < self.table.limits.kv_blocks_total:
            self.table.resize(blocks)  # admission stops at the smaller size at once
        log.info("pool.resized", digest=self.digest, kv_blocks=blocks)
        self._engine.send(Resize(blocks))

    def retire(self) -> None:
        self._idle_since_s = self._context.clock.monotonic_s()
        self._enter(VersionPhase.RETIRING)

    def drain(self) -> None:
        self._drain_until_s = self._context.clock.monotonic_s() + self._context.settings.drain_s
        self._context.host.close_version(self.digest, True)
        self._enter(VersionPhase.DRAINING)

    def undrain(self) -> None:
        self._context.host.close_version(self.digest, False)
        self._enter(VersionPhase.READY)

    def discard(self) -> None:
        """Stop everything in a separate task; ``gone`` becomes true at the end."""
        self._enter(VersionPhase.STOPPING)
        self._context.supervisor.spawn(f"discard-{self.digest[:19]}", self.stop())

    async def stop(self) -> None:
        """Return once the version has no task, engine, memory or pin left."""
        self._enter(VersionPhase.STOPPING)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._engine is not None:
            await self._engine.stop()
        self.memory.release()
        folder, self._folder = self._folder, None
        if folder is not None:
            self._context.files.unpin(folder)
        self.gone = True
        self._context.woke()

    # --- fetching and loading -------------------------------------------------------------------

    async def _fetch(self) -> None:
        try:
            await self._have_files()
        except FairwayError as error:
            self._break(error.reason, error.message, failed=not isinstance(error, Unavailable))
        else:
            self._checked_until_s = self._context.clock.monotonic_s() + CHECK_COUNTS_S
            self._failures = 0
            self._enter(VersionPhase.FETCHED)

    async def _have_files(self) -> Path:
        """Return the pinned folder after reading every chunk and comparing it with the manifest.

        Damaged files are fetched again. Raises as ``ModelSource.fetch``; no folder is pinned then.
        """
        files = self._context.files
        held, self._folder = self._folder, None
        if held is not None:
            files.unpin(held)  # pinned files would not be replaced
        only = without_weights if self.version.executor == "null" else None
        folder = await files.fetch(
            self.version.model, self.digest, only=only, progress=self._note_progress, recheck=True
        )
        files.pin(folder)
        self._folder = folder
        return folder

    async def _load(self, folder: Path) -> None:
        """Start an engine on verified files. ``_on_ready`` or ``_on_exit`` receives the outcome."""
        try:
            fresh = self._context.clock.monotonic_s() <= self._checked_until_s
            self._checked_until_s = -math.inf
            if not fresh:
                folder = await self._have_files()
            if self._lost_files():
                return
            if self._vocabulary is None:
                self._vocabulary = await self._have_text(folder)
            config = await self._config(folder)
            engine = EngineProcess(
                config,
                events=self._events(),
                clock=self._context.clock,
                supervisor=self._context.supervisor,
                timeouts=self._context.settings.timeouts,
            )
            self._engine = engine
            await engine.start()
        except FairwayError as error:
            self.memory.release()
            self._break(error.reason, error.message, failed=not isinstance(error, Unavailable))

    async def _have_text(self, folder: Path) -> Vocabulary:
        """Return the vocabulary, after the check that a gateway can load the version.

        Raises FailedPrecondition, Unavailable.
        """
        if self._context.texts is not None:
            self._template_fault = await self._context.texts.fault(folder, self.digest)
        return await asyncio.to_thread(load_vocabulary, folder)

    def _lost_files(self) -> bool:
        """Return whether the files were deleted from the cache; they are then fetched again after a pause."""
        folder = self._folder
        if folder is None or folder.is_dir():
            return False
        self._folder = None
        self._context.files.unpin(folder)
        self._break(
            "FILES_DELETED", "its files were deleted from the cache: they are fetched again", failed=False
        )
        return True

    async def _config(self, folder: Path) -> EngineConfig:
        """Return the configuration, with its memory granted."""
        settings = self._context.settings
        limits = await asyncio.to_thread(read_limits, folder)
        context = await self._context.files.max_context_tokens(self.version.model, self.digest)
        memory_bytes = 0
        draft: Path | None = None
        if self.version.executor != "null":  # a null engine allocates nothing
            bytes_per_value = 4 if settings.dtype == "float32" else 2
            weights = await asyncio.to_thread(weight_bytes, folder, bytes_per_value)
            if settings.speculation == "draft":
                draft = await asyncio.to_thread(draft_of, folder)
            if draft is not None:
                weights += await asyncio.to_thread(weight_bytes, draft, bytes_per_value)
            memory_bytes = self.memory.take(weight_bytes=weights, kv_bytes=self._kv_target).bytes
            self._context.woke()  # other loads may wait for this grant
        executor: Executor = "null" if self.version.executor == "null" else "torch"
        config = settings.config(folder, executor, memory_bytes=memory_bytes, draft=draft)
        config = limited(config, limits, max_context_tokens=context)
        self._max_sequences = config.max_sequences
        return config

    # --- events of the engine -------------------------------------------------------------------

    def _events(self) -> EngineEvents:
        return EngineEvents(
            on_progress=self._on_progress,
            on_ready=self._on_ready,
            on_stepped=self._on_stepped,
            on_heartbeat=self._on_heartbeat,
            on_resized=self._on_resized,
            on_exit=self._on_exit,
        )

    def _on_progress(self, event: Progress) -> None:
        step = _LOADING_STEPS.get(event.phase, "")
        # After a restart the message remains the cause of the restart.
        if step and step != self.message and self.phase is VersionPhase.LOADING and not self.restarts:
            self.message = step
            self._context.woke()
        self._note_progress(event.done_ratio)

    def _on_ready(self, event: Ready) -> None:
        assert self._engine is not None, "ready without an engine"
        assert self._vocabulary is not None, "ready without a vocabulary"
        if self.phase is not VersionPhase.LOADING:  # it is being removed
            return
        if not self._settle_memory(event, self._engine):
            return
        self._vocabulary.cover(event.vocab_size)
        self.table = SequenceTable(
            self.digest,
            limits=PoolLimits(
                event.kv_blocks_total,
                event.block_size,
                event.max_model_len,
                self._max_sequences,
                event.full_step_s,
            ),
            vocabulary=self._vocabulary,
            send=self._engine.send,
            clock=self._context.clock,
            tally=self._context.host.tally,
            changed=self._context.host.note_change,
            slow_reader_s=self._context.settings.slow_reader_s,
            telemetry=self._context.telemetry.version(self.version.deployment),
        )
        self._context.host.add(self.table)
        self._ready_s = self._context.clock.monotonic_s()
        self._failed, self._reason = False, ""
        self._enter(VersionPhase.READY)

    def _settle_memory(self, event: Ready, engine: EngineProcess) -> bool:
        """Record the memory that the engine took; stop an engine that took more than is free."""
        if self.version.executor == "null":
            return True
        try:
            self.memory.settle(event)
        except DoesNotFit as error:
            self._too_large = error.message
            self._context.supervisor.spawn(f"stop-{self.digest[:19]}", engine.stop())
            return False
        return True

    def _on_stepped(self, event: Stepped) -> None:
        if self.table is not None:
            self.table.on_stepped(event)
            if self.phase is VersionPhase.DRAINING and not len(self.table):
                self._context.woke()

    def _on_heartbeat(self, event: EngineHeartbeat) -> None:
        if self.table is not None:
            self.table.on_heartbeat(event)

    def _on_resized(self, event: Resized) -> None:
        if self.table is not None:
            self.table.on_resized(event)
            self.memory.resized(event.kv_blocks_total)
            self._context.woke()  # other versions may wait for the freed memory

    def _on_exit(self, exit_: EngineExit) -> None:
        self._engine = None
        self.memory.release()
        table, self.table = self.table, None
        if table is not None:
            self._context.host.remove(table)
        if self.phase is VersionPhase.STOPPING:
            return
        if table is not None and self._context.clock.monotonic_s() - self._ready_s > CALM_S:
            self._failures = 0
        match exit_:
            case LoadRefused() if self._lost_files():
                pass
            case LoadRefused(reason, message, weight_bytes, working_bytes, kv_bytes):
                self.memory.learn(weight_bytes=weight_bytes, working_bytes=working_bytes, kv_bytes=kv_bytes)
                self._break(reason.upper(), message, failed=True)
            case Crashed(_, message):
                self.restarts += 1
                self._context.telemetry.restarted(self.version.deployment)
                self._break("ENGINE_CRASHED", message, failed=False)
            case _:
                message, self._too_large = self._too_large, ""
                reason = DoesNotFit.reason if message else "ENGINE_STOPPED"
                self._break(reason, message or "the engine was stopped", failed=bool(message))

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _expects_memory(self) -> bool:
        """Whether the memory that it waits for is about to be released."""
        waits = self.phase is VersionPhase.BROKEN and self._reason == DoesNotFit.reason
        return waits and self._memory_comes

    def _break(self, reason: str, message: str, *, failed: bool) -> None:
        """Record a failure, and the time of the next attempt if a retry can help."""
        if self.phase is VersionPhase.STOPPING:
            return
        settings, clock = self._context.settings, self._context.clock
        self._failures += 1
        self._failed, self._reason = failed, reason
        first_s, most_s = (
            (settings.failed_backoff_first_s, settings.failed_backoff_most_s)
            if failed
            else (settings.crash_backoff_first_s, settings.crash_backoff_most_s)
        )
        retry_s = backoff_s(self._failures, first_s=first_s, most_s=most_s)
        self._retry_at_s = clock.monotonic_s() + retry_s
        timed = not (failed and (reason in FINAL_REASONS or reason == DoesNotFit.reason))
        self._retry_unix_s = clock.unix_s() + retry_s if timed else 0.0
        log.warning("version.broke", digest=self.digest, reason=reason, message=message, failed=failed)
        self._enter(VersionPhase.BROKEN, message)

    def _enter(self, phase: VersionPhase, message: str = "") -> None:
        if phase is not self.phase:
            log.info("version.changed", digest=self.digest, phase=phase, before=self.phase)
            self._time_phase(phase)
        self.phase = phase
        self.message = message
        self.progress_ratio = 1.0 if phase in _WITH_ENGINE else 0.0
        self._context.woke()

    def _notice(self) -> str:
        """Return the message for operators on a READY version."""
        parts = [f"chat requests fail: {self._template_fault}"] if self._template_fault else []
        if self.table is not None and self.table.gave_not_finite:
            parts.append("sequences ended without finite logits: the version or the device is at fault")
        return "; ".join(parts)

    def _time_phase(self, phase: VersionPhase) -> None:
        """Record the duration of a fetch or a load that succeeded."""
        now_s = self._context.clock.monotonic_s()
        part = {
            (VersionPhase.FETCHING, VersionPhase.FETCHED): "fetch",
            (VersionPhase.LOADING, VersionPhase.READY): "engine",
        }.get((self.phase, phase))
        if part is not None:
            self._context.telemetry.loaded(self.version.deployment, part, now_s - self._phase_s)
        self._phase_s = now_s

    def _note_progress(self, done_ratio: float) -> None:
        if done_ratio >= 1.0 or abs(done_ratio - self.progress_ratio) >= PROGRESS_STEP:
            self.progress_ratio = done_ratio
            self._context.woke()

    def _state(self) -> VersionState:
        match self.phase:
            case VersionPhase.FETCHING | VersionPhase.FETCHED:
                return VersionState.FETCHING
            case VersionPhase.LOADING:
                return VersionState.RESTARTING if self.restarts else VersionState.LOADING
            case VersionPhase.READY:
                return VersionState.READY
            case VersionPhase.RETIRING:
                return VersionState.RETIRING
            case VersionPhase.DRAINING | VersionPhase.STOPPING:
                return VersionState.DRAINING
            case VersionPhase.BROKEN if self._expects_memory:
                return VersionState.LOADING
            case VersionPhase.BROKEN:
                return VersionState.FAILED if self._failed else self._waiting_state()

    def _waiting_state(self) -> VersionState:
        return VersionState.FETCHING if self._folder is None else VersionState.RESTARTING


def without_weights(path: str) -> bool:
    """Return whether a null engine needs the file."""
    return not path.endswith(".safetensors")
