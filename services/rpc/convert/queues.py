"""Queues as messages of fairway.v1."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from fairway.v1 import scheduler_pb2
from services.core.queues import PoolQueue, QueueShare
from services.rpc.convert.inference import PRIORITIES
from services.rpc.convert.scheduler import counters_to_proto


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


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromMilliseconds(round(seconds * 1000))
    return found
