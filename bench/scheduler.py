"""How many placements a leader decides per second of one core, with 16, 256 and 1,024 workers.

``make bench-scheduler``. Drives the production ``Term`` in this process, with the observers of its role:
the ring of decisions, metrics, and lines as far as their budget lets them. ``scheduler_load`` defines what
gateways and workers send. No network, no conversion of messages: what the owner of the state does counts.

Time is virtual: gateways submit ``RATE_PER_WORKER_S`` placements per worker and second, at most
``MAX_RATE_PER_S``; a turn takes what came within ``TURN_S``. ``placements_per_s_*`` is how many one second
decides, their reports included; ``placements_per_cpu_s_*`` the same by this process's CPU clock, for a
machine that does other work as well. ``p99_decision_ms_*`` is from a turn's start to its last grant.

The prefix index holds 200,000 blocks.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import os
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

import structlog

from bench.results import print_result
from bench.scheduler_load import (
    BEAT_S,
    RUN_S,
    SHARED,
    SHARED_BLOCKS,
    START_UNIX_US,
    Prompts,
    Worker,
)
from services.app.process import rest_collector
from services.core.fleet import Granted
from services.core.generation import PlaceSpec
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.metrics import Metrics
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term, TermSettings
from services.scheduler.term_streams import Report, SubmitPlacements

INDEX_BLOCKS: Final = 200_000
OWN_BLOCKS: Final = 8  # of what the index is filled up with
RATE_PER_WORKER_S: Final = 20.0
MAX_RATE_PER_S: Final = 5000.0
TURN_S: Final = 0.002
START_S: Final = 1000.0
LINES_PER_S: Final = 200.0


class VirtualClock:
    """Implements ``ports.clock.Clock`` as far as a term uses it."""

    def __init__(self) -> None:
        self.now_s = START_S

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s + START_UNIX_US / 1e6

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("nothing sleeps here")


@dataclass(frozen=True)
class Result:
    """``digest`` is that of all grants: a change of speed alone leaves it as it is."""

    workers: int
    placements_per_s: float
    placements_per_cpu_s: float
    p50_ms: float
    p99_ms: float
    p99_cpu_ms: float
    reports_per_placement: float
    tenants_per_report: float
    predicted_hit_ratio: float
    index_blocks: int
    digest: str


@dataclass(frozen=True)
class Turn:
    wall_s: float
    cpu_s: float


class Bench:
    """One leader, its workers and one gateway."""

    def __init__(self, workers: int, seed: int) -> None:
        self.rng = Random(seed)
        self.clock = VirtualClock()
        lines = LineBudget(self.clock.monotonic_s, LINES_PER_S)
        telemetry = SchedulerTelemetry(Metrics(), self.clock, lines=lines)
        self.term = Term(1, TermSettings(), self.clock, Random(seed + 1), telemetry=telemetry)
        telemetry.term_started(self.term)
        self.session = self.term.streams.open_session("gateway", lambda: None, zone="a")
        self.rate_per_s = min(MAX_RATE_PER_S, RATE_PER_WORKER_S * workers)
        slots = max(128, round(2 * self.rate_per_s * RUN_S / workers))
        self.prompts = Prompts(self.rng)
        self.workers = [Worker(f"worker-{n}", slots, "ab"[n % 2]) for n in range(workers)]
        self.by_id = {worker.worker_id: worker for worker in self.workers}
        self.reporters = {name: self.term.streams.open_reporter(lambda: None) for name in self.by_id}
        self.digest = hashlib.sha256()
        self.number = 0
        self.submissions_due = 0.0
        self.specs: dict[int, PlaceSpec] = {}
        self._fill()
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self.placed = self.reports = self.tenants_reported = 0
        self.turns: list[Turn] = []

    def turn(self) -> None:
        """Let one turn's time pass."""
        self.clock.now_s += TURN_S
        commands: list[SubmitPlacements | Report] = [*self._submissions(), *self._reports()]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for command in commands:
            self.term.streams.send(command)
        self.term.step()
        self.turns.append(Turn(time.perf_counter() - began_s, time.process_time() - began_cpu_s))
        outcomes, self.session.outbox = self.session.outbox, []
        for outcome in outcomes:
            spec = self.specs.pop(outcome.placement_id)
            assert isinstance(outcome, Granted), outcome
            self.placed += 1
            grant = outcome.grant
            self.digest.update(f"{spec.request_id} {grant.worker_id} {grant.kv_blocks}\n".encode())
            self.by_id[grant.worker_id].start(grant, spec, self.clock.now_s)

    def _submissions(self) -> Iterator[SubmitPlacements]:
        self.submissions_due += self.rate_per_s * TURN_S
        places = []
        while self.submissions_due >= 1.0:
            self.submissions_due -= 1.0
            self.number += 1
            spec = self.specs[self.number] = self.prompts.draw(self.number, self.clock.now_s)
            places.append((self.number, spec, spec.arrival_unix_us))
        if places:
            yield SubmitPlacements(self.session, places)

    def _reports(self) -> Iterator[Report]:
        for worker in self.workers:
            if worker.is_due(self.clock.now_s):
                yield self._report(worker)

    def _report(self, worker: Worker) -> Report:
        snapshot = worker.report(self.clock.now_s)
        self.reports += 1
        self.tenants_reported += len(snapshot.tenants)
        reporter = self.reporters[worker.worker_id]
        reporter.take_counters()  # as the stream that answers does
        return Report(reporter, reporter.applied + 1, snapshot)

    def _fill(self) -> None:
        """Every shared prefix is cached somewhere, and the rest of the index is of prompts gone by."""
        self.reports = self.tenants_reported = 0
        for chain in self.prompts.shared:
            self.workers[self.rng.randrange(len(self.workers))].added += chain
        rest = (INDEX_BLOCKS - SHARED * SHARED_BLOCKS) // OWN_BLOCKS
        for n in range(max(rest, len(self.workers))):
            own = self.prompts.names(OWN_BLOCKS)
            worker = self.workers[n % len(self.workers)]
            worker.added += own
            worker.cached += own
        for worker in self.workers:
            # Spread over the second, as workers that started at different times are.
            worker.reported_s = self.clock.now_s
            self.term.streams.send(self._report(worker))
            worker.reported_s -= self.rng.random() * BEAT_S
        self.term.step()
        self.term.check_integrity()


