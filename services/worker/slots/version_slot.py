"""One assigned version on this worker: its files, and the engine that serves it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
from msgspec import structs

from services.core.errors import (
    DoesNotFit,
    FailedPrecondition,
    FairwayError,
    NotReplaceable,
    Unavailable,
)
from services.core.records import AssignedVersion
from services.ports.clock import Clock
from services.worker.batcher.driver import Batcher
from services.worker.engine_protocol import OUT_OF_MEMORY, EngineConfig, LoadFailed, Progress
from services.worker.policy.lifecycle import FINAL_REASONS, Slot, VersionPhase, backoff_s
from services.worker.policy.replacement import obstacle
from services.worker.slots.engine_process import Crashed, EngineExit
from services.worker.slots.engine_settings import EngineSettings, Executor, executor_of
from services.worker.slots.replacement import ReplacementFailed
from services.worker.slots.version_batcher import VersionBatcher
from services.worker.slots.version_engine import (
    ALONE,
    RESIZABLE,
    WITH_ENGINE,
    CrashShare,
    SlotContext,
    TookTooMuch,
    VersionEngine,
)
from services.worker.slots.version_files import draft_of
from services.worker.slots.version_memory import VersionMemory
from services.worker.slots.version_probe import ProbeFailed
from services.worker.streams.sequences import SequenceTable

log = structlog.get_logger()

CALM_S: Final = 60.0  # an engine that ran this long resets the count of crashes
PROGRESS_STEP: Final = 0.05
_BESIDE: Final = "`fairway deployments update --in-place off` loads it beside"
# The message of a version while its engine loads, by the phase that the engine reports.
_LOADING_STEPS: Final = {
    "import": "importing torch",
    "operators": "preparing operators, compiled once per machine",
    "weights": "loading weights",
    "profile": "measuring memory",
    "warm_up": "warming up",
    "canary": "trying what it promises",
}


class Failures:
    """The failures of a version since it was last calm, and when it is tried again."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.count = 0
        self.final = False  # a restart does not fix the last one
        self.in_place = False  # the last one was of a replacement, which may have ended an engine that served
        self.reason = ""  # reason of the last one, until READY
        self.retry_at_s = 0.0
        self.retry_unix_s = 0.0  # 0: time alone does not help

    @property
    def lasts(self) -> bool:
        """Whether no time is set for another attempt of the same."""
        return self.final and (self.in_place or self.reason in FINAL_REASONS)

    def add(self, reason: str, *, final: bool, in_place: bool = False) -> None:
        """Count a failure and set the time of the next attempt."""
        settings = self._settings
        self.count += 1
        self.final, self.reason, self.in_place = final, reason, in_place
        first_s, most_s = (
            (settings.failed_backoff_first_s, settings.failed_backoff_most_s)
            if final
            else (settings.crash_backoff_first_s, settings.crash_backoff_most_s)
        )
        retry_s = backoff_s(self.count, first_s=first_s, most_s=most_s)
        self.retry_at_s = self._clock.monotonic_s() + retry_s
        timed = not (self.lasts or (final and reason == DoesNotFit.reason))
        self.retry_unix_s = self._clock.unix_s() + retry_s if timed else 0.0

    def passed(self) -> None:
        """The version is READY: the last failure has no reason any more. The count stays until it is calm."""
        self.final, self.reason = False, ""


