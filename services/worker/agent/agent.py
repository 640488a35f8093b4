"""The worker agent: holds the worker's lease, runs its assigned versions and reports their state.

One level-triggered reconcile loop reads the assignment and the slots, gets actions from the pure plan and
starts them. Long work runs in the slots' own tasks, which wake the loop when they finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from fairway.task_group import TaskGroup
from services.core.fleet import ReportSnapshot, TenantCounter
from services.core.records import (
    ASSIGNMENTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    LoadedVersion,
    VersionState,
    Worker,
    dump,
)
from services.core.usage import Residence
from services.ports.clock import Clock
from services.ports.store import Entry, Store
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.lease import LeaseHolder, Registration
from services.runtime.process.machine import resident_bytes
from services.runtime.supervisor import Supervisor
from services.worker.agent.prefetcher import Prefetcher
from services.worker.agent.report import WorkerIdentity, record_of, take_snapshot
from services.worker.memory_ledger import MemoryLedger
from services.worker.policy.lifecycle import (
    Action,
    CancelRemoval,
    Discard,
    DrainVersion,
    Fetch,
    LoadVersion,
    RetireVersion,
    Slot,
    VersionPhase,
    plan,
    users_of,
    wanted,
    withdrawals,
)
from services.worker.policy.memory_shares import MemoryShare, divided, kv_targets
from services.worker.slots.engine_process import EngineLauncher
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_engine import RESIZABLE, WITH_ENGINE, SlotContext
from services.worker.slots.version_files import LocalFiles
from services.worker.slots.version_slot import VersionSlot
from services.worker.step_recorder import StepRecorder
from services.worker.streams.host import SequenceHost
from services.worker.streams.kv import PoolStats
from services.worker.telemetry import EngineLevels, WorkerTelemetry

log = structlog.get_logger()

HAND_OVER_S: Final = 5.0  # time before the end of a node at which its sequences leave
SWEEP_S: Final = 0.05
IDLE_SWEEP_S: Final = 0.5  # interval of sweeps while no sequence runs
PAUSE_S: Final = 1.0  # gap between two sweeps that shows that this process or its machine was suspended
RECONCILE_S: Final = 1.0  # longest wait between two passes; a change wakes the loop at once
PUBLISH_S: Final = 0.1  # changes within this time become one write


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """A published version with its engine's current numbers."""

    record: LoadedVersion  # the version as published
    kv_blocks_reserved: int = 0  # blocks reserved for sequences with a slot
    kv_blocks_used: int = 0  # allocated in the engine
    # Sequences that run in the engine.
    running: int = 0
    # Sequences that wait in the engine.
    waiting: int = 0
    # Engine steps so far.
    steps: int = 0
    # 0: no engine process.
    engine_pid: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker_id: str
    incarnation: int
    draining: bool
    versions: tuple[VersionStatus, ...]


