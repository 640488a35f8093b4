"""Runs a scenario, observes the fleet meanwhile, and makes the report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from services.core.generation import PlaceSpec
from services.scheduler.term import Term
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.fleet import SimFleet, simulate
from simulator.fleet.grant_watch import GrantListener
from simulator.fleet.spec import VERSION_DIGEST
from simulator.invariants.balance import Balance, Bounds
from simulator.invariants.fairness import FairnessInvariant
from simulator.invariants.fencing import Fencing
from simulator.invariants.shedding import Shedding
from simulator.lab import scenarios
from simulator.lab.load import replay
from simulator.lab.load.traces import TraceError
from simulator.lab.report.measure import Bins, RecordCollector
from simulator.lab.report.report import Course, Header, LabReport, Sample, Timeline, WorkerSample, build
from simulator.lab.report.seconds import SecondsCollector
from simulator.lab.report.table import aligned, text
from simulator.lab.scenario import Options, Scenario, ScenarioError

SAMPLE_S: Final = 0.5


class LevelSampling(GrantListener):
    """A plan of a run: samples levels at even intervals into ``timeline``, and counts grants over time."""

    def __init__(self, collector: RecordCollector, *, watched: str | None = None) -> None:
        self.timeline = Timeline()
        self.grants = Bins(0.5)
        self.grants_of_watched = Bins(0.5)
        self.ejected_s: list[float] = []  # times at which the watched worker was ejected anew
        self._watched = watched
        self._collector = collector
        self._waiting = 0
        self._is_ejected = False

    async def run(self, fleet: SimFleet) -> None:
        """Sample until cancelled."""
        self._fleet = fleet
        self._collector.origin_s = fleet.load_began_s
        fleet.grants.listeners.append(self)
        while True:
            self._look()
            await fleet.wait(SAMPLE_S)

    def term_began(self, term: Term) -> None:
        self._waiting = 0

    def entered(self, spec: PlaceSpec) -> None:
        self._waiting += 1

    def left(self, spec: PlaceSpec) -> None:
        self._waiting -= 1

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        self.grants.add(self._now_s)
        if worker_id == self._watched:
            self.grants_of_watched.add(self._now_s)

    @property
    def _now_s(self) -> float:
        return self._fleet.loop.now_s - self._fleet.load_began_s

    def share(self, from_s: float, to_s: float) -> float | None:
        """Return the watched worker's part of the grants of an interval; None without any."""
        whole = _between(self.grants, from_s, to_s)
        return _between(self.grants_of_watched, from_s, to_s) / whole if whole else None

    def _look(self) -> None:
        term = self._fleet.term
        pressure = 0.0
        if term is not None:
            pressure = term.overload.pressure(VERSION_DIGEST).pressure_ratio
            self._check_watched(term)
        workers = tuple(self._worker(name) for name in self._fleet.workers)
        self.timeline.add(Sample(self._now_s, self._waiting, pressure, workers))

    def _check_watched(self, term: Term) -> None:
        if self._watched is None:
            return
        seen = term.fleet.candidates(VERSION_DIGEST).get(self._watched)
        is_ejected = seen is not None and seen.ejected
        if is_ejected and not self._is_ejected:
            self.ejected_s.append(self._now_s)
        self._is_ejected = is_ejected

    def _worker(self, name: str) -> WorkerSample:
        prefill = decode = running = waiting = reserved = total = 0
        busy_s = 0.0
        for table in self._fleet.workers[name].host.tables():
            prefill += table.stats.prefill_tokens
            decode += table.stats.decode_tokens
            busy_s += table.stats.step_seconds
            running += len(table) - table.waiting
            waiting += table.waiting
            reserved += table.kv.blocks
            total += table.limits.kv_blocks_total
        return WorkerSample(
            name, prefill, decode, busy_s, running=running, waiting=waiting, kv_ratio=reserved / max(1, total)
        )


def _between(bins: Bins, from_s: float, to_s: float) -> float:
    first, last = round(from_s / bins.width_s), round(to_s / bins.width_s)
    return sum(bins.sums[first:last])


