"""Lifecycle plan: the next actions for the versions of one worker. Pure and level-triggered.

Memory is assigned by priority. While a version waits for memory that it could get, versions of lower
priority are not loaded. Otherwise they would take the memory that is being freed for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from services.core.records import AssignedVersion
from services.core.rollouts.routes import Withdrawal

# Reasons that a later attempt with the same files on the same worker would repeat.
FINAL_REASONS: Final = frozenset(
    {
        "UNSUPPORTED_MODEL",
        "BAD_CHECKPOINT",
        "BAD_ENGINE_CONFIG",
        "FAILED_PRECONDITION",
        "INVALID_INPUT",
        "PROBE_FAILED",
        "NOT_REPLACEABLE",
    }
)


class VersionPhase(StrEnum):
    """The state of one version. FETCHED has its files and no engine; PROBING has an engine that takes no
    requests; BROKEN waits for its next attempt."""

    FETCHING = "fetching"
    FETCHED = "fetched"
    LOADING = "loading"
    PROBING = "probing"
    READY = "ready"
    RETIRING = "retiring"
    DRAINING = "draining"
    BROKEN = "broken"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Slot:
    """The observed state of one version on this worker."""

    version: AssignedVersion  # the version's assignment when the slot was created
    phase: VersionPhase  # its state
    running: int = 0  # live sequences
    has_files: bool = False  # its folder is pinned
    # Time of a BROKEN one's next attempt.
    retry_at_s: float = 0.0
    # Deadline of a DRAINING one.
    drain_until_s: float = 0.0
    # Last time that a RETIRING one had a sequence.
    idle_since_s: float = 0.0
    # Device memory of its engine.
    granted_bytes: int = 0
    # It needs a memory grant and has none.
    unbooked: bool = False
    # Memory that a BROKEN one waits for; 0: it waits for none.
    needed_bytes: int = 0
    # No attempt of a BROKEN one would succeed.
    final: bool = False
    # It is final because it failed to replace the weights of the version before.
    failed_in_place: bool = False
    # The engine of a BROKEN or LOADING one had run before.
    restarting: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the files; creates the slot if there is none."""

    version: AssignedVersion


@dataclass(frozen=True, slots=True)
class LoadVersion:
    version_digest: str


@dataclass(frozen=True, slots=True)
class RetireVersion:
    """Its successor takes new requests; this version takes those that gateways accepted for it before."""

    version_digest: str


@dataclass(frozen=True, slots=True)
class DrainVersion:
    """Admit no new sequences; running ones may finish."""

    version_digest: str


