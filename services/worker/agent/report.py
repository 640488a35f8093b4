"""The worker's report to the scheduler, and the public record of each version on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from services.core import fleet
from services.core.errors import DoesNotFit
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.records import LoadedVersion, VersionState
from services.worker.policy.lifecycle import VersionPhase
from services.worker.slots.version_engine import RESIZABLE
from services.worker.slots.version_slot import VersionSlot
from services.worker.streams.host import SequenceHost
from services.worker.streams.live_sequence import WorkerSequence
from services.worker.streams.sequences import SequenceTable

PREEMPTIBLE_LABEL: Final = "preemptible"  # label whose value "true" marks a node that may be taken away
MAX_TENANTS: Final = 4096
MAX_USAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity and the fixed properties of this worker."""

    worker_id: str  # unique in the fleet
    address: str  # host:port of its gRPC server
    zone: str = ""  # the placement zone; empty: none
    labels: dict[str, str] = field(default_factory=dict)  # what node selectors match
    slice: str = ""  # the part of a device that it runs on; empty: whole devices
    device: str = "cpu"  # "cpu" or a CUDA device
    # Device memory available to engines.
    memory_bytes: int = 2 * 1024**3
    devices: int = 1  # devices of this kind in one group
    lease_ttl_s: int = 5  # lifetime of the registration's lease
    # Workers of one device type are expected to be equally fast.
    device_type: str = ""
    # Cost in any one currency; 0: unknown.
    cost_per_hour: float = 0.0


def take_snapshot(host: SequenceHost, identity: WorkerIdentity, *, whole: bool) -> ReportSnapshot:
    """Return the levels, and the deltas since the previous call, which the caller owns from now on.

    ``whole`` is set for the first report of a stream. It lists every live sequence, every cached prefix block
    and the counters of the last leader. Other reports list no sequences and no counters, and only the changes
    of the prefix blocks. This is one synchronous step, so the acknowledged grants and the blocks reserved for
    them belong to the same instant.
    """
    for table in host.tables():
        table.charge(at_once=whole)
    epoch, seen = host.grants.take_seen()
    return ReportSnapshot(
        worker_id=identity.worker_id,
        incarnation=host.grants.incarnation,
        address=identity.address,
        zone=identity.zone,
        draining=host.draining,
        pools=(
            *(pool for table in host.tables() for pool in _pools(host, table, whole=whole)),
            *(rows.report(ready=host.takes(rows.version_digest)) for rows in host.row_tables()),
        ),
        epoch=epoch,
        grants_seen=seen,
        tenants=host.tally.take(MAX_TENANTS),
        live=_all_live(host) if whole else (),
        usage=host.tally.take_ended(MAX_USAGE),
        counters=host.counters.all() if whole else (),
        device_type=identity.device_type,
        cost_per_hour=identity.cost_per_hour,
        node_group=host.node_group,
        preemptible=identity.labels.get(PREEMPTIBLE_LABEL) == "true",
    )


def _pools(host: SequenceHost, table: SequenceTable, *, whole: bool) -> Iterator[PoolSnapshot]:
    """Yield one pool for each version of the engine, each with all its levels. The first has its prefixes."""
    added, removed = table.kv.cached.take(whole=whole)
    shared, unshared = table.kv.shared.reported.take(whole=whole)
    for digest in table.versions:
        pool = _pool(host, table, digest)
        if digest == table.versions.first:
            pool = replace(
                pool,
                prefix_added=added,
                prefix_removed=removed,
                prefix_shared=shared,
                prefix_unshared=unshared,
            )
        yield pool


def _pool(host: SequenceHost, table: SequenceTable, version_digest: str) -> PoolSnapshot:
    stats = table.stats
    return PoolSnapshot(
        digest=version_digest,
        kv_blocks_total=table.limits.kv_blocks_total,
        kv_blocks_reserved=table.kv.blocks,
        block_size=table.limits.block_size,
        running=table.running,
        waiting=table.waiting,
        max_sequences=table.limits.max_sequences,
        max_model_len=table.limits.max_model_len,
        yields_to_rank=table.slots.yields_to_rank,
        queued_prefill_tokens=table.prefills.queued_tokens,
        ready=host.takes(version_digest),
        steps=stats.steps,
        step_seconds=stats.step_seconds,
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
        attended_tokens=stats.attended_tokens,
        long_prefills=table.prefills.long,
        engine=table.versions.shared_as,
        itl_target_s=table.itl_target_s,
    )


