"""One engine of this worker: its process, its sequences, its memory, and the versions that it serves.

Versions with the same computation (``core.rollouts.computation``) share an engine. The first that loads
starts it, the others join; each leaves by itself, and the last ends it. An adapter has the computation of its
base: it is loaded into the engine before its version is served, and dropped when that leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from services.core.errors import DoesNotFit, Unavailable
from services.core.records import AssignedVersion
from services.core.rollouts.routes import Withdrawal
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor
from services.worker.detokenizer import Vocabulary
from services.worker.engine_protocol import (
    AdapterLoaded,
    AdapterRefused,
    DropAdapter,
    EngineConfig,
    EngineHeartbeat,
    LoadAdapter,
    Pace,
    Progress,
    Ready,
    Resize,
    Resized,
    Stepped,
    WeightsRefused,
    WeightsReplaced,
)
from services.worker.memory_ledger import MemoryLedger
from services.worker.policy.lifecycle import VersionPhase
from services.worker.policy.probes import EngineSpeed, plan_probe
from services.worker.slots.engine_process import (
    Crashed,
    EngineEvents,
    EngineExit,
    EngineLauncher,
    RunningEngine,
    Stopped,
)
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.replacement import EngineEnded, Replacement, ReplacementFailed
from services.worker.slots.version_files import LocalFiles
from services.worker.slots.version_memory import VersionMemory
from services.worker.slots.version_probe import ProbeContext, ProbeFailed, PromptProbe
from services.worker.streams.charges import UsageAccounting
from services.worker.streams.host import SequenceHost
from services.worker.streams.kv import PoolLimits
from services.worker.streams.sequences import SequenceTable, ServedVersion
from services.worker.telemetry import WorkerTelemetry

if TYPE_CHECKING:
    from services.worker.slots.version_slot import VersionSlot

log = structlog.get_logger()

RESIZABLE: Final = (VersionPhase.READY, VersionPhase.RETIRING)
WITH_ENGINE: Final = (*RESIZABLE, VersionPhase.DRAINING)


class SharedEngines:
    """Single writer: the slots. An engine is here from its first claim until its last owner has left."""

    def __init__(self) -> None:
        self._engines: dict[str, VersionEngine] = {}

    def claim(self, computation: str, engine: VersionEngine) -> VersionEngine:
        """Return the engine that computes this: the given one where there is none. Empty: it shares with
        none."""
        return self._engines.setdefault(computation, engine) if computation else engine

    def drop(self, engine: VersionEngine) -> list[str]:
        """Let no other version join an engine; return its names. Idempotent."""
        names = [key for key, one in self._engines.items() if one is engine]
        for computation in names:
            del self._engines[computation]
        return names

    def has(self, computation: str) -> bool:
        """Whether an engine computes this."""
        return computation in self._engines

    def before(self, version: AssignedVersion) -> VersionSlot | None:
        """Return the version of the same deployment that a version replaces here; None without one.

        One that serves comes before one that retires.
        """
        found = [slot for engine in self._engines.values() for slot in engine.owners_before(version)]
        return min(found, key=lambda slot: RESIZABLE.index(slot.phase), default=None)

    def is_coming(self, version: AssignedVersion) -> bool:
        """Whether a version that this one replaces is about to have its engine again."""
        return any(engine.is_coming(version) for engine in self._engines.values())


@dataclass(frozen=True, slots=True)
class SlotContext:
    """What the slots of a worker share."""

    settings: EngineSettings  # settings of all engines
    host: SequenceHost  # admission and sequence tables
    ledger: MemoryLedger  # grants of the device's memory
    files: Callable[[AssignedVersion], LocalFiles]  # the files of a version
    launch: EngineLauncher  # makes the runs of engines
    clock: Clock  # time source
    supervisor: Supervisor  # owner of the slots' tasks
    # Called when a slot changed.
    woke: Callable[[], None]
    telemetry: WorkerTelemetry  # metrics of the worker
    engines: SharedEngines = field(default_factory=SharedEngines)  # engines that serve several slots


@dataclass(frozen=True, slots=True)
class TookTooMuch:
    """The engine took more memory than is free, and was stopped right after it loaded."""

    message: str


@dataclass(frozen=True, slots=True)
class CrashShare:
    """How an engine's end counts for one version.

    ``counts``: it counts as the version's crash, unless a sequence of another version was in the step.
    ``leads``: this version counts the process in the metrics, so that it is counted once.
    """

    counts: bool = True
    leads: bool = True


ALONE: Final = CrashShare()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A process that takes sequences. Its probe used the first ``handles``."""

    event: Ready
    process: RunningEngine
    handles: int


