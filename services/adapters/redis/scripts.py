"""Calls of one Redis, mostly Lua scripts, each within a bounded time.

Calls wait in one queue, round robin between tenants. A few lanes take them in batches. A lane is a task with
one connection that sends a batch at once and reads the responses. Only lanes use connections, so a cancelled
caller leaves no response half read. Waiting for a lane is not part of the timeout: a call fails only with its
batch, or when Redis counts as unavailable.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import hiredis
import redis.exceptions
import structlog

from services.adapters.redis.topologies import NO_ACCESS, RedisAccess, close_pool, connection_pool
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

MAX_WAITING: Final = 16_384  # per tenant: more than the requests that a gateway runs
BATCH_CALLS: Final = 16  # a burst is shared by the lanes, so that Redis works while others are read
BATCH_BYTES: Final = 1024**2
# Errors of a call while Redis is unavailable. RuntimeError: uvloop's transports raise it for a write on a
# connection that was reset while idle.
AWAY: Final = (redis.exceptions.RedisError, OSError, TimeoutError, RuntimeError)
_SCRIPTS: Final = Path(__file__).parent / "lua"
_LANES: Final = 4
_IDLE_S: Final = 1.0
_REFUSED_S: Final = 5.0
# What each word of the server's answer means.
_REFUSALS: Final = {
    "maxmemory": "its memory is full",
    "MISCONF": "its disk does not take its log",
    "NOREPLICAS": "too few replicas are connected",
}
# Parts of a timeout, and how many of them may be repeated.
_PARTS: Final = 5
_MAX_LATE: Final = 20


_pack: Final[Any] = hiredis.pack_command  # its stub has tuples of one element


def packed(*parts: str | int | bytes) -> bytes:
    """Return a command as Redis reads it."""
    command: bytes = _pack(parts)
    return command


@dataclass(frozen=True, slots=True)
class Call:
    """An encoded command and its caller's future, ``answer``. A call whose future is cancelled is skipped."""

    tenant_id: str
    command: bytes
    answer: asyncio.Future[Any]

    @property
    def wanted(self) -> bool:
        return not self.answer.done()

    def answered(self, answer: Any) -> None:
        if self.wanted:
            self.answer.set_result(answer)

    def failed(self, error: StoreUnavailable) -> None:
        if self.wanted:
            self.answer.set_exception(error)


