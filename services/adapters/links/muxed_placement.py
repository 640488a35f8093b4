"""Placements of a gateway, multiplexed over one link to the leading scheduler.

One task maintains the link. It opens one and sends every pending placement again, with its original arrival
time and its remaining queue time. It receives outcomes until the link breaks, then reconnects with backoff.
One writer per link batches requests into few messages. Callers wait on futures. A leader answers each
placement by the end of its queue time. A leader that sends heartbeats but no outcomes counts as unresponsive.

A placement ends exactly once for its caller: with a grant, an error, or the caller's cancellation. A grant
whose caller is no longer waiting is returned to the leader.

While no leader responds, a ``FallbackPlacer`` may place what waits, by class and arrival, several times a
second. A placement that it made is withdrawn from a leader that may still have it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol, TypeAlias

import structlog

from services.adapters.links.leader_links import LeaderLink, LeaderLinks, keep_linked
from services.core.backoff import Backoff
from services.core.errors import FairwayError, NoLeader, QueueFull, QueueTimeout, ShareExceeded
from services.core.fixed_cost.explained import RowsExplanation
from services.core.fixed_cost.slots import SlotDemand, SlotReturn
from services.core.fleet import Granted, PlacementFrame
from services.core.generation import AnyGrant, FallbackGrant, NotAdmittedReason, PlaceSpec
from services.core.limits import share_of
from services.ports.clock import Clock
from services.ports.placement import FallbackPlacer
from services.runtime.process.tenant_turns import TenantRoundRobin
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

_BATCH: Final = 512  # placements in one message
_CANCELS: Final = 8192  # withdrawals in one message
_PRESSURE_AGE_S: Final = 5.0
_ALONE_TURN_S: Final = 0.05  # shortest period of fallback placement
_ALONE_LOOK_S: Final = 1.0  # longest period between two checks whether a leader responds
_BACKOFF: Final = Backoff(first_s=0.05, max_s=2.0)
_SLOTS_BATCH: Final = 2048  # most entries of each kind in one message
MAX_EXPLAINED: Final = 256  # the same of explanations


@dataclass(frozen=True, slots=True)
class SlotsMessage:
    """What one message to the leader says of slots and rows."""

    demands: Sequence[SlotDemand] = ()
    returned: Sequence[SlotReturn] = ()
    # Explanations by request; None: nothing is stored.
    explained: Mapping[str, RowsExplanation | None] = field(default_factory=dict)


class OutgoingSlots:
    """Of each version and tenant the newest demand, of each lease the newest return. Bounded by those, and by
    ``MAX_EXPLAINED`` explanations."""

    def __init__(self) -> None:
        self._demands: dict[tuple[str, str], SlotDemand] = {}  # all with rows
        self._unsent: dict[tuple[str, str], SlotDemand] = {}
        self._returns: dict[tuple[str, str, str], SlotReturn] = {}
        self._explained: dict[str, RowsExplanation | None] = {}  # explanations by request

    def __bool__(self) -> bool:
        return bool(self._unsent or self._returns or self._explained)

    def demand(self, wanted: SlotDemand) -> None:
        key = wanted.digest, wanted.tenant
        if wanted.rows:
            self._demands[key] = wanted
        else:
            self._demands.pop(key, None)
        self._unsent[key] = wanted

    def returned(self, found: SlotReturn) -> None:
        self._returns[found.worker_id, found.digest, found.tenant] = found

    def explained(self, request_id: str, found: RowsExplanation | None) -> None:
        if len(self._explained) < MAX_EXPLAINED:  # the leader does without the others
            self._explained[request_id] = found

    def restart(self) -> None:
        """Send every demand again: to another leader, or on another stream. Its leases are new."""
        self._unsent = dict(self._demands)
        self._returns.clear()
        self._explained.clear()

    def take(self) -> SlotsMessage:
        """Return and clear one message's part of all."""
        demands = [self._unsent.pop(key) for key in list(self._unsent)[:_SLOTS_BATCH]]
        returns = [self._returns.pop(name) for name in list(self._returns)[:_SLOTS_BATCH]]
        explained, self._explained = self._explained, {}
        return SlotsMessage(demands, returns, explained)


class PlacementLink(LeaderLink[PlacementFrame], Protocol):
    """The placement stream to a leader. An empty frame is a heartbeat."""

    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        """Send (placement id, spec, queue time left) and withdrawn ids. Raises FairwayError when broken."""

    async def send_slots(self, message: SlotsMessage) -> None:
        """Send slot demands, returns and explanations. Raises FairwayError when broken."""


