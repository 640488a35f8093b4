"""The sequences of one stream from a gateway to a worker, independent of the transport."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from services.adapters.links.frame_dispatch import NotStarted, SinkTable
from services.adapters.links.link_health import LinkHealth
from services.core.generation import AnyGrant, StartSpec
from services.ports.clock import Clock
from services.ports.worker import RunningSequence, SequenceSink
from services.ports.worker_stream import StepFrame

log = structlog.get_logger()

MAX_WAITING_STARTS: Final = 4096


class Outgoing:
    """Commands not sent yet: starts in order, credits added up, cancels."""

    def __init__(self) -> None:
        self.starts: dict[int, StartSpec] = {}
        self.credits: dict[int, int] = {}
        self.cancels: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.starts or self.credits or self.cancels)

    def forget(self, handle: int) -> StartSpec | None:
        """Remove and return the start of a sequence that was not sent yet."""
        self.credits.pop(handle, None)
        return self.starts.pop(handle, None)


class SequenceLink(ABC):
    """One stream to one worker, from its opening until it breaks or is idle for too long. Not reopened."""

    def __init__(
        self,
        address: str,
        clock: Clock,
        *,
        after_frame: Callable[[], None] | None,
        unsent: Callable[[AnyGrant], None] | None,
        silence_s: float,
        idle_s: float,
    ) -> None:
        self.address = address
        self.closed = False
        self.task: asyncio.Task[None] | None = None
        self._clock = clock
        self._after_frame = after_frame
        self._unsent = unsent
        self._sinks = SinkTable()
        self._outgoing = Outgoing()
        self._health = LinkHealth(self._sinks, clock.monotonic_s(), silence_s=silence_s, idle_s=idle_s)

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if len(self._outgoing.starts) >= MAX_WAITING_STARTS:
            asyncio.get_running_loop().call_soon(sink.on_lost, "the worker does not read its starts")
            return NotStarted()
        handle = self._sinks.add(sink)
        self._outgoing.starts[handle] = spec
        self._wake()
        return _Sequence(self, handle)

    def credit(self, handle: int, tokens: int) -> None:
        if handle in self._sinks:
            credits_ = self._outgoing.credits
            credits_[handle] = credits_.get(handle, 0) + tokens
            self._wake()

    def cancel(self, handle: int) -> None:
        if not self._sinks.drop(handle):
            return
        if (spec := self._outgoing.forget(handle)) is not None:
            self._give_back(spec)
        else:
            self._outgoing.cancels.append(handle)
            self._wake()

    # --- for the transport ------------------------------------------------------------------------

    @abstractmethod
    def _wake(self) -> None:
        """Called when commands wait. The transport sends them soon, with those added until then."""

    async def _run(self, carried: Awaitable[str]) -> None:
        """Wait until the stream ends, for any reason; then notify every sink with the reason."""
        message = "the stream to the worker was closed"
        try:
            message = await carried
        finally:
            self.closed = True
            if len(self._sinks):
                log.warning("worker.lost", address=self.address, sequences=len(self._sinks), reason=message)
            for handle in list(self._outgoing.starts):
                if (spec := self._outgoing.forget(handle)) is not None:
                    self._give_back(spec)
            self._sinks.lose_all(message)

    def _on_message(self, frame: StepFrame | None) -> None:
        """Pass a received frame to its sinks; None is a heartbeat."""
        self._health.received(self._clock.monotonic_s())
        if frame is not None:
            self._sinks.dispatch(frame)
        if self._after_frame is not None:
            self._after_frame()

    def _give_back(self, spec: StartSpec) -> None:
        if self._unsent is not None:
            self._unsent(spec.grant)


class _Sequence:
    __slots__ = ("_handle", "_link")

    def __init__(self, link: SequenceLink, handle: int) -> None:
        self._link = link
        self._handle = handle

    def credit(self, tokens: int) -> None:
        self._link.credit(self._handle, tokens)

    def cancel(self) -> None:
        self._link.cancel(self._handle)
