"""``python -m simulator scale``: one run of a large fleet under a long load, in bounded memory."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final

from services.core.records import Priority
from services.gateway.service_types import GatewayLimits
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.spec import FleetSpec, TenantSpec, WorkerSpec

_TENANTS: Final = 64
_PREFIXES: Final = 2000
_GATEWAYS: Final = 4  # each has a stream to each worker
_KV_BLOCKS: Final = 2048  # so few that prefix caches are full, and what they hold no longer grows, early on
_SETTLED_KEEP_S: Final = 20.0  # Redis would keep ten minutes of settlements, which is more than a run lasts
_REQUESTS_PER_WORKER_S: Final = 4.0
_TELL_EVERY: Final = 10_000
_QUARTERS: Final = (25, 50, 75, 100)  # % of the requests
_MAX_GROWTH_RATIO: Final = 1.25  # most growth of the process's memory over the second half of the requests
_STATM: Final = Path("/proc/self/statm")


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every request finished, no invariant was violated and memory was bounded, else 1."""
    parser = argparse.ArgumentParser(prog="simulator scale", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    ended = _EndCounter(options.requests)
    report = simulate(
        scale_spec(options.workers, options.seed),
        scale_load(options.requests, workers=options.workers, seed=options.seed),
        on_record=ended.take,
    )
    result = {
        "requests": report.requests,
        "workers": options.workers,
        "wall_s": round(time.monotonic() - began_s, 1),
        "cpu_s": round(cpu_s(), 1),
        "cpu_ms_per_request": round(1e3 * ended.cpu_s_per_request, 3),
        "peak_rss_mib": peak_rss_mib(),
        "rss_mib_at_percent": ended.rss_mib_at_percent,
        "simulated_s": round(report.simulated_s, 1),
        "events": report.events,
        "finished": report.outcomes.get("finished", 0),
        "violations": len(report.violations),
    }
    print(f"outcomes: {report.outcomes}")
    if not is_bounded(ended.rss_mib_at_percent):
        print(f"memory grew with the requests, MiB by percent of them: {ended.rss_mib_at_percent}")
    print(f"RESULT {json.dumps(result)}")
    return 0 if is_whole(report) and is_bounded(ended.rss_mib_at_percent) else 1


def scale_spec(workers: int, seed: int) -> FleetSpec:
    """Return a fleet of one kind of worker, busy and not full."""
    return FleetSpec(
        workers=workers,
        gateways=_GATEWAYS,
        seed=seed,
        worker_kinds=(WorkerSpec(preset="h100", kv_blocks=_KV_BLOCKS),),
        tenants=tuple(TenantSpec(f"tenant-{number}") for number in range(_TENANTS)),
        gateway=GatewayLimits(max_requests=65_536),
        idempotency=False,
        settled_keep_s=_SETTLED_KEEP_S,
        coalesce_s=1.0,
    )


def scale_load(requests: int, *, workers: int, seed: int) -> Iterator[SimRequest]:
    """Yield requests of many tenants, four in five with a prefix that others share."""
    rng = Random(f"scale {seed}")
    at_s = 0.0
    for _ in range(requests):
        at_s += rng.expovariate(workers * _REQUESTS_PER_WORKER_S)
        shared = rng.random() < 0.8
        yield SimRequest(
            tenant=f"tenant-{rng.randrange(_TENANTS)}",
            prompt_tokens=rng.randint(80, 400),
            output_tokens=1 + min(400, int(rng.expovariate(1 / 64))),
            arrival_s=at_s,
            priority=Priority.INTERACTIVE if rng.random() < 0.5 else Priority.STANDARD,
            prefix_id=rng.randrange(_PREFIXES) if shared else 0,
            prefix_tokens=64 if shared else 0,
        )


class _EndCounter:
    """Reports progress periodically, and records what the run held at each quarter of the requests.

    ``cpu_s_per_request`` leaves out the start of the fleet: it counts from the first end to the last.
    """

    def __init__(self, requests: int) -> None:
        self.rss_mib_at_percent: dict[int, int] = {}
        self._quarters = {requests * percent // 100: percent for percent in _QUARTERS}
        self._count = 0
        self._first_cpu_s = self._last_cpu_s = 0.0

    @property
    def cpu_s_per_request(self) -> float:
        return (self._last_cpu_s - self._first_cpu_s) / max(1, self._count)

    def take(self, record: RequestRecord) -> None:
        self._count += 1
        if self._count == 1:
            self._first_cpu_s = self._last_cpu_s = cpu_s()
        percent = self._quarters.get(self._count)
        if percent is not None:
            self.rss_mib_at_percent[percent] = rss_mib()
            self._last_cpu_s = cpu_s()
        if self._count % _TELL_EVERY == 0:
            line = f"{self._count} requests, {record.ended_s:.1f} s, {cpu_s():.0f} s of CPU, {rss_mib()} MiB"
            print(line, flush=True)


def rss_mib() -> int:
    """Return what the process holds in memory now, or its maximum where the system does not report it."""
    if not _STATM.exists():
        return peak_rss_mib()
    return int(_STATM.read_text("utf-8").split()[1]) * resource.getpagesize() >> 20


def peak_rss_mib() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def cpu_s() -> float:
    """Return the CPU time of the process, which other load on the machine hardly changes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def is_whole(report: RunReport) -> bool:
    """Return whether every request finished and no invariant was violated."""
    ended = sum(report.outcomes.values())
    return not report.violations and ended == report.requests == report.outcomes.get("finished")


def is_bounded(rss_mib_at_percent: Mapping[int, int]) -> bool:
    """Return whether memory stopped growing with the requests. A run that was not measured there counts as
    bounded.

    Caches and logs fill up in the first half of a run, so that what comes on top in the second is kept of
    requests that are gone. Anything kept of each of them that weighs a third of all else at half time makes
    the second half's growth exceed a quarter; below it lies what the allocator does not give back.
    """
    half, whole = rss_mib_at_percent.get(50), rss_mib_at_percent.get(100)
    return half is None or whole is None or whole <= half * _MAX_GROWTH_RATIO
