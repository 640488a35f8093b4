"""Rollouts of whole fleets under mixed faults, judged by every invariant.

The fleet, the load, the faults and the rollout of one seed, which also sets the kind of candidate.

A rollout of seconds: few requests decide, so that faulty candidates are worse than those of
``make drill-rollouts``; ``make bench-gates`` measures what smaller regressions need.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Final

from services.controlplane.rollouts.records import (
    ENDED,
    FULL,
    GateSettings,
    Inconclusive,
    Rollout,
    RolloutArm,
    RolloutPhase,
    RolloutStep,
    RolloutStrategy,
)
from services.controlplane.rollouts.resource import Rollouts, RolloutView
from services.core.errors import FairwayError
from services.core.records import Meta
from simulator.engine.poison import EngineEnding, Poison
from simulator.engine.sim_executor import VersionFaults
from simulator.fleet.assembly import Parts, SimFleet
from simulator.fleet.chaos import FaultKind, InjectedFault, draw_faults
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.invariant import Invariant
from simulator.fleet.rollout_watch import SignedStore
from simulator.fleet.spec import MODEL, VERSION_DIGEST, FleetSpec, TenantSpec, VersionSpec, WorkerSpec
from simulator.invariants.balance import Balance
from simulator.invariants.fencing import Fencing
from simulator.invariants.splits import Arms, SplitHistory
from simulator.kernel.process import Process

CANDIDATE: Final = "sha256:" + "c2" * 32
NAME: Final = "to-candidate"
LONGEST_S: Final = 120.0
REQUESTS_PER_S: Final = 10.0  # rate while the candidate is judged
QUIET_PER_S: Final = 3.0
_FAULTS_S: Final = 35.0
# At each a replica of the candidate has no more traffic than a stable one, or a good one is slower.
_STEPS: Final = tuple(RolloutStep(bp, hold_s=2.0, min_requests=20) for bp in (1500, 3400, 10_000))
_TENANTS: Final = ("one", "two", "three")
_SESSIONS: Final = 200
_POISONED_RATIO: Final = 0.05
_STALE_RATIO: Final = 2.5
_ROBUST: Final = VersionFaults(fragile=False)


class CandidateKind(StrEnum):
    GOOD = "good"
    SLOW = "slow"  # steps take twice as long
    FAILING = "failing"  # one sequence in three ends with an error, but none of the probe
    UNANSWERING = "unanswering"  # each sequence does, also those of the probe
    CRASHING = "crashing"  # some prompts end its engine
    ABORTED = "aborted"  # good, and an operator aborts it
    REVERTED = "reverted"  # good, and an operator reverts it once it is final
    UNLOADABLE = "unloadable"  # its engines do not become ready


_CANDIDATES: Final = {
    CandidateKind.GOOD: VersionSpec(CANDIDATE, load_s=1.0, faults=_ROBUST),
    CandidateKind.SLOW: VersionSpec(CANDIDATE, load_s=1.0, step_ratio=2.0, faults=_ROBUST),
    CandidateKind.FAILING: VersionSpec(CANDIDATE, load_s=1.0, faults=VersionFaults(False, 3)),
    CandidateKind.UNANSWERING: VersionSpec(CANDIDATE, load_s=1.0, faults=VersionFaults(False, 1)),
    CandidateKind.CRASHING: VersionSpec(CANDIDATE, load_s=1.0),
    CandidateKind.ABORTED: VersionSpec(CANDIDATE, load_s=1.0, faults=_ROBUST),
    CandidateKind.REVERTED: VersionSpec(CANDIDATE, load_s=1.0, faults=_ROBUST),
    CandidateKind.UNLOADABLE: VersionSpec(CANDIDATE, load_s=1.0, loads=False),
}
_KINDS: Final = (
    CandidateKind.GOOD,
    CandidateKind.SLOW,
    CandidateKind.ABORTED,
    CandidateKind.FAILING,
    CandidateKind.GOOD,
    CandidateKind.CRASHING,
    CandidateKind.REVERTED,
    CandidateKind.SLOW,
    CandidateKind.UNANSWERING,
    CandidateKind.UNLOADABLE,
)
# A fault that slows the few workers of one arm looks like a regression of its version: decision 0047.
_FAULTS: Final = (
    FaultKind.PLANE_CRASH,
    FaultKind.PLANE_PAUSE,
    FaultKind.STORE_OUTAGE,
    FaultKind.STALE_GATEWAY,
    FaultKind.LEADER_CRASH,
    FaultKind.WORKER_CRASH,
    FaultKind.LEDGER_OUTAGE,
    FaultKind.GATEWAY_CRASH,
)


# The strategy of each of ten seeds, one of each kind.
_STRATEGIES: Final = (
    RolloutStrategy.CANARY,
    RolloutStrategy.CANARY,
    RolloutStrategy.BLUE_GREEN,
    RolloutStrategy.INSTANT,
)
# How long all traffic is on a candidate; the longer one is where nothing was judged before.
_SOAK_S: Final = 4.0
_FULL_SOAK_S: Final = 25.0


def kind_of(seed: int) -> CandidateKind:
    return _KINDS[seed % len(_KINDS)]


def strategy_of(seed: int) -> RolloutStrategy:
    return _STRATEGIES[seed // len(_KINDS) % len(_STRATEGIES)]


def is_judged(seed: int, phase: RolloutPhase | None) -> bool:
    """Whether requests of the phase are judged or are the baseline; a canary's are those of its steps."""
    if strategy_of(seed) in FULL:
        return phase in (RolloutPhase.LOADING, RolloutPhase.SOAKING)
    return phase is RolloutPhase.RUNNING