@dataclass(slots=True)
class _Adapter:
    """An adapter that the process was sent, and the memory that was granted for it."""

    number: int
    size_bytes: int
    is_loaded: bool = False


class VersionEngine:
    """There is at most one engine process at a time. Its owners are notified when it is ready and when it
    ended.

    An owner is a slot of a version. The memory is granted in the name of one of them.
    """

    def __init__(self, context: SlotContext, memory: VersionMemory) -> None:
        self._owners: dict[str, VersionSlot] = {}  # owners by version, in order of their arrival
        self._context = context
        self.memory = memory
        self._starting = False  # an owner prepares a process
        self._process: RunningEngine | None = None
        self._vocabulary: Vocabulary | None = None  # the loading engine's vocabulary
        self._max_sequences = 0
        self._paced_s = 0.0  # the ITL target that the engine has
        self._ready_s = 0.0
        # Why it was stopped right after it loaded.
        self._unfit: TookTooMuch | ProbeFailed | None = None
        self._probe: PromptProbe | None = None
        self.table: SequenceTable | None = None
        self._loaded: _Loaded | None = None  # what the engine reported, once it takes sequences
        self._adapters: dict[str, _Adapter] = {}  # adapters of the process by version
        self._numbers = count(1)  # numbers of adapters: none is used again
        self._replacement: Replacement | None = None  # replacement of its weights that is under way

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """Time since the last message of the engine's step loop; 0 while no engine should run."""
        runs = any(owner.phase in WITH_ENGINE for owner in self._owners.values())
        return self._process.silent_s if runs and self._process is not None else 0.0

    def enter(self, owner: VersionSlot) -> bool:
        """Make the slot an owner, which is served at once where the engine is ready.

        Return whether the owner is to start a process: none runs, and no other owner starts one.
        """
        self._owners.setdefault(owner.version.version_digest, owner)
        if self._loaded is not None:
            self._serve_loading(self._loaded)
            return False
        if self._starting or self._process is not None:
            return False
        self._starting = True
        return True

    @contextlib.contextmanager
    def starts(self, starter: VersionSlot) -> Iterator[None]:
        """Enclose the start by the owner that is to do it. Without a process at its end the others, which
        wait for it, try for themselves."""
        try:
            yield
        finally:
            self._starting = False
            if self._process is None:
                self.memory.release()
                for owner in self._loading():
                    if owner is not starter:
                        owner.engine_ended(Stopped(), 0.0)

    async def start(self, config: EngineConfig, vocabulary: Vocabulary) -> None:
        """Start a process; the owners are notified of the outcome. Raises FailedPrecondition."""
        self._vocabulary = vocabulary
        self._max_sequences, self._paced_s = config.max_sequences, config.itl_target_s
        events = EngineEvents(
            on_progress=self._on_progress,
            on_ready=self._on_ready,
            on_stepped=self._on_stepped,
            on_heartbeat=self._on_heartbeat,
            on_resized=self._on_resized,
            on_adapter=self._on_adapter,
            on_weights=self._on_weights,
            on_exit=self._on_exit,
        )
        process = self._context.launch(config, events)
        self._process = process
        try:
            await process.start()
        except BaseException:
            self._process = None
            raise

    def resize(self, kv_blocks: int) -> None:
        """Change the size of the KV pool. Admission stops at a smaller size at once."""
        assert self._process is not None, "no engine to resize"
        assert self.table is not None, "no pool to resize"
        if kv_blocks < self.table.limits.kv_blocks_total:
            self.table.resize(kv_blocks)
        self._process.send(Resize(kv_blocks))

    def pace(self) -> None:
        """Give a loaded engine the tightest ITL target of its owners."""
        if self.table is not None:
            promised = [owner.promised_itl_s for owner in self._owners.values() if owner.promised_itl_s]
            self.table.itl_target_s = min(promised, default=0.0)
        targets = [owner.itl_target_s for owner in self._owners.values() if owner.itl_target_s]
        target_s, process = min(targets, default=0.0), self._process
        loaded = self.table is not None or self._probe is not None
        if process is not None and loaded and target_s != self._paced_s and process.send(Pace(target_s)):
            self._paced_s = target_s

    async def leave(self, owner: VersionSlot) -> None:
        """Return once the version runs here no more. The last owner ends the process and frees the memory.

        The sequences of the version end with ENGINE_LOST, those of others go on.
        """
        digest = owner.version.version_digest
        self._owners.pop(digest, None)
        if self._owners:
            if self._replacement is not None:  # its successor has its place in the table soon
                return
            if self.table is not None and digest in self.table.versions:
                self._context.host.leave(self.table, digest)
            self._drop_adapter(digest)
            heir = next(iter(self._owners.values())).version
            self.memory.pass_on(digest, heir.version_digest, heir.deployment)
            return
        self._context.engines.drop(self)
        if self._probe is not None:
            self._probe.cancel()
        if self._process is not None:
            await self._process.stop()
        self.memory.release()

    def _loading(self) -> list[VersionSlot]:
        coming = (VersionPhase.LOADING, VersionPhase.PROBING)
        return [owner for owner in self._owners.values() if owner.phase in coming]

    # --- weights that are replaced --------------------------------------------------------------

    def owners_before(self, version: AssignedVersion) -> list[VersionSlot]:
        """Return the owners that are served and that a version of their deployment may replace."""
        if self.table is None or self._replacement is not None:
            return []
        return [one for one in self._of_deployment(version) if one.phase in RESIZABLE]

    def is_coming(self, version: AssignedVersion) -> bool:
        """Whether an owner that the version replaces starts again, or is being replaced itself."""
        starts = (VersionPhase.LOADING, VersionPhase.PROBING, VersionPhase.BROKEN)
        return self._replacement is not None or any(
            one.restarting and one.phase in starts for one in self._of_deployment(version)
        )

    def _of_deployment(self, version: AssignedVersion) -> list[VersionSlot]:
        return [
            one
            for digest, one in self._owners.items()
            if digest != version.version_digest
            and one.version.deployment == version.deployment
            and one.version.engine == version.engine
        ]

    def sharing(self, owner: VersionSlot) -> list[str]:
        """Return the other versions that the engine serves."""
        return [digest for digest in self._owners if digest != owner.digest]

    async def replace(self, before: VersionSlot, successor: VersionSlot, folder: Path, name: str) -> None:
        """Serve the successor in the place of the version before, with the weights in the folder.

        ``name``: that of the engine's computation from then on. Raises ReplacementFailed; Unavailable where
        the engine ended before anything was tried. The version before then serves, or starts again.
        """
        context, table, process, loaded = self._context, self.table, self._process, self._loaded
        assert table is not None, "only an engine that serves has weights to replace"
        assert process is not None, "only an engine that serves has weights to replace"
        assert loaded is not None, "only an engine that serves has weights to replace"
        context.host.drop_replaced(table)
        names = context.engines.drop(self)
        replacement = Replacement(successor, before, table, context, process.send)
        self._replacement = replacement
        self._owners[successor.digest] = successor
        try:
            await replacement.drain()
            successor.replacing()
            await replacement.exchange(folder)
            if not successor.probed:
                successor.engine_loaded()
                self._begin_probe(successor, loaded.event, process, replacement)
                await replacement.probed()
        except (ReplacementFailed, Unavailable, asyncio.CancelledError):
            self._give_up(replacement, names)
            raise
        self._cut_over(replacement, table, self._served(successor, loaded.event), name)

    def _begin_probe(
        self, successor: VersionSlot, event: Ready, process: RunningEngine, replacement: Replacement
    ) -> None:
        def ended(failed: ProbeFailed | None) -> None:
            self._probe = None
            replacement.resolve(failed)

        speed = EngineSpeed(self._context.settings.token_budget, event.full_step_s)
        plan = plan_probe(successor.version.probes, event, speed)
        context = ProbeContext(process.send, ended, self._context.clock, self._context.supervisor)
        self._probe = PromptProbe(plan, context, vocab_size=event.vocab_size)
        self._probe.begin()

    def _give_up(self, replacement: Replacement, names: list[str]) -> None:
        """Serve the version before again; if weights may have changed, in a new process."""
        before, context = replacement.before, self._context
        self._replacement = None
        self._owners.pop(replacement.successor.digest, None)
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        context.host.note_replacing(before.digest, False)
        for name in names:
            context.engines.claim(name, self)
        if self._process is not None and replacement.sent:
            self._process.kill("the replacement of its weights was given up")
        if not self._owners:  # the version before has left meanwhile
            context.supervisor.spawn(f"leave-{before.digest[:19]}", self.leave(before))

    def _cut_over(
        self, replacement: Replacement, table: SequenceTable, served: ServedVersion, name: str
    ) -> None:
        """Serve the successor from now on: the version before leaves in the same instant."""
        before, successor, context = replacement.before, replacement.successor, self._context
        self._replacement = None
        in_place = successor.in_place
        revision = 0 if in_place is None else in_place.route_revision
        withdrawal = Withdrawal(before.digest, revision, successor.digest)
        until_s = context.clock.monotonic_s() + context.settings.retire_s
        table.reset_silence()
        context.host.replace(table, withdrawal, served, until_s=until_s)
        self._owners.pop(before.digest, None)
        self.memory.pass_on(self.memory.owner, successor.digest, successor.version.deployment)
        context.engines.claim(name, self)
        self._ready_s = context.clock.monotonic_s()
        before.replaced()
        successor.took_over(self)
        self.pace()

    def _on_weights(self, event: WeightsReplaced | WeightsRefused) -> None:
        if self._replacement is not None:
            self._replacement.resolve(event)

    # --- events of the process ------------------------------------------------------------------

    def _on_progress(self, event: Progress) -> None:
        if self.table is not None:
            self.table.reset_silence()
        for owner in self._loading():
            owner.engine_progress(event)

    def _on_ready(self, event: Ready) -> None:
        process, vocabulary, context = self._process, self._vocabulary, self._context
        assert process is not None, "ready without an engine"
        assert vocabulary is not None, "ready without a vocabulary"
        owners = self._loading()
        if not owners:  # it is being removed
            return
        if not self._has_memory(event, process):
            return
        vocabulary.cover(event.vocab_size)
        for owner in owners:
            owner.engine_loaded()
        if any(owner.probed for owner in self._owners.values()):  # what it computes was probed here
            self._admit(event, process, 0)
            return
        speed = EngineSpeed(context.settings.token_budget, event.full_step_s)
        plan = plan_probe(owners[0].version.probes, event, speed)
        ended = partial(self._on_probed, event, process, plan.prompts)
        probe = ProbeContext(process.send, ended, context.clock, context.supervisor)
        self._probe = PromptProbe(plan, probe, vocab_size=event.vocab_size)
        self._probe.begin()

    def _on_probed(
        self, event: Ready, process: RunningEngine, prompts: int, failed: ProbeFailed | None
    ) -> None:
        self._probe = None
        if not self._loading():  # it is being removed
            return
        if failed is None:
            self._admit(event, process, prompts)
        else:
            self._refuse(failed, process)

    def _refuse(self, why: TookTooMuch | ProbeFailed, process: RunningEngine) -> None:
        """Stop the engine; its owners are notified of ``why`` when it has ended."""
        self._unfit = why
        self._context.supervisor.spawn(f"stop-{self.memory.owner[:19]}", process.stop())

    def _admit(self, event: Ready, process: RunningEngine, handles: int) -> None:
        """Take sequences from now on. The probe used the first ``handles``."""
        self._loaded = _Loaded(event, process, handles)
        self._ready_s = self._context.clock.monotonic_s()
        self._serve_loading(self._loaded)
        self.pace()  # the target may have changed while it loaded

    def _serve_loading(self, loaded: _Loaded) -> None:
        """Serve the owners that wait for the engine; an adapter once it is loaded, which begins here."""
        for owner in self._loading():
            if owner.adapter_bytes and not self._has_adapter(owner, loaded.process):
                continue
            if self.table is None:
                self.table = self._table_of(owner, loaded)
                self._context.host.add(self.table)
            else:
                self._context.host.join(self.table, self._served(owner, loaded.event))
            versions = len(self.table.versions)
            log.info("engine.joined", digest=owner.version.version_digest, versions=versions)
            owner.engine_ready()

    def _table_of(self, first: VersionSlot, loaded: _Loaded) -> SequenceTable:
        vocabulary, context, event = self._vocabulary, self._context, loaded.event
        process = loaded.process
        assert vocabulary is not None, "ready without a vocabulary"
        return SequenceTable(
            self._served(first, event),
            limits=PoolLimits(
                event.kv_blocks_total,
                event.block_size,
                event.max_model_len,
                self._max_sequences,
                event.full_step_s,
                event.capabilities,
            ),
            vocabulary=vocabulary,
            send=process.send,
            members=lambda: process.members,
            clock=context.clock,
            charges=UsageAccounting(context.host.tally, context.host.device),
            recorder=context.telemetry.recorder.engine(
                first.version.version_digest, first.version.deployment, kv_blocks_total=event.kv_blocks_total
            ),
            changed=context.host.note_change,
            slow_reader_s=context.settings.slow_reader_s,
            used_handles=loaded.handles,
        )

    def _served(self, owner: VersionSlot, engine: Ready) -> ServedVersion:
        version = owner.version
        telemetry = self._context.telemetry.version(version.deployment, engine.flops_per_token)
        adapter = self._adapters.get(version.version_digest)
        number = 0 if adapter is None else adapter.number
        return ServedVersion(version.version_digest, version.deployment, telemetry, number)

    def _has_adapter(self, owner: VersionSlot, process: RunningEngine) -> bool:
        """Whether the owner's adapter is loaded; if it was not requested, request it with its memory."""
        digest, folder = owner.version.version_digest, owner.files.folder
        if (adapter := self._adapters.get(digest)) is not None:
            return adapter.is_loaded
        assert folder is not None, "an adapter without files"
        others = sum(each.size_bytes for each in self._adapters.values())
        try:
            self.memory.adapt(others + owner.adapter_bytes)
        except DoesNotFit as error:
            message = f"its {owner.adapter_bytes} bytes do not fit: {error.message}"
            needed = owner.adapter_bytes if len(self._owners) > 1 else self.memory.needed_bytes
            self._refuse_adapter(owner, error.reason, message, needed_bytes=needed)
            return False
        number = next(self._numbers)
        self._adapters[digest] = _Adapter(number, owner.adapter_bytes)
        process.send(LoadAdapter(number, str(folder)))
        return False

    def _on_adapter(self, event: AdapterLoaded | AdapterRefused) -> None:
        found = [digest for digest, each in self._adapters.items() if each.number == event.adapter]
        if not found or self._loaded is None:  # its version has left
            return
        if isinstance(event, AdapterLoaded):
            self._adapters[found[0]].is_loaded = True
        else:
            self._drop_adapter(found[0])
            self._refuse_adapter(self._owners[found[0]], event.reason.upper(), event.message)
        self._serve_loading(self._loaded)

    def _refuse_adapter(
        self, owner: VersionSlot, reason: str, message: str, *, needed_bytes: int = 0
    ) -> None:
        """End one version; the engine goes on if another one is here."""
        owner.adapter_refused(reason, message, needed_bytes=needed_bytes)
        self._context.supervisor.spawn(f"refuse-{owner.digest[:19]}", self.leave(owner))

    def _drop_adapter(self, digest: str) -> None:
        """Free the version's adapter, if it has one here. Its sequences were cancelled."""
        if (adapter := self._adapters.pop(digest, None)) is not None and self._process is not None:
            self._process.send(DropAdapter(adapter.number))
            self.memory.adapt(sum(each.size_bytes for each in self._adapters.values()))

    def _has_memory(self, event: Ready, process: RunningEngine) -> bool:
        """Record the memory that the engine took; stop an engine that took more than is free."""
        if self.memory.granted is None:  # a null engine allocates nothing
            return True
        try:
            self.memory.settle(event)
        except DoesNotFit as error:
            self._refuse(TookTooMuch(error.message), process)
            return False
        return True

    def _on_stepped(self, event: Stepped) -> None:
        if self._probe is not None:
            self._probe.on_stepped(event)
        elif self.table is not None:
            self.table.on_stepped(event)
            if any(self._is_drained(owner) for owner in self._owners.values()):
                self._context.woke()

    def _is_drained(self, owner: VersionSlot) -> bool:
        if owner.phase is not VersionPhase.DRAINING or self.table is None:
            return False
        return not self.table.running_of(owner.version.version_digest)

    def _on_heartbeat(self, event: EngineHeartbeat) -> None:
        if self.table is not None:
            self.table.on_heartbeat(event)

    def _on_resized(self, event: Resized) -> None:
        if self.table is not None:
            self.table.on_resized(event)
            self.memory.resized(event.kv_blocks_total)
            self._context.woke()  # other versions may wait for the freed memory

    def _on_exit(self, exit_: EngineExit) -> None:
        if (replacement := self._replacement) is not None:
            failed = None if self._probe is None else self._probe.failure(exit_)
            self._probe = None
            self._owners.pop(replacement.successor.digest, None)
            replacement.resolve(EngineEnded() if failed is None else failed)
        self._process = self._loaded = None
        self._adapters.clear()
        table, self.table = self.table, None
        ran_s = 0.0
        crashed_in: frozenset[str] = frozenset()  # the versions of the step that ran
        if table is not None:
            crashed_in = table.versions_of(exit_.members) if isinstance(exit_, Crashed) else crashed_in
            if isinstance(exit_, Crashed):
                self._context.host.remove(table, exit_.cause, exit_.members)
            else:
                self._context.host.remove(table)
            ran_s = self._context.clock.monotonic_s() - self._ready_s
        unfit, self._unfit = self._unfit, None
        if self._probe is not None:
            unfit = self._probe.failure(exit_)
            self._probe = None
        ended = exit_ if unfit is None else unfit
        self.memory.release()
        ran = (VersionPhase.LOADING, VersionPhase.PROBING, *WITH_ENGINE)
        owners = [one for one in self._owners.values() if one.phase in ran]
        for owner in owners:
            counts = crashed_in <= {owner.version.version_digest}
            owner.engine_ended(ended, ran_s, share=CrashShare(counts, leads=owner is owners[0]))
