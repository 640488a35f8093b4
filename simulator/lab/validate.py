"""The simulated side of the comparison with a live installation: the same small workload, calibrated.

Two figures are calibrated on a live installation that is idle: the time of an engine's step, and the delay of
the network, which stands for all that a request passes on its way. Everything else is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from services.core.estimates.cost_model import CostModel, encode
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.fleet import simulate
from simulator.fleet.spec import FleetSpec, LinkSpec, TenantSpec, WorkerSpec
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.load import Stream, merged
from simulator.lab.report.measure import Group, RecordCollector, Slo

WORKERS: Final = 2
MAX_SEQUENCES: Final = 8
STEP_S: Final = 0.02
RATE_PER_S: Final = 8.0
LOAD_S: Final = 60.0
IDLE_GAP_S: Final = 0.5
IDLE_REQUESTS: Final = 40
_PROMPT: Final = LogNormal(120.0, 0.6, least_tokens=8, most_tokens=400)
_OUTPUT: Final = LogNormal(55.0, 0.5, least_tokens=8, most_tokens=200)
_TRIAL_S: Final = (0.0001, 0.001)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds; ``itl`` is weighted by tokens."""

    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float

    @classmethod
    def of(cls, group: Group) -> Latencies:
        """Return those of a group that has some. ValueError for one without."""
        found = [sketch.quantile(ratio) for sketch in (group.ttft, group.itl) for ratio in (0.5, 0.95)]
        known = [value for value in found if value is not None]
        if len(known) < len(found):
            raise ValueError("no request got two tokens")
        return cls(*known)


def idle_load() -> list[SimRequest]:
    """Return requests that never meet one another."""
    return [SimRequest("default", 60, 16, arrival_s=number * IDLE_GAP_S) for number in range(IDLE_REQUESTS)]


def busy_load(seed: int, *, load_s: float = LOAD_S) -> list[SimRequest]:
    """Return a load that fills the fleet to about three quarters: some requests wait."""
    stream = Stream("default", Poisson(RATE_PER_S), _PROMPT, _OUTPUT)
    return list(merged([stream], seed=seed, duration_s=load_s))


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A simulation of the installation."""

    spec: FleetSpec

    def latencies(self, load: Iterable[SimRequest]) -> Latencies:
        """Return what a load would see."""
        collector = RecordCollector(Slo())
        simulate(self.spec, load, on_record=collector.take)
        (group,) = collector.groups.values()
        return Latencies.of(group)


def calibrated(step_s: float, idle_ttft_s: float, folder: Path) -> Calibrated:
    """Return a simulation of the installation whose idle requests see what the live ones saw.

    ``idle_ttft_s`` is the live median. The median of an idle request is linear in the delay of the links:
    two trials give the line.
    """
    model = CostModel("measured", base_s=step_s, prefill_token_s=0.0, decode_sequence_s=0.0)
    path = folder / "cost_model.json"
    path.write_bytes(encode(model))
    kind = WorkerSpec(
        preset=str(path), kv_blocks=16_384, block_size=16, max_sequences=MAX_SEQUENCES, step_tokens=512
    )
    spec = FleetSpec(
        workers=WORKERS,
        gateways=1,
        schedulers=1,
        worker_kinds=(kind,),
        tenants=(TenantSpec("default"),),
        idempotency=False,
    )
    trials = [
        (delay_s, Calibrated(_with_delay(spec, delay_s)).latencies(idle_load()).ttft_p50_s)
        for delay_s in _TRIAL_S
    ]
    return Calibrated(_with_delay(spec, _solved(trials, idle_ttft_s)))


def relative_errors(live: Latencies, simulated: Latencies) -> dict[str, float]:
    """Return (simulated - live) / live of each figure, rounded."""
    figures: tuple[tuple[str, Callable[[Latencies], float]], ...] = (
        ("ttft_p50", lambda each: each.ttft_p50_s),
        ("ttft_p95", lambda each: each.ttft_p95_s),
        ("itl_p50", lambda each: each.itl_p50_s),
        ("itl_p95", lambda each: each.itl_p95_s),
    )
    return {name: round((of(simulated) - of(live)) / of(live), 3) for name, of in figures}


def _with_delay(spec: FleetSpec, delay_s: float) -> FleetSpec:
    return replace(spec, link=LinkSpec(base_s=delay_s, jitter_s=delay_s / 4))


def _solved(trials: list[tuple[float, float]], wanted: float) -> float:
    """Return the delay at which the line through the trials is ``wanted``; never below a microsecond."""
    (low_s, at_low), (high_s, at_high) = trials
    slope = (at_high - at_low) / (high_s - low_s)
    return max(1e-6, low_s + (wanted - at_low) / slope)