PlacementLinks: TypeAlias = LeaderLinks[PlacementLink]


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """``answer_grace_s``: how long after the queue time of a placement its answer may arrive."""

    max_pending: int = 16384
    answer_grace_s: float = 2.0
    backoff: Backoff = _BACKOFF


@dataclass(slots=True, eq=False)
class _Pending:
    spec: PlaceSpec
    future: asyncio.Future[AnyGrant]
    deadline_s: float
    sent_s: float | None = None  # time at which it was sent on the current link


class MuxedPlacement:
    """Implements ``ports.placement.PlacementClient`` and ``ports.slots.SlotClient``. The first placement or
    demand starts it."""

    def __init__(
        self,
        links: PlacementLinks,
        clock: Clock,
        supervisor: Supervisor,
        rng: Random,
        settings: PlacementSettings | None = None,
        *,
        fallback: FallbackPlacer | None = None,
        on_frame: Callable[[PlacementFrame | None], None] = lambda _frame: None,
        explain: Callable[[str], RowsExplanation | None] = lambda _request_id: None,
    ) -> None:
        """``on_frame`` receives what the leader sends; None: it answered. ``explain`` returns how this
        gateway ran a request of a fixed-cost model."""
        self._links = links
        self._on_frame = on_frame
        self._explain = explain
        self._slots = OutgoingSlots()
        self._fallback = fallback
        self._fallback_task: asyncio.Task[None] | None = None
        self._placed_alone = 0
        self._in_fallback = False  # fallback placement was used, and no leader has responded since
        self._clock = clock
        self._supervisor = supervisor
        self._rng = rng
        self._settings = settings if settings is not None else PlacementSettings()
        self._pending: dict[int, _Pending] = {}
        self._of_tenant: Counter[str] = Counter()
        self._unsent: TenantRoundRobin[int] = TenantRoundRobin()
        self._cancelled: list[int] = []
        self._granted: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._link: PlacementLink | None = None
        self._answered_s = -math.inf  # time of the last outcome of any placement
        self._woken = asyncio.Event()
        self._arrived = asyncio.Event()  # a placement is pending: the fallback may have to place it
        self._task: asyncio.Task[None] | None = None
        self._numbers = 0
        self._last_epoch = 0
        self._pressures: dict[str, float] = {}
        self._pressed_s = clock.monotonic_s()
        self._last_error: FairwayError | None = None

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def connected(self) -> bool:
        """Whether a link is open on which a leader has responded."""
        return self._link is not None

    @property
    def placed_alone(self) -> int:
        """Number of placements made without a leader."""
        return self._placed_alone

    def pressure(self, digest: str) -> float:
        """Return the load pressure of a version from the leader's last report, 0..1; 0 if that is old."""
        if self._clock.monotonic_s() - self._pressed_s > _PRESSURE_AGE_S:
            return 0.0
        return self._pressures.get(digest, 0.0)

    def start(self) -> None:
        """Start to connect to the leader. Idempotent."""
        if self._task is None:
            self._task = self._supervisor.spawn("placement.link", self._run(), shared=True)
            if self._fallback is not None:
                self._fallback_task = self._supervisor.spawn(
                    "placement.alone", self._run_fallback(self._fallback), shared=True
                )

    async def close(self) -> None:
        """Stop; pending placements end with NoLeader."""
        tasks = [task for task in (self._task, self._fallback_task) if task is not None]
        self._task = self._fallback_task = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        for pending in list(self._pending.values()):
            if not pending.future.done():
                pending.future.set_exception(NoLeader("the gateway is stopping"))

    async def place(self, spec: PlaceSpec) -> AnyGrant:
        """See ``ports.placement.PlacementClient.place``."""
        self.start()
        if not self._pending and (grant := self._place_alone(spec, self._clock.monotonic_s())) is not None:
            return grant
        tenant_id, most = spec.tenant_id, share_of(self._settings.max_pending)
        if self._of_tenant[tenant_id] >= most:
            raise ShareExceeded(
                f"{most} placements of this tenant are pending at this gateway, the most that may; "
                "wait until some have begun, or send it to another gateway",
                retry_after_s=1.0,
                limit=most,
            )
        if len(self._pending) >= self._settings.max_pending:
            raise QueueFull(f"{len(self._pending)} placements are pending here", retry_after_s=1.0)
        self._numbers += 1
        number = self._numbers
        pending = _Pending(
            spec,
            asyncio.get_running_loop().create_future(),
            self._clock.monotonic_s() + spec.queue_ttl_s,
        )
        self._pending[number] = pending
        self._of_tenant[tenant_id] += 1
        self._unsent.add(tenant_id, number)
        self._woken.set()
        self._arrived.set()
        try:
            return await self._outcome(pending)
        except asyncio.CancelledError:
            self._return_crossed(pending)
            raise
        finally:
            del self._pending[number]
            self._of_tenant[tenant_id] -= 1
            if not self._of_tenant[tenant_id]:
                del self._of_tenant[tenant_id]
            if pending.sent_s is None:
                self._unsent.discard(tenant_id, number)
            elif not pending.future.done():
                self._withdraw(number)
            del pending

    def demand(self, wanted: SlotDemand) -> None:
        """See ``ports.slots.SlotClient.demand``."""
        self.start()
        self._slots.demand(wanted)
        self._woken.set()

    def slots_returned(self, found: SlotReturn) -> None:
        """See ``ports.slots.SlotClient.slots_returned``."""
        self._slots.returned(found)
        self._woken.set()

    def give_back(self, grant: AnyGrant) -> None:
        """Return an unused grant to its leader. Has no effect on a grant of another leader, nor on a fallback
        grant, which ``over`` ends."""
        if isinstance(grant, FallbackGrant):
            return
        found = self._granted.pop((grant.worker_id, grant.epoch, grant.sequence), None)
        if found is not None and self._link is not None and grant.epoch == self._link.epoch:
            self._withdraw(found[0])

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None:
        """See ``ports.placement.PlacementClient.over``. Grants of a leader are reported by their worker."""
        if isinstance(grant, FallbackGrant) and self._fallback is not None:
            self._fallback.ended(grant, refusal, self._clock.monotonic_s())

    # --- without a leader -------------------------------------------------------------------------

    async def _run_fallback(self, fallback: FallbackPlacer) -> None:
        while True:
            if not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
            now_s = self._clock.monotonic_s()
            wait_s = fallback.wait_s(now_s)
            if wait_s <= 0:
                self._place_waiting(now_s)
            await self._clock.sleep(min(max(wait_s, _ALONE_TURN_S), _ALONE_LOOK_S))

    def _place_waiting(self, now_s: float) -> None:
        """Place waiting requests as far as there is room, by class, then by arrival."""
        waiting = [(number, found) for number, found in self._pending.items() if not found.future.done()]
        waiting.sort(key=lambda one: (-one[1].spec.priority.rank, one[1].spec.arrival_unix_us, one[0]))
        for number, pending in waiting[:_BATCH]:
            grant = self._place_alone(pending.spec, now_s)
            if grant is None:
                continue
            pending.future.set_result(grant)
            if pending.sent_s is None:
                self._unsent.discard(pending.spec.tenant_id, number)
            else:
                self._withdraw(number)

    def _place_alone(self, spec: PlaceSpec, now_s: float) -> FallbackGrant | None:
        grant = None if self._fallback is None else self._fallback.place(spec, now_s)
        if grant is not None:
            self._placed_alone += 1
            if not self._in_fallback:
                self._in_fallback = True
                log.warning("placement.alone", last_epoch=grant.last_epoch, waiting=len(self._pending))
        return grant

    def _on_leader_message(self, frame: PlacementFrame | None = None) -> None:
        """Record that the leader responded."""
        self._on_frame(frame)
        if self._fallback is None:
            return
        now_s = self._clock.monotonic_s()
        self._fallback.leader_answered(now_s)
        if frame is not None and frame.members is not None:
            self._fallback.replace_snapshot(frame.epoch, frame.members, now_s)
        if self._in_fallback:
            self._in_fallback = False
            log.info("placement.led_again", epoch=self._last_epoch, placed_alone=self._placed_alone)

    # --- inside -----------------------------------------------------------------------------------

    async def _outcome(self, pending: _Pending) -> AnyGrant:
        """Wait for the scheduler's answer. The scheduler enforces the queue time; here is a later limit."""
        future = pending.future
        await asyncio.wait((future,), timeout=pending.spec.queue_ttl_s)
        if not future.done() and self._link is not None:
            await asyncio.wait((future,), timeout=self._settings.answer_grace_s)
        if future.done():
            try:
                return future.result()
            finally:
                del future, pending  # an error's traceback refers to this frame
        spec = pending.spec
        if self._link is None or pending.sent_s is None:  # no leader received it
            why = f": {self._last_error.message}" if self._last_error is not None else ""
            raise NoLeader(f"no scheduler led within {spec.queue_ttl_s:g} s{why}", retry_after_s=1.0)
        await self._give_up_deaf(self._link, pending.sent_s)
        raise QueueTimeout(f"no answer within {spec.queue_ttl_s:g} s", retry_after_s=1.0, model=spec.model)

    async def _give_up_deaf(self, link: PlacementLink, sent_s: float) -> None:
        """Close a link whose leader sends heartbeats but lets the queue time of a placement pass without an
        answer.

        A leader that answers other placements is only late: another link would delay it further.
        """
        if self._answered_s < sent_s:
            silent_s = self._clock.monotonic_s() - sent_s
            log.warning("placement.leader_deaf", epoch=link.epoch, unanswered_s=round(silent_s, 1))
            await link.close()

    def _return_crossed(self, pending: _Pending) -> None:
        """Return a grant that arrived after its caller was cancelled."""
        future = pending.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self.give_back(future.result())
            self.over(future.result())

    def _withdraw(self, number: int) -> None:
        """Withdraw the placement from the leader. Without a link no leader has it."""
        if self._link is not None:
            self._cancelled.append(number)
            self._woken.set()

    async def _run(self) -> None:
        backoff = self._settings.backoff
        await keep_linked(self._links, self._use, self._missed, self._clock, backoff=backoff, rng=self._rng)

    def _missed(self, error: FairwayError) -> None:
        log.info("placement.leader_missed", reason=error.reason, error=error.message)
        self._last_error = error

    async def _use(self, link: PlacementLink) -> None:
        """Serve pending placements over a new link until it breaks; record why."""
        lost = self._last_error = await self._use_until_lost(link)
        log.info("placement.link_lost", epoch=link.epoch, reason=lost.reason, error=lost.message)

    async def _use_until_lost(self, link: PlacementLink) -> FairwayError:
        if link.epoch < self._last_epoch:
            await link.close()
            return NoLeader(f"epoch {link.epoch} has ended; the newest is {self._last_epoch}")
        self._resubmit(link)
        self._on_leader_message()
        writer = self._supervisor.spawn("placement.writer", self._write(link))
        try:
            while True:
                frame = await link.receive()
                self._on_leader_message(frame)
                self._settle(frame)
                for request_id in frame.questions:
                    self._slots.explained(request_id, self._explain(request_id))
                    self._woken.set()
        except FairwayError as error:
            return error
        finally:
            self._link = None
            writer.cancel()
            await asyncio.wait((writer,), timeout=5.0)
            await link.close()

    def _resubmit(self, link: PlacementLink) -> None:
        """Queue every pending placement for the new stream, those of a tenant in order of arrival."""
        self._last_epoch = link.epoch
        self._last_error = None
        self._cancelled.clear()
        self._granted.clear()  # grants of an earlier stream lapse by themselves
        self._unsent = TenantRoundRobin()
        for number, pending in self._pending.items():
            pending.sent_s = None
            if not pending.future.done():
                self._unsent.add(pending.spec.tenant_id, number)
        self._slots.restart()
        self._link = link
        self._woken.set()

    async def _write(self, link: PlacementLink) -> None:
        """The link's only writer. It closes a link that it cannot write to, which ends the reader's wait."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while self._unsent or self._cancelled:
                    places, cancelled = self._take_outgoing()
                    await link.send(places, cancelled)
                while self._slots:
                    await link.send_slots(self._slots.take())
        except FairwayError as error:
            log.info("placement.write_failed", reason=error.reason)
            await link.close()

    def _take_outgoing(self) -> tuple[list[tuple[int, PlaceSpec, float]], list[int]]:
        now_s = self._clock.monotonic_s()
        places: list[tuple[int, PlaceSpec, float]] = []
        while len(places) < _BATCH and (number := self._unsent.take(())) is not None:
            pending = self._pending[number]
            pending.sent_s = now_s
            places.append((number, pending.spec, max(0.0, pending.deadline_s - now_s)))
        cancelled, self._cancelled = self._cancelled[:_CANCELS], self._cancelled[_CANCELS:]
        return places, cancelled

    def _settle(self, frame: PlacementFrame) -> None:
        now_s = self._clock.monotonic_s()
        self._forget_lapsed(now_s)
        if frame.pressures is not None:
            self._pressures = {found.digest: found.pressure_ratio for found in frame.pressures}
            self._pressed_s = now_s
        if frame.outcomes:
            self._answered_s = now_s
        for outcome in frame.outcomes:
            pending = self._pending.get(outcome.placement_id)
            wanted = pending is not None and not pending.future.done()
            if isinstance(outcome, Granted):
                grant = outcome.grant
                key = grant.worker_id, grant.epoch, grant.sequence
                if pending is not None and wanted:
                    self._granted[key] = outcome.placement_id, now_s + grant.ttl_s
                    pending.future.set_result(grant)
                else:
                    self._withdraw(outcome.placement_id)
            elif pending is not None and wanted:
                pending.future.set_exception(outcome.error)

    def _forget_lapsed(self, now_s: float) -> None:
        """Drop expired grants, which need no return. They lapse in the order of arrival."""
        while self._granted:
            key = next(iter(self._granted))
            if self._granted[key][1] > now_s:
                return
            del self._granted[key]