@dataclass(frozen=True, slots=True)
class CancelRemoval:
    """It is assigned again before its removal was complete."""

    version_digest: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Stop all its work and remove the version."""

    version_digest: str


Action = Fetch | LoadVersion | RetireVersion | DrainVersion | CancelRemoval | Discard


def wanted(assigned: Sequence[AssignedVersion]) -> dict[str, AssignedVersion]:
    """Return the versions to run, by digest. One engine serves every deployment of a version.

    If deployments request different executors or devices, the first by name decides; the highest priority
    and the tightest ITL target apply.
    A version is retiring if it is retiring in all of them.
    """
    versions: dict[str, AssignedVersion] = {}
    for version in sorted(assigned, key=lambda each: (each.retiring, each.deployment)):
        known = versions.setdefault(version.version_digest, version)
        if version.priority.rank > known.priority.rank:
            known = replace(known, priority=version.priority)
        targets = [one.itl_target_s for one in (known, version) if one.itl_target_s]
        versions[version.version_digest] = replace(known, itl_target_s=min(targets, default=0.0))
    return versions


def users_of(assigned: Sequence[AssignedVersion], version_digest: str) -> frozenset[str]:
    """Return the deployments that a version is assigned for and in which it does not retire."""
    return frozenset(
        one.deployment for one in assigned if one.version_digest == version_digest and not one.retiring
    )


def withdrawals(assigned: Sequence[AssignedVersion]) -> dict[str, Withdrawal]:
    """Return the withdrawn versions: of several deployments of a version, the most open one decides."""
    found: dict[str, AssignedVersion] = {}
    for version in assigned:
        held = found.setdefault(version.version_digest, version)
        if version.least_route_revision < held.least_route_revision:
            found[version.version_digest] = version
    return {
        digest: Withdrawal(digest, version.least_route_revision, version.successor_digest)
        for digest, version in found.items()
        if version.least_route_revision
    }


def plan(
    desired: Mapping[str, AssignedVersion],
    observed: Sequence[Slot],
    now_s: float,
    *,
    free_bytes: int = 0,
    releasing: bool = False,
    retire_s: float = 0.0,
    unix_s: float = 0.0,
) -> tuple[Action, ...]:
    """Return the actions that move ``observed`` towards ``desired``: those that free memory first.

    A retiring version is removed after ``retire_s`` without a sequence: no gateway then holds a request for
    it. A warm one stays until its time, ``unix_s``, unless another version waits for its memory.
    ``free_bytes`` is the ungranted device memory. Fetches never wait. A load waits while a version of higher
    priority waits for memory. While pools are ``releasing`` memory, no BROKEN version that waits for memory
    is loaded: it would get only a part.
    """
    leaving: list[Action] = []
    coming: list[Action] = []
    kept: list[tuple[int, Slot]] = []
    warm_bytes = sum(slot.granted_bytes for slot in observed if slot.phase is VersionPhase.RETIRING)
    short = any(
        slot.unbooked and free_bytes < slot.needed_bytes <= free_bytes + warm_bytes for slot in observed
    )
    for slot in sorted(observed, key=lambda each: each.version.version_digest):
        version = desired.get(slot.version.version_digest)
        if version is not None and version.retiring:
            warm = unix_s < version.warm_until_unix_s and not short
            leaving += _retire(slot, now_s, retire_s, warm=warm)
        elif version is not None and not _reopens(slot, version, observed):
            kept.append((version.priority.rank, slot))
        else:
            leaving += _remove(slot, now_s)
    for rank, slot in sorted(kept, key=lambda each: -each[0]):
        action = _keep(slot, now_s, 0 if releasing else free_bytes)
        if (
            isinstance(action, LoadVersion)
            and slot.unbooked
            and (_is_held(rank, kept, observed, free_bytes) or _waits_for_before(slot, desired, kept))
        ):
            continue
        coming += [] if action is None else [action]
    known = {slot.version.version_digest for slot in observed}
    replaced = {
        desired[slot.version.version_digest].deployment
        for _, slot in kept
        if slot.phase is VersionPhase.READY and desired[slot.version.version_digest].in_place is not None
    }
    coming += [
        Fetch(version)
        for digest, version in sorted(desired.items())
        if digest not in known
        and not version.retiring
        # The engine of a version that was replaced has the weights of its successor.
        and not (version.served and version.deployment in replaced)
    ]
    return (*leaving, *coming)


def _reopens(slot: Slot, version: AssignedVersion, observed: Sequence[Slot]) -> bool:
    """Return whether it starts over: an operator changed its engine, or how a version is loaded that failed
    for good, or the version before has left, whose weights it failed to replace."""
    if version.engine != slot.version.engine:
        return True
    others = {one.version.deployment for one in observed if one is not slot}
    if slot.failed_in_place and slot.version.deployment not in others:
        return True
    return slot.final and (version.in_place is None) != (slot.version.in_place is None)


def _keep(slot: Slot, now_s: float, free_bytes: int) -> Action | None:
    match slot.phase:
        case VersionPhase.FETCHED:
            return LoadVersion(slot.version.version_digest)
        case VersionPhase.RETIRING | VersionPhase.DRAINING:
            return CancelRemoval(slot.version.version_digest)
        case VersionPhase.BROKEN if slot.final:
            return None
        case VersionPhase.BROKEN if slot.needed_bytes and slot.has_files:
            return LoadVersion(slot.version.version_digest) if slot.needed_bytes <= free_bytes else None
        case VersionPhase.BROKEN if now_s >= slot.retry_at_s:
            return LoadVersion(slot.version.version_digest) if slot.has_files else Fetch(slot.version)
        case _:
            return None


def _is_held(rank: int, kept: Sequence[tuple[int, Slot]], observed: Sequence[Slot], free_bytes: int) -> bool:
    """Return whether a load of this rank would take memory that a version of higher rank is about to get."""
    higher = {slot.version.version_digest: above for above, slot in kept}
    for above, slot in kept:
        if above <= rank or not slot.unbooked or slot.final:
            continue
        if slot.phase in (VersionPhase.FETCHED, VersionPhase.LOADING):
            return True
        if slot.phase is not VersionPhase.BROKEN:
            continue
        if not slot.needed_bytes:
            if slot.restarting:
                return True
            continue
        yielding = sum(
            each.granted_bytes
            for each in observed
            # They have a lower priority, or are being removed.
            if higher.get(each.version.version_digest, -1) < above
        )
        if slot.needed_bytes <= free_bytes + yielding:
            return True
    return False


def _waits_for_before(
    slot: Slot, desired: Mapping[str, AssignedVersion], kept: Sequence[tuple[int, Slot]]
) -> bool:
    """Return whether the version that it replaces lost its engine and must get its memory back first."""
    version = desired[slot.version.version_digest]
    if version.served:
        return False
    for _, other in kept:
        before = desired[other.version.version_digest]
        restarts = (
            other.phase in (VersionPhase.BROKEN, VersionPhase.LOADING) and other.restarting and other.unbooked
        )
        if restarts and before.served and before.deployment == version.deployment:
            return True
    return False


def _retire(slot: Slot, now_s: float, retire_s: float, *, warm: bool) -> list[Action]:
    digest, is_over = slot.version.version_digest, now_s >= slot.idle_since_s + retire_s
    match slot.phase:
        case VersionPhase.READY:
            return [RetireVersion(digest)]
        case VersionPhase.RETIRING:
            return [Discard(digest)] if is_over and not slot.running and not warm else []
        case VersionPhase.BROKEN if slot.restarting and not is_over:  # its sequences are placed here again
            return [LoadVersion(digest)] if now_s >= slot.retry_at_s else []
        case VersionPhase.LOADING if slot.restarting:
            return []
        case _:
            return _remove(slot, now_s)


def _remove(slot: Slot, now_s: float) -> list[Action]:
    digest = slot.version.version_digest
    match slot.phase:
        case VersionPhase.READY | VersionPhase.RETIRING:
            return [DrainVersion(digest)]
        case VersionPhase.DRAINING:
            return [Discard(digest)] if slot.running == 0 or now_s >= slot.drain_until_s else []
        case VersionPhase.STOPPING:
            return []
        case _:
            return [Discard(digest)]


def backoff_s(failures: int, *, first_s: float, most_s: float) -> float:
    """Return the pause before the next attempt after ``failures`` in a row; 0 counts as 1."""
    return min(most_s, first_s * 2.0 ** min(max(failures, 1) - 1, 32))
