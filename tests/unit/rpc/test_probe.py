"""The probe of container health checks, run as they run it, against the server of a role."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from services.rpc.server import RpcServer


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    running = RpcServer([], listen="127.0.0.1:0", internal_token="x" * 32, new_incident=lambda: "incident")
    await running.start()
    yield running
    await running.stop(0)


async def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "services.rpc.probe", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )


async def test_serving_is_0_and_draining_is_1(server: RpcServer) -> None:
    address = f"127.0.0.1:{server.port}"
    done = await probe(address)
    assert (done.returncode, done.stderr) == (1, f"{address} answers NOT_SERVING\n")
    await server.set_serving(True)
    done = await probe(address)
    assert (done.returncode, done.stderr) == (0, "")


async def test_nobody_there_is_1(server: RpcServer) -> None:
    await server.stop(0)
    done = await probe(f"127.0.0.1:{server.port}")
    assert done.returncode == 1
    assert done.stderr == f"no answer on 127.0.0.1:{server.port} (UNAVAILABLE)\n"


async def test_usage() -> None:
    done = await probe()
    assert done.returncode == 1
    assert "HOST:PORT" in done.stderr
