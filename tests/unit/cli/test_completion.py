"""The shell completes names of resources, and nothing where no server answers in time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc
from tests.unit.cli.serving import serving


class ControlPlane(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Lists two keys and two tenants; ``delay_s`` before each answer."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def ListKeys(self, request: Any, context: Any) -> cp.ListKeysResponse:
        await asyncio.sleep(self.delay_s)
        return cp.ListKeysResponse(keys=[cp.Key(metadata=cp.Metadata(name=each)) for each in ("ci", "cron")])

    async def ListTenants(self, request: Any, context: Any) -> cp.ListTenantsResponse:
        names = ("acme", "default")
        return cp.ListTenantsResponse(tenants=[cp.Tenant(metadata=cp.Metadata(name=each)) for each in names])


async def completed(folder: Path, words: str, address: str) -> tuple[list[str], str]:
    """Return what the shell would offer for the last of ``words``, and stderr."""

    def run() -> subprocess.CompletedProcess[str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("FAIRWAY_")}
        return subprocess.run(
            [sys.executable, "-m", "fairway.cli.main"],
            cwd=folder,
            env={
                **known,
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "_FAIRWAY_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split(" ")) - 1),
                "FAIRWAY_CONTROLPLANE": address,
                "FAIRWAY_ADMIN_KEY": "k",
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    done = await asyncio.to_thread(run)
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fairway keys rotate ", ["ci", "cron"]),
        ("fairway keys rotate cr", ["cron"]),
        ("fairway tenants show ", ["acme", "default"]),
        ("fairway keys create x --tenant a", ["acme"]),
        ("fairway keys create ", []),
    ],
)
async def test_names_are_completed(tmp_path: Path, words: str, offered: list[str]) -> None:
    async with serving(ControlPlane()) as port:  # type: ignore[abstract]
        assert await completed(tmp_path, words, f"127.0.0.1:{port}") == (offered, "")


async def test_nothing_is_completed_and_said_where_no_server_answers(tmp_path: Path) -> None:
    assert await completed(tmp_path, "fairway keys rotate ", "127.0.0.1:9") == ([], "")
    assert await completed(tmp_path, "fairway keys rotate ", "") == ([], "")
    assert await completed(tmp_path, "fairway nodes show ", "no address") == ([], "")


async def test_a_slow_server_is_not_waited_for(tmp_path: Path) -> None:
    async with serving(ControlPlane(delay_s=60.0)) as port:  # type: ignore[abstract]
        began = time.monotonic()
        assert await completed(tmp_path, "fairway keys show ", f"127.0.0.1:{port}") == ([], "")
        assert time.monotonic() - began < 50.0