class WorkerAgent:
    """Owns the worker's slots. ``run`` it until cancelled, then ``close`` it."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        settings: EngineSettings,
        host: SequenceHost,
        store: Store,
        files: Callable[[AssignedVersion], LocalFiles],
        launch: EngineLauncher,
        clock: Clock,
        supervisor: Supervisor,
        telemetry: WorkerTelemetry | None = None,
        rng: random.Random | None = None,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """``sweep_s``: between two checks of deadlines while sequences run."""
        self._identity = identity
        self._host = host
        self._clock = clock
        self._supervisor = supervisor
        self._ledger = MemoryLedger(identity.memory_bytes)
        self._slots: dict[str, VersionSlot] = {}
        self._assigned = Assignment(identity.worker_id)
        self._closing = False
        self._woken = asyncio.Event()  # wakes the reconcile loop
        self._changed = asyncio.Event()  # wakes the publish loop
        self._context = SlotContext(
            settings,
            host,
            self._ledger,
            files,
            launch,
            clock,
            supervisor,
            self._wake,
            telemetry if telemetry is not None else WorkerTelemetry(clock=clock),
        )
        self._prefetcher = Prefetcher(files, clock, self._changed.set)
        self._sweep_s = sweep_s
        self._key = ASSIGNMENTS + identity.worker_id
        self._assignments: Informer[Assignment] = Informer(
            store, self._key, _assignment, clock, on_change=lambda _key, _record: self._wake(), rng=rng
        )
        self._registration = Registration(
            store,
            WORKERS + identity.worker_id,
            dump(self._record()),
            clock,
            ttl_s=identity.lease_ttl_s,
            rng=rng,
            created=self._wake,
        )

    async def run(self) -> None:
        """Register, reconcile and sweep until cancelled; then release the registration."""
        async with TaskGroup() as group:
            group.create_task(self._assignments.run())
            group.create_task(self._registration.run())
            group.create_task(self._reconcile_forever())
            group.create_task(self._publish_forever())
            group.create_task(self._prefetcher.run())
            group.create_task(self._sweep_forever())

    async def close(self) -> None:
        """Return once every engine process has ended. Sequences that still run end with ENGINE_LOST."""
        self._closing = True
        outcomes = await asyncio.gather(
            *(slot.stop() for slot in self._slots.values()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                log.error("version.stop_failed", exc_info=outcome)
        self._slots.clear()
        self._host.close()
        self.check_integrity()

    async def wait_registered(self, timeout_s: float) -> int:
        """Return the incarnation once the worker is registered. Raises StoreUnavailable."""
        incarnation = await self._registration.wait_registered(timeout_s)
        self._follow_incarnation()
        return incarnation

    async def drain(self, timeout_s: float) -> int:
        """Reject new sequences from now on; return how many still run after ``timeout_s``."""
        self._host.draining = True
        self._host.note_change()
        self._wake()
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self._host.running and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(SWEEP_S)
        log.info("worker.drained", remaining=self._host.running)
        return self._host.running

    def status(self) -> WorkerStatus:
        """Return the loaded versions and their current numbers."""
        return WorkerStatus(
            worker_id=self._identity.worker_id,
            incarnation=self._host.grants.incarnation,
            draining=self._host.draining,
            versions=tuple(self._status_of(record) for record in self._records()),
        )

    @property
    def recorder(self) -> StepRecorder:
        """The flight recorder of its engines."""
        return self._context.telemetry.recorder

    def levels(self) -> tuple[EngineLevels, ...]:
        """Return the current levels of each version, for the metrics."""
        return tuple(self._levels_of(slot) for slot in self._slots.values())

    def residents(self) -> tuple[Residence, ...]:
        """Return the assigned deployments that have memory; those of one engine have equal parts of its."""
        loaded = [
            (one, slot.memory)
            for one in self._assigned.versions
            if (slot := self._slots.get(one.version_digest)) is not None and slot.phase in WITH_ENGINE
        ]
        sharing = Counter(memory.owner for _, memory in loaded)
        total = self._ledger.total_bytes
        return tuple(
            Residence(one.deployment, one.owner, grant.bytes / total / sharing[memory.owner])
            for one, memory in loaded
            if (grant := memory.granted) is not None and total
        )

    def moving(self) -> dict[str, bool]:
        """Return, by digest of each loaded version, whether its engine's step loop is not stalled."""
        return {
            digest: not slot.table.stalled for digest, slot in self._slots.items() if slot.table is not None
        }

    def problem(self) -> str:
        """Return why this worker cannot serve; empty while its engines run and it admits requests."""
        if self._host.draining:
            return "this worker takes no new requests"
        silent = [
            f"{digest[:19]} for {self._slots[digest].engine.silent_s:.1f} s"
            for digest, moves in self.moving().items()
            if not moves
        ]
        return f"the step loop is silent: {', '.join(silent)}" if silent else ""

    @property
    def views(self) -> tuple[Informer[Assignment], LeaseHolder]:
        """The assignment informer and the lease of the registration."""
        return self._assignments, self._registration.lease

    def take_snapshot(self, whole: bool) -> ReportSnapshot:
        """Return the report for the scheduler; the caller owns the deltas in it from now on.

        ``whole``: it is the first report of a stream.
        """
        return take_snapshot(self._host, self._identity, whole=whole)

    def on_leader(self, epoch: int) -> None:
        """Reject grants of leaders with a lower epoch from now on."""
        self._host.on_leader(epoch)

    def on_counters(self, counters: Sequence[TenantCounter]) -> None:
        """Store the leader's tenant counters, for the report to the next leader."""
        self._host.counters.store(counters)

    def check_integrity(self) -> None:
        """Raise AssertionError when the memory ledger or the KV reservations are inconsistent."""
        self._ledger.check_integrity()
        self._host.check_integrity()

    # --- loops ----------------------------------------------------------------------------------

    async def _reconcile_forever(self) -> None:
        while True:
            self._woken.clear()
            if self._assignments.synced and not self._closing:  # the assignment is unknown before the sync
                self._reconcile()
            self._changed.set()  # what a pass changed is published at once
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECONCILE_S):
                    await self._woken.wait()

    def _reconcile(self) -> None:
        entry = self._assignments.view.get(self._key)
        self._assigned = Assignment(self._identity.worker_id) if entry is None else entry.record
        for digest in [digest for digest, slot in self._slots.items() if slot.gone]:
            del self._slots[digest]
        self._host.assign_group(self._assigned.node_group)
        self._prefetcher.want(self._assigned.prefetch, self._assigned.pinned)
        self._host.withdrawals = withdrawals(self._assigned.versions)
        # Sequences leave a node that ends while it still runs: their gateways resume them at once.
        left_s = self._left_s()
        desired = wanted(self._assigned.versions) if left_s > 0.0 else {}
        for digest, version in desired.items():
            if (slot := self._slots.get(digest)) is not None:
                slot.pace(version.itl_target_s)
                slot.in_place = version.in_place
                slot.has_before = any(
                    one.phase in RESIZABLE and one.version.deployment == version.deployment
                    for one in self._slots.values()
                    if one is not slot
                )
                slot.deployments = users_of(self._assigned.versions, digest)
        observed = {digest: slot.observed(drain_s=left_s) for digest, slot in self._slots.items()}
        self._share_memory(desired, observed)
        actions = plan(
            desired,
            list(observed.values()),
            self._clock.monotonic_s(),
            free_bytes=self._ledger.free_bytes,
            releasing=any(slot.memory.releases_memory for slot in self._slots.values()),
            retire_s=self._context.settings.retire_s,
            unix_s=self._clock.unix_s(),
        )
        for action in actions:
            log.info("version.planned", action=type(action).__name__, digest=_digest(action))
            match action:
                case Fetch(version):
                    slot = self._slots.setdefault(version.version_digest, VersionSlot(version, self._context))
                    slot.fetch()
                case LoadVersion(digest):
                    self._slots[digest].load()
                case RetireVersion(digest):
                    self._slots[digest].retire()
                case DrainVersion(digest):
                    self._slots[digest].drain()
                case CancelRemoval(digest):
                    self._slots[digest].undrain()
                case Discard(digest):
                    self._slots[digest].discard()

    def _left_s(self) -> float:
        """Return the time until sequences are handed over because the node ends."""
        ends_unix_s = self._assigned.ends_unix_s
        return ends_unix_s - HAND_OVER_S - self._clock.unix_s() if ends_unix_s else math.inf

    def _share_memory(self, desired: Mapping[str, AssignedVersion], observed: Mapping[str, Slot]) -> None:
        """Move every KV pool towards its share of the device."""
        together: dict[str, list[VersionSlot]] = {}  # the versions of one engine, by its memory's owner
        for slot in self._slots.values():
            together.setdefault(slot.memory.owner, []).append(slot)
        shares = {
            owner: share
            for owner, slots in together.items()
            if (share := _share(slots, desired, observed)) is not None
        }
        staying = {
            self._slots[digest].memory.owner
            for digest, version in desired.items()
            if digest in self._slots and not version.retiring
        }
        targets = divided(kv_targets(self._ledger.total_bytes, list(shares.values())), list(shares.values()))
        later = kv_targets(
            self._ledger.total_bytes, [share for owner, share in shares.items() if owner in staying]
        )
        for owner, slots in together.items():
            for slot in slots:
                slot.share_memory(targets.get(owner), comes=owner in later)

    async def _publish_forever(self) -> None:
        """Write the public record when it changed, and follow the registration's incarnation.

        Runs on each change and after each pass of the reconciler.
        """
        published = self._record()
        while True:
            self._follow_incarnation()
            record = self._record()
            if record != published:
                self._registration.update(dump(record))
                published = record
                await self._clock.sleep(PUBLISH_S)
            await self._changed.wait()
            self._changed.clear()

    async def _sweep_forever(self) -> None:
        swept_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(self._sweep_s if self._host.running else IDLE_SWEEP_S)
            now_s = self._clock.monotonic_s()
            if now_s - swept_s > PAUSE_S:
                self._host.reset_silence()
            swept_s = now_s
            self._host.sweep(now_s)

    # --- inside ---------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken.set()
        self._changed.set()

    def _follow_incarnation(self) -> None:
        """Adopt a new registration's incarnation. While etcd is unreachable the last one stays valid, so an
        etcd outage does not stop the worker from serving."""
        incarnation = self._registration.incarnation
        if incarnation is not None and incarnation != self._host.grants.incarnation:
            self._host.grants.registered(incarnation)
            self._host.note_change()
            log.info("worker.registered", worker_id=self._identity.worker_id, incarnation=incarnation)

    def _record(self) -> Worker:
        identity = self._identity
        return Worker(
            worker_id=identity.worker_id,
            address=identity.address,
            zone=identity.zone,
            labels=identity.labels,
            slice=identity.slice,
            device=identity.device,
            memory_bytes=identity.memory_bytes,
            draining=self._host.draining,
            versions=self._records(),
            memory_free_bytes=self._ledger.free_bytes,
            devices=identity.devices,
            cost_per_hour=identity.cost_per_hour,
            prefetched=self._prefetcher.present,
        )

    def _records(self) -> tuple[LoadedVersion, ...]:
        """Return one record per assigned deployment, and one per version that is being removed."""
        records: list[LoadedVersion] = []
        for assigned in self._assigned.versions:
            slot = self._slots.get(assigned.version_digest)
            if slot is None:
                continue
            least = self._host.least_route_revision(assigned.version_digest)
            record = record_of(slot, assigned.deployment, least_route_revision=least)
            if assigned.engine != slot.version.engine and slot.phase is not VersionPhase.STOPPING:
                record = LoadedVersion(
                    assigned.deployment,
                    assigned.model,
                    assigned.version_digest,
                    VersionState.FAILED,
                    "another deployment runs this version with executor {}, {} x {} devices".format(
                        *slot.version.engine
                    ),
                    reason="EXECUTOR_CONFLICT",
                )
            records.append(record)
        assigned_digests = {assigned.version_digest for assigned in self._assigned.versions}
        records += [
            record_of(slot, slot.version.deployment)
            for digest, slot in self._slots.items()
            if digest not in assigned_digests
        ]
        return tuple(records)

    def _levels_of(self, slot: VersionSlot) -> EngineLevels:
        # What an engine serves several versions with is counted once.
        table = slot.table if slot.leads else None
        rows, grant = slot.rows, self._ledger.held_by(slot.digest)
        stats = PoolStats() if table is None else table.stats
        return EngineLevels(
            model=slot.version.deployment,
            state=slot.phase.value,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_reserved=0 if table is None else table.kv.blocks,
            kv_blocks_total=0 if table is None else table.limits.kv_blocks_total,
            running=0 if table is None else table.running,
            waiting=0 if table is None else table.waiting,
            parked=0 if table is None else table.slots.parked,
            queued_prefill_tokens=0 if table is None else table.prefills.queued_tokens,
            silent_s=slot.engine.silent_s,
            rss_bytes=resident_bytes(slot.engine.pid) if slot.leads else 0,
            device_bytes=0 if grant is None else grant.bytes,
            rows_running=0 if rows is None else rows.running,
            rows_waiting=0 if rows is None else len(rows) - rows.running,
        )

    def _status_of(self, record: LoadedVersion) -> VersionStatus:
        slot = self._slots[record.version_digest]
        table, rows = slot.table, slot.rows
        if rows is not None:
            return VersionStatus(
                record,
                running=rows.running,
                waiting=len(rows) - rows.running,
                steps=rows.batches,
                engine_pid=slot.engine.pid,
            )
        if table is None:
            return VersionStatus(record, engine_pid=slot.engine.pid)
        return VersionStatus(
            record,
            kv_blocks_reserved=table.kv.blocks,
            kv_blocks_used=table.stats.kv_blocks_used,
            running=table.running,
            waiting=table.waiting,
            steps=table.stats.steps,
            engine_pid=slot.engine.pid,
        )


