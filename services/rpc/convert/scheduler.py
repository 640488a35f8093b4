"""Placements and reports between the wire and the core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fairway.v1 import scheduler_pb2
from services.core.errors import FairwayError, InvalidInput
from services.core.fleet import (
    Granted,
    PlacementFrame,
    PlacementRefused,
    PoolMember,
    PoolPressure,
    PoolSnapshot,
    ReportedSequence,
    ReportSnapshot,
    SequenceUsage,
    TenantCounter,
    TenantTokens,
)
from services.core.generation import Grant, PlaceSpec
from services.rpc.convert.inference import PRIORITIES, PRIORITY_OF
from services.rpc.status import by_reason


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def place_to_proto(placement_id: int, spec: PlaceSpec, queue_ttl_s: float) -> scheduler_pb2.PlaceRequest:
    """Return the request; ``queue_ttl_s`` is the remaining queue time when it is sent again."""
    return scheduler_pb2.PlaceRequest(
        placement_id=placement_id,
        request_id=spec.request_id,
        choice=spec.choice,
        tenant_id=spec.tenant_id,
        priority=PRIORITIES[spec.priority],
        model=spec.model,
        version_digest=spec.version_digest,
        route_revision=spec.route_revision,
        prompt_tokens=spec.prompt_tokens,
        max_output_tokens=spec.max_output_tokens,
        arrival_unix_us=spec.arrival_unix_us,
        queue_ttl_ms=_ms(queue_ttl_s),
        excluded_workers=spec.excluded_workers,
        ticket=spec.ticket,
        traceparent=spec.traceparent,
        prefix_hashes=spec.prefix_hashes,
        deadline_left_ms=0 if spec.deadline_left_s is None else max(1, _ms(spec.deadline_left_s)),
        tenant_weight=spec.tenant_weight,
        attempt=spec.attempt,
        ttft_target_ms=0 if spec.ttft_target_s is None else max(1, _ms(spec.ttft_target_s)),
        over_quota=spec.over_quota,
        committed_tokens_per_minute=spec.committed_tokens_per_minute,
        begun=spec.begun,
    )


def place_from_proto(message: scheduler_pb2.PlaceRequest) -> tuple[int, PlaceSpec]:
    return message.placement_id, PlaceSpec(
        request_id=message.request_id,
        choice=message.choice,
        tenant_id=message.tenant_id,
        priority=PRIORITY_OF[message.priority],
        model=message.model,
        version_digest=message.version_digest,
        route_revision=message.route_revision,
        prompt_tokens=message.prompt_tokens,
        max_output_tokens=message.max_output_tokens,
        arrival_unix_us=message.arrival_unix_us,
        queue_ttl_s=message.queue_ttl_ms / 1000,
        ticket=message.ticket,
        excluded_workers=tuple(message.excluded_workers),
        traceparent=message.traceparent,
        prefix_hashes=tuple(message.prefix_hashes),
        deadline_left_s=message.deadline_left_ms / 1000 if message.deadline_left_ms else None,
        tenant_weight=message.tenant_weight or 1.0,
        attempt=message.attempt,
        ttft_target_s=message.ttft_target_ms / 1000 if message.ttft_target_ms else None,
        over_quota=message.over_quota,
        committed_tokens_per_minute=message.committed_tokens_per_minute,
        begun=message.begun,
    )


def connect_request(
    places: Iterable[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]
) -> scheduler_pb2.ConnectRequest:
    """Return one message of (placement id, spec, queue time left) and withdrawn placement ids."""
    request = scheduler_pb2.ConnectRequest(places=[place_to_proto(*place) for place in places])
    if cancelled:
        request.cancel.placement_ids.extend(cancelled)
    return request


def grant_to_proto(grant: Grant, placement_id: int = 0) -> scheduler_pb2.Grant:
    """Return the grant. A gateway that forwards it to a worker sets no placement id."""
    return scheduler_pb2.Grant(
        placement_id=placement_id,
        worker_id=grant.worker_id,
        incarnation=grant.incarnation,
        epoch=grant.epoch,
        sequence=grant.sequence,
        kv_blocks=grant.kv_blocks,
        ttl_ms=_ms(grant.ttl_s),
        version_digest=grant.version_digest,
        address=grant.address,
        route_revision=grant.route_revision,
    )


def grant_from_proto(message: scheduler_pb2.Grant) -> Grant:
    return Grant(
        worker_id=message.worker_id,
        address=message.address,
        incarnation=message.incarnation,
        epoch=message.epoch,
        sequence=message.sequence,
        kv_blocks=message.kv_blocks,
        ttl_s=message.ttl_ms / 1000,
        version_digest=message.version_digest,
        route_revision=message.route_revision,
    )


def leadership(epoch: int, leader_id: str) -> scheduler_pb2.Leadership:
    return scheduler_pb2.Leadership(epoch=epoch, leader_id=leader_id)


def frame_to_proto(frame: PlacementFrame) -> scheduler_pb2.ConnectResponse:
    """Return the message of a frame, without its leadership."""
    grants: list[scheduler_pb2.Grant] = []
    refusals: list[scheduler_pb2.Refusal] = []
    for outcome in frame.outcomes:
        if isinstance(outcome, Granted):
            grants.append(grant_to_proto(outcome.grant, outcome.placement_id))
        else:
            refusals.append(_refusal_to_proto(outcome.placement_id, outcome.error))
    message = scheduler_pb2.ConnectResponse(
        grants=grants,
        refusals=refusals,
        pressures=[
            scheduler_pb2.PoolPressure(
                version_digest=found.digest,
                pressure_ratio=found.pressure_ratio,
                predicted_wait_ms=_ms(found.predicted_wait_s),
            )
            for found in frame.pressures or ()
        ],
    )
    if frame.members is not None:
        message.fleet.members.extend(_member_to_proto(member) for member in frame.members)
    return message


def frame_from_proto(message: scheduler_pb2.ConnectResponse, epoch: int) -> PlacementFrame:
    """Return the frame; ``epoch`` is the stream's, for messages without leadership."""
    granted = [Granted(found.placement_id, grant_from_proto(found)) for found in message.grants]
    refused = [PlacementRefused(found.placement_id, _error_of(found)) for found in message.refusals]
    beat = message.HasField("leadership")
    return PlacementFrame(
        message.leadership.epoch if beat else epoch,
        (*granted, *refused),
        pressures=tuple(
            PoolPressure(found.version_digest, found.pressure_ratio, found.predicted_wait_ms / 1000)
            for found in message.pressures
        )
        if beat
        else None,
        members=tuple(map(_member_from_proto, message.fleet.members)) if message.HasField("fleet") else None,
    )


