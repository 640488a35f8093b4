"""The record of one idempotency key on this gateway, and the clients that follow its request.

``serve`` claims the record. If this gateway owns it, a ``Request`` runs in the same task, wrapped by the
ownership: what it emits is recorded and followed, and its settlement is the record's end. If another gateway
owns it, it is read until it ends, or until it can be claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from services.core.errors import (
    FairwayError,
    IdempotencyConflict,
    NoWorkerAvailable,
    RequestCancelled,
    ResultExpired,
)
from services.gateway.events import Delivered, Finished, RequestSink
from services.gateway.idempotency.followers import FollowerBroadcast, RecordFollower, too_large
from services.gateway.idempotency.ownership import Ending, Launch, RecordOwnership
from services.gateway.idempotency.record_codec import encode, failure_in
from services.gateway.idempotency.record_reader import EarlierRun, RecordReader
from services.gateway.idempotency.telemetry import Arrivals, KeyOutcome, outcome_of
from services.gateway.idempotency.types import KeyedPorts
from services.gateway.incidents import failure_of
from services.gateway.requests.request import Request
from services.ports.idempotency import Claim, Expired, OtherBody, Owned, RecordKey

log = structlog.get_logger()

# How often a record may change owners under one client before the client gets an error to retry.
MAX_ROUNDS: Final = 32
# It counts a tenant's request as running until the function that it returns is called.
Enter = Callable[[str, Request], Callable[[], None]]


class KeyedRecord:
    """This gateway's part in one key and body, and the host of the clients that follow it."""

    def __init__(
        self,
        key: RecordKey,
        fingerprint: str,
        ports: KeyedPorts,
        launch: Launch,
        enter: Enter,
        departed: Callable[[RecordFollower], None],
    ) -> None:
        """``departed`` is called for every client that is done."""
        self.key = key
        self.fingerprint = fingerprint
        self.broadcast = FollowerBroadcast(ports.window_tokens, self._left)
        self.ownership: RecordOwnership | None = None
        self.pending_end: Ending | None = None
        self._ports = ports
        self._launch = launch
        self._enter = enter
        self._departed = departed
        self._arrivals = Arrivals(ports.telemetry, key.tenant_id)
        self._reader = RecordReader(self.broadcast)
        self._following = False  # a request at another gateway
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._stopped: FairwayError | None = None

    # --- clients -----------------------------------------------------------------------------------

    def start(self, task: asyncio.Task[None]) -> None:
        """Set the task that runs ``serve``; ``close`` must follow its end."""
        self._task = task

    def join(
        self, sink: RequestSink, client_window: int | None, delivered: Delivered | None, *, first: bool
    ) -> RecordFollower:
        """Return the handle of a client, which receives what it does not have of the request."""
        follower = self.broadcast.join(sink, client_window, delivered, first=first)
        self._arrivals.joined(ended=self.broadcast.ended)
        self._stop_grace()
        asyncio.get_running_loop().call_soon(self.broadcast.catch_up, follower)
        return follower

    @property
    def end_bytes(self) -> int:
        """The bytes of an end that the store has not accepted yet."""
        return len(self.pending_end.chunk) if self.pending_end is not None else 0

    def drop_answer(self) -> None:
        """Write the pending end as one whose output was too large: charged, never run again."""
        if self.pending_end is not None and self.pending_end.ended:
            self.pending_end = replace(self.pending_end, chunk=encode([failure_in(too_large())]))
            self.broadcast.failed(too_large())

    @property
    def joinable(self) -> bool:
        """Whether another client can join: it runs, or its pending end is in memory."""
        if self.broadcast.ended:
            return self.pending_end is not None and self.pending_end.ended
        return self._stopped is None

    def stop(self, error: FairwayError) -> None:
        """End this gateway's part in the request: another gateway may continue it."""
        self._stopped = self._stopped or error
        if self.ownership is None and self._task is not None:
            self._task.cancel()
        elif self.ownership is not None and self.ownership.request is not None:
            self.ownership.request.cancel(error)

    def close(self) -> None:
        """Release everything. Called when the task is done, which may never have begun."""
        self._stop_grace()
        self._arrivals.claimed(KeyOutcome.REFUSED)
        self._fail(self._stopped or RequestCancelled("the request was cancelled"))

    def trim_output(self) -> None:
        """Trim an output that is not retained whole, and grant the run the corresponding credit."""
        if not self.broadcast.whole:
            self.broadcast.shorten()
            if self.ownership is not None:
                for choice in list(self.broadcast.log.choices):
                    self.ownership.credit(choice)

    def stop_retaining(self) -> None:
        """Stop retaining the whole output: no other client can join, so the request ends with its clients."""
        self.broadcast.shorten()
        if not len(self.broadcast):
            self._start_grace(0.0)

    # --- the one task ------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Return once the request ended here and every client received its end."""
        try:
            for _ in range(MAX_ROUNDS):
                if await self._round():
                    return
            raise NoWorkerAvailable(
                f"the request changed hands {MAX_ROUNDS} times; send it again with its key", retry_after_s=1.0
            )
        except asyncio.CancelledError:
            self._fail(self._stopped or RequestCancelled("the request was cancelled"))
            if self._stopped is None:
                raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic in a native library is no Exception
            record, new_incident = self.key.digest[:12], self._ports.new_incident
            self._fail(failure_of(error, new_incident, "idempotency.crashed", record=record))

    async def _round(self) -> bool:
        """Claim once and act on the result. Returns whether the request is over."""
        claim = await self._claim()
        if isinstance(claim, OtherBody):
            raise IdempotencyConflict(
                "this idempotency key was used for another request; take a new key for a new request",
                field="idempotency_key",
            )
        if isinstance(claim, Expired):
            raise ResultExpired(
                "the request of this idempotency key was run and its output is no longer stored; it will "
                "not run again: use another key",
                field="idempotency_key",
            )
        if isinstance(claim, Owned):
            return await self._own(claim)
        return await self._follow()

    async def _claim(self) -> Claim:
        found = KeyOutcome.REFUSED
        try:
            claim = await self._ports.store.claim(self.key, self.fingerprint, self._ports.owner)
            found = outcome_of(claim)
        finally:
            self._ports.telemetry.claim(found)
            self._arrivals.claimed(found)
        log.info("idempotency.claimed", record=self.key.digest[:12], found=found.value)
        return claim

    async def _follow(self) -> bool:
        """Follow the run at another gateway. Returns whether it ended; if not, the record can be claimed."""
        self._following = True
        self._stop_without_followers()
        ended = await self._reader.follow(self._ports, self.key)
        self._following = False
        if isinstance(self._reader.end, Finished):
            self.broadcast.finished(self._reader.end)
        elif ended:
            self._fail(self._reader.end or too_large())
        return ended

    async def _own(self, claim: Owned) -> bool:
        """Run the request from where an earlier run ended. Returns False when another owner took over."""
        ownership = self.ownership = RecordOwnership(
            claim.hold, self._ports, self._reader, self.stop_retaining
        )
        try:
            earlier = await self._reader.load(self._ports.store, self.key, claim.chunks)
            if not self.broadcast.whole:
                raise too_large()  # the retained part of the output is not enough to continue
            await self._run(ownership, earlier)
        finally:
            self.ownership, self.pending_end = None, ownership.pending_end
        return not ownership.fenced

    async def _run(self, ownership: RecordOwnership, earlier: EarlierRun | None) -> None:
        """Return once the request ended, and the record with it."""
        request, admit = self._launch(ownership, earlier)
        ownership.start(request, earlier)
        if self._stopped is not None:
            request.cancel(self._stopped)
        if not len(self.broadcast):
            self._start_grace()
        leave = self._enter(self.key.tenant_id, request)
        try:
            await request.deliver(admit, ownership)
        finally:
            leave()

    def _fail(self, error: FairwayError) -> None:
        """End the clients, unless they received an end."""
        if not self.broadcast.ended:
            self.broadcast.failed(error)

    # --- departing clients -------------------------------------------------------------------------

    def _left(self, follower: RecordFollower, withdrawn: bool) -> None:
        self._departed(follower)
        if len(self.broadcast) or self.broadcast.ended:
            return
        if self._following:
            self._stop_without_followers()
        else:
            self._start_grace(0.0 if withdrawn or not self.broadcast.whole else None)

    def _stop_without_followers(self) -> None:
        """Stop following a run at another gateway when no client here follows it."""
        if not len(self.broadcast) and self._task is not None:
            self._stopped = self._stopped or RequestCancelled("the request was cancelled")
            self._task.cancel()

    def _start_grace(self, seconds: float | None = None) -> None:
        self._stop_grace()
        wait_s = self._ports.limits.detach_grace_s if seconds is None else seconds
        self._grace = asyncio.get_running_loop().call_later(wait_s, self._end_after_grace)

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _end_after_grace(self) -> None:
        """End a request without clients after its grace, unless another gateway's client follows it."""
        if self.broadcast.ended:
            return
        ownership = self.ownership
        if ownership is None or self._ports.clock.monotonic_s() < ownership.watched_until_s:
            self._start_grace(1.0)
        elif ownership.request is not None:
            ownership.request.cancel(RequestCancelled("the client disconnected and did not return"))