def run(scenario: Scenario) -> LabReport:
    """Return the report of a scenario. Same scenario, same report."""
    collector = RecordCollector(scenario.slo, warm_up_s=scenario.warm_up_s)
    watched, from_s = scenario.watched or (None, 0.0)
    watch = LevelSampling(collector, watched=watched)
    fairness = FairnessInvariant()
    seconds = None if scenario.by_second_s is None else SecondsCollector(scenario.by_second_s)

    def ended(record: RequestRecord) -> None:
        collector.take(record)
        if seconds is not None:
            seconds.take(record)

    ran = simulate(
        scenario.fleet,
        scenario.load(),
        plans=(watch, *scenario.plans, *(() if seconds is None else (seconds,))),
        invariants=(Balance(), Bounds(), Fencing(), Shedding(), fairness),
        on_record=ended,
    )
    spec = scenario.fleet
    header = Header(
        scenario=scenario.name,
        summary=scenario.summary,
        workers=spec.workers,
        preset=", ".join(kind.preset for kind in spec.worker_kinds),
        seed=spec.seed,
        duration_s=scenario.duration_s,
        warm_up_s=scenario.warm_up_s,
        marks=scenario.marks,
        notes=scenario.notes,
    )
    report = build(
        header,
        collector,
        watch.timeline,
        Course(ran.simulated_s, ran.violations, ran.trace_digest),
        weights={tenant.name: tenant.weight for tenant in spec.tenants},
        bound_tokens=fairness.bounds()[1],
        figures={
            **(_gray(watch, from_s, scenario) if watched is not None else {}),
            **_together(collector, scenario.together),
        },
    )
    return report if seconds is None else replace(report, seconds=tuple(seconds.rows()))


def _together(collector: RecordCollector, tenants: tuple[str, ...]) -> dict[str, float | None]:
    """Return the p95 of the first tokens of all requests of these tenants, as of one."""
    return {"together_ttft_p95_s": collector.ttft_of(tenants).quantile(0.95)} if tenants else {}


def _gray(watch: LevelSampling, from_s: float, scenario: Scenario) -> dict[str, float | None]:
    """Return how soon the watched worker was found, and its share of grants while its fault lasts on."""
    to_s = min((mark.to_s for mark in scenario.marks if mark.from_s >= from_s), default=scenario.duration_s)
    found_s = next((at_s for at_s in watch.ejected_s if at_s >= from_s), None)
    return {
        "found_after_s": None if found_s is None else found_s - from_s,
        "share_before_ratio": watch.share(0.0, from_s),
        "share_after_ratio": None if found_s is None else watch.share(found_s, to_s),
    }


TRACES: Final = "FAIRWAY_TRACES"


def main(arguments: Sequence[str]) -> int:
    """Run the command; the result is its exit status: 2 for a wrong use, 1 for violated invariants."""
    parsed = _parser().parse_args(arguments)
    if parsed.list:
        rows = [(name, scenarios.summary(name)) for name in scenarios.names()]
        print("\n".join(aligned(rows)))
        print("A path that ends in .csv or .jsonl is replayed: an Azure LLM inference or a Mooncake trace.")
        return 0
    if not parsed.scenario:
        print("error: name a scenario; --list shows those that there are", file=sys.stderr)
        return 2
    try:
        report = run(_scenario(parsed.scenario, _options(parsed)))
        print(text(report), end="")
        if parsed.out is not None:
            write(report, parsed.out)
    except (ScenarioError, TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if report.violations else 0


def _scenario(name: str, options: Options) -> Scenario:
    return replay.scenario(name, options) if replay.is_trace(name) else scenarios.load(name, options)


def traces_folder(given: Path | None) -> Path | None:
    """Return the folder of recorded traces: the given one, else that of FAIRWAY_TRACES, else none."""
    if given is not None:
        return given
    named = os.environ.get(TRACES)
    return Path(named) if named else None


def write(report: LabReport, folder: Path) -> None:
    """Write report.json into ``folder``, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "report.json"
    target.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    print(target)


def _options(parsed: argparse.Namespace) -> Options:
    return Options(
        workers=parsed.workers,
        seed=parsed.seed,
        duration_s=parsed.duration,
        rate_per_s=parsed.rate,
        load_ratio=parsed.load,
        preset=parsed.preset,
        traces=traces_folder(parsed.traces),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator simulate", description=__doc__)
    parser.add_argument(
        "scenario",
        nargs="?",
        default="",
        help="a scenario by name, a Python file with one, or a trace to replay (.csv, .jsonl)",
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and what each shows")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--duration", type=float, help="seconds during which requests arrive")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--load", type=float, help="the rate as a share of what the fleet can serve at most")
    parser.add_argument(
        "--preset", default="a10", help="a cost model by name, or a file of fairway calibrate"
    )
    parser.add_argument("--traces", type=Path, help=f"a folder in which traces are looked for; else {TRACES}")
    parser.add_argument("--out", type=Path, help="a folder for report.json")
    return parser