def end_of(kind: CandidateKind) -> RolloutPhase:
    """Return the phase in which a rollout of that kind has to end."""
    if kind is CandidateKind.REVERTED:
        return RolloutPhase.REVERTED
    return RolloutPhase.COMPLETED if kind is CandidateKind.GOOD else RolloutPhase.ABORTED


def rollout(seed: int) -> Rollout:
    """Return the terms. A step that its gate cannot decide goes on, as where traffic is low."""
    strategy = strategy_of(seed)
    full = strategy in FULL
    gate = GateSettings(min_sessions=15, patience_s=18.0, inconclusive=Inconclusive.PROMOTE)
    return Rollout(
        Meta(NAME),
        MODEL,
        strategy,
        (RolloutArm("canary", CANDIDATE),),
        _STEPS[-1:] if full else _STEPS,
        gate=gate,
        soak_s=_FULL_SOAK_S if full else _SOAK_S,
        load_timeout_s=60.0,
    )


def rollout_fleet(seed: int) -> FleetSpec:
    rng = Random(f"rollout fleet {seed}")
    return FleetSpec(
        seed=seed,
        skewed=True,
        workers=rng.randint(6, 10),
        gateways=rng.randint(2, 3),
        planes=rng.randint(2, 3),
        replicas=rng.randint(3, 4),
        tenants=tuple(map(TenantSpec, _TENANTS)),
        worker_kinds=(WorkerSpec(kv_blocks=512, max_sequences=16, step_tokens=512),),
        versions=(VersionSpec(faults=_ROBUST), _CANDIDATES[kind_of(seed)]),
        max_context_tokens=2048,
        engine_restart_s=1.0,
    )


def rollout_faults(seed: int) -> tuple[InjectedFault, ...]:
    """Return each kind of fault once; half of the stale gateways stay so beyond the age of a view."""
    rng = Random(f"rollout faults {seed}")
    drawn = draw_faults(rng, duration_s=_FAULTS_S, count=len(_FAULTS), among=_FAULTS)
    return tuple(
        replace(fault, for_s=fault.for_s * _STALE_RATIO) if fault.kind is FaultKind.STALE_GATEWAY else fault
        for fault in drawn
    )


def rollout_load(seed: int, phase: Callable[[], RolloutPhase | None]) -> Iterator[SimRequest]:
    """Yield requests of sessions until the rollout has ended."""
    rng, at_s, number = Random(f"rollout load {seed}"), 0.0, 0
    while (now := phase()) not in ENDED and at_s < LONGEST_S:
        at_s += rng.expovariate(REQUESTS_PER_S if is_judged(seed, now) else QUIET_PER_S)
        number += 1
        poisoned = rng.random() < _POISONED_RATIO
        yield SimRequest(
            tenant=rng.choice(_TENANTS),
            prompt_tokens=rng.randint(16, 100),
            output_tokens=rng.randint(6, 12),
            arrival_s=at_s,
            session=f"session-{rng.randrange(_SESSIONS)}",
            key=f"key-{number}" if rng.random() < 0.1 else "",
            retries=1,
            poison=Poison(EngineEnding.RAISES, number) if poisoned else None,
        )


_BEGIN_S: Final = 2.0
_LOOK_S: Final = 0.25
_ABORT_WITHIN_S: Final = 14.0
_FINAL: Final = (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)


