"""Owner of every background task of a process."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from services.ports.clock import Clock

log = structlog.get_logger()
T = TypeVar("T")


class Supervisor:
    """Holds a reference to each spawned task until it ends, and records which ones crashed.

    A task that ends with an exception makes the process unhealthy, even when another task awaits it. Its
    health service then answers NOT_SERVING, so that the process is restarted. A task returns its expected
    errors instead of raising them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._context = contextvars.copy_context()  # the context of the process, without a tenant
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: list[str] = []
        self._closing = False

    @property
    def healthy(self) -> bool:
        return not self._failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the tasks that crashed, oldest first."""
        return tuple(self._failures)

    @property
    def running(self) -> int:
        return len(self._tasks)

    def spawn(self, name: str, coro: Coroutine[Any, Any, T], *, shared: bool = False) -> asyncio.Task[T]:
        """Start a task and own it until it ends. Raises RuntimeError after ``close``.

        ``shared``: it serves all tenants, so that nothing of the request that happens to start it is its own.
        """
        if self._closing:
            coro.close()
            raise RuntimeError(f"cannot start {name}: the process is shutting down")
        context = self._context.copy() if shared else None
        task = asyncio.get_running_loop().create_task(coro, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._done, context=context)
        return task

    async def close(self, grace_s: float = 5.0) -> None:
        """Cancel every task except the caller's and wait until each ended, at most ``grace_s``."""
        self._closing = True
        current = asyncio.current_task()
        pending = {task for task in self._tasks if task is not current}
        for task in pending:
            task.cancel()
        if pending:
            _, stuck = await asyncio.wait(pending, timeout=grace_s)
            for task in stuck:
                log.error("supervisor.task_stuck", task=task.get_name())

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._closing:
            if len(self._failures) < 100:
                self._failures.append(task.get_name())
            log.error("supervisor.task_crashed", task=task.get_name(), exc_info=error)


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Return once one ended; the others are cancelled and have ended too. Raises its exception."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()
