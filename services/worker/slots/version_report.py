"""What a worker reports of a version: its public state, its message and its memory."""

from __future__ import annotations

from services.core.errors import DoesNotFit
from services.core.records import LoadedVersion, VersionState
from services.worker.policy.lifecycle import VersionPhase
from services.worker.slots.version_engine import RESIZABLE
from services.worker.slots.version_slot import VersionSlot


def record_of(slot: VersionSlot, deployment: str) -> LoadedVersion:
    """Return the public record of the slot's version for a deployment."""
    table, memory, failures = slot.table, slot.memory, slot.failures
    limits = None if table is None else table.limits
    grant = memory.granted
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
        engine_restarts=slot.restarts,
        reason=failures.reason if broken else "",
        failed_attempts=0 if table is not None else failures.count,
        retry_unix_s=failures.retry_unix_s if broken else 0.0,
        weight_bytes=0 if grant is None else grant.weight_bytes,
        working_bytes=0 if grant is None else grant.working_bytes,
        kv_bytes=0 if grant is None else grant.kv_bytes,
        needed_bytes=memory.needed_bytes,
        spare_bytes=memory.spare_bytes if slot.phase in RESIZABLE else 0,
    )


def _expects_memory(slot: VersionSlot) -> bool:
    """Return whether the memory that it waits for is about to be released."""
    waits = slot.phase is VersionPhase.BROKEN and slot.failures.reason == DoesNotFit.reason
    return waits and slot.memory_comes


def _notice_of(slot: VersionSlot) -> str:
    """Return the message for operators on a READY version."""
    fault = slot.files.template_fault
    parts = [f"chat requests fail: {fault}"] if fault else []
    if slot.table is not None and slot.table.gave_not_finite:
        parts.append("sequences ended without finite logits: the version or the device is at fault")
    return "; ".join(parts)


def _state_of(slot: VersionSlot) -> VersionState:
    match slot.phase:
        case VersionPhase.FETCHING | VersionPhase.FETCHED:
            return VersionState.FETCHING
        case VersionPhase.LOADING:
            return VersionState.RESTARTING if slot.restarts else VersionState.LOADING
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