class Operator:
    """A plan of a run: starts the seed's rollout, aborts or reverts it by its kind, awaits its end."""

    def __init__(self, seed: int) -> None:
        self._kind = kind_of(seed)
        self._seed = seed
        self._rng = Random(f"operator {seed}")
        self.phase: RolloutPhase | None = None  # the phase that it read last

    async def run(self, fleet: SimFleet) -> None:
        process = Process("operator", fleet.loop, self._rng)
        rollouts = Rollouts(SignedStore(process, fleet.network, fleet.routes), process.clock)
        await fleet.wait(_BEGIN_S)
        await self._until_done(fleet, lambda: rollouts.create(rollout(self._seed), request_id="start"))
        abort_s: float | None = None
        aborts = self._kind is CandidateKind.ABORTED
        reverts = self._kind is CandidateKind.REVERTED
        while self.phase not in ENDED:
            await fleet.wait(_LOOK_S)
            try:
                found = (await rollouts.get(NAME)).stored.record
            except FairwayError:
                continue
            if reverts and found.phase in _FINAL:
                reverts = False
                await self._until_done(fleet, lambda: rollouts.revert(NAME, request_id="revert"))
                continue
            self.phase = found.phase
            if found.phase in (RolloutPhase.RUNNING, RolloutPhase.SOAKING) and abort_s is None:
                abort_s = fleet.loop.now_s + self._rng.uniform(0.0, _ABORT_WITHIN_S)
            if aborts and abort_s is not None and fleet.loop.now_s >= abort_s:
                aborts = False
                await self._until_done(fleet, lambda: rollouts.abort(NAME, request_id="abort"))

    async def _until_done(self, fleet: SimFleet, call: Callable[[], Awaitable[RolloutView]]) -> None:
        while True:
            try:
                await call()
            except FairwayError:
                await fleet.wait(2 * _LOOK_S)
            else:
                return


SEEDS: Final = 40


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What became of one seed."""

    report: RunReport
    kind: CandidateKind
    # How many faults of each kind were carried out.
    faults: dict[str, int]
    # Phases in order; ``why`` is the reason of the last one.
    phases: tuple[RolloutPhase, ...]
    why: str
    # Writes of the rollout, by process.
    writers: dict[str, int]
    # What requests went through: "on candidate", "rerouted", "stale view".
    reached: dict[str, int]

    @property
    def violations(self) -> tuple[str, ...]:
        return self.report.violations


def run_rollout(
    seed: int, *, parts: Parts | None = None, show: Callable[[str], None] | None = None
) -> RolloutResult:
    """Return what became of one seed. Same arguments, same result, trace and all."""
    kind, operator, strikes = kind_of(seed), Operator(seed), FaultSchedule(rollout_faults(seed))
    history = SplitHistory(VERSION_DIGEST, CANDIDATE, end_of(kind))
    arms = Arms(history, answers=kind is not CandidateKind.UNANSWERING)
    invariants: tuple[Invariant, ...] = (history, arms, Balance(), Fencing())
    report = simulate(
        rollout_fleet(seed),
        rollout_load(seed, lambda: operator.phase),
        plans=(operator, strikes),
        invariants=invariants,
        on_record=arms.closed,
        parts=parts,
        show=show,
    )
    return RolloutResult(
        report,
        kind,
        {fault.value: count for fault, count in sorted(strikes.struck.items())},
        tuple(history.phases),
        "" if history.rollout is None else history.rollout.history[-1].message,
        history.writers,
        dict(arms.reached),
    )


def unreached(results: Sequence[RolloutResult]) -> list[str]:
    """Return what none of the runs came to: kinds, faults, phases and what invariants compare."""
    struck, reached = Counter[str](), Counter[str]()
    for result in results:
        struck.update(result.faults)
        reached.update(result.reached)
    missing = {*CandidateKind} - {result.kind for result in results}
    missing |= {fault.kind.value for fault in rollout_faults(0)} - set(struck)
    missing |= {*RolloutPhase} - {phase for result in results for phase in result.phases}
    missing |= {name for name, count in reached.items() if not count}
    if not any(len(result.writers) > 2 for result in results):
        missing.add("a failover in the midst of a rollout")
    return sorted(missing)


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every invariant held in every seed and the usual seeds reached everything, else 1."""
    parser = argparse.ArgumentParser(prog="simulator rollouts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args(arguments)
    began_s, found, requests = time.monotonic(), Counter[str](), 0
    results: list[RolloutResult] = []
    for seed in range(options.first, options.first + options.seeds):
        ran = run_rollout(seed, show=print if options.trace else None)
        results.append(ran)
        requests += ran.report.requests
        found["violations"] += len(ran.violations)
        kind = f"{strategy_of(seed)} {ran.kind}"
        found[f"{kind} {ran.phases[-1] if ran.phases else 'not started'}"] += 1
        print(f"seed {seed}: {kind}, {', '.join(ran.phases)}: {ran.why}; {ran.reached}", flush=True)
        for violation in ran.violations:
            print(f"  VIOLATION {violation}", flush=True)
    print(f"ends: {', '.join(f'{name} {count}' for name, count in sorted(found.items()))}")
    result = {
        "seeds": options.seeds,
        "requests": requests,
        "violations": found["violations"],
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    missing = unreached(results) if options.first == 0 and options.seeds >= SEEDS else []
    if missing:
        print(f"NOT REACHED: {', '.join(missing)}")
    print(f"RESULT {json.dumps(result)}")
    return 1 if found["violations"] or missing else 0
