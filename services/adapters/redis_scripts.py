"""Calls of one Redis, Lua scripts above all, each within a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.adapters.breaker import CircuitBreaker
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock

# What a call raises when Redis is away, whichever way the connection went. RuntimeError: a write on a
# connection that was reset while it lay in the pool, by uvloop's transports.
_AWAY: Final = (redis.exceptions.RedisError, OSError, TimeoutError, RuntimeError)
_SCRIPTS: Final = Path(__file__).parent / "lua"


class RedisScripts:
    """A pool of connections and the scripts run on it. The caller closes it.

    An outage costs the first few calls ``timeout_s`` each; then calls fail at once, and one a second tries
    again. Every failure is StoreUnavailable.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        timeout_s: float,
        max_connections: int,
        password: str | None = None,
    ) -> None:
        """A password in the URL goes before ``password``, which keeps it out of the environment."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._breaker = CircuitBreaker()
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            password=password,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)

    def script(self, *names: str) -> Any:
        """Return the script of these files, one after another."""
        text = "\n".join((_SCRIPTS / f"{name}.lua").read_text() for name in names)
        return self._redis.register_script(text)

    @property
    def breaker_open(self) -> bool:
        """Redis counts as away: it is asked once a second only."""
        return self._breaker.open

    async def run(self, script: Any, keys: Sequence[str], arguments: Sequence[str | int | bytes]) -> Any:
        return await self._bounded(lambda: script(keys=list(keys), args=list(arguments)))

    async def hash(self, key: str) -> Mapping[bytes, bytes]:
        """Return the fields of a hash; none where there is no key."""
        found: Mapping[bytes, bytes] = await self._bounded(lambda: self._redis.hgetall(key))
        return found

    async def _bounded(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make one call, at most ``timeout_s`` in all; fail at once while the breaker is open."""
        now_s = self._clock.monotonic_s()
        if not self._breaker.allow(now_s):
            raise StoreUnavailable(
                "Redis is not answering", retry_after_s=max(self._breaker.retry_after_s(now_s), 0.1)
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                with _cancellable():
                    answer = await call()
        except _AWAY as error:
            self._breaker.failed(self._clock.monotonic_s())
            kind = type(error).__name__
            raise StoreUnavailable(f"Redis did not answer: {kind}", retry_after_s=1.0) from error
        self._breaker.succeeded()
        return answer

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)


@contextmanager
def _cancellable() -> Iterator[None]:
    """Raise CancelledError at the end if the task was cancelled within, whatever came of the call.

    The client waits with ``asyncio.wait_for``, which before Python 3.12 drops a cancellation that comes while
    what it waits for is just done.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
