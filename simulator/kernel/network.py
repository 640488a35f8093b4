"""The network between simulated processes: connections, latency, and everything that breaks them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from simulator.kernel.connection import Broken, ConnectionOpened, Pipe, Silent, SimConnection
from simulator.kernel.loop import VirtualTimeLoop
from simulator.kernel.process import Process

__all__ = ["Broken", "Latency", "Network", "Silent", "SimConnection", "Unreachable"]

T = TypeVar("T")

_NOBODYS: Final = Context()  # nothing is set in it, and what runs in it sets nothing


class Unreachable(Exception):
    """No connection or answer: there is no listener, or nothing arrived within the time."""


@dataclass(frozen=True, slots=True)
class Latency:
    """One way takes ``base_s``, plus an exponential time of mean ``jitter_s``, plus for a ``tail_ratio`` of
    the messages an exponential time of mean ``tail_s``."""

    base_s: float = 0.0002
    jitter_s: float = 0.0001
    tail_ratio: float = 0.001
    tail_s: float = 0.01

    def draw_s(self, rng: Random) -> float:
        """Return the latency of one message."""
        delay_s = self.base_s - self.jitter_s * math.log(1.0 - rng.random())
        if self.tail_ratio and rng.random() < self.tail_ratio:
            delay_s -= self.tail_s * math.log(1.0 - rng.random())
        return delay_s


@dataclass(slots=True)
class _Listener:
    process: Process
    accept: Callable[[SimConnection], None]
    context: Context
    answers: Any
    gone: bool = False  # it vanished with its machine, so no refusal is sent


class Network:
    """Processes by name, listeners by address. Faults hold between names, so they outlive a restart."""

    def __init__(self, loop: VirtualTimeLoop, rng: Random, latency: Latency | None = None) -> None:
        self.loop = loop
        self._rng = Random(rng.getrandbits(64))
        self._latency = latency if latency is not None else Latency()
        self._latencies: dict[tuple[str, str], Latency] = {}
        self._listeners: dict[str, _Listener] = {}
        self._cuts: dict[tuple[str, str], dict[Pipe, None]] = {}
        self._ends: dict[str, dict[int, SimConnection]] = {}  # open connections by process name
        self._watched: dict[Process, None] = {}
        self._connections = 0

    # --- use --------------------------------------------------------------------------------------

    def listen(
        self,
        process: Process,
        address: str,
        accept: Callable[[SimConnection], None],
        *,
        answers: object = None,
    ) -> None:
        """Call ``accept`` inside the process for each connection to the address, until it crashes.

        ``answers`` is what questions are put to. A new life of the process takes the address over.
        """
        held = self._listeners.get(address)
        assert held is None or held.process.dead, f"{address} is taken by {held.process.name}"
        self._listeners[address] = _Listener(process, accept, process.context(), answers)
        self._watch(process)

    async def connect(self, process: Process, address: str, *, within_s: float) -> SimConnection:
        """Return this process's end of a new connection. Raises Unreachable."""
        answer: asyncio.Future[SimConnection] = self.loop.create_future()
        self._watch(process)
        if self._road_open(process.name, address):
            reach_s = self.loop.now_s + self.delay_s(process.name, self._host(address))
            self.loop.at(reach_s, self._knock, process, address, answer, context=Context())
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            raise Unreachable(f"{address} did not answer within {within_s:g} s") from None
        finally:
            if not answer.done():
                answer.cancel()

    async def ask(
        self,
        process: Process,
        address: str,
        question: Callable[[Any], Coroutine[Any, Any, T]],
        *,
        within_s: float,
    ) -> T:
        """Return what ``question`` answers when it is called with what answers there, after a way there and
        one back.

        The question must answer without waiting. Raises what it raised, or Unreachable: it may have been
        answered then.
        """
        loop = self.loop
        answer: asyncio.Future[T] = loop.create_future()
        if self._road_open(process.name, address):
            reach_s = loop.now_s + self.delay_s(process.name, self._host(address))
            loop.at(reach_s, self._put, process, address, question, answer, context=_NOBODYS)
        silence = loop.call_later(within_s, _give_up, answer, address, within_s)
        try:
            return await answer
        finally:
            silence.cancel()

    # --- faults -----------------------------------------------------------------------------------

    def set_latency(self, left: str, right: str, latency: Latency | None) -> None:
        """Messages between the two take another time, both ways; None: the network's."""
        for way in ((left, right), (right, left)):
            if latency is None:
                self._latencies.pop(way, None)
            else:
                self._latencies[way] = latency

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Until ``heal`` messages wait, as TCP sends them again, and new connections are not answered."""
        self._cuts.setdefault((source, target), {})
        if both:
            self._cuts.setdefault((target, source), {})

    def partition(self, *sides: Iterable[str]) -> None:
        """Cut each process of a side from those of the others."""
        groups = [tuple(side) for side in sides]
        for at, group in enumerate(groups):
            for other in groups[at + 1 :]:
                for source in group:
                    for target in other:
                        self.cut(source, target)

    def heal(self, left: str | None = None, right: str | None = None) -> None:
        """End the cuts between two processes, of one, or all; what waited is on its way."""
        wanted = {name for name in (left, right) if name is not None}
        for way in [way for way in self._cuts if wanted <= set(way)]:
            for pipe in self._cuts.pop(way):
                pipe.flush()

    def half_open(self, source: str, target: str) -> None:
        """What is sent on the present connections from source to target vanishes; new ones are whole."""
        for end in self._between(source, target):
            end.outgoing.vanish()

    def disconnect(self, left: str, right: str) -> None:
        """The present connections between the two break; each side observes it."""
        for end in self._between(left, right):
            end.break_off("the connection was reset")

    def connections(self, name: str) -> int:
        """Return how many ends the process has."""
        return len(self._ends.get(name, ()))

    # --- for connections --------------------------------------------------------------------------

    def delay_s(self, source: str, target: str) -> float:
        if self._latencies:
            return self._latencies.get((source, target), self._latency).draw_s(self._rng)
        return self._latency.draw_s(self._rng)

    def holds(self, pipe: Pipe) -> bool:
        if not self._cuts:
            return False
        held = self._cuts.get((pipe.source, pipe.target))
        if held is None:
            return False
        held[pipe] = None
        return True

    def forget(self, end: SimConnection) -> None:
        self._ends.get(end.process.name, {}).pop(end.number, None)

    # --- inside -----------------------------------------------------------------------------------

    def _host(self, address: str) -> str:
        listener = self._listeners.get(address)
        return listener.process.name if listener is not None else ""

    def _road_open(self, name: str, address: str) -> bool:
        return (name, self._host(address)) not in self._cuts

    def _knock(self, process: Process, address: str, answer: asyncio.Future[SimConnection]) -> None:
        """A connection request reaches the machine, which refuses it without a listener."""
        listener = self._listeners.get(address)
        if listener is None or listener.process.dead:
            if listener is None or not listener.gone:
                self._answer(process, "", _fail, answer, Unreachable(f"nobody listens at {address}"))
            return
        self.loop.call_soon(self._accept, listener, process, answer, context=listener.context)

    def _accept(self, listener: _Listener, process: Process, answer: asyncio.Future[SimConnection]) -> None:
        host = listener.process
        there = Pipe(self, process.name, host.name, listener.context.copy())
        back = Pipe(self, host.name, process.name, process.context())
        near, far = self._end(process, host.name, there), self._end(host, process.name, back)
        there.end, back.end = far, near
        back.carry(ConnectionOpened(answer, near))
        listener.accept(far)

    def _end(self, process: Process, peer: str, outgoing: Pipe) -> SimConnection:
        self._connections += 1
        end = SimConnection(self, self._connections, process, peer, outgoing)
        if process.dead:
            end.lost(f"{process.name} ended", silent=False)
        else:
            self._ends.setdefault(process.name, {})[end.number] = end
        return end

    def _put(
        self,
        process: Process,
        address: str,
        question: Callable[[Any], Coroutine[Any, Any, Any]],
        answer: asyncio.Future[Any],
    ) -> None:
        """A question reaches the machine."""
        listener = self._listeners.get(address)
        if listener is None or listener.process.dead:
            if listener is None or not listener.gone:
                self._answer(process, "", _fail, answer, Unreachable(f"nobody listens at {address}"))
            return
        context = listener.context.copy()
        if listener.process.stopped:  # it answers when it is resumed
            self.loop.call_soon(self._reply, listener, process, question, answer, context=context)
        else:
            context.run(self._reply, listener, process, question, answer)

    def _reply(
        self,
        listener: _Listener,
        process: Process,
        question: Callable[[Any], Coroutine[Any, Any, Any]],
        answer: asyncio.Future[Any],
    ) -> None:
        host = listener.process
        coroutine = question(listener.answers)
        try:
            coroutine.send(None)
        except StopIteration as done:
            self._answer(process, host.name, _succeed, answer, done.value)
        except Exception as error:
            self._answer(process, host.name, _fail, answer, error)
        else:
            coroutine.close()
            raise AssertionError("a question is answered without waiting")

    def _answer(
        self,
        process: Process,
        host: str,
        settle: Callable[[asyncio.Future[Any], Any], None],
        answer: asyncio.Future[Any],
        value: object,
    ) -> None:
        if (host, process.name) in self._cuts:
            return
        reach_s = self.loop.now_s + self.delay_s(host, process.name)
        self.loop.at(reach_s, settle, answer, value, context=process.context())

    def _watch(self, process: Process) -> None:
        if process not in self._watched:
            self._watched[process] = None
            process.on_crash(lambda silent: self._crashed(process, silent))

    def _crashed(self, process: Process, silent: bool) -> None:
        self._watched.pop(process, None)
        for listener in self._listeners.values():
            if listener.process is process:
                listener.gone = silent
        for end in self._ends.pop(process.name, {}).values():
            end.lost(f"{process.name} ended", silent=silent)

    def _between(self, source: str, target: str) -> list[SimConnection]:
        return [end for end in self._ends.get(source, {}).values() if end.peer == target]


def _succeed(answer: asyncio.Future[Any], value: object) -> None:
    if not answer.done():
        answer.set_result(value)


def _give_up(answer: asyncio.Future[Any], address: str, within_s: float) -> None:
    _fail(answer, Unreachable(f"{address} did not answer within {within_s:g} s"))


def _fail(answer: asyncio.Future[Any], error: Any) -> None:
    if not answer.done():
        answer.set_exception(error)
