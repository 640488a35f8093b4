"""The fleet, the load, the faults and the rollout of one seed, which also sets the kind of candidate.

A rollout of seconds: few requests decide, so that faulty candidates are worse than those of
``make drill-rollouts``; ``make bench-gates`` measures what smaller regressions need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from services.core.records import Meta
from simulator.engine.poison import EngineEnding, Poison
from simulator.engine.sim_executor import VersionFaults
from simulator.fleet.chaos import FaultKind, InjectedFault, draw_faults
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.spec import MODEL, FleetSpec, TenantSpec, VersionSpec, WorkerSpec

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
    UNLOADABLE = "unloadable"  # its engines do not become ready


_CANDIDATES: Final = {
    CandidateKind.GOOD: VersionSpec(CANDIDATE, load_s=1.0, faults=_ROBUST),
    CandidateKind.SLOW: VersionSpec(CANDIDATE, load_s=1.0, step_ratio=2.0, faults=_ROBUST),
    CandidateKind.FAILING: VersionSpec(CANDIDATE, load_s=1.0, faults=VersionFaults(False, 3)),
    CandidateKind.UNANSWERING: VersionSpec(CANDIDATE, load_s=1.0, faults=VersionFaults(False, 1)),
    CandidateKind.CRASHING: VersionSpec(CANDIDATE, load_s=1.0),
    CandidateKind.ABORTED: VersionSpec(CANDIDATE, load_s=1.0, faults=_ROBUST),
    CandidateKind.UNLOADABLE: VersionSpec(CANDIDATE, load_s=1.0, loads=False),
}
_KINDS: Final = (
    CandidateKind.GOOD,
    CandidateKind.SLOW,
    CandidateKind.ABORTED,
    CandidateKind.FAILING,
    CandidateKind.GOOD,
    CandidateKind.CRASHING,
    CandidateKind.ABORTED,
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
