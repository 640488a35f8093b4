"""Placement decisions and workers as messages of fairway.v1."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.v1 import scheduler_pb2
from fairway.v1 import scheduler_pb2 as pb
from services.core.decisions import FleetWorker, PlacementDecision, RankedWorker, WorkerPool
from services.core.queues import PoolQueue, QueueShare
from services.rpc.convert.inference import PRIORITIES
from services.rpc.convert.scheduler import counters_to_proto

_MAX_DURATION_S: Final = 1e9


def decision_to_proto(decision: PlacementDecision) -> pb.PlacementDecision:
    return pb.PlacementDecision(
        choice=decision.choice,
        tenant=decision.tenant,
        model=decision.model,
        version_digest=decision.version_digest,
        priority=PRIORITIES[decision.priority],
        attempt=decision.attempt,
        epoch=decision.epoch,
        queued_time=timestamp(decision.queued_unix_s),
        wait=_duration(decision.wait_s),
        outcome=decision.outcome,
        worker_id=decision.worker_id,
        prompt_tokens=decision.prompt_tokens,
        reserved_tokens=decision.reserved_tokens,
        excluded_workers=decision.excluded_workers,
        bypassed=decision.bypassed,
        looks=decision.looks,
        looks_without_room=decision.looks_without_room,
        looks_giving_way=decision.looks_giving_way,
        counter_tokens=decision.counter_tokens,
        ranked=[_ranked_to_proto(found) for found in decision.ranked],
        rejections=[
            pb.FilterRejections(filter=found.filter, workers=found.workers, named=found.named)
            for found in decision.rejections
        ],
    )


def worker_to_proto(worker: FleetWorker) -> pb.Reporter:
    return pb.Reporter(
        worker_id=worker.worker_id,
        address=worker.address,
        incarnation=worker.incarnation,
        zone=worker.zone,
        device_type=worker.device_type,
        cost_per_hour=worker.cost_per_hour,
        state=worker.state,
        last_report=_duration(worker.silent_s),
        prefix_blocks=worker.prefix_blocks,
        pools=[_pool_to_proto(pool) for pool in worker.pools],
    )


def _ranked_to_proto(ranked: RankedWorker) -> pb.RankedWorker:
    return pb.RankedWorker(
        worker_id=ranked.worker_id,
        score=ranked.score,
        in_draw=ranked.in_draw,
        cached_tokens=ranked.cached_tokens,
        predicted_ttft=_duration(ranked.predicted_ttft_s),
        kv_tokens_room=max(0, ranked.kv_tokens_room),
        parts=[pb.ScorePart(scorer=name, value=value) for name, value in ranked.parts],
    )


def _pool_to_proto(pool: WorkerPool) -> pb.ReporterPool:
    message = pb.ReporterPool(
        version_digest=pool.version_digest,
        kv_tokens_total=pool.kv_tokens_total,
        kv_tokens_room=pool.kv_tokens_room,
        slots=pool.slots,
        running=pool.running,
        waiting=pool.waiting,
        granted=pool.granted,
        queued_prefill_tokens=pool.queued_prefill_tokens,
        ready=pool.ready,
        predicted_step=_duration(pool.predicted_step_s),
        slowness_ratio=pool.slowness_ratio,
        health=pool.health,
        health_reason=pool.health_reason,
    )
    if pool.measured_step_s is not None:
        message.measured_step.CopyFrom(_duration(pool.measured_step_s))
    return message


def timestamp(unix_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMilliseconds(round(unix_s * 1000))
    return found


def _duration(seconds: float) -> Duration:
    """Return the duration, clamped so that one worker's bad number does not fail the response."""
    found = Duration()
    found.FromMicroseconds(round(max(0.0, min(seconds, _MAX_DURATION_S)) * 1e6))
    return found


def pool_to_proto(pool: PoolQueue) -> scheduler_pb2.PoolQueue:
    message = scheduler_pb2.PoolQueue(
        version_digest=pool.version_digest,
        queued=pool.queued,
        queued_prompt_tokens=pool.queued_prompt_tokens,
        oldest_wait=_duration(pool.oldest_wait_s),
        granted=pool.granted,
        running=pool.running,
        waiting=pool.waiting,
        workers=pool.workers,
        serving_workers=pool.serving_workers,
        kv_tokens_total=pool.kv_tokens_total,
        kv_tokens_free=pool.kv_tokens_free,
        shares=[_share_to_proto(share) for share in pool.shares],
        shares_left_off=pool.shares_left_off,
        pressure_ratio=pool.pressure_ratio,
        counters=counters_to_proto(pool.counters),
    )
    if pool.predicted_wait_s is not None:
        message.predicted_wait.CopyFrom(_duration(pool.predicted_wait_s))
    return message


def _share_to_proto(share: QueueShare) -> scheduler_pb2.QueueShare:
    return scheduler_pb2.QueueShare(
        tenant=share.tenant,
        priority=PRIORITIES[share.priority],
        queued=share.queued,
        queued_prompt_tokens=share.queued_prompt_tokens,
        oldest_wait=_duration(share.oldest_wait_s),
    )