def measure(workers: int, placements: int, *, seed: int = 1) -> Result:
    """Return what ``placements`` cost, after a start that is not counted."""
    bench = Bench(workers, seed)
    while bench.clock.now_s < START_S + RUN_S + 1.0:
        bench.turn()
    bench.reset()
    while bench.placed < placements:
        bench.turn()
    bench.term.check_integrity()
    walls = sorted(turn.wall_s for turn in bench.turns)
    cpus = sorted(turn.cpu_s for turn in bench.turns)
    tokens = bench.term.fleet.prefix_tokens
    return Result(
        workers=workers,
        placements_per_s=bench.placed / sum(walls),
        placements_per_cpu_s=bench.placed / sum(cpus),
        p50_ms=1e3 * walls[len(walls) // 2],
        p99_ms=1e3 * walls[len(walls) * 99 // 100],
        p99_cpu_ms=1e3 * cpus[len(cpus) * 99 // 100],
        reports_per_placement=bench.reports / bench.placed,
        tenants_per_report=bench.tenants_reported / bench.reports,
        predicted_hit_ratio=tokens.predicted / tokens.granted,
        index_blocks=len(bench.term.fleet.prefixes),
        digest=bench.digest.hexdigest()[:16],
    )


@contextmanager
def _profiled(*, on: bool) -> Iterator[None]:
    """Print where the time goes."""
    if not on:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 256, 1024])
    parser.add_argument("--placements", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    rest_collector()  # as each process does once it has started
    with open(os.devnull, "w") as sink:
        structlog.configure(
            processors=[structlog.processors.TimeStamper("iso"), structlog.processors.JSONRenderer()],
            logger_factory=structlog.PrintLoggerFactory(sink),
        )
        for workers in options.workers:
            with _profiled(on=options.profile):
                found = measure(workers, options.placements)
            print(
                f"{workers} workers: {found.placements_per_s:.0f} placements/s "
                f"({found.placements_per_cpu_s:.0f} per CPU second), a turn {found.p50_ms:.2f} ms "
                f"(p99 {found.p99_ms:.2f}, {found.p99_cpu_ms:.2f} of CPU), "
                f"{found.reports_per_placement:.2f} reports per placement with "
                f"{found.tenants_per_report:.1f} tenants each, {found.predicted_hit_ratio:.0%} of prompt "
                f"tokens predicted cached, {found.index_blocks} blocks indexed, grants {found.digest}"
            )
            figures[f"placements_per_s_{workers}"] = round(found.placements_per_s)
            figures[f"placements_per_cpu_s_{workers}"] = round(found.placements_per_cpu_s)
            figures[f"p99_decision_ms_{workers}"] = round(found.p99_ms, 3)
    if {"placements_per_s_256", "placements_per_s_1024"} <= figures.keys():
        figures["placements_1024_over_256"] = (
            figures["placements_per_s_1024"] / figures["placements_per_s_256"]
        )
    print_result(figures)


if __name__ == "__main__":
    main()