def _assignment(entry: Entry) -> Assignment:
    return entry.load(Assignment)


def _share(
    slots: Sequence[VersionSlot], desired: Mapping[str, AssignedVersion], observed: Mapping[str, Slot]
) -> MemoryShare | None:
    """Return an engine's claim on memory. It follows the versions that share the engine and stay.

    Where all leave, or need no memory, it is what they hold.
    """
    memory = slots[0].memory
    staying = [slot for slot in slots if _stays(slot, desired.get(slot.digest), observed[slot.digest])]
    if memory.granted is None and not any(observed[slot.digest].unbooked for slot in staying):
        return None
    versions = [desired.get(slot.digest, slot.version) for slot in staying or slots]
    rank = max(version.priority.rank for version in versions)
    share = memory.share(rank, movable=any(slot.phase in RESIZABLE for slot in staying))
    if share is None or not staying:
        return share
    return replace(
        share,
        split=versions[0].deployment,
        traffic=sum(version.kv_share for version in versions),
        retires=all(version.retiring for version in versions),
    )


def _stays(slot: VersionSlot, wanted: AssignedVersion | None, observed: Slot) -> bool:
    return wanted is not None and wanted.engine == slot.version.engine and not observed.final


def _digest(action: Action) -> str:
    return action.version.version_digest if isinstance(action, Fetch) else action.version_digest
