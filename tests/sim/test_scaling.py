"""Fleets whose replicas follow the load: what holds under mixed faults, and the bugs found.

``make sim`` runs 500 seeds and checks that they reach every fault.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.records import DEPLOYMENTS, NODES, Deployment, IsolationTier, Node, dump, load
from services.ports.store import Put
from simulator.fleet.assembly import Parts, SimFleet
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.clients.session import ONCE
from simulator.fleet.fleet import simulate
from simulator.fleet.nodes.gateway_node import GatewayNode
from simulator.fleet.spec import TenantSpec, VersionSpec
from simulator.invariants.balance import Balance
from simulator.invariants.scaling import BOUNDS, DECIDER, HELD, ORDERS, Decisions, HeldRequests
from simulator.scaling.seeds import run_scaling, scaling_fleet, scaling_load, unreached
from tests.sim.planted.gateways import EndsTwice
from tests.sim.planted.planes import WritesUnfenced
from tests.sim.planted.scaling import (
    AssignsNothing,
    DecidesTooFew,
    DecidesTooMany,
    ForgetsDeadlines,
    ForgetsOrders,
    HoldsForEver,
    LosesErrors,
)
from tests.support.sweep import daily


@pytest.mark.parametrize("seed", daily(range(12), (0, 5)))
def test_a_fleet_that_scales_under_faults_keeps_every_invariant(seed: int) -> None:
    result = run_scaling(seed)
    assert result.violations == (), f"python -m simulator scaling --seeds 1 --first {seed} --trace"
    assert result.reached["at_zero"] or scaling_fleet(seed).least_replicas, "no idle phase reached zero"


@pytest.mark.sweep
def test_a_seed_does_not_reach_everything() -> None:
    """Else the check of ``make sim`` finds nothing."""
    assert unreached([run_scaling(0)])


# The bug, the invariant that finds it, and the seed that is tried first: one in which it shows.
PLANTED = {
    "more than the most": (Parts(plane=DecidesTooMany), BOUNDS, 0),
    "less than the least": (Parts(plane=DecidesTooFew), BOUNDS, 1),
    "assignments without versions": (Parts(plane=AssignsNothing), BOUNDS, 0),
    "two planes write": (Parts(plane=WritesUnfenced), DECIDER, 0),
    "a need is ordered again": (Parts(plane=ForgetsOrders), ORDERS, 0),
    "a deadline is forgotten": (Parts(gateway=ForgetsDeadlines), HELD, 1),
    "a held request ends twice": (Parts(gateway=EndsTwice), ONCE, 2),
}
SEEDS = range(12)


@pytest.mark.parametrize("bug", daily(sorted(PLANTED), ["a need is ordered again", "two planes write"]))
def test_planted_bugs_are_found(bug: str) -> None:
    parts, invariant, first = PLANTED[bug]
    for seed in (first, *SEEDS):
        found = run_scaling(seed, parts=parts).violations
        if any(text.startswith(invariant) for text in found):
            return
    pytest.fail(f"{len(SEEDS)} seeds do not find it")


@pytest.mark.parametrize("gateway", [HoldsForEver, LosesErrors])
def test_a_request_that_is_held_without_a_limit_or_an_end_is_found(gateway: type[GatewayNode]) -> None:
    seed = next(seed for seed in range(20) if not scaling_fleet(seed).least_replicas)
    never = replace(scaling_fleet(seed), versions=(VersionSpec(loads=False),))
    found = run_scaling(seed, spec=never, parts=Parts(gateway=gateway)).violations
    assert any(text.startswith(HELD) for text in found), found
    assert not any(text.startswith(HELD) for text in run_scaling(seed, spec=never).violations)


def test_a_sequence_that_is_longer_than_the_idle_time_keeps_its_replica() -> None:
    """A drain would hand it over, to wait at zero for the replica that it starts again."""
    spec = scaling_fleet(2)
    assert spec.scaling is not None
    scaling = replace(spec.scaling, faulty_ratio=0.0)
    spec = replace(spec, scaling=scaling)
    decisions, records = Decisions(scaling), list[RequestRecord]()
    load = (SimRequest("one", prompt_tokens=32, output_tokens=1900, arrival_s=1.0),)
    report = simulate(spec, load, invariants=(decisions,), on_record=records.append)
    (record,) = records
    assert (report.violations, record.outcome, record.resumes) == ((), "finished", 0)
    assert record.ended_s - record.first_token_s > 30.0 > scaling.bounds.idle_s
    assert not decisions.decisions, "it reached zero while it ran"


class _OwnNodes:
    """A plan: the deployment and all nodes become those of one tenant."""

    async def run(self, fleet: SimFleet) -> None:
        (entry,) = (await fleet.store.list(DEPLOYMENTS)).entries
        own = replace(load(entry.value, Deployment), tenant="one")
        nodes = [Put(NODES + name, dump(Node(name, tenant="one"))) for name in fleet.workers]
        await fleet.store.commit([Put(entry.key, dump(own)), *nodes])


def test_a_dedicated_tenant_wakes_its_own_deployment() -> None:
    spec = scaling_fleet(2)
    assert spec.scaling is not None
    tenants = TenantSpec("one", isolation=IsolationTier.DEDICATED), TenantSpec("two")
    scaling = replace(spec.scaling, faulty_ratio=0.0)
    spec = replace(spec, tenants=tenants, scaling=scaling)
    decisions, held, records = Decisions(scaling), HeldRequests(), list[RequestRecord]()

    def ended(record: RequestRecord) -> None:
        held.closed(record)
        records.append(record)

    wakes = (
        SimRequest("one", prompt_tokens=32, output_tokens=40, arrival_s=at_s) for at_s in (10.0, 40.0, 41.0)
    )
    report = simulate(
        spec, wakes, plans=(_OwnNodes(),), invariants=(decisions, held, Balance()), on_record=ended
    )
    assert report.violations == ()
    assert [one.outcome for one in records] == ["finished"] * 3
    assert (held.held, held.woken) == (3, 3)
    assert list(decisions.decisions) == [0, 1], "it slept, and its own request started it"


class _Preemption:
    """A plan: announces the end of each node that serves, once, and records which had a notice."""

    def __init__(self, notice_s: float) -> None:
        self.notice_s = notice_s
        self.busy: dict[str, int] = {}  # sequences at the time of the notice

    async def run(self, fleet: SimFleet) -> None:
        while True:
            await fleet.wait(0.5)
            for name in fleet.provider.nodes:
                if name not in self.busy and (running := fleet.workers[name].host.running):
                    self.busy[name] = running
                    fleet.provider.preempt(name, self.notice_s)
                    self.fleet = fleet


@pytest.mark.parametrize("seed", daily(range(4), (1,)))
def test_no_sequence_runs_on_a_node_that_ends_after_its_notice(seed: int) -> None:
    spec = scaling_fleet(seed)
    assert spec.scaling is not None
    spec = replace(spec, scaling=replace(spec.scaling, faulty_ratio=0.0))
    plan, records = _Preemption(notice_s=9.0), list[RequestRecord]()
    report = simulate(
        spec, scaling_load(seed), plans=(plan,), invariants=(Balance(),), on_record=records.append
    )
    assert report.violations == ()
    ended = {name: plan.fleet.released[name] for name in plan.busy if name in plan.fleet.released}
    assert ended, "no node was preempted while it served"
    assert set(ended.values()) == {0}
    assert any(one.finished and one.resumes for one in records), "no stream moved"
