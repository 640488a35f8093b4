"""Calls of one Redis, Lua scripts above all, each within a bounded time.

Calls wait in one queue, in turns between tenants. A few lanes take them in batches: a lane is a task with one
connection, which sends a batch at once and reads the answers. Only lanes touch connections, so a caller that
is cancelled leaves nothing half-read behind. Waiting for a lane counts against nobody's time: a call fails
only with the batch that it was sent in, or when Redis is found to be away.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis.asyncio
import redis.exceptions
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.adapters.redis.breaker import CircuitBreaker
from services.adapters.redis.calls import Call, CallQueue
from services.adapters.redis.loop_timeout import LoopTimeout
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

# What a call raises when Redis is away, whichever way the connection went. RuntimeError: a write on a
# connection that was reset while it lay idle, by uvloop's transports.
_AWAY: Final = (redis.exceptions.RedisError, OSError, TimeoutError, RuntimeError)
_SCRIPTS: Final = Path(__file__).parent / "lua"
_LANES: Final = 4
_IDLE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


class RedisScripts:
    """The scripts of one Redis and the lanes that call them. The caller closes it.

    A lane that gets no answer makes a new connection. Only if that is not answered either, Redis is away: all
    that wait fail then, others fail at once, and one call a second tries again. Every failure is
    StoreUnavailable.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        timeout_s: float,
        password: str | None = None,
        repeatable: bool = False,
        lanes: int = _LANES,
    ) -> None:
        """``timeout_s`` bounds each attempt to connect and each batch. ``repeatable``: a second run of any
        script lets nothing more through, so what a broken connection left open is sent once more.

        A password in the URL goes before ``password``, which keeps it out of the environment.
        """
        self._clock = clock
        self._timeout_s = timeout_s
        self._repeatable = repeatable
        self._breaker = CircuitBreaker()
        self._pool: Any = redis.asyncio.ConnectionPool.from_url(
            url,
            password=password,
            socket_timeout=None,  # the lanes bound all that they do
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
        )
        self._scripts: list[Script] = []
        self._queue = CallQueue()
        self._max_lanes = lanes
        self._lanes: list[_Lane] = []
        self._idle: list[_Lane] = []
        self._tasks = Supervisor(clock)

    def script(self, *names: str) -> Script:
        """Return the script of these files, one after another."""
        text = "\n".join((_SCRIPTS / f"{name}.lua").read_text() for name in names)
        found = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        self._scripts.append(found)
        return found

    @property
    def breaker_open(self) -> bool:
        """Redis counts as away: it is asked once a second only."""
        return self._breaker.open

    async def connect(self) -> None:
        """Return once a lane is connected and Redis has every script. Raises StoreUnavailable."""
        await self._call("", ("PING",))

    async def run(
        self, tenant_id: str, script: Script, keys: Sequence[str], arguments: Sequence[str | int | bytes]
    ) -> Any:
        return await self._call(tenant_id, ("EVALSHA", script.sha, len(keys), *keys, *arguments))

    async def hash(self, tenant_id: str, key: str) -> Mapping[bytes, bytes]:
        """Return the fields of a hash; none where there is no key."""
        answer = await self._call(tenant_id, ("HGETALL", key))
        if isinstance(answer, dict):
            return answer
        return dict(zip(answer[::2], answer[1::2], strict=True))

    async def close(self) -> None:
        _fail(self._queue.take_all(), "the connection to Redis was closed")
        await self._tasks.close()
        for lane in self._lanes:
            await lane.drop()
        await self._pool.aclose()

    async def _call(self, tenant_id: str, command: Sequence[str | int | bytes]) -> Any:
        """Return the answer. Fails at once while the breaker is open."""
        now_s = self._clock.monotonic_s()
        if not self._breaker.allow(now_s):
            raise StoreUnavailable(
                "Redis is not answering", retry_after_s=max(self._breaker.retry_after_s(now_s), 0.1)
            )
        size_bytes = sum(len(part) for part in command if not isinstance(part, int))
        call = Call(tenant_id, command, size_bytes, asyncio.get_running_loop().create_future())
        self._queue.put(call)
        self._wake_lane()
        answer = await call.answer
        if isinstance(answer, Exception):
            if isinstance(answer, redis.exceptions.ReadOnlyError):
                self._breaker.failed(self._clock.monotonic_s())
            raise StoreUnavailable(_message(answer), retry_after_s=1.0) from answer
        return answer

    # --- the lanes ---------------------------------------------------------------------------------

    def _wake_lane(self) -> None:
        if self._idle:
            self._idle.pop().wake.set()
        elif len(self._lanes) < self._max_lanes:
            lane = _Lane(self._pool.make_connection(), self._scripts)
            self._lanes.append(lane)
            self._tasks.spawn("redis lane", self._serve(lane))

    async def _serve(self, lane: _Lane) -> None:
        while True:
            batch = self._queue.take()
            if not batch:
                lane.wake.clear()
                self._idle.append(lane)
                await lane.wake.wait()
                continue
            try:
                await self._exchange(lane, batch)
            except Exception as error:
                log.error("redis.lane_crashed", calls=len(batch), exc_info=error)
                await lane.drop()
            finally:
                _fail(batch, "the call of Redis was given up")

    async def _exchange(self, lane: _Lane, batch: list[Call]) -> None:
        """Send the batch and answer its calls: each with its answer or its error."""
        for last in (False, True):
            if not await self._connected(lane, batch):
                return
            try:
                async with LoopTimeout(self._timeout_s):
                    answers = await lane.ask([call.command for call in batch])
            except _AWAY as error:
                await lane.drop()
                if last:  # it takes connections and gives no answers
                    self._away(batch, error)
                elif not self._repeatable:
                    _fail(batch, _message(error))
                    await self._connected(lane, [])
                    return
            else:
                self._breaker.succeeded()
                lane.used_s = self._clock.monotonic_s()
                for call, answer in zip(batch, answers, strict=True):
                    call.answered(answer)
                return

    async def _connected(self, lane: _Lane, batch: list[Call]) -> bool:
        """Whether the lane is connected; when no connection can be made, Redis is away.

        A connection that lay idle may be closed by now. What cannot be repeated is not risked on it.
        """
        idle_s = self._clock.monotonic_s() - lane.used_s
        if lane.connected and not self._repeatable and idle_s > _IDLE_S:
            await self._try_out(lane)
        if lane.connected:
            return True
        for last in (False, True):  # one that is reset just then says little
            try:
                async with LoopTimeout(self._timeout_s):
                    await lane.connect()
                    return True
            except _AWAY as error:
                await lane.drop()
                if last or isinstance(error, TimeoutError):
                    self._away(batch, error)
                    break
        return False

    async def _try_out(self, lane: _Lane) -> None:
        """The lane is connected if its connection still answers."""
        try:
            async with LoopTimeout(self._timeout_s):
                await lane.ask([("PING",)])
        except _AWAY:
            await lane.drop()

    def _away(self, batch: list[Call], error: Exception) -> None:
        self._breaker.failed(self._clock.monotonic_s())
        _fail([*batch, *self._queue.take_all()], _message(error))


