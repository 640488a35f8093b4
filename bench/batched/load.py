"""Closed and open loops over connections, and what they took."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil

from bench.batched.connections import Connection, Failed

DRAIN_S: Final = 3.0
_FIRST_ANSWER_S: Final = 20.0
Connect = Callable[[Callable[[str], None]], Awaitable[Connection]]


@dataclass(frozen=True, slots=True)
class Target:
    """One system under load.

    ``connect`` returns a new connection; its argument is called with the reason of a failure. ``messages``:
    encoded requests. ``is_answer``: False for a message that answers nothing; raises Failed for an error.
    ``pids``: the processes of the system, without their children.
    """

    name: str
    connect: Connect
    messages: Sequence[bytes]
    is_answer: Callable[[bytes], bool]
    pids: Sequence[int] = ()


@dataclass(slots=True)
class Taken:
    """What a run took. ``seconds``: latencies of the answered requests."""

    name: str
    wall_s: float
    seconds: list[float] = field(default_factory=list)
    client_s: float = 0.0  # processor time of this process
    unanswered: int = 0  # requests of an open loop without an answer, some time after its end
    server_s: float = 0.0  # processor time of the system, of a closed loop

    @property
    def per_s(self) -> float:
        return len(self.seconds) / self.wall_s

    def ms(self, ratio: float) -> float:
        """Return a quantile; a request without an answer counts as infinite."""
        ordered = sorted(self.seconds)
        place = min(len(ordered) + self.unanswered - 1, int((len(ordered) + self.unanswered) * ratio))
        return ordered[place] * 1e3 if 0 <= place < len(ordered) else math.inf

    @property
    def server_us(self) -> float:
        """Processor time of the system per request: what load beside it changes least."""
        return self.server_s / max(1, len(self.seconds)) * 1e6

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.per_s:.0f}/s, p50 {self.ms(0.5):.2f} ms, p99 {self.ms(0.99):.2f} ms, "
            f"server {self.server_us:.0f} us of processor each, "
            f"client {self.client_s / self.wall_s:.2f} of a core"
        )


class _Failure:
    """The first failure of a run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def set(self, reason: str) -> None:
        if not self._reason.done():
            self._reason.set_result(reason)

    async def sleep(self, seconds: float) -> None:
        """Return after that time. Raises Failed at once."""
        await asyncio.wait((self._reason,), timeout=max(0.0, seconds))
        self.check()

    async def unless(self, answered: asyncio.Future[None], limit_s: float) -> None:
        """Return once ``answered`` is done. Raises Failed at once, or after the limit."""
        await asyncio.wait((self._reason, answered), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self.check()
        if not answered.done():
            raise Failed(f"{self._name}: no answer within {limit_s:g} s")

    def check(self) -> None:
        if self._reason.done():
            raise Failed(f"{self._name}: {self._reason.result()}")


def processor_s(pids: Sequence[int]) -> float:
    """Return the processor time that the processes and their children have used."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
    return total


async def closed_loop(target: Target, *, connections: int, seconds: float, warm_s: float = 1.0) -> Taken:
    """Send the next request of a connection once the one before is answered. Raises Failed."""
    clock, failure = time.perf_counter, _Failure(target.name)
    taken = Taken(target.name, 0.0)
    began_s = math.inf

    def drive(connection: Connection, number: int) -> None:
        at, sent_s = number, clock()

        def answered() -> None:
            nonlocal at, sent_s
            now_s = clock()
            if sent_s >= began_s:
                taken.seconds.append(now_s - sent_s)
            at, sent_s = at + connections, now_s
            connection.send(target.messages[at % len(target.messages)])

        on_answers(target, connection, failure, answered)
        connection.send(target.messages[at % len(target.messages)])

    opened = [await target.connect(failure.set) for _ in range(connections)]
    try:
        for number, connection in enumerate(opened):
            drive(connection, number)
        await failure.sleep(warm_s)
        began_s, used_s, server_s = clock(), time.process_time(), processor_s(target.pids)
        await failure.sleep(seconds)
        taken.wall_s, taken.client_s = clock() - began_s, time.process_time() - used_s
        taken.server_s = processor_s(target.pids) - server_s
        return taken
    finally:
        for connection in opened:
            connection.close()


def on_answers(
    target: Target, connection: Connection, failure: _Failure, answered: Callable[[], None]
) -> None:
    """Call ``answered`` for each answer of the connection from now on. An error ends the run."""

    def received(message: bytes) -> None:
        try:
            if not target.is_answer(message):
                return
        except Failed as error:
            failure.set(str(error))
            return
        answered()

    connection.on_answer = received


async def one_answer(target: Target, connection: Connection, failure: _Failure) -> None:
    """Send one request and return once it is answered: what opening takes is no latency. Raises Failed."""
    answered = asyncio.get_running_loop().create_future()
    on_answers(target, connection, failure, lambda: answered.set_result(None))
    connection.send(target.messages[0])
    await failure.unless(answered, _FIRST_ANSWER_S)


async def open_loop(
    target: Target,
    times_s: Sequence[float],
    *,
    connections: int,
    picks: Sequence[int] | None = None,
    start: asyncio.Barrier | None = None,
) -> Taken:
    """Send requests at these times after the start, whatever is answered. Raises Failed.

    ``picks``: the message of each request. ``start``: of loops that start together, once all are connected. A
    request that finds no free connection waits for one; its latency counts from its own time.
    """
    clock, failure = time.perf_counter, _Failure(target.name)
    found: list[float] = []
    waiting: deque[tuple[float, bytes]] = deque()
    free: deque[Callable[[float, bytes], None]] = deque()  # the longest at rest first: servers close those

    def ready(connection: Connection) -> None:
        due_s = 0.0

        def send(at_s: float, message: bytes) -> None:
            nonlocal due_s
            due_s = at_s
            connection.send(message)

        def answered() -> None:
            found.append(clock() - due_s)
            if waiting:
                send(*waiting.popleft())
            else:
                free.append(send)

        on_answers(target, connection, failure, answered)
        free.append(send)

    opened = [await target.connect(failure.set) for _ in range(connections)]
    try:
        await asyncio.gather(*(one_answer(target, connection, failure) for connection in opened))
        for connection in opened:
            ready(connection)
        if start is not None:
            await start.wait()
        began_s, used_s = clock(), time.process_time()
        for number, time_s in enumerate(times_s):
            due_s = began_s + time_s
            if (left_s := due_s - clock()) > 0:
                await failure.sleep(left_s)
            message = target.messages[(number if picks is None else picks[number]) % len(target.messages)]
            if free:
                free.popleft()(due_s, message)
            else:
                waiting.append((due_s, message))
        wall_s, end_s = clock() - began_s, clock() + DRAIN_S
        while len(found) < len(times_s) and clock() < end_s:
            await failure.sleep(0.02)
        return Taken(target.name, wall_s, found, time.process_time() - used_s, len(times_s) - len(found))
    finally:
        for connection in opened:
            connection.close()
