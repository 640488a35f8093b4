"""The load, the fleet and the schedule of faults of one seed of ``make sim``: small, mixed, many faults.

A fairness seed has few workers, and two to four tenants that nearly always wait. The demand far exceeds what
the bound of fairness consists of, so an unfair order exceeds the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, Final

from services.core.records import Priority
from services.gateway.policy.degrade import DegradeLevels
from services.gateway.service_types import GatewayLimits
from services.scheduler.policy.overload.pressure import ServiceTargets
from services.scheduler.policy.overload.shedding import SheddingPolicy
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import TermSettings
from simulator.engine.poison import EngineEnding, Poison
from simulator.engine.sim_batches import LEAST_TOKENS, MOST_TOKENS
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.clients.row_client import SimRows
from simulator.fleet.spec import FleetSpec, RowsSpec, TenantSpec, WorkerSpec


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
    PLANE_CRASH = "plane_crash"
    PLANE_PAUSE = "plane_pause"
    LEDGER_OUTAGE = "ledger_outage"
    STALE_GATEWAY = "stale_gateway"  # cut off from the store alone
    ZONE_LOSS = "zone_loss"  # every worker of a zone, with its machine
    NODE_LOSS = "node_loss"  # a node that was ordered is taken away
    NODE_PREEMPTED = "node_preempted"  # the same, with a notice before
    PROVIDER_OUTAGE = "provider_outage"


# Faults of a fleet with control planes.
ROLLOUT_FAULTS: Final = frozenset(
    {FaultKind.PLANE_CRASH, FaultKind.PLANE_PAUSE, FaultKind.LEDGER_OUTAGE, FaultKind.STALE_GATEWAY}
)
# Faults of a fleet that orders nodes.
NODE_FAULTS: Final = frozenset(
    {FaultKind.ZONE_LOSS, FaultKind.NODE_LOSS, FaultKind.NODE_PREEMPTED, FaultKind.PROVIDER_OUTAGE}
)
CHAOS_FAULTS: Final = tuple(kind for kind in FaultKind if kind not in ROLLOUT_FAULTS | NODE_FAULTS)


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
class InjectedFault:
    """One fault."""

    kind: FaultKind
    # Time since the start of the load.
    at_s: float
    # It is healed so long after it struck.
    for_s: float
    # Chooses among what the kind can strike, 0..1.
    pick: float
    # Chooses the far end of a cut, 0..1.
    other: float
    # The kind's own measure: a worker's slowness, a clock's jump in seconds, a message's delay.
    amount: float
    moment: Moment = Moment.AT_ONCE


def draw_faults(
    rng: Random, *, duration_s: float, count: int, among: Sequence[FaultKind] = CHAOS_FAULTS
) -> tuple[InjectedFault, ...]:
    """Return ``count`` faults spread over a time, in order. Every kind comes once before any comes twice."""
    kinds: list[FaultKind] = []
    while len(kinds) < count:
        round_ = list(among)
        rng.shuffle(round_)
        kinds += round_
    drawn = [_draw(kind, rng, duration_s) for kind in kinds[:count]]
    return tuple(sorted(drawn, key=lambda fault: fault.at_s))


def _draw(kind: FaultKind, rng: Random, duration_s: float) -> InjectedFault:
    moment = Moment.AT_ONCE
    if kind in _STRIKES_A_WORKER:
        moment = rng.choice((Moment.AT_ONCE, Moment.AFTER_GRANT, Moment.IN_PREFILL))
    return InjectedFault(
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


REQUESTS: Final = 200
ROW_REQUESTS: Final = 60
DURATION_S: Final = 12.0
FAULTS: Final = 8
FLOOD_RATIO: Final = 0.4
POISONED_RATIO: Final = 0.25  # share of the seeds that have poisoned requests
_PREFIXES: Final = 6
_ROW_WORKERS: Final = 3
_PRIORITIES: Final = (Priority.BATCH, Priority.STANDARD, Priority.STANDARD, Priority.INTERACTIVE)
_TENANTS: Final = (
    TenantSpec("whale", weight=1.0),
    TenantSpec("minnow-0", weight=1.0),
    TenantSpec("minnow-1", weight=2.0),
    TenantSpec("capped", max_concurrency=3),
    TenantSpec("metered", requests_per_minute=4),
    TenantSpec("frugal", degraded_tokens=16),
    TenantSpec("committed", committed_tokens_per_minute=600),
)
# Less patience than by default, so that little is too much.
_TERM: Final = TermSettings(shedding=SheddingPolicy(targets=ServiceTargets(0.7, 2.0)))


def chaos_spec(seed: int, *, workers: int) -> FleetSpec:
    """Return a fleet whose workers hold little, so that they fill up, preempt and refuse."""
    rng = Random(f"fleet {seed}")
    return FleetSpec(
        seed=seed,
        skewed=True,
        workers=workers,
        tenants=_TENANTS,
        worker_kinds=(
            WorkerSpec(preset="a10", kv_blocks=96, block_size=16, max_sequences=3, step_tokens=512),
            WorkerSpec(preset="a100", kv_blocks=64, block_size=32, max_sequences=4, step_tokens=1024),
        ),
        max_context_tokens=2048,
        term=_TERM,
        gateway=GatewayLimits(
            queue_ttl_s=rng.choice((2.5, 10.0)), window_tokens=32, degrade=DegradeLevels(0.3, 0.8)
        ),
        slow_reader_s=3.0,
        engine_restart_s=1.0,
        rows=RowsSpec(workers=_ROW_WORKERS, by_layers=seed % 8 == 1) if has_rows(seed) else None,
    )


def chaos_faults(seed: int) -> tuple[InjectedFault, ...]:
    return draw_faults(Random(f"faults {seed}"), duration_s=DURATION_S, count=FAULTS)


def chaos_load(seed: int, requests: int = REQUESTS) -> Iterator[SimRequest]:
    """Yield requests in bursts and lulls; some have keys, deadlines, slow readers, or leave.

    In half of the seeds a part of them comes as one flood of long prompts, of more than the fleet can hold.
    """
    rng, poisons = Random(f"load {seed}"), chaos_poisons(seed, requests)
    first = rng.randrange(requests // 4, requests // 2 + 1) if rng.random() < 0.5 else requests
    flood = range(first, first + round(requests * FLOOD_RATIO))
    at_s = 0.0
    for number in range(requests):
        burst = rng.random() < 0.7
        speed = 60.0 if number in flood else 3.0 if burst else 0.4
        at_s += rng.expovariate(requests / DURATION_S * speed)
        request = _request(rng, number, at_s, flood=number in flood)
        yield replace(request, **_poisoned(poisons[number])) if number in poisons else request


def _poisoned(poison: Poison) -> dict[str, Any]:
    """Return what a poison changes in a request: patient, so that its end is known."""
    return {"poison": poison, "prefix_id": 0, "prefix_tokens": 0, "deadline_s": None, "cancel_after_s": None}


def has_rows(seed: int) -> bool:
    """Return whether a fleet of this seed serves a fixed-cost version too."""
    return seed % 4 == 1


def chaos_rows(seed: int, requests: int = ROW_REQUESTS) -> Iterator[SimRows]:
    """Yield requests of one to forty rows of mixed lengths, more in bursts than the pool can run."""
    rng = Random(f"rows {seed}")
    at_s = 0.0
    for _ in range(requests):
        at_s += rng.expovariate(requests / DURATION_S * (3.0 if rng.random() < 0.7 else 0.4))
        rows = 1 if rng.random() < 0.5 else rng.randint(2, 40)
        longest = rng.choice((8, 16, MOST_TOKENS))
        poison = rng.random() < 0.04
        yield SimRows(
            tenant=rng.choices(_TENANTS, (6, 2, 2, 1, 1, 2, 2))[0].name,
            tokens=tuple(rng.randint(LEAST_TOKENS, longest) for _ in range(rows)),
            arrival_s=at_s,
            priority=rng.choice(_PRIORITIES),
            deadline_s=rng.uniform(0.2, 8.0) if rng.random() < 0.1 else None,
            cancel_after_s=rng.uniform(0.01, 4.0) if rng.random() < 0.1 else None,
            poisons={rng.randrange(rows): rng.choice(list(EngineEnding))} if poison else {},
        )


def chaos_poisons(seed: int, requests: int = REQUESTS) -> dict[int, Poison]:
    """Return the requests whose input ends engines, by number: two inputs in one seed of four, each twice."""
    rng = Random(f"poisons {seed}")
    if rng.random() >= POISONED_RATIO:
        return {}
    found: dict[int, Poison] = {}
    for number in range(2):
        poison = Poison(rng.choice(list(EngineEnding)), number, rng.choice((0, 0, 3)))
        found.update(dict.fromkeys(rng.sample(range(requests), 2), poison))
    return found


def _request(rng: Random, number: int, at_s: float, *, flood: bool) -> SimRequest:
    tenant = rng.choices(_TENANTS, (6, 2, 2, 1, 1, 2, 2))[0].name
    long_prompt = rng.random() < (0.8 if flood else 0.05)
    prompt_tokens = rng.randint(900, 1300) if long_prompt else rng.randint(8, 400)
    output_tokens = max(1, min(300, round(rng.expovariate(1 / 60))))
    shared = rng.random() < 0.5
    return SimRequest(
        tenant=tenant,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_output_tokens=None if rng.random() < 0.5 else output_tokens + rng.randint(0, 200),
        arrival_s=at_s,
        priority=rng.choice(_PRIORITIES),
        prefix_id=rng.randrange(_PREFIXES) if shared else 0,
        prefix_tokens=min(prompt_tokens - 1, 192) if shared else 0,
        deadline_s=rng.uniform(0.2, 8.0) if rng.random() < 0.1 else None,
        cancel_after_s=rng.uniform(0.01, 4.0) if rng.random() < 0.1 else None,
        read_tokens_per_s=rng.choice((0.5, 8.0, 40.0)) if rng.random() < 0.08 else None,
        key=f"key-{number}" if rng.random() < 0.25 else "",
        retries=rng.randint(1, 3) if rng.random() < 0.3 else 0,
    )


EVERY: Final = 10
MAX_WORKERS: Final = 3
_FIRST: Final = 7
_WEIGHTS: Final = ((1.0, 4.0), (1.0, 2.0, 4.0), (1.0, 1.0, 3.0, 3.0))
_AHEAD_S: Final = 0.4
_CROWD_S: Final = 0.8
_LATE_S: Final = 4.0
_WINDOW_TOKENS: Final = 64.0
_PREDICTED_TOKENS: Final = 32
# Those under which a sequence that was granted ends where it began, so that what it costs is known.
_KINDS: Final = (
    FaultKind.WORKER_SLOW,
    FaultKind.LEADER_CRASH,
    FaultKind.LEADER_PAUSE,
    FaultKind.REDIS_OUTAGE,
    FaultKind.CLOCK_JUMP,
)


def is_saturated(seed: int) -> bool:
    """Return whether the seed is a fairness seed: one in ``EVERY`` is."""
    return seed % EVERY == _FIRST


def saturated_spec(seed: int, *, workers: int) -> FleetSpec:
    """Return a fleet of at most ``MAX_WORKERS``, with little room for what goes past others.

    In half of the seeds the scheduler predicts every output as it comes; else all as of one length. Nothing
    is refused.
    """
    rng = Random(f"saturated fleet {seed}")
    predicted = 4096 if is_exact(seed) else _PREDICTED_TOKENS
    return FleetSpec(
        seed=seed,
        skewed=True,
        workers=min(workers, rng.randint(1, MAX_WORKERS)),
        tenants=_saturated_tenants(seed),
        worker_kinds=(
            WorkerSpec(preset="a10", kv_blocks=256, block_size=16, max_sequences=3, step_tokens=512),
            WorkerSpec(preset="a100", kv_blocks=256, block_size=16, max_sequences=2, step_tokens=512),
        ),
        max_context_tokens=2048,
        term=TermSettings(
            queue=QueueLimits(predicted_output_tokens=predicted, output_samples=1_000_000),
            order=OrderPolicy(bypass_window_tokens=_WINDOW_TOKENS),
            shedding=replace(SheddingPolicy(), enabled=False),
        ),
        gateway=GatewayLimits(queue_ttl_s=600.0, window_tokens=32),
    )


def saturated_faults(seed: int, *, duration_s: float) -> tuple[InjectedFault, ...]:
    """Return up to two faults; none in a third of the seeds."""
    rng = Random(f"saturated faults {seed}")
    drawn = draw_faults(rng, duration_s=duration_s, count=len(CHAOS_FAULTS))
    fit = [fault for fault in drawn if fault.kind in _KINDS]
    return tuple(sorted(rng.sample(fit, rng.randint(0, 2)), key=lambda fault: fault.at_s))


def saturated_load(seed: int, requests: int) -> Iterator[SimRequest]:
    """Yield requests of tenants by their weights. The first tenant's come before all others', and the last
    tenant's some seconds later, when the others have been served for a while."""
    rng = Random(f"saturated load {seed}")
    tenants = _saturated_tenants(seed)
    drawn = sorted(
        (_arrival_s(rng, index, len(tenants)), number, tenants[index].name)
        for number, index in enumerate(_dealt(rng, tenants, requests))
    )
    for at_s, _, tenant in drawn:
        yield _saturated_request(rng, tenant, at_s, exact=is_exact(seed))


