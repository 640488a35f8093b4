"""Placements of a gateway over one link to whichever scheduler leads.

One task keeps the link: it opens one, sends again everything that is pending with its original arrival and
what is left of its time to wait, receives outcomes until the link breaks, and starts over with backoff. One
writer per link gathers what callers ask for into few messages. Callers wait on futures.

A placement ends exactly once for its caller: with a grant, an error, or its own cancellation. A grant that
finds no caller any more is given back.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final, Protocol

import structlog

from services.core.errors import FairwayError, NoLeader, QueueFull, QueueTimeout
from services.core.fleet import Granted, PlacementFrame
from services.core.generation import Grant, PlaceSpec
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

_BATCH: Final = 512  # placements in one message
_CANCELS: Final = 8192  # withdrawals in one message


class PlacementLink(Protocol):
    """An open stream to a leader. Closed by who opened it; ``send`` and ``receive`` by one task each."""

    @property
    def epoch(self) -> int: ...

    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        """Send (placement id, spec, queue time left) and withdrawn ids. Raises FairwayError when broken."""

    async def receive(self) -> PlacementFrame:
        """Return the next frame, empty for a heartbeat. Raises FairwayError when the link broke or the
        leader was not heard for too long."""

    async def close(self) -> None:
        """End the stream; ``receive`` raises from now on. Idempotent."""


class PlacementLinks(Protocol):
    async def open(self) -> PlacementLink:
        """Return a link that heard its leader, in bounded time. Raises NoLeader or another FairwayError."""

    async def wait_leader_change(self, timeout_s: float) -> None:
        """Return when another leader than that of the last ``open`` may be there, or after the timeout."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """``answer_grace_s``: how much longer than the queue's time to live an answer may take."""

    max_pending: int = 16384
    answer_grace_s: float = 2.0
    min_backoff_s: float = 0.05
    max_backoff_s: float = 2.0


@dataclass(slots=True, eq=False)
class _Pending:
    spec: PlaceSpec
    future: asyncio.Future[Grant]
    deadline_s: float
    sent: bool = False


