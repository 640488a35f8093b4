"""A stack of its own for a benchmark: every role as a process, the null executor instead of a model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODEL = "null"
CHECKPOINT = Path("models/tiny/checkpoint")


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, timeout_s: float = 20.0) -> None:
    """Return once something listens. Raises SystemExit after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port} after {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class NullStack:
    """Where the stack answers."""

    grpc: str
    http: str
    api_key: str
    model: str

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, *, step_s: float = 0.0) -> Iterator[NullStack]:
        """Bring a stack up in ``folder``, one replica of the null executor, and down again."""
        state = folder / "state"
        environment = {**os.environ, "FAIRWAY_NULL_STEP_S": str(step_s)}

        def fairway(*arguments: str) -> None:
            command = [sys.executable, "-m", "fairway.cli.main", *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")

        model = folder / "model"
        shutil.copytree(CHECKPOINT, model, ignore=shutil.ignore_patterns("*.safetensors"))
        fairway("up", "--detach", "--no-model", "--state-dir", str(state))
        try:
            at = ("--state-dir", str(state))
            fairway("models", "publish", str(model), "--name", MODEL, "--tag", "latest", *at)
            fairway("deployments", "create", MODEL, "--model", MODEL, "--version", "latest",
                    "--executor", "null", "--replicas", "1", "--wait", *at)  # fmt: skip
            endpoints = json.loads((state / "endpoints.json").read_text())
            yield cls(endpoints["grpc"], endpoints["http"], endpoints["api_key"], MODEL)
        finally:
            fairway("down", "--state-dir", str(state))
