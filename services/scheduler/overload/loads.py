"""The demand on each pool and what a replica of it can do, for the scaling of deployments.

Work is in prompt and output tokens; of a fixed-cost version in rows. The rate of a replica comes from its
fitted step times and the mix of the requests that ended lately (``core.estimates.capacity``), because what an
idle replica computes shows only what it received. Without a fit, the rate measured while work waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import fmean

from services.core.decisions import PoolQueue
from services.core.estimates.capacity import Bound, ReplicaCapacity, RequestMix, capacity_of
from services.core.estimates.cost_model import CostModel
from services.core.estimates.pool_load import ClassLoad, GroupLoad, PoolLoad
from services.core.fleet import PoolSnapshot
from services.core.records import Priority
from services.scheduler.fleet.view import FleetView
from services.scheduler.overload.pool_load import Overload, PoolWork
from services.scheduler.policy.placement.candidate import Candidate
from services.scheduler.slots.pools import SlotPools, row_workers


def loads_of(fleet: FleetView, overload: Overload, slots: SlotPools, now_s: float) -> Iterator[PoolQueue]:
    """Yield every pool with a worker, a queue or a demand, by digest, with its load alone."""
    for digest in sorted({*fleet.versions, *overload.versions, *slots.versions}):
        candidates = fleet.candidates(digest)
        serving = {name: one for name, one in candidates.items() if one.serving}
        rows = slots.rows_by_class(digest)
        work = overload.work(digest, now_s)
        if rows or any(fleet.pool_of(name, digest).row_slots for name in candidates):
            load = _of_rows(fleet, digest, work, rows, serving=bool(serving))
        else:
            load = _of_sequences(fleet, digest, work, serving)
        groups = _groups(fleet, digest, work, slots.rows_by_group(digest), serving)
        yield PoolQueue(
            digest,
            workers=len(candidates),
            serving_workers=len(serving),
            load=PoolLoad(
                *load[:3],
                held=sum(one.held for one in groups),
                running=sum(one.running for one in groups),
                groups=groups,
                reporter=fleet.epoch,
                rate_bound=load[3],
            ),
        )


def _groups(
    fleet: FleetView,
    digest: str,
    work: PoolWork,
    rows: Mapping[str, int],
    serving: Mapping[str, Candidate],
) -> tuple[GroupLoad, ...]:
    serves = {one.node_group for one in serving.values()}
    queued = {**work.queued, **{("", group): count for group, count in rows.items()}}
    held = [
        GroupLoad(group, deployment, held=count)
        for (deployment, group), count in sorted(queued.items())
        if count and group not in serves
    ]
    running = Counter[str]()
    for name, candidate in fleet.candidates(digest).items():
        running[candidate.node_group] += fleet.in_flight(name, digest)
    return *held, *(GroupLoad(group, running=count) for group, count in sorted((+running).items()))


_Load = tuple[tuple[ClassLoad, ...], float | None, float, Bound | None]


def _of_sequences(fleet: FleetView, digest: str, work: PoolWork, serving: Mapping[str, Candidate]) -> _Load:
    mix, tokens = work.mix, work.request_tokens
    found = [
        one
        for name, candidate in serving.items()
        if (one := _capacity_of(candidate, mix, fleet.pool_of(name, digest))) is not None
    ]
    if not found:
        return work.classes, work.measured_rate, tokens, None
    rate = fmean(one.requests_per_s for one in found) * tokens
    return work.classes, rate, tokens, min(found, key=lambda one: one.requests_per_s).bound


def _capacity_of(candidate: Candidate, mix: RequestMix | None, pool: PoolSnapshot) -> ReplicaCapacity | None:
    """Return what a replica serves, None before its step times and a mix are known.

    A declared ITL target bounds it, unless one sequence alone misses the target: then no number of replicas
    meets it.
    """
    model = candidate.step_model
    if mix is None or not model.samples or not candidate.kv_tokens_total:
        return None
    costs = CostModel(
        "fitted",
        base_s=max(1e-6, model.per_step_s),
        prefill_token_s=model.per_prefill_s,
        decode_sequence_s=model.per_decode_s,
        attended_token_s=model.per_attended_s,
        kv_bytes_per_token=1,
        kv_memory_bytes=candidate.kv_tokens_total,
    )
    most = max(1, pool.max_sequences)
    found = capacity_of(costs, mix, itl_target_s=pool.itl_target_s or math.inf, max_sequences=most)
    return found or capacity_of(costs, mix, max_sequences=most)


def _of_rows(
    fleet: FleetView, digest: str, work: PoolWork, rows: Mapping[Priority, int], *, serving: bool
) -> _Load:
    """Rows arrived are those that ended and those that are here. The highest classes are in flight first."""
    pools = [fleet.pool_of(name, digest) for name in fleet.candidates(digest)]
    in_flight, waiting = sum(pool.running + pool.waiting for pool in pools), dict[Priority, float]()
    for priority in sorted(rows, key=lambda one: -one.rank):
        waiting[priority] = max(0, rows[priority] - in_flight)
        in_flight = max(0, in_flight - rows[priority])
    ended = {one.priority: one for one in work.classes}
    classes = tuple(
        ClassLoad(
            priority,
            ended[priority].target_s if priority in ended else work.target_s(priority),
            waiting.get(priority, 0.0),
            (ended[priority].arrived if priority in ended else 0.0) + rows.get(priority, 0),
        )
        for priority in Priority
        if priority in ended or rows.get(priority)
    )
    _, row_s = row_workers(fleet, digest)
    measured = serving and any(pool.row_us for pool in pools)
    return classes, 1.0 / row_s if measured else None, 1.0, None
