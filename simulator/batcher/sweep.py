"""The derived window against the best fixed one, found by sweep, on each workload.

    python -m simulator batching [--rows 10000]

Open loops are compared by goodput: the highest rate at which the objective holds. Closed loops are compared
by rows per second. Prints a line per workload, and ``RESULT {json}`` last: the least ratio, and those of all
workloads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.worker.batcher.policy.linger import BatchObjective
from services.worker.batcher.policy.window import DerivedWindow, FixedWindow, Window
from simulator.batcher.costs import BatchCosts
from simulator.batcher.curve import curves, picture
from simulator.batcher.world import (
    BatcherOutcome,
    BatcherSpec,
    BatcherWorld,
    ClosedLoop,
    OpenLoop,
)
from simulator.lab.load.arrivals import Gamma, OnOff, Poisson

WINDOWS_S: Final = (0.0, 0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
HALVINGS: Final = 6  # halvings of the interval in which the highest rate lies
BURST_S: Final = (0.1, 0.2)  # mean time with three times the rate between, and without


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """Measured costs, the widths of the traffic, and what answers must meet."""

    costs: BatchCosts
    widths: tuple[tuple[int, float], ...]
    objective: BatchObjective

    def rate_per_s(self, rows: int) -> float:
        """Return the rows per second of batches of so many rows of the mean width."""
        return rows / sum(share * self.costs.mean_s(width, rows) for width, share in self.widths)


def poisson(rate_per_s: float) -> OpenLoop:
    return OpenLoop(Poisson(rate_per_s))


def clustered(rate_per_s: float) -> OpenLoop:
    return OpenLoop(Gamma(rate_per_s, cv=3.0))


def bursts(rate_per_s: float) -> OpenLoop:
    on_s, off_s = BURST_S
    off_per_s = rate_per_s * (on_s + off_s) / (3.0 * on_s + off_s)
    return OpenLoop(OnOff(3.0 * off_per_s, off_per_s, on_s, off_s))


OPEN: Final[Mapping[str, Callable[[float], OpenLoop]]] = {
    "poisson": poisson,
    "clustered": clustered,
    "bursts": bursts,
}
CLOSED: Final = (8, 64)  # clients


def device_kinds() -> dict[str, MeasuredDevice]:
    """Return what was measured here, and one device with a large fixed cost, as accelerators have."""
    mlp, minilm = (BatchCosts.measured(model) for model in ("mlp", "minilm"))
    mixed = ((16, 0.7), (64, 0.3))
    return {
        "mlp": MeasuredDevice(mlp, ((0, 1.0),), BatchObjective(0.05)),
        "minilm": MeasuredDevice(minilm, mixed, BatchObjective(2.0)),
        "accelerator": MeasuredDevice(BatchCosts.linear(3e-3, 0.1e-3), ((0, 1.0),), BatchObjective(0.05)),
    }


def run(kind: MeasuredDevice, load: OpenLoop | ClosedLoop, window: Window, rows: int) -> BatcherOutcome:
    """Return the outcome of one run."""
    spec = BatcherSpec(load, kind.costs, window, rows=rows, widths=kind.widths, objective=kind.objective)
    return BatcherWorld(spec).run()


def goodput(kind: MeasuredDevice, load: Callable[[float], OpenLoop], window: Window, rows: int) -> float:
    """Return the highest rate at which the objective holds, to a sixtieth of the device's rate."""
    low, high = 0.0, 1.1 * kind.rate_per_s(100)
    for _ in range(HALVINGS):
        rate_per_s = (low + high) / 2
        found = run(kind, load(rate_per_s), window, rows)
        if found.p99_s <= kind.objective.latency_s:
            low = rate_per_s
        else:
            high = rate_per_s
    return low


def figures(kind: MeasuredDevice, window: Window, rows: int) -> dict[str, float]:
    """Return the figure of each workload, the more the better."""
    found = {name: goodput(kind, load, window, rows) for name, load in OPEN.items()}
    for clients in CLOSED:
        outcome = run(kind, ClosedLoop(clients), window, rows)
        found[f"closed-{clients}"] = outcome.within / outcome.seconds
    return found


def compare(kind: MeasuredDevice, rows: int) -> dict[str, tuple[float, float, float]]:
    """Return (derived, best fixed, its window) by workload."""
    derived = figures(kind, DerivedWindow(), rows)
    fixed = {window_s: figures(kind, FixedWindow(window_s), rows) for window_s in WINDOWS_S}
    found = {}
    for name, own in derived.items():
        best_s = max(WINDOWS_S, key=lambda window_s: fixed[window_s][name])
        found[name] = (own, fixed[best_s][name], best_s)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--curve", type=Path, help="write the throughput-latency curve there, and no more")
    options = parser.parse_args(arguments)
    if options.curve is not None:
        found = curves(options.rows)
        for name, points in found.items():
            print(
                name,
                *(f"{each.clients}: {each.per_s:.0f}/s {each.p99_ms:.1f} ms" for each in points),
                sep="; ",
            )
        options.curve.write_text(picture(found), "utf-8")
        return 0
    ratios = {}
    for device, kind in device_kinds().items():
        for name, (own, best, window_s) in compare(kind, options.rows).items():
            ratio = ratios[f"{device} {name}"] = round(own / best, 3)
            print(
                f"{device:12} {name:10} derived {own:9.1f}/s  best fixed {best:9.1f}/s at "
                f"{window_s * 1e3:4.1f} ms  ratio {ratio:.3f}",
                flush=True,
            )
    print("RESULT", json.dumps({"linger_vs_best_fixed": min(ratios.values()), "ratios": ratios}))
    return 0
