"""Ranks on two nodes, which are two processes here: the same tokens, and one end for both."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest
import pytest_asyncio

from fairway.engines.environment import engine_variables
from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.rpc.server import RpcServer, RpcService
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.follower import COMMAND, FollowerServicer
from services.worker.slots.engine_process import Crashed, EngineTimeouts, process_launcher
from services.worker.slots.followed_engine import Followers, led_launcher
from tests.contract.engine.conftest import TINY, VLLM_PYTHON, Engine
from tests.integration.worker.harness import TOKEN, FolderSource
from tests.support import local_servers
from tests.support.stack import ROOT
from tests.support.waiting import until
from tests.vllm.conftest import Run, config_of, ranks_of, tokens

SOON_S = 2.0
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Nodes:
    """Starts engines that lead from this node."""

    start: Callable[..., Run]

    @property
    def follower(self) -> psutil.Process:
        """The process on the other node."""
        mine = psutil.Process().children()
        (found,) = [each for each in mine if COMMAND[-1] in each.cmdline()]
        return found


@pytest_asyncio.fixture
async def nodes(supervisor: Supervisor, vllm_dir: Path) -> AsyncIterator[Nodes]:
    clock, address = SystemClock(), f"127.0.0.1:{local_servers.free_port()}"
    options: dict[str, Any] = {"vllm_dir": vllm_dir, "ranks_address": "127.0.0.1"}
    following = process_launcher(clock, supervisor, EngineTimeouts(), command=COMMAND, **options)
    service = RpcService(
        worker_pb2.DESCRIPTOR.services_by_name["FollowerService"],
        worker_pb2_grpc.add_FollowerServiceServicer_to_server,
        FollowerServicer(following, FolderSource(TINY), devices=1),
    )
    server = RpcServer((service,), listen=address, internal_token=TOKEN, new_incident=lambda: "incident")
    await server.start()
    followers = Followers("w1", (address,), "127.0.0.1", GrpcStreams(TOKEN))
    launch = led_launcher(
        process_launcher(clock, supervisor, EngineTimeouts(), **options), followers, clock, supervisor
    )
    runs: list[Run] = []

    def start(**sizes: Any) -> Run:
        runs.append(Run(launch, config_of(nodes=2, **sizes)))
        return runs[-1]

    yield Nodes(start)
    for run in runs:
        await run.engine.stop()
    await server.stop(0)


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if runs(each)]


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
async def test_ranks_on_two_nodes_give_the_tokens_of_one(
    nodes: Nodes, start: Callable[..., Engine], sizes: dict[str, int]
) -> None:
    before = set(SHARED.iterdir())
    run = nodes.start(**sizes)
    await run.engine.start()
    await run.ready()
    assert [len(ranks_of(pid)) for pid in (run.engine.pid, nodes.follower.pid)] == [1, 1]
    found = await run.outputs(run.submit())
    await run.engine.stop()
    await until(lambda: not children(), SOON_S)
    assert set(SHARED.iterdir()) <= before
    assert found == tokens(start("torch"))


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
async def test_the_end_of_any_process_ends_both_nodes_and_the_next_engine_is_followed(
    nodes: Nodes, sizes: dict[str, int]
) -> None:
    for lost in ("rank", "leader", "follower"):
        run = nodes.start(**sizes)
        await run.engine.start()
        await run.ready()
        run.submit(300)
        await until(lambda: all(len(each) >= 3 for each in run.tokens.values()))  # noqa: B023
        ranks = [*ranks_of(run.engine.pid), *ranks_of(nodes.follower.pid)]
        pids = {"rank": ranks[-1].pid, "leader": run.engine.pid, "follower": nodes.follower.pid}
        os.kill(pids[lost], signal.SIGKILL)
        killed_s = time.monotonic()
        await until(lambda: run.exit is not None and not children() and not any(map(runs, ranks)))  # noqa: B023
        assert time.monotonic() - killed_s < SOON_S
        assert isinstance(run.exit, Crashed)


def test_a_rank_ends_with_the_process_that_started_it_whoever_else_is_gone() -> None:
    """The agent that would kill the group may have been killed with the process."""
    command = [VLLM_PYTHON, "-m", "tests.vllm.rank_parent"]
    with subprocess.Popen(
        command, cwd=ROOT, env=engine_variables(threads=1), stdout=PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _, alive = psutil.wait_procs([rank], timeout=10)
        for each in alive:
            each.kill()
    assert not alive


async def test_what_ranks_listen_on_is_the_stated_address(nodes: Nodes) -> None:
    run = nodes.start(tensor_parallel=2)
    await run.engine.start()
    await run.ready()
    family = [psutil.Process(run.engine.pid), nodes.follower]
    family += [child for each in family for child in each.children(recursive=True)]
    listening = {
        each.laddr.ip
        for process in family
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
