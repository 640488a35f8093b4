"""Tenants of every isolation tier on one fleet: a packed one bursts, dedicated nodes are lost.

Each seed runs twice, with the burst and without. What a tenant beside the burst loses is the ratio of its
99th percentiles of TTFT, over the requests that arrive during the burst.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import Final

from services.core.errors import IsolationUnavailable, Overloaded
from services.core.records import IsolationTier
from services.gateway.service_types import GatewayLimits
from simulator.fleet.assembly import Parts, SimFleet
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.clients.row_client import SimRows
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.invariant import Looks
from simulator.fleet.spec import FleetSpec, RowsSpec, TenantSpec, WorkerSpec
from simulator.invariants.balance import Balance
from simulator.invariants.fencing import Fencing
from simulator.invariants.isolation import KvShares, NodeGroups, Slots
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.load import SharedPrefixes, Stream, merged
from simulator.lab.scenario import Script, Step

SEEDS: Final = 12
LOSS: Final = "tier-loss"
BESIDE: Final = "beside-burst"
REFUSING, WAITING, SLICED, NEIGHBOUR, BURSTING = "refusing", "waiting", "sliced", "neighbour", "bursting"
MOST_RATIO: Final = {NEIGHBOUR: 3.0, SLICED: 1.1}
_TENANTS: Final = (
    TenantSpec(REFUSING, isolation=IsolationTier.DEDICATED),
    TenantSpec(WAITING, isolation=IsolationTier.DEDICATED, isolation_waits=True),
    TenantSpec(SLICED, isolation=IsolationTier.PARTITIONED),
    TenantSpec(NEIGHBOUR),
    TenantSpec(BURSTING, kv_share=0.25),
)
_DURATION_S: Final = 14.0
_BURST_S: Final = (2.0, 6.0)
_LOST_S: Final = (4.0, 11.0)
_NOTICED_S: Final = 5.0  # time until the leader has noticed that a node fell silent, or is back
_AT_ONCE_S: Final = 0.5
_ROWS_EVERY_S: Final = 0.5
_NODES: Final = 3  # the first workers: one node of each tenant that is not packed


def tiers_fleet(seed: int) -> FleetSpec:
    """Return a node for each dedicated tenant, a slice of a quarter of a node, and three shared nodes."""
    node = WorkerSpec(kv_blocks=512, max_sequences=32, step_tokens=1024)
    slice_ = WorkerSpec(kv_blocks=128, max_sequences=8, step_tokens=256)
    return FleetSpec(
        seed=seed,
        skewed=True,
        workers=2 * _NODES,
        tenants=_TENANTS,
        worker_kinds=(node, node, slice_, node, node, node),
        node_groups=tuple(tenant.node_group for tenant in _TENANTS[:_NODES]),
        max_context_tokens=2048,
        engine_restart_s=1.0,
        gateway=GatewayLimits(queue_ttl_s=30.0),
        rows=RowsSpec(workers=_NODES + 1),
    )


def tiers_load(seed: int, *, burst: bool) -> Iterator[SimRequest | SimRows]:
    """Yield the requests of all tenants, and rows of one on a lost node and of one beside the burst."""
    short, reply = LogNormal(150.0, 0.6, most_tokens=600), LogNormal(30.0, 0.6, most_tokens=200)
    prefixes = SharedPrefixes(count=6, tokens=128)
    streams = [Stream(tenant.name, Poisson(2.0), short, reply) for tenant in _TENANTS[:_NODES]]
    streams.append(Stream(NEIGHBOUR, Poisson(10.0), short, reply))
    streams.append(Stream(BURSTING, Poisson(1.0), short, reply, prefixes=prefixes))
    if burst:
        from_s, until_s = _BURST_S
        streams.append(
            Stream(
                BURSTING,
                Poisson(50.0),
                short,
                reply,
                "burst",
                prefixes=prefixes,
                from_s=from_s,
                until_s=until_s,
            )
        )
    rows = (
        SimRows(tenant, (8, 16, 24), arrival_s=number * _ROWS_EVERY_S)
        for number in range(int(_DURATION_S / _ROWS_EVERY_S))
        for tenant in (REFUSING, SLICED, NEIGHBOUR)
    )
    return heapq.merge(merged(streams, seed=seed, duration_s=_DURATION_S), rows, key=attrgetter("arrival_s"))


def has_new_leader(seed: int) -> bool:
    """Whether the leader is lost too, in the midst of the outage of the nodes."""
    return seed % 4 == 3


def tiers_script(seed: int) -> Script:
    """Return the loss and return of both dedicated nodes; half of the seeds lose their machines silently."""
    rng, (from_s, until_s) = Random(f"tiers {seed}"), _LOST_S
    silent = rng.random() < 0.5

    def lose(name: str) -> Step:
        return Step(from_s, lambda fleet: fleet.crash(name, silent=silent))

    def heal(name: str) -> Step:
        return Step(until_s, lambda fleet: fleet.restart(name))

    steps = [do(f"worker-{number}") for number in range(2) for do in (lose, heal)]
    if has_new_leader(seed):
        steps.append(Step(from_s + rng.uniform(0.0, 3.0), _lose_leader))
    return Script(tuple(steps))


def _lose_leader(fleet: SimFleet) -> None:
    if (leader := fleet.leader) is not None:
        fleet.crash(leader.name)


@dataclass(frozen=True, slots=True)
class TiersResult:
    """What became of one seed: the run with the burst."""

    report: RunReport
    ratios: dict[str, float]  # 99th percentile of TTFT beside the burst over that without it, by tenant
    outcomes: dict[str, Counter[str]]  # by tenant
    ran: Counter[tuple[str, str]]  # see ``NodeGroups``
    kv_most: float  # see ``KvShares``
    violations: tuple[str, ...]


def run_tiers(seed: int, *, parts: Parts | None = None, looks: Looks = Looks.TOUCHED) -> TiersResult:
    """Return what became of one seed. Same arguments, same result."""
    records: list[RequestRecord] = []
    quiet: list[RequestRecord] = []
    groups, shares = NodeGroups(), KvShares()
    report = simulate(
        tiers_fleet(seed),
        tiers_load(seed, burst=True),
        plans=(tiers_script(seed),),
        invariants=(Balance(), Fencing(), Slots(), groups, shares),
        looks=looks,
        on_record=records.append,
        parts=parts,
    )
    simulate(
        tiers_fleet(seed),
        tiers_load(seed, burst=False),
        plans=(tiers_script(seed),),
        on_record=quiet.append,
        parts=parts,
    )
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        outcomes[record.request.tenant][record.outcome] += 1
    ratios = {tenant: _p99_s(records, tenant) / _p99_s(quiet, tenant) for tenant in MOST_RATIO}
    found = [
        f"{BESIDE}: the TTFT of {tenant} rose to {ratio:.2f} times"
        for tenant, ratio in ratios.items()
        if ratio > MOST_RATIO[tenant]
    ]
    found += [text for record in records if (text := _loss(record, new_leader=has_new_leader(seed)))]
    return TiersResult(report, ratios, outcomes, groups.ran, shares.most, (*report.violations, *found))


def _p99_s(records: Sequence[RequestRecord], tenant: str) -> float:
    """Return the 99th percentile of TTFT over what arrived in the burst; who got no token waited for ever."""
    from_s, until_s = _BURST_S
    found = sorted(
        record.ttft_s if record.ttft_s is not None else math.inf
        for record in records
        if record.request.tenant == tenant and from_s <= record.request.arrival_s < until_s
    )
    return found[math.ceil(0.99 * len(found)) - 1]


def _loss(record: RequestRecord, *, new_leader: bool) -> str | None:
    """Return what is wrong with the end of a request, by the tier of its tenant."""
    request, (from_s, until_s) = record.request, _LOST_S
    took_s = record.ended_s - record.sent_s
    text = f"{LOSS}: {request.tenant} at {request.arrival_s:.2f} s: {record.outcome} after {took_s:.2f} s"
    if request.tenant == REFUSING and request.arrival_s < until_s + _NOTICED_S:
        is_noticed = from_s + _NOTICED_S <= request.arrival_s < until_s and not new_leader
        is_refused = record.outcome == IsolationUnavailable.reason and took_s <= _AT_ONCE_S
        return text if is_noticed and not is_refused else None
    is_shed = request.tenant == BURSTING and record.outcome == Overloaded.reason
    return None if record.finished or is_shed else text


def unreached(results: Sequence[TiersResult]) -> list[str]:
    """Return what no run came to, without which its invariants judge nothing."""
    outcomes = sum((result.outcomes[REFUSING] for result in results), Counter[str]())
    reached = {
        "a request refused for want of a node": outcomes[IsolationUnavailable.reason],
        "rows refused for want of a node": sum(
            result.report.rows.get(IsolationUnavailable.reason, 0) for result in results
        ),
        "a tenant at its share of KV": any(result.kv_most > 0.95 for result in results),
        "a tenant on each of its nodes": all(
            result.ran[tenant.name, f"worker-{number}"]
            for result in results
            for number, tenant in enumerate(_TENANTS[:_NODES])
        ),
    }
    return [name for name, found in reached.items() if not found]


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every invariant held in every seed, else 1."""
    parser = argparse.ArgumentParser(prog="simulator tiers", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    options = parser.parse_args(arguments)
    began_s, results = time.monotonic(), list[TiersResult]()
    for seed in range(options.first, options.first + options.seeds):
        ran = run_tiers(seed)
        results.append(ran)
        ratios = ", ".join(f"{tenant} {ratio:.2f}" for tenant, ratio in ran.ratios.items())
        print(f"seed {seed}: p99 of TTFT over that without the burst: {ratios}", flush=True)
        for violation in ran.violations:
            print(f"  VIOLATION {violation}", flush=True)
    violations, missing = sum(len(ran.violations) for ran in results), unreached(results)
    if missing:
        print(f"NOT REACHED: {', '.join(missing)}")
    result = {
        "seeds": options.seeds,
        "requests": sum(ran.report.requests for ran in results),
        "violations": violations,
        "worst_ratio": round(max(ran.ratios[NEIGHBOUR] for ran in results), 2),
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    print(f"RESULT {json.dumps(result)}")
    return 1 if violations or missing else 0
