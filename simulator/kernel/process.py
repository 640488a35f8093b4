"""A simulated process: its clocks, and how it stops, crashes and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from random import Random
from typing import Any, Final, ParamSpec, TypeVar

from services.runtime.ids import Ids
from services.runtime.supervisor import Supervisor
from simulator.kernel.handles import OWNER, Owner
from simulator.kernel.loop import VirtualTimeLoop

P = ParamSpec("P")
T = TypeVar("T")

UNIX_START_S: Final = 1_700_000_000.0  # what an exact clock shows when a simulation starts


@dataclass(frozen=True, slots=True)
class Skew:
    """How a machine's clocks differ from exact ones.

    ``rate`` is seconds shown per second that passes, ``offset_s`` what the monotonic clock shows at the
    start, ``unix_offset_s`` how far the wall clock is ahead of an exact one.
    """

    rate: float = 1.0
    offset_s: float = 0.0
    unix_offset_s: float = 0.0


class Process(Owner):
    """One life of a process. What runs in it is started by ``spawn``, ``run`` or a message of the network.

    Everything that is made in its context belongs to it: tasks, timers and callbacks, and what those make.
    While it is paused none of that runs; once it crashed none ever does, not even a ``finally``.
    """

    def __init__(
        self, name: str, loop: VirtualTimeLoop, rng: Random, *, skew: Skew | None = None, life: int = 1
    ) -> None:
        skew = skew if skew is not None else Skew()
        super().__init__(name, offset_s=skew.offset_s, rate=skew.rate)
        self.loop = loop
        self.life = life
        self.rng = Random(rng.getrandbits(64))
        self.unix_offset_s = skew.unix_offset_s
        self._booted_s = skew.offset_s
        self._next_life_rng = Random(rng.getrandbits(64))
        self._on_crash: dict[int, Callable[[bool], None]] = {}
        self._hooks = 0
        context = copy_context()
        context.run(OWNER.set, self)
        self._context = context
        self.clock = ProcessClock(self)
        self.supervisor: Supervisor = _ProcessSupervisor(self)
        self.ids: Ids = ProcessIds(Random(self.rng.getrandbits(64)))

    def __repr__(self) -> str:
        return f"<Process {self.name} life {self.life}>"

    @property
    def alive(self) -> bool:
        """It has not crashed; it may be paused."""
        return not self.dead

    @property
    def paused(self) -> bool:
        return self.stopped and not self.dead

    @property
    def running(self) -> bool:
        """It neither crashed nor is paused."""
        return not self.stopped

    # --- what it does -----------------------------------------------------------------------------

    def context(self) -> Context:
        """Return a new context whose callbacks belong to this process."""
        return self._context.copy()

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the call returns, made inside the process: what it builds and starts belongs to it."""
        assert self.running, f"{self.name} does not run"
        return self.context().run(call, *args, **kwargs)

    def spawn(self, name: str, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of the process, owned by its supervisor."""
        return self.supervisor.spawn(name, coro)

    def call_soon(self, call: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Call inside the process: once it is resumed if it is paused, never if it crashed."""
        return self.loop.call_soon(call, *args, context=self.context())

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call inside the process after ``delay_s`` of its clock."""
        when_s = self.global_s(self.local_s(self.loop.now_s) + delay_s)
        return self.loop.at(when_s, call, *args, context=self.context())

    # --- what happens to it -----------------------------------------------------------------------

    def pause(self) -> None:
        """Stop it as SIGSTOP does: time and its clocks continue, and due callbacks wait."""
        self._check_outside()
        self.loop.owner_stopped(self)

    def resume(self) -> None:
        """Run what fell due while it was paused, in that order, at this instant."""
        self.loop.owner_resumed(self)

    def crash(self, *, silent: bool = False) -> None:
        """Kill it: none of it runs any more, and its connections break for its peers after a latency.

        ``silent``: the machine is lost with it, so that the peers are not notified. Idempotent.
        """
        if self.dead:
            return
        self._check_outside()
        self.loop.owner_died(self)
        for hook in list(self._on_crash.values()):
            hook(silent)
        self._on_crash.clear()

    def restart(self) -> Process:
        """Return the next life of a process that crashed: same name and clocks, nothing else of it."""
        assert self.dead, f"{self.name} is alive"
        skew = Skew(self.rate, self.offset_s, self.unix_offset_s)
        born = Process(self.name, self.loop, self._next_life_rng, skew=skew, life=self.life + 1)
        born._booted_s = self._booted_s
        return born

    def unix_s(self) -> float:
        """Return what the wall clock shows now."""
        return UNIX_START_S + self.unix_offset_s + self.local_s(self.loop.now_s) - self._booted_s

    def jump_unix(self, seconds: float) -> None:
        """The wall clock is set forward, or back, by so much."""
        self.unix_offset_s += seconds

    def on_crash(self, hook: Callable[[bool], None]) -> Callable[[], None]:
        """Call ``hook(silent)`` when it crashes, outside of it. Return what takes the hook away again."""
        self._hooks += 1
        number = self._hooks
        self._on_crash[number] = hook
        return lambda: self._on_crash.pop(number, None) and None

    def _check_outside(self) -> None:
        assert OWNER.get() is not self, f"{self.name} cannot do that to itself: ask the loop, outside of it"


class ProcessClock:
    """Implements ``ports.clock.Clock`` with one process's clocks."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic_s(self) -> float:
        process = self._process
        return process.offset_s + process.loop.now_s * process.rate

    def unix_s(self) -> float:
        return self._process.unix_s()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ProcessIds(Ids):
    """Draws from a seeded source."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def request_id(self) -> str:
        return f"req_{self._rng.getrandbits(96):024x}"

    def incident_id(self) -> str:
        return f"inc_{self._rng.getrandbits(64):016x}"

    def seed(self) -> int:
        return self._rng.getrandbits(63)


class _ProcessSupervisor(Supervisor):
    """The production supervisor; what is spawned from outside belongs to its process too."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.clock)
        self._process = process

    def spawn(self, name: str, coro: Coroutine[Any, Any, T], *, shared: bool = False) -> asyncio.Task[T]:
        if OWNER.get() is self._process and not shared:
            return super().spawn(name, coro)
        return self._process.context().run(super().spawn, name, coro)
