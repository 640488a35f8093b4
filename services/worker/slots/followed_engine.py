"""An engine whose ranks are on several nodes: it and its followers live and end together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec

from fairway.task_group import TaskGroup
from fairway.v1 import worker_pb2
from services.core.errors import FailedPrecondition, FairwayError, Unavailable
from services.ports.clock import Clock
from services.ports.streams import ClientStream, StreamClient, StreamLost
from services.rpc.methods import FOLLOW
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import Command, EngineConfig
from services.worker.slots.engine_process import EngineEvents, EngineExit, EngineLauncher, RunningEngine

BEAT_S: Final = 0.5
SILENCE_S: Final = 5.0  # a node that is silent for so long is gone; the end of a process shows at once

T = TypeVar("T")
_Stream = ClientStream[worker_pb2.FollowRequest, worker_pb2.FollowResponse]


@dataclass(frozen=True, slots=True)
class Followers:
    """The nodes that a worker leads. ``ranks_address``: its own, to which its ranks bind."""

    worker_id: str
    addresses: tuple[str, ...]
    ranks_address: str
    streams: StreamClient


def led_launcher(
    launch: EngineLauncher, followers: Followers, clock: Clock, supervisor: Supervisor
) -> EngineLauncher:
    """Return a launcher whose engines have followers where one node does not have all the ranks."""

    def led(config: EngineConfig, events: EngineEvents) -> RunningEngine:
        if config.nodes == 1:
            return launch(config, events)
        return FollowedEngine(config, events, launch, followers, clock, supervisor)

    return led


class FollowedEngine:
    """Implements ``RunningEngine``."""

    def __init__(
        self,
        config: EngineConfig,
        events: EngineEvents,
        launch: EngineLauncher,
        followers: Followers,
        clock: Clock,
        supervisor: Supervisor,
    ) -> None:
        self._config = config
        self._events = events
        self._launch = launch
        self._followers = followers
        self._clock = clock
        self._supervisor = supervisor
        self._streams: dict[str, _Stream] = {}
        self._engine: RunningEngine | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """See ``RunningEngine``."""
        return 0 if self._engine is None else self._engine.pid

    @property
    def silent_s(self) -> float:
        """See ``RunningEngine``."""
        return 0.0 if self._engine is None else self._engine.silent_s

    @property
    def members(self) -> tuple[int, ...]:
        """See ``RunningEngine``."""
        return () if self._engine is None else self._engine.members

    async def start(self) -> None:
        """See ``RunningEngine``. Raises Unavailable for a follower that cannot be reached."""
        try:
            listener = socket.create_server((self._followers.ranks_address, 0))
        except OSError as error:
            address = self._followers.ranks_address
            raise FailedPrecondition(f"FAIRWAY_RANKS_ADDRESS {address}: {error.strerror}") from error
        with listener:
            host, port = listener.getsockname()
            config = msgspec.structs.replace(self._config, store=f"{host}:{port}")
            try:
                for node, follower in enumerate(self._followers.addresses[: config.nodes - 1], 1):
                    await self._open(follower, msgspec.structs.replace(config, node=node))
                events = replace(self._events, on_exit=self._on_exit)
                config = msgspec.structs.replace(config, store_fd=listener.fileno())
                self._engine = self._launch(config, events)
                await self._engine.start()
            except BaseException:
                await self._close()
                raise
        self._supervisor.spawn(f"followers-{self.pid}", self._follow())

    def send(self, command: Command) -> bool:
        """See ``RunningEngine``."""
        return self._engine is not None and self._engine.send(command)

    def kill(self, reason: str) -> None:
        """See ``RunningEngine``."""
        if self._engine is not None:
            self._engine.kill(reason)

    async def stop(self) -> None:
        """See ``RunningEngine``."""
        if self._engine is not None:
            await self._engine.stop()

    async def _open(self, follower: str, config: EngineConfig) -> None:
        """Return once the follower starts its ranks. Raises Unavailable, FailedPrecondition."""
        opening = self._followers.streams.open(follower, FOLLOW, timeout_s=SILENCE_S)
        stream = await _named(follower, opening)
        self._streams[follower] = stream
        request = worker_pb2.FollowRequest(
            worker_id=self._followers.worker_id, config=msgspec.json.encode(config)
        )
        await _named(follower, _exchange(stream, request))

    async def _follow(self) -> None:
        """Watch the followers until the engine ends; without one of them it is killed."""
        try:
            async with TaskGroup() as group:
                watchers = [
                    group.create_task(self._watch(follower, stream))
                    for follower, stream in self._streams.items()
                ]
                await self._ended.wait()
                for watcher in watchers:
                    watcher.cancel()
        finally:
            await self._close()

    async def _watch(self, follower: str, stream: _Stream) -> None:
        try:
            while True:
                await self._clock.sleep(BEAT_S)
                await _named(follower, _exchange(stream, worker_pb2.FollowRequest()))
        except FairwayError as error:
            self.kill(error.message)

    async def _close(self) -> None:
        for stream in self._streams.values():
            await stream.close()
        self._streams.clear()

    def _on_exit(self, exit_: EngineExit) -> None:
        self._ended.set()
        self._events.on_exit(exit_)


async def _exchange(stream: _Stream, request: worker_pb2.FollowRequest) -> None:
    await stream.write(request)
    await stream.read(SILENCE_S)


async def _named(follower: str, call: Awaitable[T]) -> T:
    """Return the call's result. Raises Unavailable, FailedPrecondition with the follower's address."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await call
    except TimeoutError:
        raise Unavailable(f"the follower {follower} was silent for {SILENCE_S:g} s") from None
    except StreamLost as lost:
        raise Unavailable(f"the follower {follower} is not there: {lost.message}") from None
    except FairwayError as error:
        raise FailedPrecondition(f"the follower {follower}: {error.message}") from error
