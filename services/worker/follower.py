"""The follower's RPC: ranks of engines that lead from another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import structlog

from fairway.task_group import TaskGroup
from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.core.errors import FailedPrecondition, InvalidInput
from services.ports.streams import MessageStream, StreamLost
from services.rpc import bounds
from services.rpc.bounded_writes import send_headers
from services.rpc.server import GrpcServerStream
from services.worker.engine_protocol import EngineConfig, LoadFailed
from services.worker.slots.engine_process import EngineEvents, EngineExit, EngineLauncher, RunningEngine
from services.worker.slots.followed_engine import SILENCE_S
from services.worker.slots.version_files import ModelSource

log = structlog.get_logger()

COMMAND: Final = ("-P", "-m", "services.worker.engines.vllm.follower")
MAX_ENGINES: Final = 16
_ANSWER: Final = worker_pb2.FollowResponse()


class FollowerServicer(worker_pb2_grpc.FollowerServiceServicer):
    """Follows one worker at a time, with one process for each engine of it."""

    def __init__(self, launch: EngineLauncher, files: ModelSource, *, devices: int) -> None:
        """``launch`` starts a process that runs ``COMMAND``."""
        self._launch = launch
        self._files = files
        self._devices = devices
        self._leader = ""
        self._streams = 0
        self._engines: set[RunningEngine] = set()

    async def Follow(  # type: ignore[override]  # the stubs type generators only
        self, request_iterator: AsyncIterator[worker_pb2.FollowRequest], context: Any
    ) -> None:
        await send_headers(context)
        await self.serve_leader(GrpcServerStream(request_iterator, context))

    async def serve_leader(
        self, stream: MessageStream[worker_pb2.FollowResponse, worker_pb2.FollowRequest]
    ) -> None:
        """Run the ranks until they or the leader end. Raises FailedPrecondition, InvalidInput."""
        first = await stream.read(SILENCE_S)
        config = self._accepted(first)
        self._leader = first.worker_id
        self._streams += 1
        try:
            async with TaskGroup() as group:
                group.create_task(self._run(config))
                while True:
                    await stream.write(_ANSWER)
                    await stream.read(SILENCE_S)
        except BaseExceptionGroup as errors:  # the first ended the stream; the rest are cancellations
            if not isinstance(errors.exceptions[0], StreamLost):
                raise errors.exceptions[0] from None
            log.info("leader.lost", worker_id=first.worker_id, message=errors.exceptions[0].message)
        finally:
            self._streams -= 1

    async def close(self, timeout_s: float) -> None:
        """End all ranks, and with them the streams of their leaders."""
        for engine in tuple(self._engines):
            engine.kill("the follower stops")

    def _accepted(self, request: worker_pb2.FollowRequest) -> EngineConfig:
        """Return the configuration of an engine that can be followed. Raises as ``serve_leader``."""
        bounds.check(request)
        try:
            config = msgspec.json.decode(request.config, type=EngineConfig)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidInput(f"config is none of this release: {error}", field="config") from error
        if config.executor != "vllm" or not 0 < config.node < config.nodes:
            raise InvalidInput("config is of no engine that has ranks on other nodes", field="config")
        ranks = config.tensor_parallel * config.pipeline_parallel // config.nodes
        if ranks > self._devices:
            raise FailedPrecondition(
                f"{ranks} ranks do not fit on {self._devices} devices: FAIRWAY_DEVICES is that of all nodes"
            )
        if self._streams and request.worker_id != self._leader:
            raise FailedPrecondition(f"it follows {self._leader}: a follower has one worker")
        if self._streams >= MAX_ENGINES:
            raise FailedPrecondition(f"it follows {MAX_ENGINES} engines, the most at a time")
        return config

    async def _run(self, config: EngineConfig) -> None:
        """Run the ranks on the version's files. Raises FailedPrecondition when they end."""
        folder = await self._files.fetch(config.model, config.version_digest, recheck=True)
        self._files.pin(folder)
        try:
            exit_ = await self._ended(msgspec.structs.replace(config, model_dir=str(folder)))
        finally:
            self._files.unpin(folder)
        raise FailedPrecondition(f"its ranks ended: {_cause(exit_)}")

    async def _ended(self, config: EngineConfig) -> EngineExit:
        """Start a process and return how it ended; it is killed if this task is cancelled."""
        ended: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()

        def note(exit_: EngineExit) -> None:
            self._engines.discard(engine)
            if not ended.done():
                ended.set_result(exit_)

        engine = self._launch(config, EngineEvents(on_ready=lambda _: log.info("ranks.ready"), on_exit=note))
        await engine.start()
        self._engines.add(engine)
        try:
            return await ended
        finally:
            if not ended.done() or ended.cancelled():
                engine.kill("its leader is gone")


def _cause(exit_: EngineExit) -> str:
    match exit_:
        case LoadFailed(reason, message):
            return f"{reason}: {message}"
        case _:
            return getattr(exit_, "message", "they were stopped")