def is_exact(seed: int) -> bool:
    """Return whether clients of this fairness seed allow as many tokens of output as come."""
    return seed // EVERY % 2 == 0


def _saturated_tenants(seed: int) -> tuple[TenantSpec, ...]:
    rng = Random(f"saturated tenants {seed}")
    weights = list(rng.choice(_WEIGHTS))
    rng.shuffle(weights)
    return tuple(TenantSpec(f"tenant-{number}", weight=weight) for number, weight in enumerate(weights))


def _dealt(rng: Random, tenants: tuple[TenantSpec, ...], requests: int) -> list[int]:
    """Return whose each request is."""
    return rng.choices(range(len(tenants)), [tenant.weight for tenant in tenants], k=requests)


def _arrival_s(rng: Random, index: int, tenants: int) -> float:
    if index == 0:
        return rng.uniform(0.0, _AHEAD_S)
    if index == tenants - 1 and tenants > 2:
        return _LATE_S + rng.uniform(0.0, _CROWD_S)
    return _AHEAD_S + rng.uniform(0.0, _CROWD_S)


def _saturated_request(rng: Random, tenant: str, at_s: float, *, exact: bool) -> SimRequest:
    output_tokens = rng.randint(4, 48)
    return SimRequest(
        tenant=tenant,
        prompt_tokens=rng.randint(16, 96),
        output_tokens=output_tokens,
        max_output_tokens=None if exact else output_tokens + rng.randint(0, 48),
        arrival_s=at_s,
        priority=Priority.STANDARD,
    )