class _Lane:
    """One connection, of one task."""

    def __init__(self, connection: Any, scripts: Sequence[Script]) -> None:
        self.wake = asyncio.Event()
        self.used_s = 0.0
        self._connection = connection
        self._scripts = scripts
        self._loaded = False

    @property
    def connected(self) -> bool:
        return self._loaded and bool(self._connection.is_connected)

    async def connect(self) -> None:
        """Return once Redis answered on a new connection and has the scripts."""
        await self._connection.connect()
        await self._load()
        self._loaded = True

    async def drop(self) -> None:
        """Give the connection up, with what is unread in it."""
        self._loaded = False
        try:
            await self._connection.disconnect(nowait=True)
        except _AWAY:
            return

    async def ask(self, commands: Sequence[Sequence[str | int | bytes]]) -> list[Any]:
        """Return an answer or a ResponseError for each command. Raises when the connection breaks."""
        answers = await self._pipeline(commands)
        missing = [
            number
            for number, answer in enumerate(answers)
            if isinstance(answer, redis.exceptions.NoScriptError)
        ]
        if missing:  # Redis was restarted, or its scripts were flushed; nothing of these was run
            await self._load()
            again = await self._pipeline([commands[number] for number in missing])
            for number, answer in zip(missing, again, strict=True):
                answers[number] = answer
        return answers

    async def _load(self) -> None:
        for answer in await self._pipeline([("SCRIPT", "LOAD", script.text) for script in self._scripts]):
            if isinstance(answer, Exception):
                raise answer

    async def _pipeline(self, commands: Sequence[Sequence[str | int | bytes]]) -> list[Any]:
        connection = self._connection
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(await connection.read_response())
            except redis.exceptions.ResponseError as error:
                answers.append(error)
        return answers


def _fail(calls: list[Call], message: str) -> None:
    """End the calls that have no answer yet, each with an error of its own."""
    for call in calls:
        call.failed(StoreUnavailable(message, retry_after_s=1.0))


def _message(error: Exception) -> str:
    return f"Redis did not answer: {type(error).__name__}"
