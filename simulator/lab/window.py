"""``python -m simulator window FILE``: requests of a window, replayed on simulated fleets.

The file has the metric, the quantile and the runs: for each, the cost model of a step, the workers with the
ratio of their step times, and the requests. ``fairway diagnose`` writes it; the answer is one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from services.core.estimates.cost_model import TINY_CPU, CostModel, encode, slowed
from services.core.records import Priority
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.fleet import simulate
from simulator.fleet.spec import FleetSpec, TenantSpec, WorkerSpec

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_REQUESTS: Final = 20_000
MAX_WORKERS: Final = 1024
MAX_RUNS: Final = 8
_KV_TOKENS: Final = 2**20  # a window has no record of KV: there is always room


class ReplayedRequest(Struct, frozen=True):
    """``at_s`` counts from the start of the window. ``prefix`` tokens are those that its tenant shares."""

    at_s: float
    tenant: str
    prompt: int
    output: int
    prefix: int = 0
    priority: Priority = Priority.STANDARD


class ReplayRun(Struct, frozen=True):
    """``workers``: the ratio of each one's step times to the prices of the window."""

    name: str
    workers: list[float]
    requests: list[ReplayedRequest]


class ReplayedWindow(Struct, frozen=True):
    """``prices``: seconds per step, prompt token, decoded token and token that decodes read."""

    metric: Literal["ttft", "itl", "total"]
    quantile: float
    prices: tuple[float, float, float, float]
    slots: int  # sequences of a worker at once
    runs: list[ReplayRun]


def quantile_of(window: ReplayedWindow, run: ReplayRun, folder: Path) -> float:
    """Return the quantile of a run; 0 without a request that finished. ``folder`` receives cost models."""
    kinds = []
    for place, ratio in enumerate(run.workers):
        path = folder / f"worker-{place}.json"
        path.write_bytes(encode(slowed(_costs(window.prices), ratio)))
        kinds.append(WorkerSpec(str(path), _KV_TOKENS // 16, 16, max(1, window.slots)))
    longest = max((one.prompt + one.output for one in run.requests), default=0)
    spec = FleetSpec(
        workers=len(kinds),
        worker_kinds=tuple(kinds),
        tenants=tuple(TenantSpec(name) for name in sorted({one.tenant for one in run.requests})),
        max_context_tokens=max(4096, 2 * longest),
        idempotency=False,
    )
    found: list[float] = []

    def ended(record: RequestRecord) -> None:
        if record.finished and record.ttft_s is not None:
            decode_s = record.last_token_s - record.first_token_s
            gaps = max(1, record.output_tokens - 1)
            values = {"ttft": record.ttft_s, "itl": decode_s / gaps, "total": record.ttft_s + decode_s}
            found.append(values[window.metric])

    simulate(spec, _load(run.requests), on_record=ended)
    found.sort()
    return found[min(len(found) - 1, int(window.quantile * len(found)))] if found else 0.0


def _costs(prices: tuple[float, float, float, float]) -> CostModel:
    step_s, prefill_s, decode_s, attended_s = prices
    return replace(
        TINY_CPU,
        name="window",
        base_s=max(1e-6, step_s),
        prefill_token_s=prefill_s,
        decode_sequence_s=decode_s,
        attended_token_s=attended_s,
    )


def _load(requests: Sequence[ReplayedRequest]) -> Iterator[SimRequest]:
    prefixes = {name: place for place, name in enumerate(sorted({one.tenant for one in requests}), 1)}
    for one in sorted(requests, key=lambda one: one.at_s):
        yield SimRequest(
            tenant=one.tenant,
            prompt_tokens=max(1, one.prompt),
            output_tokens=max(1, one.output),
            arrival_s=max(0.0, one.at_s),
            priority=one.priority,
            prefix_id=prefixes[one.tenant] if one.prefix else 0,
            prefix_tokens=min(one.prefix, one.prompt),
        )


def read_window(path: Path) -> ReplayedWindow:
    """Return what a file has. Raises ValueError for anything else, OSError."""
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        window = msgspec.json.decode(text, type=ReplayedWindow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no window: {error}") from error
    bounds = (
        ("runs", len(window.runs), MAX_RUNS),
        ("workers", max((len(one.workers) for one in window.runs), default=0), MAX_WORKERS),
        ("requests", max((len(one.requests) for one in window.runs), default=0), MAX_REQUESTS),
    )
    for name, count, most in bounds:
        if not 1 <= count <= most:
            raise ValueError(f"{path} has {count} {name}; 1 to {most} are replayed")
    return window


def main(arguments: Sequence[str]) -> int:
    """Replay the window of a file; the result is the exit status: 2 for a wrong use."""
    if len(arguments) != 1:
        print("error: name one file, as `fairway diagnose` writes it", file=sys.stderr)
        return 2
    try:
        window = read_window(Path(arguments[0]))
        with tempfile.TemporaryDirectory() as folder:
            found = {run.name: quantile_of(window, run, Path(folder)) for run in window.runs}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0
