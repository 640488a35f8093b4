"""The load and the fleet of a fairness seed: few workers, and two to four tenants that nearly always wait.

The demand far exceeds what the bound of fairness consists of, so an unfair order exceeds the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Final

from services.core.records import Priority
from services.gateway.service_types import GatewayLimits
from services.scheduler.policy.overload.shedding import SheddingPolicy
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import TermSettings
from simulator.fleet.chaos import CHAOS_FAULTS, FaultKind, InjectedFault, draw_faults
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.spec import FleetSpec, TenantSpec, WorkerSpec

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
        tenants=_tenants(seed),
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
    tenants = _tenants(seed)
    drawn = sorted(
        (_arrival_s(rng, index, len(tenants)), number, tenants[index].name)
        for number, index in enumerate(_dealt(rng, tenants, requests))
    )
    for at_s, _, tenant in drawn:
        yield _request(rng, tenant, at_s, exact=is_exact(seed))


def is_exact(seed: int) -> bool:
    """Return whether clients of this fairness seed allow as many tokens of output as come."""
    return seed // EVERY % 2 == 0


def _tenants(seed: int) -> tuple[TenantSpec, ...]:
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


def _request(rng: Random, tenant: str, at_s: float, *, exact: bool) -> SimRequest:
    output_tokens = rng.randint(4, 48)
    return SimRequest(
        tenant=tenant,
        prompt_tokens=rng.randint(16, 96),
        output_tokens=output_tokens,
        max_output_tokens=None if exact else output_tokens + rng.randint(0, 48),
        arrival_s=at_s,
        priority=Priority.STANDARD,
    )
