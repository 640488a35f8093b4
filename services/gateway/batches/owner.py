"""The batches that this gateway runs: claimed under its lease, released before the lease can lapse.

A batch whose owner died is free when the owner's lease lapses, and another gateway claims it. Which batch is
next, and which one yields, is decided by ``policy/batch_turns.py``. That a batch is stalled is stated in its
owner's key, for all gateways.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from services.core.batches import (
    BATCH_OWNERS,
    BatchRecord,
    BatchStatus,
    OwnerRecord,
    batch_key,
    owner_key,
)
from services.core.errors import StoreUnavailable
from services.core.fixed_cost.turns import TenantTurns
from services.gateway.batches.execution import BatchExecution
from services.gateway.batches.ports import BatchPorts
from services.gateway.batches.store import OwnedBatch, OwnershipLost
from services.gateway.policy.batch_turns import UnfinishedBatch, next_batches, not_oldest, yielding_turn
from services.ports.clock import Clock
from services.runtime.fleet_state.informer import RecordView
from services.runtime.fleet_state.lease import LeaseHolder
from services.runtime.process.tenant_turns import run_as
from services.runtime.supervisor import Supervisor, first_of

log = structlog.get_logger()
_LOOK_S: Final = 0.5
_PAUSE_S: Final = 1.0
# Pause after another request ran: the next one would find its workers taken.
_BUSY_S: Final = 5.0
# Pause after an unexpected failure, so that one batch cannot keep a gateway busy.
_CRASH_PAUSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """Of one gateway at once: batches, their lines, and lines while it serves other requests."""

    max_batches: int
    max_lines: int
    busy_lines: int


@dataclass(slots=True)
class _Turn:
    """A batch that runs here."""

    # Tenant and batch id.
    name: tuple[str, str]
    held: OwnedBatch
    execution: BatchExecution
    began_s: float
    task: asyncio.Task[None]
    # Whether the batch is stalled, as its owner's key states it.
    stalled: bool = False
    # Its task was cancelled: a second time would interrupt the release of the batch.
    leaving: bool = False

    def leave(self) -> None:
        if not self.leaving:
            self.leaving = True
            self.task.cancel()


class BatchOwner:
    """Claims and runs batches. ``run`` is the only task that claims; each batch has a task of its own."""

    def __init__(
        self,
        ports: BatchPorts,
        batches: RecordView[BatchRecord],
        owners: RecordView[OwnerRecord],
        lease: LeaseHolder,
        supervisor: Supervisor,
        *,
        gateway_id: str,
        limits: OwnerLimits,
        gateways: Callable[[], int],
        serves_others: Callable[[], bool] = lambda: False,
        may_hold: Callable[[str], bool] = lambda tenant: True,
    ) -> None:
        """``gateways``: how many are live. ``serves_others``: whether requests that are no lines run here.

        ``may_hold``: whether the data of a tenant may be here.
        """
        self._ports = ports
        self._batches = batches
        self._owners = owners
        self._lease = lease
        self._clock: Clock = ports.clock
        self._supervisor = supervisor
        self._gateway_id = gateway_id
        self._limits = limits
        self._gateways = gateways
        self._serves_others = serves_others
        self._may_hold = may_hold
        self._busy_until_s = -math.inf
        self._turns: dict[tuple[str, str], _Turn] = {}
        self._order = TenantTurns()
        self._not_before_s: dict[tuple[str, str], float] = {}
        self._left_stalled_s: dict[tuple[str, str], float] = {}
        self._closed = False

    @property
    def running(self) -> int:
        return len(self._turns)

    async def run(self) -> None:
        """Claim and run batches until ``close``, or until cancelled."""
        try:
            while not self._closed:
                try:
                    await self._lease.acquire()
                    await first_of(self._lease.hold(), self._claim_forever())
                except StoreUnavailable as error:
                    log.warning("batches.store_lost", error=error.message)
                await self._give_up()
                await self._clock.sleep(_PAUSE_S)
        finally:
            await self._give_up()

    async def close(self) -> None:
        """Leave the batches to other gateways, and claim no more."""
        self._closed = True
        await self._give_up()

    async def _give_up(self) -> None:
        """End what runs here; then release the lease, with which the claims end."""
        tasks = [turn.task for turn in self._turns.values()]
        for turn in self._turns.values():
            turn.leave()
        if tasks:
            await asyncio.wait(tasks)
        await self._lease.release()

    async def _claim_forever(self) -> None:
        while not self._closed:
            try:
                await self._claim()
            except StoreUnavailable as error:  # Batches continue while the lease holds.
                log.info("batches.claim_failed", error=error.message)
            await self._clock.sleep(_LOOK_S)

    async def _claim(self) -> None:
        await self._release_left()
        await self._mark()
        waiting, running = self._waiting(), self._running()
        self._left_stalled_s = {
            name: at_s for name, at_s in self._left_stalled_s.items() if self._is_unfinished(name)
        }
        room = self._limits.max_batches - len(self._turns)
        counts = Counter(batch.tenant for batch in running)
        stalled_s = self._left_stalled_s
        for batch in next_batches(waiting, counts, self._order, room, stalled_s, self._ending()):
            await self._begin(batch)
        self._end_turns()

    async def _mark(self) -> None:
        """State which batches are stalled here."""
        for (tenant, batch_id), turn in list(self._turns.items()):
            lease_id, stalled = self._lease.lease_id, turn.execution.is_stalled
            if turn.stalled is stalled or turn.leaving or lease_id is None:
                continue
            await self._ports.store.mark(
                tenant, batch_id, self._gateway_id, lease_id, turn.held.epoch, stalled=stalled
            )
            turn.stalled = stalled
            log.info("batch.stalled" if stalled else "batch.resumed", batch_id=batch_id, tenant=tenant)

    async def _release_left(self) -> None:
        """Release what is owned in this gateway's name and does not run: an answer of the store was lost."""
        for key, held in list(self._owners.view.items()):
            tenant, batch_id = key.removeprefix(BATCH_OWNERS).split("/", 1)
            if held.record.gateway == self._gateway_id and (tenant, batch_id) not in self._turns:
                await self._ports.store.release(tenant, batch_id, held.create_revision)

    def _is_unfinished(self, name: tuple[str, str]) -> bool:
        held = self._batches.view.get(batch_key(*name))
        return held is not None and not held.record.status.is_over

    def _waiting(self) -> list[UnfinishedBatch]:
        """Return the batches that no gateway owns."""
        now_s = self._clock.monotonic_s()
        self._not_before_s = {name: at_s for name, at_s in self._not_before_s.items() if at_s > now_s}
        found = []
        for held in self._batches.view.values():
            batch = held.record
            name = (batch.tenant, batch.batch_id)
            if batch.status.is_over or owner_key(*name) in self._owners.view:
                continue
            if not self._may_hold(batch.tenant):
                continue
            if name not in self._turns and name not in self._not_before_s:
                found.append(UnfinishedBatch(*name, batch.create_unix_s, self._ends(batch)))
        return found

    def _running(self) -> list[UnfinishedBatch]:
        """Return the batches that some gateway runs and that neither are stalled nor end."""
        stalled = {name: turn.stalled for name, turn in self._turns.items()}
        for key, held in self._owners.view.items():
            tenant, batch_id = key.removeprefix(BATCH_OWNERS).split("/", 1)
            stalled.setdefault((tenant, batch_id), held.record.stalled)
        found = []
        for name, is_stalled in stalled.items():
            batch = self._batches.view.get(batch_key(*name))
            if batch is not None and not is_stalled and not self._ends(batch.record):
                found.append(UnfinishedBatch(*name, batch.record.create_unix_s))
        return found

    def _ending(self) -> frozenset[str]:
        """Return the tenants with a batch that ends here."""
        held = (self._batches.view.get(batch_key(*name)) for name in self._turns)
        return frozenset(one.record.tenant for one in held if one is not None and self._ends(one.record))

    def _ends(self, batch: BatchRecord) -> bool:
        cancelled = batch.status is BatchStatus.CANCELLING
        return cancelled or self._clock.unix_s() >= batch.expire_unix_s

    async def _begin(self, batch: UnfinishedBatch) -> None:
        lease_id = self._lease.lease_id
        if lease_id is None:
            return
        held = await self._ports.store.claim(batch.tenant, batch.batch_id, self._gateway_id, lease_id)
        if held is None or self._closed or self._lease.lease_id != lease_id:
            return
        log.info("batch.claimed", batch_id=batch.batch_id, tenant=batch.tenant, line=held.record.next_line)
        now_s, name = self._clock.monotonic_s(), (batch.tenant, batch.batch_id)
        if not batch.ends:
            self._order.started({batch.tenant: 1.0})
        execution = BatchExecution(held, self._ports, self._share)
        task = self._supervisor.spawn(f"batch {batch.batch_id}", self._run(name, held, execution))
        self._turns[name] = _Turn(name, held, execution, now_s, task)
        task.add_done_callback(lambda _: self._turns.pop(name))

    def _end_turns(self) -> None:
        """End turns here: one if tenants wait and no gateway has a place for them, and those whose tenant
        runs an older batch."""
        if not self._turns:
            return
        running = self._running()
        younger, tenants = not_oldest(running), {batch.tenant for batch in running}
        for turn in self._turns.values():
            if turn.name[1] in younger and not turn.stalled:
                turn.leave()
        ending, tenants_waiting = self._ending(), set[str]()
        for batch in self._waiting():
            if batch.tenant not in (ending if batch.ends else tenants):
                tenants_waiting.add(batch.tenant)
        waiting = len(tenants_waiting)
        free = max(0, self._gateways() * self._limits.max_batches - len(self._owners.view))
        now_s = self._clock.monotonic_s()
        yielding = yielding_turn(self._turns.values(), now_s, waiting, free)
        if yielding is not None:
            if yielding.stalled:
                self._left_stalled_s[yielding.name] = now_s
            yielding.leave()

    async def _run(self, name: tuple[str, str], held: OwnedBatch, execution: BatchExecution) -> None:
        run_as(held.record.tenant)
        try:
            await execution.run()
        except OwnershipLost:
            log.warning("batch.ownership_lost", batch_id=name[1])
        except Exception:
            self._not_before_s[name] = self._clock.monotonic_s() + _CRASH_PAUSE_S
            log.exception("batch.crashed", batch_id=name[1])
        finally:
            with suppress(StoreUnavailable):
                await self._ports.store.release(*name, held.epoch)

    def _share(self) -> int:
        """Return how many lines of one batch run here at once: few as long as others come."""
        now_s = self._clock.monotonic_s()
        if self._serves_others():
            self._busy_until_s = now_s + _BUSY_S
        most = self._limits.busy_lines if now_s < self._busy_until_s else self._limits.max_lines
        return max(1, most // max(1, sum(not turn.stalled for turn in self._turns.values())))
