"""Which tenant's item is next: one of each tenant in turn. The event loop of a role runs so too.

Each step of a request is a callback of the loop, whatever woke it: a message that was read, a batch of
answers of Redis, a worker's frame, a scheduler's refusals. Run in the order in which they became ready,
thousands of one tenant would hold the loop for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Generator
from contextvars import Context, ContextVar
from typing import Any, Final, Generic, TypeVar

import uvloop

Item = TypeVar("Item")
Result = TypeVar("Result")


class TenantRoundRobin(Generic[Item]):
    """Waiting items, by tenant. Each tenant's items are taken in order; a served tenant moves to the end."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, item: Item) -> None:
        items = self._waiting.get(tenant)
        if items is None:
            items = self._waiting[tenant] = OrderedDict()
        items[item] = None

    def add_first(self, tenant: str, item: Item) -> None:
        """Add an item before all others, for a turn that it already had."""
        self.add(tenant, item)
        self._waiting[tenant].move_to_end(item, last=False)
        self._waiting.move_to_end(tenant, last=False)

    def discard(self, tenant: str, item: Item) -> None:
        """Remove an item that may be waiting."""
        items = self._waiting.get(tenant)
        if items is not None:
            items.pop(item, None)
            if not items:
                del self._waiting[tenant]

    def next_tenant(self, busy: Container[str]) -> str | None:
        """Return the next tenant that is not ``busy``."""
        for tenant in self._waiting:
            if tenant not in busy:
                return tenant
        return None

    def take(self, busy: Container[str]) -> Item | None:
        """Remove and return the next item of a tenant that is not ``busy``."""
        tenant = self.next_tenant(busy)
        if tenant is None:
            return None
        items = self._waiting[tenant]
        item, _ = items.popitem(last=False)
        self._waiting.move_to_end(tenant)
        if not items:
            del self._waiting[tenant]
        return item


# How long tenants' callbacks run before the loop looks for input and timers. One that has begun is not ended.
SLICE_S: Final = 0.005
_tenant: ContextVar[str] = ContextVar("loop_tenant", default="")


def run_as(tenant_id: str) -> None:
    """Let the current task, and those that it starts from now on, take turns as this tenant."""
    _tenant.set(tenant_id)


def nobody() -> Context:
    """Return the context of a callback that serves all tenants, whoever schedules it."""
    return Context()


class TenantLoop(uvloop.Loop):
    """Runs callbacks of contexts with a tenant by turns of tenants, in slices; all others as they come.

    A tenant's callbacks keep their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: TenantRoundRobin[asyncio.Handle] = TenantRoundRobin()
        self._waits = 0
        self._scheduled = False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio. Tasks and futures of asyncio wake by it."""
        tenant = _tenant.get() if context is None else context.get(_tenant, "")
        if not tenant:
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._waiting.add(tenant, handle)
        self._waits += 1
        if not self._scheduled:
            self._scheduled = True
            super().call_soon(self._run_turns, context=nobody())
        return handle

    def _run_turns(self) -> None:
        """Run what waits, one callback of each tenant in turn; what these add waits for the next time."""
        ends_s = time.perf_counter() + SLICE_S
        try:
            for _ in range(self._waits):
                handle = self._waiting.take(())
                assert handle is not None
                self._waits -= 1
                if not handle.cancelled():
                    handle._run()
                if time.perf_counter() >= ends_s:
                    break
        finally:  # KeyboardInterrupt, SystemExit: others are reported by the handle
            self._scheduled = bool(self._waits)
            if self._scheduled:
                super().call_soon(self._run_turns, context=nobody())


class LoopTurns:
    """Lets at most ``per_turn`` pieces of work begin in an iteration of the event loop.

    One of each source in turn: a source with few pieces does not wait for one with many. The callers bound
    the waiting pieces.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._begun = 0  # calls that began in this iteration
        self._waiting: TenantRoundRobin[Callable[[], None]] = TenantRoundRobin()  # waiting calls by source

    def add(self, source: str, act: Callable[[], None]) -> None:
        """Call ``act`` in a turn of the source."""
        if not self._waiting and not self._begun:
            asyncio.get_running_loop().call_soon(self._next, context=nobody())
        self._waiting.add(source, act)

    async def turn(self, source: str) -> None:
        """Return once a piece of the source may begin."""
        if self._begun < self._per_turn and not self._waiting:
            if not self._begun:
                asyncio.get_running_loop().call_soon(self._next, context=nobody())
            self._begun += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self.add(source, lambda: None if turn.done() else turn.set_result(None))
        await turn

    async def run(self, source: str, steps: Generator[None, None, Result]) -> Result:
        """Return the result of steps that each take a few milliseconds."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            await self.turn(source)

    def _next(self) -> None:
        self._begun = min(self._per_turn, len(self._waiting))  # what an act adds comes in the next iteration
        try:
            for _ in range(self._begun):
                if (act := self._waiting.take(())) is not None:
                    act()
        finally:  # a piece that fails stops no other
            if self._begun:
                asyncio.get_running_loop().call_soon(self._next, context=nobody())
