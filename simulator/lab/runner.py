"""Runs a scenario and makes its report."""

from __future__ import annotations

from simulator.fleet.fleet import simulate
from simulator.invariants.balance import Balance
from simulator.invariants.bounds import Bounds
from simulator.invariants.fairness import Fairness
from simulator.invariants.fencing import Fencing
from simulator.invariants.shedding import Shedding
from simulator.lab.report.measure import Collector
from simulator.lab.report.report import Course, Header, Report, build
from simulator.lab.scenario import Scenario
from simulator.lab.watch import Watch


def run(scenario: Scenario) -> Report:
    """Return the report of a scenario. Same scenario, same report."""
    collector = Collector(scenario.slo, warm_up_s=scenario.warm_up_s)
    watched, from_s = scenario.watched or (None, 0.0)
    watch = Watch(collector, watched=watched)
    fairness = Fairness()
    ran = simulate(
        scenario.fleet,
        scenario.load(),
        plans=(watch, *scenario.plans),
        invariants=(Balance(), Bounds(), Fencing(), Shedding(), fairness),
        on_record=collector.take,
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
    return build(
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


def _together(collector: Collector, tenants: tuple[str, ...]) -> dict[str, float | None]:
    """Return the p95 of the first tokens of all requests of these tenants, as of one."""
    return {"together_ttft_p95_s": collector.ttft_of(tenants).quantile(0.95)} if tenants else {}


def _gray(watch: Watch, from_s: float, scenario: Scenario) -> dict[str, float | None]:
    """Return how soon the watched worker was found, and its share of grants while its fault lasts on."""
    to_s = min((mark.to_s for mark in scenario.marks if mark.from_s >= from_s), default=scenario.duration_s)
    found_s = next((at_s for at_s in watch.ejected_s if at_s >= from_s), None)
    return {
        "found_after_s": None if found_s is None else found_s - from_s,
        "share_before_ratio": watch.share(0.0, from_s),
        "share_after_ratio": None if found_s is None else watch.share(found_s, to_s),
    }