class CallQueue:
    """One queue per tenant, served round robin: a tenant's many calls delay another's by one call each."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Call]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, call: Call) -> None:
        """Raises StoreUnavailable when too many calls of its tenant wait."""
        calls = self._waiting.setdefault(call.tenant_id, deque())
        if len(calls) >= MAX_WAITING:
            raise StoreUnavailable(f"{MAX_WAITING} calls of this tenant wait for Redis", retry_after_s=1.0)
        calls.append(call)

    def take(self) -> list[Call]:
        """Return the next batch, without cancelled calls. Empty when the queue is empty."""
        batch: list[Call] = []
        size_bytes = 0
        while self._waiting and len(batch) < BATCH_CALLS:
            tenant_id, calls = next(iter(self._waiting.items()))
            if calls[0].wanted:
                size_bytes += len(calls[0].command)
                if batch and size_bytes > BATCH_BYTES:
                    break
                batch.append(calls[0])
            calls.popleft()
            if calls:
                self._waiting.move_to_end(tenant_id)
            else:
                del self._waiting[tenant_id]
        return batch

    def take_all(self) -> list[Call]:
        """Remove and return every waiting call."""
        calls = [call for waiting in self._waiting.values() for call in waiting]
        self._waiting.clear()
        return calls


class LoopTimeout:
    """``asyncio.timeout`` of ``seconds``, in five parts. A part that ended late, because the loop stalled, is
    repeated.

    So a response that arrived while the loop stalled is read before the timeout. At most 20 parts are
    repeated, so that the wait also ends on a loop that is always late.
    """

    def __init__(self, seconds: float) -> None:
        self._part_s = seconds / _PARTS
        self._left = _PARTS
        self._late = _MAX_LATE
        self._timeout = asyncio.timeout(None)
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._part_s, self._part_over, loop.time() + self._part_s)

    def _part_over(self, due_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - due_s > self._part_s and self._late:
            self._late -= 1
        else:
            self._left -= 1
        if self._left:
            self._wait()
        else:
            self._timeout.reschedule(now_s)


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str

    @classmethod
    def of(cls, names: Sequence[str]) -> Script:
        """Return the script that joins these files."""
        text = "\n".join((_SCRIPTS / f"{name}.lua").read_text("utf-8") for name in names)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisScripts:
    """The scripts of one Redis and the lanes that call them. The caller closes it.

    A lane without a response opens a new connection. If that fails too, Redis counts as unavailable: waiting
    calls fail, later ones fail at once, and one per second tries again. Every failure is StoreUnavailable.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        timeout_s: float,
        access: RedisAccess = NO_ACCESS,
        repeatable: bool = False,
        lanes: int = _LANES,
    ) -> None:
        """``timeout_s`` bounds each connection attempt and each batch. ``repeatable``: a second run of any
        script admits nothing more, so a batch whose connection broke is sent once more.
        """
        self._clock = clock
        self._timeout_s = timeout_s
        self._repeatable = repeatable
        self._breaker = CircuitBreaker()
        self._available_since_s = clock.monotonic_s()
        self._refusal, self._refused_s = "", -math.inf
        self._pool: Any = connection_pool(url, access, timeout_s)
        self._scripts: list[Script] = []
        self._queue = CallQueue()
        self._max_lanes = lanes
        self._lanes: list[_Lane] = []
        self._idle: list[_Lane] = []
        self._tasks = Supervisor(clock)

    def script(self, *names: str) -> Script:
        """Register and return the script that joins these files."""
        found = Script.of(names)
        self._scripts.append(found)
        return found

    @property
    def breaker_open(self) -> bool:
        """Redis counts as unavailable: one call per second is tried."""
        return self._breaker.open

    @property
    def problem(self) -> str:
        """Why calls fail, or failed in the last few seconds; empty while none does."""
        if self._breaker.open:
            return "Redis does not answer"
        refused = self._clock.monotonic_s() - self._refused_s < _REFUSED_S
        return f"Redis refuses writes: {self._refusal}" if refused else ""

    @property
    def available_since_s(self) -> float:
        """The monotonic time at which Redis was last found available again."""
        return self._available_since_s

    async def connect(self) -> None:
        """Return once a lane is connected and Redis has every script. Raises StoreUnavailable."""
        await self._call("", ("PING",))

    async def run(
        self, tenant_id: str, script: Script, keys: Sequence[str], arguments: Sequence[str | int | bytes]
    ) -> Any:
        return await self._call(tenant_id, ("EVALSHA", script.sha, len(keys), *keys, *arguments))

    async def hash(self, tenant_id: str, key: str) -> Mapping[bytes, bytes]:
        """Return the fields of a hash; empty when the key does not exist."""
        answer = await self._call(tenant_id, ("HGETALL", key))
        if isinstance(answer, dict):
            return answer
        return dict(zip(answer[::2], answer[1::2], strict=True))

    async def memory(self) -> tuple[int, int]:
        """Return the bytes that count towards ``maxmemory``, and ``maxmemory``; 0: no bound."""
        lines = (await self._call("", ("INFO", "memory"))).decode().splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        counted = int(values["used_memory"]) - int(values.get("mem_not_counted_for_evict", 0))
        return counted, int(values["maxmemory"])

    async def close(self) -> None:
        _fail(self._queue.take_all(), "the connection to Redis was closed")
        await self._tasks.close()
        for lane in self._lanes:
            await lane.drop()
        await close_pool(self._pool)

    async def _call(self, tenant_id: str, command: Sequence[str | int | bytes]) -> Any:
        """Return the response. Fails at once while the breaker is open."""
        now_s = self._clock.monotonic_s()
        if not self._breaker.allow(now_s):
            raise StoreUnavailable(
                "Redis is not answering", retry_after_s=max(self._breaker.retry_after_s(now_s), 0.1)
            )
        call = Call(tenant_id, packed(*command), asyncio.get_running_loop().create_future())
        self._queue.put(call)
        self._wake_lane()
        answer = await call.answer
        if isinstance(answer, Exception):
            raise StoreUnavailable(_message(answer), retry_after_s=1.0) from answer
        return answer

    # --- the lanes ---------------------------------------------------------------------------------

    def _wake_lane(self) -> None:
        if self._idle:
            self._idle.pop().wake.set()
        elif len(self._lanes) < self._max_lanes:
            lane = _Lane(self._pool.make_connection(), self._scripts)
            self._lanes.append(lane)
            self._tasks.spawn("redis lane", self._serve(lane), shared=True)

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
        """Send the batch and complete each call with its response or its error."""
        for last in (False, True):
            if not await self._connected(lane, batch):
                return
            try:
                async with LoopTimeout(self._timeout_s):
                    answers = await lane.send([call.command for call in batch])
            except AWAY as error:
                await lane.drop()
                if last:  # Redis accepts connections but does not respond
                    self._away(batch, error)
                elif not self._repeatable:
                    _fail(batch, _message(error))
                    await self._connected(lane, [])
                    return
            else:
                lane.used_s = self._clock.monotonic_s()
                if self._breaker.open:
                    self._available_since_s = lane.used_s
                self._breaker.succeeded()
                for call, answer in zip(batch, answers, strict=True):
                    call.answered(answer)
                    self._look_for_refusal(answer)
                return

    def _look_for_refusal(self, answer: Any) -> None:
        """Note an answer by which Redis takes no writes: its memory or its disk is full."""
        if isinstance(answer, redis.exceptions.ResponseError):
            found = next((text for word, text in _REFUSALS.items() if word in str(answer)), "")
            if found:
                self._refusal, self._refused_s = found, self._clock.monotonic_s()

    async def _connected(self, lane: _Lane, batch: list[Call]) -> bool:
        """Return whether the lane is connected. When no connection can be opened, Redis counts as
        unavailable.

        The server may have closed an idle connection, so it is tested before a batch that cannot be repeated.
        """
        idle_s = self._clock.monotonic_s() - lane.used_s
        if lane.connected and not self._repeatable and idle_s > _IDLE_S:
            await self._try_out(lane)
        if lane.connected:
            return True
        for last in (False, True):  # a single reset is not enough to count as unavailable
            try:
                async with LoopTimeout(self._timeout_s):
                    await lane.connect()
                    return True
            except AWAY as error:
                await lane.drop()
                if last or isinstance(error, TimeoutError):
                    self._away(batch, error)
                    break
        return False

    async def _try_out(self, lane: _Lane) -> None:
        """Drop the lane's connection unless it still responds."""
        try:
            async with LoopTimeout(self._timeout_s):
                await lane.send([packed("PING")])
        except AWAY:
            await lane.drop()

    def _away(self, batch: list[Call], error: Exception) -> None:
        self._breaker.failed(self._clock.monotonic_s())
        _fail([*batch, *self._queue.take_all()], _message(error))


