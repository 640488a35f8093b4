"""Virtual time for the store's readers and lease holders: an hour takes milliseconds, the same every run."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from services.adapters.memory.store import MemoryStore
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Compacted,
    Condition,
    ConditionFailed,
    Entry,
    Listing,
    Operation,
    Store,
    WatchBatch,
)

T = TypeVar("T")


class _JumpSelector(selectors.SelectSelector):
    """Nothing is ready: the clock jumps to the next timer."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task is blocked and no timer is pending"
            self.now_s += timeout
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = _JumpSelector()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now_s


class LoopClock:
    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()

    def unix_s(self) -> float:
        return self.monotonic_s()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Link:
    """One client's way to a store: it can be cut, and be slow before and after the store acts.

    While it is cut a call waits ``timeout_s``, like one to a frozen server, and a watch breaks.
    """

    def __init__(self, store: Store, clock: Clock, *, slow_s: float = 0.0, rng: random.Random | None = None):
        self._store = store
        self._clock = clock
        self._slow_s = slow_s
        self._rng = rng if rng is not None else random.Random(1)
        self._cut = False
        self._changed = asyncio.Event()
        self.timeout_s = 3.0
        self.lose_next_answer = False
        self.compacted = False
        self.calls: list[tuple[float, str]] = []

    def cut(self) -> None:
        self._cut = True
        self._changed.set()

    def mend(self) -> None:
        self._cut = False
        self._changed = asyncio.Event()

    async def get(self, key: str) -> Entry | None:
        return await self._call("get", self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._call("list", self._store.list(prefix))

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        return await self._call("commit", self._store.commit(operations, conditions))

    async def grant_lease(self, ttl_s: int) -> int:
        return await self._call("grant_lease", self._store.grant_lease(ttl_s))

    async def keep_alive(self, lease_id: int) -> None:
        await self._call("keep_alive", self._store.keep_alive(lease_id))

    async def revoke_lease(self, lease_id: int) -> None:
        await self._call("revoke_lease", self._store.revoke_lease(lease_id))

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        self.calls.append((self._clock.monotonic_s(), "watch"))
        await self._pass()
        if self.compacted:
            raise Compacted("gone")
        async with aclosing(self._store.watch(prefix, after_revision)) as batches:
            while True:
                next_batch = asyncio.ensure_future(anext(batches))
                broken = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({next_batch, broken}, return_when=asyncio.FIRST_COMPLETED)
                    if broken.done():
                        raise StoreUnavailable("the stream broke")
                    batch = next_batch.result()
                finally:
                    for task in (next_batch, broken):
                        task.cancel()
                    await asyncio.gather(next_batch, broken, return_exceptions=True)
                yield batch

    async def _call(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        self.calls.append((self._clock.monotonic_s(), name))
        try:
            await self._pass()
        except BaseException:
            call.close()
            raise
        answer = await call
        await self._pass()
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise StoreUnavailable("the answer was lost")
        return answer

    async def _pass(self) -> None:
        await self._clock.sleep(self._rng.uniform(0, self._slow_s))
        if self._cut:
            await self._clock.sleep(self.timeout_s)
            raise StoreUnavailable("no answer")


class World:
    """A store, the clock of the virtual loop, and the tasks that are ended with it."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.store = MemoryStore(self.clock)
        self._tasks: list[asyncio.Task[None]] = []

    def link(self, *, slow_s: float = 0.0, rng: random.Random | None = None) -> Link:
        return Link(self.store, self.clock, slow_s=slow_s, rng=rng)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.append(task)
        return task

    def pause_process(self, seconds: float) -> None:
        """Time passes and no task runs, as when the process is stopped or the event loop is blocked."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _VirtualTimeLoop)
        loop.jump.now_s += seconds

    async def stop(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait({task})

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        crashed = [o for o in outcomes if isinstance(o, Exception)]
        assert crashed == [], "a task ended by itself"
        self.store.check_integrity()


@pytest.fixture
def virtual() -> Callable[[Callable[[World], Coroutine[Any, Any, T]]], T]:
    """Run ``scenario(world)`` in virtual time and return what it returns."""

    def run(scenario: Callable[[World], Coroutine[Any, Any, T]]) -> T:
        async def whole() -> T:
            world = World()
            try:
                return await scenario(world)
            finally:
                await world.close()

        with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
            return runner.run(whole())

    return run