def _all_live(host: SequenceHost) -> tuple[fleet.ReportedSequence, ...]:
    return tuple(_live(sequence) for table in host.tables() for sequence in table.sequences())


def _live(sequence: WorkerSequence) -> fleet.ReportedSequence:
    generation = sequence.spec.generation
    return fleet.ReportedSequence(
        request_id=generation.request_id,
        choice=sequence.spec.choice,
        tenant=sequence.spec.tenant_id,
        digest=sequence.version_digest,
        kv_blocks=sequence.reserved_blocks,
        priority=generation.priority,
        placed_alone=sequence.fallback,
    )


def record_of(slot: VersionSlot, deployment: str, *, least_route_revision: int = 0) -> LoadedVersion:
    """Return the public record of the slot's version for a deployment.

    ``least_route_revision`` is the fence that its starts obey.
    """
    table, memory, failures = slot.table, slot.memory, slot.failures
    limits = None if table is None else table.limits
    grant = memory.granted if slot.leads else None
    broken = slot.phase is VersionPhase.BROKEN and not _expects_memory(slot)
    return LoadedVersion(
        deployment=deployment,
        model=slot.version.model,
        version_digest=slot.digest,
        state=_state_of(slot),
        message=_notice_of(slot) if slot.phase is VersionPhase.READY else slot.message,
        progress_ratio=slot.progress_ratio,
        kv_blocks_total=0 if limits is None else limits.kv_blocks_total,
        block_size=0 if limits is None else limits.block_size,
        max_model_len=0 if limits is None else limits.max_model_len,
        capabilities=tuple(sorted(slot.capabilities)),
        engine_restarts=slot.restarts,
        reason=failures.reason if broken else "",
        failed_attempts=0 if table is not None or slot.phase is VersionPhase.READY else failures.count,
        retry_unix_s=failures.retry_unix_s if broken else 0.0,
        weight_bytes=0 if grant is None else grant.weight_bytes,
        working_bytes=0 if grant is None else grant.working_bytes,
        kv_bytes=0 if grant is None else grant.kv_bytes,
        needed_bytes=memory.needed_bytes,
        spare_bytes=_spare_bytes(slot),
        least_route_revision=least_route_revision,
    )


def _spare_bytes(slot: VersionSlot) -> int:
    """Return what it releases to a version that waits; a parked one with an engine of its own leaves."""
    grant = slot.memory.granted if slot.leads else None
    if grant is None or slot.phase not in RESIZABLE:
        return 0
    alone = slot.table is None or len(slot.table.versions) == 1
    return grant.bytes if slot.parked and alone else slot.memory.spare_bytes


def _expects_memory(slot: VersionSlot) -> bool:
    """Return whether the memory that it waits for is about to be released."""
    waits = slot.phase is VersionPhase.BROKEN and slot.failures.reason == DoesNotFit.reason
    return waits and slot.memory_comes


def _notice_of(slot: VersionSlot) -> str:
    """Return the message for operators on a READY version."""
    fault = slot.files.template_fault
    parts = [f"chat requests fail: {fault}"] if fault else []
    if slot.table is not None and slot.table.had_non_finite:
        parts.append("sequences ended without finite logits: the version or the device is at fault")
    return "; ".join(parts)


def _state_of(slot: VersionSlot) -> VersionState:
    match slot.phase:
        case VersionPhase.FETCHING | VersionPhase.FETCHED:
            return VersionState.FETCHING
        case VersionPhase.LOADING:
            return VersionState.RESTARTING if slot.restarting else VersionState.LOADING
        case VersionPhase.PROBING:
            return VersionState.LOADING
        case VersionPhase.READY:
            return VersionState.READY
        case VersionPhase.RETIRING:
            return VersionState.RETIRING
        case VersionPhase.DRAINING | VersionPhase.STOPPING:
            return VersionState.DRAINING
        case VersionPhase.BROKEN if _expects_memory(slot):
            return VersionState.LOADING
        case VersionPhase.BROKEN:
            if slot.failures.final:
                return VersionState.FAILED
            return VersionState.FETCHING if slot.files.folder is None else VersionState.RESTARTING