class _Lane:
    """One connection, used by one task."""

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
        """Return once Redis responded on a new connection and has the scripts."""
        await self._connection.connect()
        await self._load()
        self._loaded = True

    async def drop(self) -> None:
        """Close the connection, with any unread data."""
        self._loaded = False
        try:
            await self._connection.disconnect(nowait=True)
        except AWAY:
            return

    async def send(self, commands: Sequence[bytes]) -> list[Any]:
        """Return a response or a ResponseError for each command. Raises when the connection breaks."""
        answers = await self._pipeline(commands)
        missing = [
            number
            for number, answer in enumerate(answers)
            if isinstance(answer, redis.exceptions.NoScriptError)
        ]
        if missing:  # Redis was restarted or its scripts were flushed; none of these ran
            await self._load()
            again = await self._pipeline([commands[number] for number in missing])
            for number, answer in zip(missing, again, strict=True):
                answers[number] = answer
        if any(_is_read_only(answer) for answer in answers):
            raise redis.exceptions.ConnectionError("the server is no master any more")
        return answers

    async def _load(self) -> None:
        loads = [packed("SCRIPT", "LOAD", script.text) for script in self._scripts]
        for answer in await self._pipeline(loads):
            if isinstance(answer, Exception):
                raise answer

    async def _pipeline(self, commands: Sequence[bytes]) -> list[Any]:
        connection = self._connection
        await connection.send_packed_command(b"".join(commands), check_health=False)
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(await connection.read_response())
            except redis.exceptions.ResponseError as error:
                answers.append(error)
        return answers


def _fail(calls: list[Call], message: str) -> None:
    """Fail the calls that have no response yet, each with its own error."""
    for call in calls:
        call.failed(StoreUnavailable(message, retry_after_s=1.0))


def _is_read_only(answer: Any) -> bool:
    """Return whether a replica refused a command or a script: its master was demoted since it connected."""
    return isinstance(answer, redis.exceptions.ResponseError) and "READONLY" in str(answer)


def _message(error: Exception) -> str:
    return f"Redis did not answer: {type(error).__name__}"


class CircuitBreaker:
    """Open from ``failed`` until ``succeeded``; while open it allows one attempt every ``pause_s``."""

    def __init__(self, *, pause_s: float = 1.0) -> None:
        self._pause_s = pause_s
        self._open = False
        self._next_attempt_s = 0.0

    @property
    def open(self) -> bool:
        return self._open

    def allow(self, now_s: float) -> bool:
        """Return whether to try now. While open, True uses up the attempt of this ``pause_s``."""
        if not self._open:
            return True
        if now_s < self._next_attempt_s:
            return False
        self._next_attempt_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        self._open = False

    def failed(self, now_s: float) -> None:
        self._open = True
        self._next_attempt_s = now_s + self._pause_s

    def retry_after_s(self, now_s: float) -> float:
        """Return the time until the next attempt is allowed."""
        return max(0.0, self._next_attempt_s - now_s) if self._open else 0.0
