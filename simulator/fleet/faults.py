"""What goes wrong, and when: schedules of faults drawn from a seed. ``strikes`` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final


class FaultKind(StrEnum):
    """Every fault that a fleet can be given; ``Strikes`` carries each out."""

    WORKER_CRASH = "worker_crash"
    WORKER_PAUSE = "worker_pause"
    WORKER_FLAP = "worker_flap"
    WORKER_SLOW = "worker_slow"
    WORKER_DRAIN = "worker_drain"
    POOL_LOSS = "pool_loss"
    ENGINE_CRASH = "engine_crash"
    ENGINE_HANG = "engine_hang"
    GATEWAY_CRASH = "gateway_crash"
    GATEWAY_PAUSE = "gateway_pause"
    GATEWAY_DRAIN = "gateway_drain"
    LEADER_CRASH = "leader_crash"
    LEADER_PAUSE = "leader_pause"
    STORE_OUTAGE = "store_outage"
    REDIS_OUTAGE = "redis_outage"
    NETWORK_CUT = "network_cut"
    HALF_OPEN = "half_open"
    LATENCY_STORM = "latency_storm"
    CLOCK_JUMP = "clock_jump"


class Moment(StrEnum):
    """When a fault strikes once its time has come. The last two choose the worker that it strikes."""

    AT_ONCE = "at_once"
    AFTER_GRANT = "after_grant"
    IN_PREFILL = "in_prefill"


_STRIKES_A_WORKER: Final = frozenset(
    {
        FaultKind.WORKER_CRASH,
        FaultKind.WORKER_PAUSE,
        FaultKind.WORKER_SLOW,
        FaultKind.WORKER_DRAIN,
        FaultKind.ENGINE_CRASH,
        FaultKind.ENGINE_HANG,
        FaultKind.NETWORK_CUT,
        FaultKind.HALF_OPEN,
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``at_s`` counts from the start of the load; it is healed ``for_s`` after it struck.

    ``pick`` chooses among what the kind can strike, 0..1, and ``other`` the far end of a cut. ``amount`` is
    the kind's own measure: by how much a worker is slow, how far a clock jumps in seconds, how much longer a
    message takes.
    """

    kind: FaultKind
    at_s: float
    for_s: float
    pick: float
    other: float
    amount: float
    moment: Moment = Moment.AT_ONCE


def draw_faults(rng: Random, *, duration_s: float, count: int) -> tuple[Fault, ...]:
    """Return ``count`` faults spread over a time, in order. Every kind comes once before any comes twice."""
    kinds: list[FaultKind] = []
    while len(kinds) < count:
        round_ = list(FaultKind)
        rng.shuffle(round_)
        kinds += round_
    drawn = [_draw(kind, rng, duration_s) for kind in kinds[:count]]
    return tuple(sorted(drawn, key=lambda fault: fault.at_s))


def _draw(kind: FaultKind, rng: Random, duration_s: float) -> Fault:
    moment = Moment.AT_ONCE
    if kind in _STRIKES_A_WORKER:
        moment = rng.choice((Moment.AT_ONCE, Moment.AFTER_GRANT, Moment.IN_PREFILL))
    return Fault(
        kind=kind,
        at_s=rng.uniform(0.05, 0.9) * duration_s,
        for_s=rng.choice((0.3, 1.0, 2.0, 4.0, 8.0)) * rng.uniform(0.5, 1.5),
        pick=rng.random(),
        other=rng.random(),
        amount=_amount(kind, rng),
        moment=moment,
    )


def _amount(kind: FaultKind, rng: Random) -> float:
    if kind is FaultKind.WORKER_SLOW:
        return rng.uniform(2.0, 6.0)
    if kind is FaultKind.CLOCK_JUMP:
        return rng.choice((-1.0, 1.0)) * rng.choice((1.0, 60.0, 7200.0))
    if kind is FaultKind.LATENCY_STORM:
        return rng.choice((20.0, 200.0, 1000.0))
    return 0.0