def _member_to_proto(member: PoolMember) -> scheduler_pb2.PoolMember:
    return scheduler_pb2.PoolMember(
        worker_id=member.worker_id,
        address=member.address,
        incarnation=member.incarnation,
        version_digest=member.digest,
        kv_tokens_room=max(0, member.kv_tokens_room),
        kv_tokens_total=member.kv_tokens_total,
        block_size=member.block_size,
        slots=max(0, member.slots),
        max_model_len=member.max_model_len,
    )


def _member_from_proto(message: scheduler_pb2.PoolMember) -> PoolMember:
    return PoolMember(
        worker_id=message.worker_id,
        address=message.address,
        incarnation=message.incarnation,
        digest=message.version_digest,
        kv_tokens_room=message.kv_tokens_room,
        kv_tokens_total=message.kv_tokens_total,
        block_size=message.block_size,
        slots=message.slots,
        max_model_len=message.max_model_len,
    )


def _refusal_to_proto(placement_id: int, error: FairwayError) -> scheduler_pb2.Refusal:
    return scheduler_pb2.Refusal(
        placement_id=placement_id,
        reason=error.reason,
        message=error.message,
        retry_after_ms=0 if error.retry_after_s is None else max(1, _ms(error.retry_after_s)),
    )


def _error_of(message: scheduler_pb2.Refusal) -> FairwayError:
    retry_after_s = message.retry_after_ms / 1000 if message.retry_after_ms else None
    return by_reason(message.reason, message.message, retry_after_s=retry_after_s)


def report_to_proto(snapshot: ReportSnapshot, number: int, *, full: bool) -> scheduler_pb2.ReportRequest:
    """Return the report. ``full``: live sequences are listed, as in the first report of a stream."""
    return scheduler_pb2.ReportRequest(
        worker_id=snapshot.worker_id,
        incarnation=snapshot.incarnation,
        report=number,
        address=snapshot.address,
        pools=[_pool_to_proto(pool) for pool in snapshot.pools],
        epoch=snapshot.epoch,
        grants_seen=snapshot.grants_seen,
        tenants=[
            scheduler_pb2.TenantTokens(
                tenant_id=use.tenant,
                version_digest=use.digest,
                prefill_tokens=use.prefill,
                output_tokens=use.output,
                priority=PRIORITIES[use.priority],
                cached_tokens=use.cached,
            )
            for use in snapshot.tenants
        ],
        live=[_live_to_proto(sequence) for sequence in snapshot.live] if full else (),
        draining=snapshot.draining,
        zone=snapshot.zone,
        usage=[_usage_to_proto(use) for use in snapshot.usage],
        device_type=snapshot.device_type,
        cost_per_hour=snapshot.cost_per_hour,
        deltas_number=snapshot.deltas_number,
        counters=counters_to_proto(snapshot.counters) if full else (),
    )


