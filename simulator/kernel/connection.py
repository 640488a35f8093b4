"""A connection between two simulated processes: a pipe each way, in order, and an end at each process.

A pipe transfers ownership of its messages: a sender does not touch one after sending it. What is sent while
its way is cut waits, as TCP sends it again; what is sent into a pipe that vanishes is lost, and all that
comes after it. A sender that waits (``send``) is at most ``WINDOW`` messages ahead of its reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final, Protocol

from simulator.kernel.loop import VirtualTimeLoop
from simulator.kernel.process import Process

WINDOW: Final = 256


class Broken(Exception):
    """The connection is over. ``error`` is what the peer gave as its reason, None when it gave none."""

    def __init__(self, message: str, error: Exception | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.error = error


class Silent(Exception):
    """Nothing came within the time."""


class Roads(Protocol):
    """What a pipe needs from its network."""

    @property
    def loop(self) -> VirtualTimeLoop: ...

    def delay_s(self, source: str, target: str) -> float:
        """Return how long the next message takes."""

    def holds(self, pipe: Pipe) -> bool:
        """Whether the way is cut; ``flush`` notifies the pipe when it is whole again."""

    def forget(self, end: SimConnection) -> None:
        """The end is over."""


class Pipe:
    """One direction. ``vanished``: whatever is sent from now on is lost."""

    __slots__ = (
        "_last_s",
        "_roads",
        "_under_way",
        "_waiting",
        "context",
        "end",
        "source",
        "target",
        "vanished",
    )

    def __init__(self, roads: Roads, source: str, target: str, context: Context) -> None:
        self._roads = roads
        self.source = source
        self.target = target
        self.context = context  # context of the receiver
        self.end: SimConnection | None = None  # connection at which it arrives
        self.vanished = False
        self._last_s = 0.0
        self._under_way: deque[tuple[float, Any]] = deque()
        self._waiting: deque[Any] = deque()

    def carry(self, message: Any) -> None:
        if self.vanished:
            return
        if self._waiting or self._roads.holds(self):
            self._waiting.append(message)
            return
        roads = self._roads
        arrival_s = roads.loop.now_s + roads.delay_s(self.source, self.target)
        self._last_s = arrival_s = max(arrival_s, self._last_s)
        self._under_way.append((arrival_s, message))
        if len(self._under_way) == 1:
            roads.loop.at(arrival_s, self._arrive, context=self.context)

    def flush(self) -> None:
        """Send what waited: the route is whole again."""
        waiting, self._waiting = self._waiting, deque()
        for message in waiting:
            self.carry(message)

    def vanish(self) -> None:
        """Queued messages are lost too; messages in flight arrive."""
        self.vanished = True
        self._waiting.clear()

    def _arrive(self) -> None:
        under_way, end = self._under_way, self.end
        now_s = self._roads.loop.now_s
        assert end is not None
        while under_way and under_way[0][0] <= now_s:
            end.arrived(under_way.popleft()[1])
        if under_way:
            self._roads.loop.at(under_way[0][0], self._arrive, context=self.context)


class _PipeClosed:
    """The last message of a pipe."""

    __slots__ = ("error", "text")

    def __init__(self, text: str, error: Exception | None) -> None:
        self.text = text
        self.error = error


class ConnectionOpened:
    """The first message of the way back: the task that waits for the connection has it now."""

    __slots__ = ("_answer", "_end")

    def __init__(self, answer: asyncio.Future[SimConnection], end: SimConnection) -> None:
        self._answer = answer
        self._end = end

    def settle(self) -> None:
        if self._answer.done():  # it waited no longer
            self._end.close()
        else:
            self._answer.set_result(self._end)


class _Room:
    """The reader of the other pipe has read so much that its sender may continue."""


_ROOM: Final = _Room()


class SimConnection:
    """One end. Owned by one process; ``receive`` is for one task, or ``on_message`` is set, never both.

    ``on_message`` and ``on_broken`` are called inside the process, for what arrives after they were set.
    """

    def __init__(self, roads: Roads, number: int, process: Process, peer: str, outgoing: Pipe) -> None:
        self.number = number
        self.process = process
        self.peer = peer
        self.outgoing = outgoing
        self.on_message: Callable[[Any], None] | None = None
        self.on_broken: Callable[[Broken], None] | None = None
        self._roads = roads
        self._inbox: deque[Any] = deque()
        self.over: Broken | None = None  # why nothing can be sent any more
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()
        self._ahead = 0  # messages of ours without an acknowledgement of the peer
        self._read = 0  # messages of the peer that we read and did not acknowledge
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0
        self._patience_s = 0.0  # its patience by our process's clock
        self._was_silent = False

    def post(self, message: Any) -> None:
        """Send without waiting. Raises Broken."""
        if self.over is not None:
            raise self.over
        self._ahead += 1
        self.outgoing.carry(message)

    async def send(self, message: Any) -> None:
        """Send once the peer has read enough of what was sent before. Raises Broken."""
        await self.wait_room()
        self.post(message)

    @property
    def has_room(self) -> bool:
        """Whether ``send`` would not wait."""
        return self._ahead < WINDOW or self.over is not None

    async def wait_room(self) -> None:
        """Return when the peer has read enough, or the connection is over."""
        while not self.has_room:
            waiter: asyncio.Future[None] = self._roads.loop.create_future()
            self._writers.append(waiter)
            await waiter

    async def receive(self, within_s: float | None = None) -> Any:
        """Return the next message. Raises Broken after the last, Silent when none came in time.

        Time is that of the process, so one that was paused for longer may report silence although
        something came meanwhile.
        """
        while not self._inbox:
            if self.over is not None:
                raise self.over
            assert self._reader is None, "a connection has one reader"
            self._reader = self._roads.loop.create_future()
            self._was_silent = False
            if within_s is not None:
                self._set_alarm(within_s)
            try:
                await self._reader
            finally:
                self._reader = None
            if self._was_silent:
                raise Silent(f"nothing came for {within_s:g} s")
        self._count_read()
        return self._inbox.popleft()

    def read_each(self, on_message: Callable[[Any], None], on_broken: Callable[[Broken], None]) -> None:
        """Call for each message from now on, those received before included, and once for the end."""
        self.on_message, self.on_broken = on_message, on_broken
        while self._inbox:
            self._count_read()
            on_message(self._inbox.popleft())
        if self.over is not None:
            on_broken(self.over)

    def close(self, error: Exception | None = None) -> None:
        """The peer receives what was sent, then Broken with that error. Idempotent."""
        if self.over is None:
            self.outgoing.carry(_PipeClosed(f"{self.process.name} closed the connection", error))
            self._finish(Broken("the connection was closed on this side"))
            self._inbox.clear()

    # --- for the network --------------------------------------------------------------------------

    def arrived(self, message: Any) -> None:
        """A message is here. Called inside the process."""
        if self.over is not None:
            return
        if message is _ROOM:
            self._ahead -= WINDOW // 2
            self._wake_writers()
        elif type(message) is _PipeClosed:
            self._finish(Broken(message.text, message.error))
        elif type(message) is ConnectionOpened:
            message.settle()
        elif self.on_message is not None:
            self._count_read()
            self.on_message(message)
        else:
            self._inbox.append(message)
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)

    def break_off(self, text: str) -> None:
        """Break the connection: both ends observe it, this one at once."""
        if self.over is None:
            self.outgoing.carry(_PipeClosed(text, None))
            self.process.call_soon(self.arrived, _PipeClosed(text, None))

    def lost(self, text: str, *, silent: bool) -> None:
        """The process is dead; its peer observes it unless the machine died too."""
        if self.over is None:
            if silent:
                self.outgoing.vanish()
            else:
                self.outgoing.carry(_PipeClosed(text, None))
            self.over = Broken(text)

    # --- inside -----------------------------------------------------------------------------------

    def _finish(self, broken: Broken) -> None:
        self.over = broken
        self._roads.forget(self)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        self._wake_writers()
        if self.on_broken is not None:
            self.on_broken(broken)

    def _wake_writers(self) -> None:
        while self._writers:
            waiter = self._writers.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _count_read(self) -> None:
        self._read += 1
        if self._read == WINDOW // 2:
            self._read = 0
            if self.over is None:
                self.outgoing.carry(_ROOM)

    def _set_alarm(self, within_s: float) -> None:
        """One timer serves many waits: it is set again when it fires before the last deadline."""
        now_s = self._roads.loop.now_s
        process = self.process
        self._patience_s = process.local_s(now_s) + within_s
        due_s = process.global_s(self._patience_s)
        if self._alarm is not None:
            if self._alarm_s <= due_s:
                return
            self._alarm.cancel()
        self._alarm_s = due_s
        self._alarm = self._roads.loop.at(due_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._reader is None or self.over is not None:
            return
        process = self.process
        due_s = process.global_s(self._patience_s)
        if due_s > self._roads.loop.now_s:
            self._alarm_s = due_s
            self._alarm = self._roads.loop.at(due_s, self._ring)
            return
        self._was_silent = True
        if not self._reader.done():
            self._reader.set_result(None)