class VersionSlot:
    """State machine of one version. An action starts work and returns; a new phase and ``woke`` end it."""

    def __init__(self, version: AssignedVersion, context: SlotContext) -> None:
        self.version = version
        self.phase = VersionPhase.FETCHING
        self.message = ""
        self.progress_ratio = 0.0
        self.restarts = 0  # crashes that count as the version's
        self.restarting = False  # its engine had run before
        self.probed = False
        self.promised_itl_s = version.itl_target_s  # target that an objective promises; 0: none does
        self.gone = False
        self.in_place = version.in_place  # how it replaces the version before, as assigned now
        self.has_before = False  # whether another version of its deployment serves here now
        self.deployments: frozenset[str] = frozenset()  # deployments that it is assigned for and not retiring
        self._context = context
        context.telemetry.expect(version.deployment)
        memory = VersionMemory(
            version.version_digest,
            version.deployment,
            ledger=context.ledger,
            wished_kv_bytes=context.settings.kv_memory_bytes,
        )
        # A version has an engine of its own until it loads, then that of its computation.
        self.engine: VersionEngine | VersionBatcher = VersionEngine(context, memory)
        self._kv_target: int | None = None  # bytes, from the last division of the device's memory
        self.memory_comes = False
        self.failures = Failures(context.settings, context.clock)
        self.files = context.files(version)
        self.adapter_bytes = 0  # memory of its adapter; 0: it is none, or its files were not read
        # Free memory that its refused adapter waits for, 0: time alone helps. None: none was refused.
        self._adapter_needs: int | None = None
        self._drain_until_s = 0.0
        self._idle_since_s = 0.0
        self._phase_s = context.clock.monotonic_s()
        self._task: asyncio.Task[None] | None = None

    @property
    def itl_target_s(self) -> float:
        """The time between tokens that its engine aims at; 0: any."""
        return self.promised_itl_s or self._context.settings.itl_target_s

    @property
    def digest(self) -> str:
        return self.version.version_digest

    @property
    def memory(self) -> VersionMemory:
        """The memory of its engine, which releases it."""
        return self.engine.memory

    @property
    def table(self) -> SequenceTable | None:
        """The sequences of its engine, None while that does not serve the version."""
        table = self.engine.table if isinstance(self.engine, VersionEngine) else None
        return table if table is not None and self.digest in table.versions else None

    @property
    def parked(self) -> bool:
        """Whether it retires and has ended its requests: it stays only for a revert."""
        idle_s = self._context.clock.monotonic_s() - self._idle_since_s
        return self.phase is VersionPhase.RETIRING and idle_s >= self._context.settings.retire_s

    @property
    def leads(self) -> bool:
        """Whether its engine's memory is counted with this version, of those that share it."""
        return self.memory.owner == self.digest

    @property
    def rows(self) -> Batcher | None:
        """The rows of a fixed-cost version, None until it was ready."""
        return self.engine.rows if isinstance(self.engine, VersionBatcher) else None

    @property
    def capabilities(self) -> frozenset[str]:
        """What its engine promises; empty while that does not serve the version."""
        if isinstance(self.engine, VersionBatcher):
            return self.engine.capabilities
        return frozenset() if self.table is None else self.table.limits.capabilities

    def observed(self, *, drain_s: float = math.inf) -> Slot:
        """Return its state. ``drain_s``: the longest that it may drain from now on."""
        table = self.table
        running = len(self.rows or ()) + (0 if table is None else table.running_of(self.digest))
        if running:
            self._idle_since_s = self._context.clock.monotonic_s()
        grant = self.memory.granted
        return Slot(
            version=self.version,
            phase=self.phase,
            running=running,
            has_files=self.files.folder is not None,
            retry_at_s=self.failures.retry_at_s,
            drain_until_s=min(self._drain_until_s, self._context.clock.monotonic_s() + drain_s),
            idle_since_s=self._idle_since_s,
            granted_bytes=0 if grant is None or not self.leads else grant.bytes,
            unbooked=self.version.executor != "null" and grant is None,
            needed_bytes=self._needed_bytes(),
            final=self.failures.lasts,
            failed_in_place=self.failures.lasts and self.failures.in_place,
            restarting=not self.failures.final and self.files.folder is not None,
        )

    def _needed_bytes(self) -> int:
        """Return the free memory at which it is tried again, 0 if it waits for none."""
        if self.failures.reason != DoesNotFit.reason:
            return 0
        return self.memory.needed_bytes if self._adapter_needs is None else self._adapter_needs

    # --- actions --------------------------------------------------------------------------------

    def fetch(self) -> None:
        self._enter(VersionPhase.FETCHING)
        self._task = self._context.supervisor.spawn(f"fetch-{self.digest[:19]}", self._fetch())

    def load(self) -> None:
        assert self.files.folder is not None, "nothing to load"
        self._adapter_needs = None
        self._enter(VersionPhase.LOADING, self.message if self.restarting else "")
        self._task = self._context.supervisor.spawn(f"load-{self.digest[:19]}", self._load())

    def share_memory(self, kv_bytes: int | None, *, comes: bool) -> None:
        """Resize towards the target KV size; None: no memory available, or its needs are unknown.

        ``comes``: it gets memory once leaving versions have released theirs.
        """
        self._kv_target = kv_bytes
        self.memory_comes = comes
        if self.phase not in RESIZABLE or kv_bytes is None or not isinstance(self.engine, VersionEngine):
            return
        if self.table is None:
            return
        blocks = self.memory.aim(kv_bytes)
        if blocks is not None:
            log.info("pool.resized", digest=self.digest, kv_blocks=blocks)
            self.engine.resize(blocks)

    def pace(self, itl_target_s: float) -> None:
        """Aim at the assignment's ITL target; 0: the worker's own."""
        self.promised_itl_s = itl_target_s
        if isinstance(self.engine, VersionEngine):
            self.engine.pace()

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
        if isinstance(self.engine, VersionEngine):
            await self.engine.leave(self)
        else:
            await self.engine.stop()
        self.files.unpin()
        self.gone = True
        self._context.woke()

    # --- fetching and loading -------------------------------------------------------------------

    async def _fetch(self) -> None:
        try:
            await self.files.fetch(self._note_progress)
        except FairwayError as error:
            self._break(error.reason, error.message, failed=not isinstance(error, Unavailable))
        else:
            self.failures.count = 0
            self._enter(VersionPhase.FETCHED)

    async def _load(self) -> None:
        """Start an engine on checked files. ``_on_ready`` or ``_on_exit`` receives the outcome."""
        try:
            await self.files.checked(self._note_progress)
            if self._lost_files():
                return
            folder = self.files.folder
            assert folder is not None, "checked files have no folder"
            if await self.files.kind() == "fixed-cost":
                self._require_beside("a fixed-cost model")
                await self._start_batcher(folder)
                return
            await self._start_engine(folder)
        except ReplacementFailed as failed:
            self._break(failed.reason, failed.message, failed=True, in_place=True)
        except FairwayError as error:
            self._break(error.reason, error.message, failed=not isinstance(error, Unavailable))

    async def _start_engine(self, folder: Path) -> None:
        """Start the engine of the version's computation, or join it where another version has it."""
        vocabulary = await self.files.vocabulary(folder)
        shares = self.version.executor != "null"  # a null engine has no memory to share
        computation = await self.files.computation(folder) if shares else ""
        if shares:  # a null engine computes nothing that an adapter could change
            self.adapter_bytes = await self.files.adapter_bytes(folder, self._bytes_per_value)
            self.adapter_bytes *= max(1, self.version.tensor_parallel)  # each rank has at most the whole
            if self.adapter_bytes:
                self._require_beside("an adapter")
        assert isinstance(self.engine, VersionEngine), "a version has one kind"
        if computation and self.in_place is not None and await self._took_over(folder, computation):
            return
        engine = self._context.engines.claim(computation and self._name_of(computation), self.engine)
        self.engine = engine
        if engine.enter(self):
            with engine.starts(self):
                await engine.start(await self._config(folder), vocabulary)

    def _require_beside(self, what: str) -> None:
        """Raises NotReplaceable if it is to replace the weights of a version that serves here."""
        if self.in_place is not None and self.has_before and not self.restarting:
            raise NotReplaceable(f"{what} replaces no weights: {_BESIDE}")

    async def _took_over(self, folder: Path, computation: str) -> bool:
        """Return whether it replaced the weights of its deployment's version before, if that is served here.

        Raises NotReplaceable, ReplacementFailed and Unavailable.
        """
        engines, name = self._context.engines, self._name_of(computation)
        if engines.has(name):
            return False
        before = engines.before(self.version)
        if before is None:
            if engines.is_coming(self.version):
                raise Unavailable("the version before starts again; its weights are replaced after that")
            return False
        engine = before.engine
        assert isinstance(engine, VersionEngine), "rows have no shared engine"
        why = obstacle(
            await self._parts_of(before),
            await self.files.parts(folder),
            deployment=self.version.deployment,
            users=before.deployments,
            sharing=engine.sharing(before),
            nodes=self._nodes,
        )
        if why:
            raise NotReplaceable(f"{why}: {_BESIDE}")
        if engines.before(self.version) is not before:
            raise Unavailable("the version before starts again; its weights are replaced after that")
        self._enter(VersionPhase.LOADING, f"requests of {before.digest[:19]} finish")
        await engine.replace(before, self, folder, name)
        return True

    async def _parts_of(self, before: VersionSlot) -> Mapping[str, str]:
        """Return the parts of the version before. If its files were deleted, the next attempt fetches them.

        Raises NotReplaceable, and Unavailable that names it.
        """
        files = before.files
        try:
            if files.folder is None:  # it may start again meanwhile, and then uses its own
                files = self._context.files(before.version)
                await files.fetch(self._note_progress)
            assert files.folder is not None, "fetched files have no folder"
            return await files.parts(files.folder)
        except NotReplaceable:
            raise
        except FairwayError as error:
            if isinstance(error, FailedPrecondition):
                before.files.unpin()
            whose = f"{before.digest[:19]}, whose weights are replaced"
            raise Unavailable(f"the files of {whose}, cannot be read: {error.message}") from error
        finally:
            if files is not before.files:
                files.unpin()

    @property
    def _nodes(self) -> int:
        return self._context.settings.nodes_of(self.version.tensor_parallel * self.version.pipeline_parallel)

    def _name_of(self, computation: str) -> str:
        """Return the name of its engine: versions of one executor, model of weights and computation share."""
        executor, *sizes = self.version.engine
        return f"{executor} {sizes} {computation}"

    @property
    def _bytes_per_value(self) -> int:
        return 4 if self._context.settings.dtype == "float32" else 2

    async def _start_batcher(self, folder: Path) -> None:
        executor, tensor_parallel, pipeline_parallel = self.version.engine
        if executor == "null":
            raise FailedPrecondition("a fixed-cost version has no executor null")
        if tensor_parallel * pipeline_parallel > 1:
            raise FailedPrecondition(
                "a fixed-cost version runs on one device: tensor_parallel and pipeline_parallel are for "
                "models that generate"
            )
        if isinstance(self.engine, VersionEngine):
            self.engine = VersionBatcher(self, self._context, self.memory)
        settings = self._context.settings
        weights = await self.files.weight_bytes(folder, self._bytes_per_value)
        grant = self.memory.take(weight_bytes=weights, kv_bytes=self._kv_target)
        self._context.woke()  # other loads may wait for this grant
        on: Executor = "vllm_rows" if executor == "vllm" else "rows"
        config = settings.config(folder, on, memory_bytes=grant.bytes, draft=None)
        await self.engine.start(structs.replace(config, kv_memory_bytes=grant.kv_bytes))

    def _lost_files(self) -> bool:
        """Return whether the files were deleted from the cache; they are then fetched again after a pause."""
        if not self.files.lost():
            return False
        self._break(
            "FILES_DELETED", "its files were deleted from the cache: they are fetched again", failed=False
        )
        return True

    async def _config(self, folder: Path) -> EngineConfig:
        """Return the configuration, with its memory granted."""
        settings = self._context.settings
        memory_bytes = 0
        draft: Path | None = None
        if self.version.executor != "null":  # a null engine allocates nothing
            weights = await self.files.weight_bytes(folder, self._bytes_per_value)
            if settings.speculation == "draft" and self.version.executor != "vllm":
                draft = await asyncio.to_thread(draft_of, folder)
            if draft is not None:
                weights += await self.files.weight_bytes(draft, self._bytes_per_value)
            grant = self.memory.take(weight_bytes=weights + self.adapter_bytes, kv_bytes=self._kv_target)
            # Each adapter's memory is granted again when it is loaded.
            memory_bytes = grant.bytes - self.adapter_bytes
            self._context.woke()  # other loads may wait for this grant
        config = settings.config(
            folder, executor_of(self.version.executor), memory_bytes=memory_bytes, draft=draft
        )
        config = structs.replace(
            config,
            itl_target_s=self.itl_target_s,
            tensor_parallel=self.version.tensor_parallel,
            pipeline_parallel=self.version.pipeline_parallel,
            nodes=self._nodes,
            model=self.version.model,
            version_digest=self.version.version_digest,
        )
        return await self.files.limited(config, folder)

    # --- events of the engine -------------------------------------------------------------------

    def engine_progress(self, event: Progress) -> None:
        """Record how far the engine has loaded."""
        step = _LOADING_STEPS.get(event.phase, "")
        # The cause of a restart stays the message until READY.
        if step and step != self.message and self.phase is VersionPhase.LOADING and not self.restarting:
            self.message = step
            self._context.woke()
        self._note_progress(event.done_ratio)

    def replacing(self) -> None:
        """The weights of the engine are being replaced by the version's."""
        self._enter(VersionPhase.LOADING, "replacing weights")

    def took_over(self, engine: VersionEngine) -> None:
        """The engine of the version before computes with its weights, and takes sequences for it."""
        self.engine = engine
        self.engine_ready()

    def replaced(self) -> None:
        """Its engine serves its successor; nothing is left to stop."""
        self._enter(VersionPhase.STOPPING)
        self.files.unpin()
        self.gone = True

    def engine_loaded(self) -> None:
        """The engine answers a probe before it takes requests, unless the version has done so here."""
        if not self.probed:
            self._enter(VersionPhase.PROBING, "answers a probe")

    def engine_ready(self) -> None:
        """The engine takes sequences from now on."""
        self.probed = True
        self.failures.passed()
        self._enter(VersionPhase.READY)

    def adapter_refused(self, reason: str, message: str, *, needed_bytes: int) -> None:
        """The engine goes on without the version, which waits for so much memory; 0: for none."""
        self._adapter_needs = needed_bytes
        self._break(reason, message, failed=True)

    def engine_ended(
        self, exit_: EngineExit | TookTooMuch | ProbeFailed, ran_s: float, *, share: CrashShare = ALONE
    ) -> None:
        """Record why the engine ended, and what the version has of it. ``ran_s``: how long it was ready."""
        if self.phase is VersionPhase.STOPPING:
            return
        if ran_s > CALM_S:
            self.failures.count = 0
        match exit_:
            case LoadFailed() if self._lost_files():
                pass
            case LoadFailed():
                if share.leads and exit_.reason == OUT_OF_MEMORY:
                    self._context.telemetry.lacked_memory(self.version.deployment, "load")
                self.memory.learn(exit_)
                self._break(exit_.reason.upper(), exit_.message, failed=True)
            case Crashed(_, message):
                self.restarting = True
                self.restarts += share.counts
                if share.leads:
                    self._context.telemetry.restarted(self.version.deployment)
                    if exit_.out_of_memory:
                        self._context.telemetry.lacked_memory(self.version.deployment, "serve")
                self._break("ENGINE_CRASHED", message, failed=False)
            case TookTooMuch(message):
                self._break(DoesNotFit.reason, message, failed=True)
            case ProbeFailed(reason, message):
                self._break(reason, message, failed=True)
            case _:
                self._break("ENGINE_STOPPED", "the engine was stopped", failed=False)

    # --- inside ---------------------------------------------------------------------------------

    def _break(self, reason: str, message: str, *, failed: bool, in_place: bool = False) -> None:
        """Record a failure, and the time of the next attempt if a retry can help."""
        if self.phase is VersionPhase.STOPPING:
            return
        self.failures.add(reason, final=failed, in_place=in_place)
        log.warning("version.broke", digest=self.digest, reason=reason, message=message, failed=failed)
        self._enter(VersionPhase.BROKEN, message)

    def _enter(self, phase: VersionPhase, message: str = "") -> None:
        if phase is not self.phase:
            log.info("version.changed", digest=self.digest, phase=phase, before=self.phase)
            self._time_phase(phase)
        self.phase = phase
        self.message = message
        self.progress_ratio = 1.0 if phase in WITH_ENGINE else 0.0
        self._context.woke()

    def _time_phase(self, phase: VersionPhase) -> None:
        """Record the duration of a fetch or a load that succeeded."""
        now_s = self._context.clock.monotonic_s()
        part = {
            (VersionPhase.FETCHING, VersionPhase.FETCHED): "fetch",
            (VersionPhase.LOADING, VersionPhase.READY): "engine",
            (VersionPhase.LOADING, VersionPhase.PROBING): "engine",
            (VersionPhase.PROBING, VersionPhase.READY): "probe",
        }.get((self.phase, phase))
        if part is not None:
            self._context.telemetry.loaded(self.version.deployment, part, now_s - self._phase_s)
        self._phase_s = now_s

    def _note_progress(self, done_ratio: float) -> None:
        if done_ratio >= 1.0 or abs(done_ratio - self.progress_ratio) >= PROGRESS_STEP:
            self.progress_ratio = done_ratio
            self._context.woke()