class MuxedPlacement:
    """Implements ``ports.placement.PlacementClient``. Starts by itself with the first placement."""

    def __init__(
        self,
        links: PlacementLinks,
        clock: Clock,
        supervisor: Supervisor,
        rng: Random,
        settings: PlacementSettings | None = None,
    ) -> None:
        self._links = links
        self._clock = clock
        self._supervisor = supervisor
        self._rng = rng
        self._settings = settings if settings is not None else PlacementSettings()
        self._pending: dict[int, _Pending] = {}
        self._unsent: dict[int, None] = {}
        self._cancelled: list[int] = []
        self._granted: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._link: PlacementLink | None = None
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # The link outlives the request that starts it: what it logs must not carry that request's names.
        self._context = contextvars.copy_context()
        self._numbers = 0
        self._last_epoch = 0
        self._last_error: FairwayError | None = None

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def connected(self) -> bool:
        """A leader was heard on a link that is not known to be broken."""
        return self._link is not None

    def start(self) -> None:
        """Begin to look for the leader. Idempotent."""
        if self._task is None:
            self._task = self._context.run(self._supervisor.spawn, "placement.link", self._run())

    async def close(self) -> None:
        """Stop; what is pending ends with NoLeader."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,), timeout=5.0)
        for pending in list(self._pending.values()):
            if not pending.future.done():
                pending.future.set_exception(NoLeader("the gateway is stopping"))
        await self._links.close()

    async def place(self, spec: PlaceSpec) -> Grant:
        """See ``ports.placement.PlacementClient.place``."""
        self.start()
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
        self._unsent[number] = None
        self._woken.set()
        try:
            return await self._outcome(pending)
        except asyncio.CancelledError:
            self._return_crossed(pending)
            raise
        finally:
            self._pending.pop(number, None)
            if self._unsent.pop(number, _SENT) is _SENT and not pending.future.done():
                self._withdraw(number)

    def give_back(self, grant: Grant) -> None:
        """Return the room of a grant that will not be used; without effect on one of another leader."""
        found = self._granted.pop((grant.worker_id, grant.epoch, grant.sequence), None)
        if found is not None and self._link is not None and grant.epoch == self._link.epoch:
            self._withdraw(found[0])

    # --- inside -----------------------------------------------------------------------------------

    async def _outcome(self, pending: _Pending) -> Grant:
        """Wait for the scheduler's answer: it enforces the time to live, unless it stays silent."""
        future = pending.future
        await asyncio.wait((future,), timeout=pending.spec.queue_ttl_s)
        if not future.done() and self._link is not None:
            await asyncio.wait((future,), timeout=self._settings.answer_grace_s)
        if future.done():
            return future.result()
        spec = pending.spec
        if self._link is None or not pending.sent:  # nobody was there to ask
            why = f": {self._last_error.message}" if self._last_error is not None else ""
            raise NoLeader(f"no scheduler led within {spec.queue_ttl_s:g} s{why}", retry_after_s=1.0)
        raise QueueTimeout(f"no answer within {spec.queue_ttl_s:g} s", retry_after_s=1.0, model=spec.model)

    def _return_crossed(self, pending: _Pending) -> None:
        """The caller was cancelled after its grant came and before it saw it."""
        future = pending.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self.give_back(future.result())

    def _withdraw(self, number: int) -> None:
        """Tell the leader, if there is one: without a link nobody knows of the placement."""
        if self._link is not None:
            self._cancelled.append(number)
            self._woken.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            started_s = self._clock.monotonic_s()
            self._last_error = await self._connect_once()
            if self._clock.monotonic_s() - started_s > self._settings.max_backoff_s:
                failures = 0
            failures += 1
            ceiling_s = self._settings.min_backoff_s * 2.0 ** min(failures, 16)
            ceiling_s = min(self._settings.max_backoff_s, ceiling_s)
            await self._links.wait_leader_change(self._rng.uniform(ceiling_s / 2, ceiling_s))

    async def _connect_once(self) -> FairwayError:
        """Serve the pending over a new link until it breaks; return why it did, or why there is none."""
        try:
            link = await self._links.open()
        except FairwayError as error:
            log.info("placement.leader_missed", reason=error.reason, error=error.message)
            return error
        lost = await self._use(link)
        log.info("placement.link_lost", epoch=link.epoch, reason=lost.reason, error=lost.message)
        return lost

    async def _use(self, link: PlacementLink) -> FairwayError:
        if link.epoch < self._last_epoch:
            await link.close()
            return NoLeader(f"epoch {link.epoch} is over; {self._last_epoch} was heard already")
        self._resubmit(link)
        writer = self._supervisor.spawn("placement.writer", self._write(link))
        try:
            while True:
                frame = await link.receive()
                self._settle(frame)
        except FairwayError as error:
            return error
        finally:
            self._link = None
            writer.cancel()
            await asyncio.wait((writer,), timeout=5.0)
            await link.close()

    def _resubmit(self, link: PlacementLink) -> None:
        """Everything pending is unknown to the new stream, in the order in which it came."""
        self._last_epoch = link.epoch
        self._last_error = None
        self._cancelled.clear()
        self._granted.clear()  # grants of an earlier stream lapse by themselves
        for pending in self._pending.values():
            pending.sent = False
        self._unsent = dict.fromkeys(number for number, p in self._pending.items() if not p.future.done())
        self._link = link
        self._woken.set()

    async def _write(self, link: PlacementLink) -> None:
        """The link's only writer. One that it cannot write to is closed, which ends its reader's wait."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while self._unsent or self._cancelled:
                    places, cancelled = self._take_outgoing()
                    await link.send(places, cancelled)
        except FairwayError as error:
            log.info("placement.write_failed", reason=error.reason)
            await link.close()

    def _take_outgoing(self) -> tuple[list[tuple[int, PlaceSpec, float]], list[int]]:
        now_s = self._clock.monotonic_s()
        places: list[tuple[int, PlaceSpec, float]] = []
        for number in tuple(islice(self._unsent, _BATCH)):
            del self._unsent[number]
            pending = self._pending[number]
            pending.sent = True
            places.append((number, pending.spec, max(0.0, pending.deadline_s - now_s)))
        cancelled, self._cancelled = self._cancelled[:_CANCELS], self._cancelled[_CANCELS:]
        return places, cancelled

    def _settle(self, frame: PlacementFrame) -> None:
        now_s = self._clock.monotonic_s()
        self._forget_lapsed(now_s)
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
        """Grants that may no longer be used need no giving back. They lapse in the order of their coming."""
        while self._granted:
            key = next(iter(self._granted))
            if self._granted[key][1] > now_s:
                return
            del self._granted[key]


_SENT: Final = object()
