"""A proxy in the environment receives nothing that stays within the fleet or on one machine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
CREDENTIALS = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
CHANNEL = """
import asyncio
async def main():
    channel = {channel}
    channel.get_state(try_to_connect=True)
    await asyncio.sleep(30)
asyncio.run(main())
"""
# Each connects to ADDRESS, and waits there until it is killed.
PROGRAMS = {
    "roles": "from services.rpc.channel import open_channel\n"
    + CHANNEL.format(channel="open_channel('ADDRESS')"),
    "client": "from fairway.client.endpoints import open_endpoints\n"
    + CHANNEL.format(channel="open_endpoints(['ADDRESS'], None, 1024, now=float)[0].channel"),
    "etcd": """
import asyncio
from services.adapters.etcd.channel import EtcdChannel
async def main():
    channel = EtcdChannel(['ADDRESS'])
    with channel.stubs() as stubs:
        stubs.channel.get_state(try_to_connect=True)
    await asyncio.sleep(30)
asyncio.run(main())
""",
    "probe of containers": "from services.rpc.probe import health_problem\n"
    "health_problem('ADDRESS', timeout_s=30)",
    "probe of fairway up": """
import asyncio
from fairway.cli.fleet.probes import grpc_serving
asyncio.run(grpc_serving('ADDRESS')())
""",
    "traces": """
from random import Random
from services.runtime.telemetry.otlp import connect
tracer, queue = connect('http://ADDRESS', ratio=1.0, role='gateway', follows=False, rng=Random(1))
tracer.start_span('request').end()
queue.shutdown()
""",
    "blobs": """
import obstore
from pathlib import Path
from services.adapters.blobs.s3 import open_bucket
from services.runtime.clock import SystemClock
from services.runtime.config import load
obstore.head(open_bucket(load({
    'FAIRWAY_BLOB_STORE': 's3://models', 'FAIRWAY_S3_ENDPOINT': 'http://ADDRESS', 'FAIRWAY_S3_REGION': 'x',
    'FAIRWAY_S3_CREDENTIALS_FILE': 'credentials',
}), SystemClock()), 'key')
""",
}


class Listener:
    """A port that answers nothing. ``called``: someone connected."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.address = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.called.set()
        await reader.read()
        writer.close()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_stays_in_the_fleet_passes_no_proxy(program: str, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(CREDENTIALS)
    proxy, target = Listener(), Listener()
    async with await proxy.start(), await target.start():
        plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAMS[program].replace("ADDRESS", target.address)),
            env={**plain, "PYTHONPATH": str(ROOT), **dict.fromkeys(VARIABLES, f"http://{proxy.address}")},
            cwd=tmp_path,
            stderr=asyncio.subprocess.DEVNULL,
        )
        calls = [asyncio.create_task(each.called.wait()) for each in (proxy, target)]
        await asyncio.wait(calls, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        child.kill()
        await child.wait()
        for call in calls:
            call.cancel()
    assert (proxy.called.is_set(), target.called.is_set()) == (False, True)
