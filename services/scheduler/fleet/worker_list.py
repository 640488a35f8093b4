"""Worker list of a term for operators. Reads the term's state and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.core.decisions import FleetWorker, WorkerPool
from services.core.fleet import PoolSnapshot
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import NO_SUMS, WorkerState
from services.scheduler.health.worker_health import WorkerStanding


def workers_of(
    fleet: FleetView, standings: Iterable[WorkerStanding], prefix_blocks: Mapping[str, int], now_s: float
) -> list[FleetWorker]:
    """Return every worker that has reported, sorted by name."""
    found = {(standing.worker_id, standing.digest): standing for standing in standings}
    return [
        FleetWorker(
            worker_id=worker.worker_id,
            address=worker.address,
            incarnation=worker.incarnation,
            zone=worker.zone,
            device_type=worker.device_type,
            cost_per_hour=worker.cost_per_hour,
            state=worker.state,
            silent_s=max(0.0, now_s - worker.report_s),
            prefix_blocks=prefix_blocks.get(worker.worker_id, 0),
            pools=tuple(
                _pool(fleet, worker, pool, found.get((worker.worker_id, digest)))
                for digest, pool in sorted(worker.pools.items())
            ),
        )
        for worker in sorted(fleet.states, key=lambda state: state.worker_id)
    ]


def _pool(
    fleet: FleetView, worker: WorkerState, pool: PoolSnapshot, standing: WorkerStanding | None
) -> WorkerPool:
    candidate = fleet.candidates(pool.digest)[worker.worker_id]
    model = candidate.step_model
    return WorkerPool(
        version_digest=pool.digest,
        kv_tokens_total=candidate.kv_tokens_total,
        kv_tokens_room=candidate.kv_tokens_room,
        slots=candidate.slots,
        running=pool.running,
        waiting=pool.waiting,
        granted=worker.sums.get(pool.digest, NO_SUMS).grants,
        queued_prefill_tokens=candidate.queued_prefill_tokens,
        ready=pool.ready,
        measured_step_s=pool.step_seconds / pool.steps if pool.steps else None,
        predicted_step_s=max(0.0, model.seconds(1, 0, candidate.running, candidate.attended_tokens)),
        slowness_ratio=candidate.slowness_ratio,
        health="" if standing is None else standing.state,
        health_reason="" if standing is None else standing.why,
    )
