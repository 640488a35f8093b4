"""Fairway's gateway against LiteLLM's proxy: the same clients, limits on, backends that answer at once.

Requests per second of a core: 32 connections in a closed loop, requests over the processor time of the proxy
or gateway. Added p95: an open loop of 20 requests a second, minus the p95 of the bare backend. Fairway's
share includes its scheduler and worker, which LiteLLM does not have. In turns; a ratio is of one round.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from bench.admissions.http_load import HttpTarget, closed_loop, open_loop
from bench.overhead import quantile
from bench.stack import NullStack, free_port, wait_for_port

ROUNDS: Final = 3
CONNECTIONS: Final = 32
CLOSED_S: Final = 8.0
RATE_PER_S: Final = 20.0
OPEN_REQUESTS: Final = 200


async def versus_litellm(
    fairway: HttpTarget, litellm: HttpTarget, bare: HttpTarget
) -> dict[str, list[float]]:
    """Return the ratios of the RESULT line; a line of absolute figures per round is printed."""
    targets = (fairway, litellm)
    per_core: dict[str, list[float]] = {target.name: [] for target in targets}
    added_ms: dict[str, list[float]] = {target.name: [] for target in targets}
    for target in targets:
        await closed_loop(target, connections=8, seconds=3.0)
    for number in range(ROUNDS):
        bare_s = quantile(await open_loop(bare, rate_per_s=RATE_PER_S, requests=OPEN_REQUESTS), 0.95)
        for target in targets:
            before_s = processor_s(target.pids)
            answered = await closed_loop(target, connections=CONNECTIONS, seconds=CLOSED_S)
            per_core[target.name].append(answered / (processor_s(target.pids) - before_s))
            taken = await open_loop(target, rate_per_s=RATE_PER_S, requests=OPEN_REQUESTS)
            added_ms[target.name].append((quantile(taken, 0.95) - bare_s) * 1000)
        latest = {name: (round(per_core[name][-1], 1), round(added_ms[name][-1], 2)) for name in per_core}
        print(f"round {number + 1} of {ROUNDS}: (requests/s of a core, added p95 ms) {latest}", flush=True)

    def over(values: dict[str, list[float]]) -> list[float]:
        return [one / other for one, other in zip(values[fairway.name], values[litellm.name], strict=True)]

    return {
        "rps_per_core_vs_litellm": over(per_core),
        "added_p95_vs_litellm": over(added_ms),
        "rps_per_core": per_core[fairway.name],
        "rps_per_core_litellm": per_core[litellm.name],
    }


def processor_s(pids: tuple[int, ...]) -> float:
    """Return the processor time that the processes and their children have used."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def gateway_target(stack: NullStack, state: Path) -> HttpTarget:
    """Return the gateway of a stack as a target. Raises SystemExit when its process is not found."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("FAIRWAY_STATE_DIR", "").startswith(str(state))
            if mine and "services" in command and "gateway" in command:
                return HttpTarget("fairway", stack.http, stack.api_key, stack.model, (process.pid,))
    raise SystemExit(f"no gateway runs in {state}")


@contextlib.contextmanager
def null_backend() -> Iterator[tuple[HttpTarget, int]]:
    """Yield the bare backend and its port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "bench.admissions.null_backend", str(port)])
    try:
        wait_for_port(port)
        yield HttpTarget("bare", f"http://127.0.0.1:{port}", "none", "null", (process.pid,)), port
    finally:
        process.terminate()
        process.wait(10)
