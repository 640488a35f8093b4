"""A leading worker and its follower, over gRPC: what is refused, and that neither outlives the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.core.errors import FailedPrecondition, FairwayError, NotFound, Unavailable
from services.ports.streams import StreamLost
from services.rpc.methods import FOLLOW
from services.rpc.server import RpcServer, RpcService
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import Command, EngineConfig, LoadFailed
from services.worker.follower import FollowerServicer
from services.worker.slots.engine_process import Crashed, EngineEvents, EngineExit, RunningEngine, Stopped
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.followed_engine import FollowedEngine, Followers
from tests.integration.worker.harness import TOKEN, FolderSource
from tests.support import local_servers
from tests.support.waiting import until

GROUP = EngineConfig(
    "", "leads", executor="vllm", tensor_parallel=2, nodes=2, model="m", version_digest="sha256:0"
)


@dataclass(eq=False)
class Process:
    """Stands for an engine's process."""

    config: EngineConfig
    events: EngineEvents
    pid: int = 1
    silent_s: float = 0.0
    members: tuple[int, ...] = ()
    started: bool = False
    ended: EngineExit | None = None

    async def start(self) -> None:
        self.started = True

    def send(self, command: Command) -> bool:
        return True

    def kill(self, reason: str) -> None:
        self.end(Crashed(-9, reason))

    async def stop(self) -> None:
        self.end(Stopped())

    def end(self, exit_: EngineExit) -> None:
        if self.ended is None:
            self.ended = exit_
            self.events.on_exit(exit_)


@dataclass
class Node:
    """Starts processes that stand for engines."""

    processes: list[Process] = field(default_factory=list)

    def launch(self, config: EngineConfig, events: EngineEvents) -> RunningEngine:
        self.processes.append(Process(config, events))
        return self.processes[-1]


@dataclass
class Pair:
    """A leading node and a follower."""

    leader: Node
    follower: Node
    servicer: FollowerServicer
    files: FolderSource
    address: str
    supervisor: Supervisor
    exits: list[EngineExit] = field(default_factory=list)

    def engine(
        self, config: EngineConfig = GROUP, *, worker: str = "w1", address: str = ""
    ) -> FollowedEngine:
        events = EngineEvents(on_ready=lambda _: None, on_exit=self.exits.append)
        followers = Followers(worker, (address or self.address,), "127.0.0.1", GrpcStreams(TOKEN))
        return FollowedEngine(config, events, self.leader.launch, followers, SystemClock(), self.supervisor)

    async def started(self) -> tuple[FollowedEngine, Process, Process]:
        engine = self.engine()
        await engine.start()
        await until(lambda: self.follower.processes and self.follower.processes[-1].started)
        return engine, self.leader.processes[-1], self.follower.processes[-1]


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    supervisor = Supervisor(SystemClock())
    leader, follower, files = Node(), Node(), FolderSource(tmp_path)
    address = f"127.0.0.1:{local_servers.free_port()}"
    servicer = FollowerServicer(follower.launch, files, devices=1)
    service = RpcService(
        worker_pb2.DESCRIPTOR.services_by_name["FollowerService"],
        worker_pb2_grpc.add_FollowerServiceServicer_to_server,
        servicer,
    )
    server = RpcServer((service,), listen=address, internal_token=TOKEN, new_incident=lambda: "incident")
    await server.start()
    yield Pair(leader, follower, servicer, files, address, supervisor)
    await server.stop(0)
    await supervisor.close()
    assert supervisor.healthy, supervisor.failures
    assert files.pins == 0


