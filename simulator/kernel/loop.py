"""An asyncio event loop on virtual time: the clock jumps to the next timer when nothing is ready.

One order of events for one program: ready callbacks run first in, first out; timers in the order of their
instants, and those of one instant in the order of their making; tasks and futures hash by a counter, so that
sets of them iterate in one order; garbage is collected at counted callbacks, so that what a collection
finalises is finalised at the same event of every run.

The loop touches nothing outside: it has no selector, files, sockets, signals or threads. What would run in an
executor runs inline.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

from simulator.kernel.handles import OWNER, Future, Owner, ReadyCallback, Task, Timer
from simulator.kernel.outside import InsideLoop, OutsideWorld, SimulationError

__all__ = [
    "CallbackFailed", "Deadlock", "LimitReached", "Limits", "OutsideWorld", "SimulationError",
    "VirtualTimeLoop", "run",
]  # fmt: skip

T = TypeVar("T")

_FEW_CANCELLED: Final = 1024
_NAMED: Final = 20


class Deadlock(SimulationError):
    """Every task is blocked and no timer is pending."""


class LimitReached(SimulationError):
    """The simulation ran for longer than it may, in virtual time or in callbacks."""


class CallbackFailed(SimulationError):
    """A callback or a task without a waiter raised; the cause is chained."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``instant_callbacks`` bounds what runs without the clock moving: beyond it, a program spins.

    ``young_callbacks``: between two collections of young garbage; ``full_collections``: so many of those
    between two of all garbage.
    """

    virtual_s: float = float("inf")
    callbacks: int = sys.maxsize
    instant_callbacks: int = 10_000_000
    young_callbacks: int = 20_000
    full_collections: int = 100


class VirtualTimeLoop(InsideLoop):
    """Runs one simulation; see the module. Closed by who made it, with everything that still waits dropped.

    ``after_instant`` is called after the last callback of each instant. What it raises ends the run. It may
    be set at any time.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits if limits is not None else Limits()
        self.after_instant: Callable[[], None] | None = None
        self.now_s = 0.0
        self.callbacks = 0
        self._ready: deque[ReadyCallback | Timer] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._cancelled_timers = 0
        self._timer_number = 0
        self._on_timer_cancelled = self._timer_cancelled  # bound once: each timer holds it
        self._object_number = 0
        self._stopped_owners = 0
        self._instant_began = 0
        self._collect_at = self.limits.young_callbacks
        self._look_at = 0
        self._collections = 0
        self._failure: BaseException | None = None
        self._running = self._stopping = self._closed = False
        self._generators: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], Owner | None]
        self._generators = weakref.WeakKeyDictionary()
        self._graves: list[object] = []  # what of the dead must not be finalised before the end

    # --- running ----------------------------------------------------------------------------------

    def run_until_complete(self, future: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:  # type: ignore[override]
        """Return what the future or coroutine returns. What else runs stays where it is."""
        self._check_open()
        task = future if isinstance(future, asyncio.Future) else self.create_task(future, name="main")
        self._run(task.done)
        return task.result()

    def run_forever(self) -> None:
        """Return after ``stop``."""
        self._stopping = False
        self._run(lambda: self._stopping)

    def stop(self) -> None:
        self._stopping = True

    def _run(self, ended: Callable[[], bool]) -> None:
        if self._running or events._get_running_loop() is not None:
            raise RuntimeError("an event loop is running already")
        hooks = sys.get_asyncgen_hooks()
        collected = gc.isenabled()
        gc.collect()  # Garbage of before is finalised now, and not at some event of the run.
        gc.freeze()  # No collection of this or a later run walks the objects that exist now.
        gc.disable()
        sys.set_asyncgen_hooks(firstiter=self._generator_began, finalizer=self._generator_dropped)
        self._running = True
        events._set_running_loop(self)
        try:
            turn = self._turn
            while not ended():
                turn()
        finally:
            events._set_running_loop(None)
            self._running = False
            sys.set_asyncgen_hooks(*hooks)
            if collected:
                gc.enable()

    def _turn(self) -> None:
        """Run what is ready at this instant; when nothing is, go to the next."""
        ready = self._ready
        if not ready:
            self._advance()
        timers = self._timers
        if timers and timers[0][0] <= self.now_s:
            self._fall_due()
        batch = len(ready)
        self._run_ready(batch)
        self.callbacks += batch
        if self._failure is not None:
            self._raise_failure()
        if self.callbacks >= self._look_at:
            self._look()

    def _fall_due(self) -> None:
        """Make the timers of this instant ready, in order."""
        timers, ready, now_s = self._timers, self._ready, self.now_s
        while timers and timers[0][0] <= now_s:
            timer = heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._cancelled_timers -= 1
            else:
                ready.append(timer)

    def _run_ready(self, batch: int) -> None:
        popleft = self._ready.popleft
        try:
            for _ in range(batch):
                handle = popleft()
                if handle._cancelled:
                    continue
                context = handle._context
                if self._stopped_owners:
                    owner = context.get(OWNER)
                    if owner is not None and owner.stopped:
                        owner.parked.append(handle)
                        continue
                context.run(handle._callback, *handle._args)
        except (SimulationError, AssertionError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise CallbackFailed(f"a callback raised at {self.now_s:.6f} s: {error!r}") from error

    def _advance(self) -> None:
        """Move the clock to the next timer. Raises Deadlock when there is none."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)[2]._scheduled = False
            self._cancelled_timers -= 1
        if not timers:
            self._deadlock()
        when_s = timers[0][0]
        if when_s > self.now_s:
            if self.after_instant is not None:
                self.after_instant()
                if self._ready:  # the hook may act: what it scheduled is of this instant
                    return
                when_s = max(self.now_s, timers[0][0])
            if when_s > self.limits.virtual_s:
                raise LimitReached(f"the simulation passed {self.limits.virtual_s:g} s")
            self.now_s = when_s
            self._instant_began = self.callbacks

    def _look(self) -> None:
        """What need not be looked at after every turn."""
        limits = self.limits
        if self.callbacks >= self._collect_at:
            self._collect()
        if self.callbacks > limits.callbacks:
            raise LimitReached(f"the simulation ran {self.callbacks} callbacks, {self.now_s:.6f} s in")
        if self.callbacks - self._instant_began > limits.instant_callbacks:
            raise LimitReached(
                f"{limits.instant_callbacks} callbacks ran at {self.now_s:.6f} s and the clock does not move:"
                f" {self._blocked()}"
            )

        self._look_at = min(
            self._collect_at, limits.callbacks + 1, self.callbacks + max(1, limits.instant_callbacks)
        )

    def _collect(self) -> None:
        self._collect_at = self.callbacks + self.limits.young_callbacks
        self._collections += 1
        gc.collect(2 if self._collections % self.limits.full_collections == 0 else 1)

    def _deadlock(self) -> NoReturn:
        raise Deadlock(f"every task is blocked at {self.now_s:.6f} s: {self._blocked()}")

    def _blocked(self) -> str:
        tasks = sorted(self.tasks(), key=lambda task: task.number)
        names = [
            task.get_name() if task.owner is None else f"{task.owner.name}/{task.get_name()}"
            for task in tasks
        ]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more

    # --- what is to run ---------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> ReadyCallback:
        handle = ReadyCallback(callback, args, context if context is not None else copy_context())
        if not self._closed:  # what a coroutine that is dropped at the end still requests
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call after ``delay`` seconds of the running owner's clock."""
        owner = OWNER.get()
        if owner is None:
            return self.at(self.now_s + delay, callback, *args, context=context)
        return self.at(owner.global_s(owner.local_s(self.now_s) + delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call when the running owner's clock, which ``time`` reads, shows ``when``."""
        owner = OWNER.get()
        when_s = when if owner is None else owner.global_s(when)
        return self.at(when_s, callback, *args, context=context)

    def at(
        self, when_s: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call at an instant of the loop, whatever a process's clock shows; now if that has passed."""
        timer = Timer(
            when_s,
            callback,
            args,
            context if context is not None else copy_context(),
            self._on_timer_cancelled,
        )
        if not self._closed:
            self._timer_number += 1
            heappush(self._timers, (when_s, self._timer_number, timer))
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> ReadyCallback:
        return self.call_soon(callback, *args, context=context)

    def time(self) -> float:
        """Return seconds of the running owner's monotonic clock; ``now_s`` is the loop's own."""
        owner = OWNER.get()
        return self.now_s if owner is None else owner.local_s(self.now_s)

    def create_future(self) -> asyncio.Future[Any]:
        return Future(loop=self)

    def next_number(self) -> int:
        """Return the number of another object of this loop."""
        self._object_number += 1
        return self._object_number

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> Task[T]:
        if self._closed:
            coro.close()
        self._check_open()
        number = self.next_number()
        return Task(
            coro,
            loop=self,
            name=name if name is not None else f"task-{number}",
            number=number,
            owner=OWNER.get() if context is None else context.get(OWNER),
            context=context,
        )

    def tasks(self) -> list[Task[Any]]:
        """Return the tasks that have not ended, in no order."""
        return [task for task in asyncio.all_tasks(self) if isinstance(task, Task)]

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run it inline; the future is done."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(copy_context().run(func, *args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _timer_cancelled(self) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > _FEW_CANCELLED and self._cancelled_timers * 2 > len(self._timers):
            kept = []
            for entry in self._timers:
                if entry[2]._cancelled:
                    entry[2]._scheduled = False
                else:
                    kept.append(entry)
            self._timers[:] = kept  # The list is changed in place, because the turn that runs holds it.
            heapify(self._timers)
            self._cancelled_timers = 0

    # --- owners -----------------------------------------------------------------------------------

    def owner_stopped(self, owner: Owner) -> None:
        """Run nothing of it until ``owner_resumed``."""
        assert not owner.stopped, f"{owner.name} is stopped already"
        owner.stopped = True
        self._stopped_owners += 1

    def owner_resumed(self, owner: Owner) -> None:
        """Run what fell due meanwhile, in that order, then what comes."""
        assert owner.stopped, f"{owner.name} is not paused"
        assert not owner.dead, f"{owner.name} is dead"
        owner.stopped = False
        self._stopped_owners -= 1
        self._ready.extend(owner.parked)
        owner.parked.clear()

    def owner_died(self, owner: Owner) -> None:
        """Run nothing of it ever again, nor any finaliser of it: it is kept, still, until the loop closes."""
        if not owner.stopped:
            self.owner_stopped(owner)
        owner.dead = True
        self._graves += sorted((task for task in self.tasks() if task.owner is owner), key=hash)

    # --- ends -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop everything that waits; requests of its finalisers to the loop are ignored. Idempotent."""
        if self._closed:
            return
        assert not self._running, "a loop that runs cannot be closed"
        self._closed = True
        tasks = sorted(self.tasks(), key=lambda task: task.number)
        running, hook = events._get_running_loop(), sys.unraisablehook
        events._set_running_loop(self)  # a finaliser that starts a task gets the loop first
        # Coroutines that wait in their cleanup, as a task group does, must not be reported.
        sys.unraisablehook = _ignore
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            with suppress(BaseException):
                coroutine.close()
        sys.unraisablehook = hook
        events._set_running_loop(running)
        self._ready.clear()
        self._timers.clear()
        self._graves.clear()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    async def shutdown_asyncgens(self) -> None:
        return

    async def shutdown_default_executor(self) -> None:
        return

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Asyncio's hook for an unhandled exception: it ends the run."""
        if self._failure is None and not self._closed:
            error = context.get("exception")
            self._failure = CallbackFailed(f"{context.get('message')} at {self.now_s:.6f} s: {error!r}")
            self._failure.__cause__ = error

    default_exception_handler = call_exception_handler

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_failure(self) -> NoReturn:
        failure, self._failure = self._failure, None
        assert failure is not None
        raise failure

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def _generator_began(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[generator] = OWNER.get()

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An async generator was not closed: its owner closes it, unless it is dead."""
        owner = self._generators.get(generator)
        if self._closed or (owner is not None and owner.dead):
            self._graves.append(generator)
        else:
            self.call_soon(self.create_task, generator.aclose())


def _name(task: Task[Any]) -> str:
    return task.get_name() if task.owner is None else f"{task.owner.name}/{task.get_name()}"


def run(main: Coroutine[Any, Any, T], *, limits: Limits | None = None) -> T:
    """Return what ``main`` returns, on a new loop. What it leaves running is dropped, not ended."""
    with VirtualTimeLoop(limits) as loop:
        return loop.run_until_complete(main)


def _ignore(_: object) -> None:
    """Report nothing of what a dropped coroutine raises."""
