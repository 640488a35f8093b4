"""The event loop of a role: tenants take turns in it.

Each step of a request is a callback of the loop, whatever woke it: a message that was read, a batch of
answers of Redis, a worker's frame, a scheduler's refusals. Run in the order in which they became ready,
thousands of one tenant would hold the loop for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Final

import uvloop

from services.runtime.process.tenant_turns import TenantRoundRobin

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
