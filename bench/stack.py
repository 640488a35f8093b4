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
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from fairway.v1 import inference_pb2, inference_pb2_grpc

MODEL = "null"
CHECKPOINT = Path("models/tiny/checkpoint")
CONTEXT_TOKENS = 32768
KV_MEMORY_BYTES = 1024**3


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, timeout_s: float = 20.0) -> None:
    """Return once a server accepts connections. Raises SystemExit after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port} after {timeout_s:g} s")


def wait_for_replicas(address: str, api_key: str, count: int = 1, timeout_s: float = 60.0) -> None:
    """Return once the gateway lists ``count`` ready replicas. Raises SystemExit after ``timeout_s``."""
    metadata = (("authorization", f"Bearer {api_key}"),)
    deadline = time.monotonic() + timeout_s
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while time.monotonic() < deadline:
            models = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata).models
            if any(model.name == MODEL and model.ready_replicas >= count for model in models):
                return
            time.sleep(0.1)
    raise SystemExit(f"fewer than {count} replicas are ready after {timeout_s:g} s")


def metric_sum(state: Path, process: str, name: str, labels: str = "") -> float:
    """Return the sum of a metric over its series with ``labels``, a part of their text."""
    address = json.loads((state / "endpoints.json").read_text())["metrics"][process]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith((name + "{", name + " ")) and labels in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@dataclass(frozen=True, slots=True)
class NullStack:
    """Where the stack answers."""

    grpc: str
    http: str
    api_key: str
    model: str

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, folder: Path, *, step_s: float = 0.0, workers: int = 1, settings: Sequence[str] = ()
    ) -> Iterator[NullStack]:
        """Bring a stack up in ``folder``, a replica of the null executor per worker, and down again.

        ``settings`` are ROLE:VARIABLE=VALUE.
        """
        state = folder / "state"
        # Room for every sequence of the benchmark at once: preemption is not what is measured.
        environment = {
            **os.environ,
            "FAIRWAY_NULL_STEP_S": str(step_s),
            "FAIRWAY_KV_MEMORY_BYTES": str(KV_MEMORY_BYTES),
        }

        def fairway(*arguments: str) -> None:
            command = [sys.executable, "-m", "fairway.cli.main", *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")

        model = folder / "model"
        shutil.copytree(CHECKPOINT, model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT_TOKENS
        (model / "config.json").write_text(json.dumps(config))
        given = [part for setting in settings for part in ("--set", setting)]
        fairway("up", "--detach", "--no-model", "--workers", str(workers), "--state-dir", str(state), *given)
        try:
            at = ("--state-dir", str(state))
            # The null executor reads no weights.
            name = ("--name", MODEL, "--tag", "latest")
            fairway("models", "publish", str(model), *name, "--for-another-engine", *at)
            fairway("deployments", "create", MODEL, "--model", MODEL, "--version", "latest",
                    "--executor", "null", "--replicas", str(workers), *at)  # fmt: skip
            endpoints = json.loads((state / "endpoints.json").read_text())
            wait_for_replicas(endpoints["grpc"], endpoints["api_key"], workers)
            yield cls(endpoints["grpc"], endpoints["http"], endpoints["api_key"], MODEL)
        finally:
            fairway("down", "--state-dir", str(state))
