"""What this worker tells the scheduler of itself."""

from __future__ import annotations

from services.core import fleet
from services.core.fleet import PoolSnapshot, ReportSnapshot, TenantTokens
from services.worker.host import SequenceHost
from services.worker.live_sequence import LiveSequence
from services.worker.sequences import SequenceTable

MAX_TENANTS = 4096


def take_snapshot(host: SequenceHost, *, worker_id: str, address: str, zone: str) -> ReportSnapshot:
    """Return the levels, and the deltas since the call before, which the caller owns from now on.

    One synchronous step: the grants seen and the blocks reserved for them belong to the same instant.
    """
    for table in host.tables():
        table.charge()
    epoch, seen = host.grants.take_seen()
    return ReportSnapshot(
        worker_id=worker_id,
        incarnation=host.grants.incarnation,
        address=address,
        zone=zone,
        draining=host.draining,
        pools=tuple(_pool(host, table) for table in host.tables()),
        epoch=epoch,
        grants_seen=seen,
        tenants=tuple(TenantTokens(*use) for use in host.tally.take(MAX_TENANTS)),
        live=tuple(_live(table, sequence) for table in host.tables() for sequence in table.sequences()),
    )


def _pool(host: SequenceHost, table: SequenceTable) -> PoolSnapshot:
    waiting = table.waiting
    return PoolSnapshot(
        digest=table.version_digest,
        kv_blocks_total=table.limits.kv_blocks_total,
        kv_blocks_reserved=table.reserved,
        block_size=table.limits.block_size,
        running=len(table) - waiting,
        waiting=waiting,
        max_sequences=table.limits.max_sequences,
        max_model_len=table.limits.max_model_len,
        queued_prefill_tokens=table.queued_prefill_tokens,
        ready=host.takes(table.version_digest),
        steps=table.stats.steps,
        step_seconds=table.stats.step_seconds,
    )


def _live(table: SequenceTable, sequence: LiveSequence) -> fleet.LiveSequence:
    generation = sequence.spec.generation
    return fleet.LiveSequence(
        request_id=generation.request_id,
        choice=sequence.spec.choice,
        tenant=sequence.spec.tenant_id,
        digest=table.version_digest,
        kv_blocks=sequence.reserved_blocks,
        priority=generation.priority,
    )
