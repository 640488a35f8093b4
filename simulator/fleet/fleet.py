"""A whole fleet in one process on virtual time: production services over a simulated network and device."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from fairway.task_group import TaskGroup
from simulator.fleet.assembly import Parts, SimFleet
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.clients.row_client import SimRows
from simulator.fleet.grant_watch import EventTrace
from simulator.fleet.invariant import Instants, Invariant, InvariantSampling, Looks
from simulator.fleet.spec import FleetSpec, LinkSpec, TenantSpec, WorkerSpec
from simulator.kernel.loop import VirtualTimeLoop

__all__ = [
    "FleetSpec", "LinkSpec", "Parts", "Plan", "RunReport", "SimFleet", "TenantSpec", "WorkerSpec", "simulate",
]  # fmt: skip


PLANS_S: Final = 15.0


class Plan(Protocol):
    """What happens to a fleet besides its load, or what looks at it meanwhile.

    ``run`` starts with the load and is cancelled after it.
    """

    async def run(self, fleet: SimFleet) -> None: ...


@dataclass(frozen=True, slots=True)
class RunReport:
    """``violations`` is empty when every invariant held. Seconds are virtual."""

    seed: int
    requests: int
    simulated_s: float
    outcomes: dict[str, int]
    rows: dict[str, int]  # rows of fixed-cost models, by outcome
    rows_p95_s: dict[str, float]  # 95th percentile of their answered requests, by tenant
    violations: tuple[str, ...]
    trace_digest: str
    events: int


def simulate(
    spec: FleetSpec,
    load: Iterable[SimRequest | SimRows],
    *,
    plans: Sequence[Plan] = (),
    invariants: Sequence[Invariant] = (),
    looks: Looks = Looks.SAMPLES,
    on_record: Callable[[RequestRecord], None] = lambda _: None,
    parts: Parts | None = None,
    show: Callable[[str], None] | None = None,
) -> RunReport:
    """Return what became of a load on a fleet. Same arguments, same report.

    ``load`` is read as it is due, so that it may be longer than memory; its arrivals never go back.
    ``on_record`` receives each request when it ended; no record is stored here. With ``invariants``, plans
    end ``PLANS_S`` after the load, the fleet is healed, has to come to rest, and is judged; ``looks`` sets
    when they look at the fleet before. ``show`` is given the trace line by line.
    """
    outcomes: Counter[str] = Counter()

    def ended(record: RequestRecord) -> None:
        outcomes[record.outcome] += 1
        on_record(record)

    with _no_logs(), VirtualTimeLoop() as loop:
        trace = EventTrace(lambda: loop.now_s, show)
        run = _Run(plans, invariants, looks, parts, ended, trace)
        fleet = loop.run_until_complete(_run(spec, loop, load, run))
        return RunReport(
            seed=spec.seed,
            requests=fleet.clients.sent,
            simulated_s=loop.now_s,
            outcomes=dict(sorted(outcomes.items())),
            rows=dict(sorted(fleet.rows.outcomes.items())),
            rows_p95_s={name: found.quantile(0.95) or 0.0 for name, found in fleet.rows.seconds.items()},
            violations=tuple(map(str, fleet.violations.found)),
            trace_digest=trace.digest,
            events=loop.callbacks,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    plans: Sequence[Plan]
    invariants: Sequence[Invariant]
    looks: Looks
    parts: Parts | None
    ended: Callable[[RequestRecord], None]
    trace: EventTrace


async def _run(
    spec: FleetSpec, loop: VirtualTimeLoop, load: Iterable[SimRequest | SimRows], run: _Run
) -> SimFleet:
    fleet = SimFleet(spec, loop, on_record=run.ended, trace=run.trace, parts=run.parts)
    await fleet.start()
    for invariant in run.invariants:
        invariant.watch(fleet)
    Instants(fleet, run.invariants, run.looks)
    async with TaskGroup() as group:
        plans = [group.create_task(plan.run(fleet)) for plan in run.plans]
        sampling = group.create_task(InvariantSampling(run.invariants).run(fleet))
        await fleet.send(load)
        if run.invariants:
            await asyncio.wait(plans or [sampling], timeout=PLANS_S)
        else:
            await fleet.clients.wait_idle()
        for plan in plans:
            plan.cancel()
        if run.invariants:
            await heal_all(fleet)
            await come_to_rest(fleet)
        sampling.cancel()
    for invariant in run.invariants:
        invariant.at_rest(fleet)
    return fleet


@contextmanager
def _no_logs() -> Iterator[None]:
    """A simulation's log lines are dropped: writing them would take most of its time."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)


REST: Final = "comes-to-rest"
_LOOK_S: Final = 0.5
_PATIENCE_S: Final = 180.0  # longer than any lease, deadline or slot lasts


async def heal_all(fleet: SimFleet) -> None:
    """Undo every fault: all processes run, all links carry, nothing is slow."""
    for name, process in list(fleet.processes.items()):
        if process.paused:
            process.resume()
        elif not process.alive:
            fleet.restart(name)
    fleet.network.heal()
    for worker in fleet.workers.values():
        worker.slow(1.0)


async def come_to_rest(fleet: SimFleet) -> None:
    """Return once no component holds a resource; add a violation when that does not happen in time."""
    deadline_s = fleet.loop.now_s + _PATIENCE_S
    while not fleet.ready or leftovers(fleet):
        if fleet.loop.now_s > deadline_s:
            fleet.violations.add(REST, f"not after {_PATIENCE_S:g} s: ready={fleet.ready} {leftovers(fleet)}")
            return
        await fleet.wait(_LOOK_S)


def leftovers(fleet: SimFleet) -> dict[str, int]:
    """Return the resources still held, by name; empty in a fleet at rest."""
    found: dict[str, int] = {
        "clients": len(fleet.clients.present),
        "clients of rows": len(fleet.rows.present),
    }
    for name, worker in fleet.workers.items():
        found |= {f"{name} {what}": count for what, count in worker.held().items()}
    for name, gateway in fleet.gateways.items():
        found[f"{name} requests"] = gateway.service.running
        found[f"{name} rows"] = gateway.rows.rows
        found[f"{name} placements"] = gateway.placement.pending
        found[f"{name} untaken tokens"] = gateway.service.buffered_tokens
        found[f"{name} unsettled"] = gateway.limiter.unsettled
    term = fleet.term
    if term is not None:
        found["outstanding grants"] = term.fleet.outstanding
        found["queued placements"] = len(term.queue)
        found |= {f"slots {kind}": count for kind, count in term.slots.by_kind().items()}
    for tenant in fleet.spec.tenants:
        found[f"slots of {tenant.name}"] = fleet.slots_held(tenant.name)
    return {name: count for name, count in found.items() if count}
