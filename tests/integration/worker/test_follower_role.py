"""`fairway engines follow` as a process: it serves with the fleet's secret, and ends by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.cli.fleet.probes import grpc_serving
from fairway.engines.environment import Installed, mark
from fairway.v1 import worker_pb2
from services.adapters.grpc.client_stream import GrpcStreams
from services.core.errors import InvalidInput
from services.rpc.methods import FOLLOW
from tests.integration.worker.harness import TOKEN
from tests.support import local_servers

ROOT = Path(__file__).parents[3]


def command(folder: Path, address: str) -> list[str]:
    options = {
        "--listen": address,
        "--registry": f"127.0.0.1:{local_servers.free_port()}",
        "--state-dir": str(folder / "state"),
        "--internal-token-file": str(folder / "token"),
        "--dir": str(folder / "vllm"),
    }
    given = [part for pair in options.items() for part in pair]
    return [sys.executable, "-m", "fairway.cli.main", "engines", "follow", *given]


async def test_the_command_runs_a_follower_until_sigterm(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "python").symlink_to(sys.executable)
    mark(tmp_path / "vllm", Installed("vllm", "0", "cpu", ""))
    address = f"127.0.0.1:{local_servers.free_port()}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FAIRWAY_")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            command(tmp_path, address), env=environ, cwd=ROOT, stderr=log
        )
    try:
        probe = grpc_serving(address)
        async with asyncio.timeout(60):
            while await probe():
                await asyncio.sleep(0.05)
        stream = await GrpcStreams(TOKEN).open(address, FOLLOW, timeout_s=5.0)
        await stream.write(worker_pb2.FollowRequest(worker_id="w1", config=b"{}"))
        with pytest.raises(InvalidInput, match="config is none of this release"):
            await stream.read(5.0)
        await stream.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def test_without_vllm_the_command_names_the_next_one(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "127.0.0.1:1"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert "fairway engines install vllm" in done.stderr
