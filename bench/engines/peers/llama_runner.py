"""llama.cpp's server as a runner: ``python -m bench.engines.peers.llama_runner GGUF SERVER SLOTS``.

``SERVER`` is the ``llama-server`` binary, started as a child that takes ``SLOTS`` requests at a time; those
of a load go to it over HTTP, all at once. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.engines.peers.wire import Prompts, claim_output, die_with_parent, serve, timed

CONTEXT_TOKENS: Final = 1024  # of a slot
START_S: Final = 60.0
ANSWER_S: Final = 600.0


def main(model: str, server: str, slots: str) -> None:
    die_with_parent()
    out = claim_output()
    port, threads = free_port(), str(len(os.sched_getaffinity(0)))
    options = f"-c {CONTEXT_TOKENS * int(slots)} -np {slots} -b 2048 -ub 512 -fa on --no-webui"
    options += f" -t {threads} -tb {threads} --host 127.0.0.1 --port {port}"
    libraries = {"LD_LIBRARY_PATH": str(Path(server).parent)}
    # The server dies with this process, which dies with the benchmark.
    child = subprocess.Popen(
        [server, "-m", model, *options.split()],
        env=os.environ | libraries,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(address, child)
        with ThreadPoolExecutor(int(slots)) as pool:

            def run(prompts: Prompts, outputs: list[int]) -> Prompts:
                return list(pool.map(partial(complete, address), prompts, outputs))

            serve(out, timed(run))
    finally:
        child.kill()
        child.wait()


def complete(address: str, prompt: list[int], tokens: int) -> list[int]:
    """Return the token ids of one greedy completion."""
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer: dict[str, Any] = json.load(response)
    return list(answer["tokens"])


def wait_until_healthy(address: str, child: subprocess.Popen[bytes]) -> None:
    """Return once the model is loaded. Raises SystemExit if the server ends or takes too long."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and child.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("llama-server does not answer")


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