async def test_both_nodes_get_their_places_and_one_store_and_end_together(pair: Pair) -> None:
    engine, leads, follows = await pair.started()
    assert (leads.config.node, follows.config.node) == (0, 1)
    assert leads.config.store == follows.config.store
    assert leads.config.store.startswith("127.0.0.1:")
    assert leads.config.store_fd >= 0 > follows.config.store_fd
    assert follows.config.model_dir == str(pair.files.folder)
    await engine.stop()
    await until(lambda: follows.ended is not None)
    assert pair.exits == [Stopped()]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            Crashed(4, "the engine ended with exit code 4"),
            "its ranks ended: the engine ended with exit code 4",
        ),
        (LoadFailed("internal", "ValueError"), "its ranks ended: internal: ValueError"),
    ],
)
async def test_the_end_of_the_followers_ranks_is_the_engines(
    pair: Pair, ended: EngineExit, words: str
) -> None:
    _, _, follows = await pair.started()
    follows.end(ended)
    await until(lambda: bool(pair.exits))
    (found,) = pair.exits
    assert isinstance(found, Crashed)
    assert found.message == f"the follower {pair.address}: {words}"


async def test_the_end_of_the_leaders_engine_is_the_followers_and_it_follows_the_next(pair: Pair) -> None:
    _, leads, follows = await pair.started()
    leads.end(Crashed(-9, "killed"))
    await until(lambda: follows.ended is not None)
    _, _, again = await pair.started()
    assert again is not follows
    await pair.servicer.close(0.0)
    await until(lambda: len(pair.exits) == 2)
    assert "the follower stops" in str(pair.exits[1])


async def test_files_that_cannot_be_fetched_end_the_engine_by_their_reason(pair: Pair) -> None:
    pair.files.error = NotFound("no version sha256:0")
    await pair.engine().start()
    await until(lambda: bool(pair.exits))
    assert "no version sha256:0" in str(pair.exits[0])


async def test_a_follower_that_is_not_there_is_named_before_a_process_starts(pair: Pair) -> None:
    nobody = f"127.0.0.1:{local_servers.free_port()}"
    with pytest.raises(Unavailable, match=f"the follower {nobody} is not there"):
        await pair.engine(address=nobody).start()
    assert not pair.leader.processes


async def test_a_follower_has_one_worker(pair: Pair) -> None:
    await pair.started()
    with pytest.raises(FailedPrecondition, match="it follows w1: a follower has one worker"):
        await pair.engine(worker="w2").start()


async def test_more_ranks_than_devices_are_refused_by_the_setting(pair: Pair) -> None:
    wide = msgspec.structs.replace(GROUP, tensor_parallel=4)
    with pytest.raises(FailedPrecondition, match="2 ranks do not fit on 1 devices: FAIRWAY_DEVICES"):
        await pair.engine(wide).start()


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"{",
        b"[" * 9000,
        b'{"socket_path": "", "model_dir": "", "wheels": 4}',
        msgspec.json.encode(GROUP),
    ],
)
async def test_what_is_no_configuration_of_a_follower_is_refused(pair: Pair, config: bytes) -> None:
    stream = await GrpcStreams(TOKEN).open(pair.address, FOLLOW, timeout_s=5.0)
    await stream.write(worker_pb2.FollowRequest(worker_id="w1", config=config))
    with pytest.raises(FairwayError, match="config") as refused:
        await stream.read(5.0)
    assert refused.value.metadata["field"] == "config"
    await stream.close()


async def test_a_stranger_is_refused(pair: Pair) -> None:
    stream = await GrpcStreams("x" * 40).open(pair.address, FOLLOW, timeout_s=5.0)
    with pytest.raises((FairwayError, StreamLost), match=r"credential|token|key"):
        await stream.write(worker_pb2.FollowRequest(worker_id="w1", config=msgspec.json.encode(GROUP)))
        await stream.read(5.0)
    await stream.close()
    assert not pair.follower.processes


def test_ranks_divide_evenly_among_nodes() -> None:
    settings = EngineSettings(devices=4, followers=("a:1", "b:1"))
    assert [settings.nodes_of(ranks) for ranks in (1, 4, 6, 8, 12)] == [1, 1, 2, 2, 3]
    with pytest.raises(FailedPrecondition, match="5 ranks do not divide evenly among up to 3 nodes of 4"):
        settings.nodes_of(5)