def report_from_proto(message: scheduler_pb2.ReportRequest) -> ReportSnapshot:
    """Raises InvalidInput for a version that is listed twice."""
    pools = tuple(_pool_from_proto(pool) for pool in message.pools)
    if len({pool.digest for pool in pools}) != len(pools):
        raise InvalidInput("pools name a version twice", field="pools")
    return ReportSnapshot(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        address=message.address,
        zone=message.zone,
        draining=message.draining,
        pools=pools,
        epoch=message.epoch,
        grants_seen=tuple(message.grants_seen),
        tenants=tuple(
            TenantTokens(
                use.tenant_id,
                use.version_digest,
                use.prefill_tokens,
                use.output_tokens,
                PRIORITY_OF[use.priority],
                use.cached_tokens,
            )
            for use in message.tenants
        ),
        usage=tuple(_usage_from_proto(use) for use in message.usage),
        counters=counters_from_proto(message.counters),
        device_type=message.device_type,
        cost_per_hour=message.cost_per_hour,
        deltas_number=message.deltas_number,
        live=tuple(
            ReportedSequence(
                request_id=live.request_id,
                choice=live.choice,
                tenant=live.tenant_id,
                digest=live.version_digest,
                kv_blocks=live.kv_blocks,
                priority=PRIORITY_OF[live.priority],
                placed_alone=live.placed_alone,
            )
            for live in message.live
        ),
    )


def _pool_to_proto(pool: PoolSnapshot) -> scheduler_pb2.PoolReport:
    return scheduler_pb2.PoolReport(
        version_digest=pool.digest,
        kv_blocks_total=pool.kv_blocks_total,
        kv_blocks_reserved=pool.kv_blocks_reserved,
        block_size=pool.block_size,
        running=pool.running,
        waiting=pool.waiting,
        max_sequences=pool.max_sequences,
        max_model_len=pool.max_model_len,
        queued_prefill_tokens=pool.queued_prefill_tokens,
        ready=pool.ready,
        steps=pool.steps,
        step_seconds=pool.step_seconds,
        prefill_tokens=pool.prefill_tokens,
        decode_tokens=pool.decode_tokens,
        attended_tokens=pool.attended_tokens,
        long_prefills=pool.long_prefills,
        prefix_added=pool.prefix_added,
        prefix_removed=pool.prefix_removed,
        prefix_shared=pool.prefix_shared,
        prefix_unshared=pool.prefix_unshared,
        yields_to_rank=pool.yields_to_rank,
    )


def _pool_from_proto(message: scheduler_pb2.PoolReport) -> PoolSnapshot:
    return PoolSnapshot(
        digest=message.version_digest,
        kv_blocks_total=message.kv_blocks_total,
        kv_blocks_reserved=message.kv_blocks_reserved,
        block_size=message.block_size,
        running=message.running,
        waiting=message.waiting,
        max_sequences=message.max_sequences,
        max_model_len=message.max_model_len,
        queued_prefill_tokens=message.queued_prefill_tokens,
        ready=message.ready,
        steps=message.steps,
        step_seconds=message.step_seconds,
        prefill_tokens=message.prefill_tokens,
        decode_tokens=message.decode_tokens,
        attended_tokens=message.attended_tokens,
        long_prefills=message.long_prefills,
        prefix_added=tuple(message.prefix_added),
        prefix_removed=tuple(message.prefix_removed),
        prefix_shared=tuple(message.prefix_shared),
        prefix_unshared=tuple(message.prefix_unshared),
        yields_to_rank=message.yields_to_rank,
    )


def _usage_to_proto(use: SequenceUsage) -> scheduler_pb2.SequenceUsage:
    return scheduler_pb2.SequenceUsage(
        request_id=use.request_id,
        choice=use.choice,
        tenant_id=use.tenant,
        version_digest=use.digest,
        prompt_tokens=use.prompt_tokens,
        output_tokens=use.output_tokens,
        cached_tokens=use.cached_tokens,
        ended=use.ended,
        placed_alone=use.placed_alone,
        priority=PRIORITIES[use.priority],
    )


def _usage_from_proto(message: scheduler_pb2.SequenceUsage) -> SequenceUsage:
    return SequenceUsage(
        request_id=message.request_id,
        choice=message.choice,
        tenant=message.tenant_id,
        digest=message.version_digest,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
        ended=message.ended,
        placed_alone=message.placed_alone,
        priority=PRIORITY_OF[message.priority],
    )


def counters_to_proto(counters: Iterable[TenantCounter]) -> list[scheduler_pb2.TenantCounter]:
    return [
        scheduler_pb2.TenantCounter(
            tenant_id=counter.tenant,
            version_digest=counter.digest,
            priority=PRIORITIES[counter.priority],
            virtual_tokens=counter.virtual_tokens,
            floor_tokens=counter.floor_tokens,
        )
        for counter in counters
    ]


def counters_from_proto(messages: Iterable[scheduler_pb2.TenantCounter]) -> tuple[TenantCounter, ...]:
    return tuple(
        TenantCounter(
            message.tenant_id,
            message.version_digest,
            PRIORITY_OF[message.priority],
            message.virtual_tokens,
            message.floor_tokens,
        )
        for message in messages
    )


def _live_to_proto(sequence: ReportedSequence) -> scheduler_pb2.LiveSequence:
    return scheduler_pb2.LiveSequence(
        request_id=sequence.request_id,
        choice=sequence.choice,
        tenant_id=sequence.tenant,
        version_digest=sequence.digest,
        kv_blocks=sequence.kv_blocks,
        priority=PRIORITIES[sequence.priority],
        placed_alone=sequence.placed_alone,
    )
