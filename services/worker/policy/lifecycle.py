"""What to do next with the versions of one worker. Pure and level-triggered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.core.records import AssignedVersion


class Phase(StrEnum):
    """Where one version is. FETCHED has its files and no engine; BROKEN waits for ``retry_at_s``."""

    FETCHING = "fetching"
    FETCHED = "fetched"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    BROKEN = "broken"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Slot:
    """Observed: one version on this worker. ``drain_until_s`` counts while draining."""

    version: AssignedVersion
    phase: Phase
    running: int = 0
    has_files: bool = False
    retry_at_s: float = 0.0
    drain_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the files; the slot comes into being if it is not there."""

    version: AssignedVersion


@dataclass(frozen=True, slots=True)
class Load:
    version_digest: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new sequences; those that run may end."""

    version_digest: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """It is wanted again before it was gone."""

    version_digest: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Stop whatever goes on and forget the version."""

    version_digest: str


Action = Fetch | Load | Drain | Undrain | Discard


def wanted(assigned: Sequence[AssignedVersion]) -> dict[str, AssignedVersion]:
    """Return what is to run, by digest. One engine serves every deployment of a version.

    Of deployments that ask for different executors the first by name decides.
    """
    versions: dict[str, AssignedVersion] = {}
    for version in sorted(assigned, key=lambda each: each.deployment):
        versions.setdefault(version.version_digest, version)
    return versions


def plan(
    desired: Mapping[str, AssignedVersion], observed: Sequence[Slot], now_s: float
) -> tuple[Action, ...]:
    """Return the actions that move ``observed`` towards ``desired``: what frees memory first."""
    leaving: list[Action] = []
    coming: list[Action] = []
    for slot in sorted(observed, key=lambda each: each.version.version_digest):
        version = desired.get(slot.version.version_digest)
        if version is not None and version.executor == slot.version.executor:
            coming += _keep(slot, now_s)
        else:
            leaving += _remove(slot, now_s)
    known = {slot.version.version_digest for slot in observed}
    coming += [Fetch(desired[digest]) for digest in sorted(desired) if digest not in known]
    return (*leaving, *coming)


def _keep(slot: Slot, now_s: float) -> list[Action]:
    match slot.phase:
        case Phase.FETCHED:
            return [Load(slot.version.version_digest)]
        case Phase.DRAINING:
            return [Undrain(slot.version.version_digest)]
        case Phase.BROKEN if now_s >= slot.retry_at_s:
            return [Load(slot.version.version_digest) if slot.has_files else Fetch(slot.version)]
        case _:
            return []


def _remove(slot: Slot, now_s: float) -> list[Action]:
    digest = slot.version.version_digest
    match slot.phase:
        case Phase.READY:
            return [Drain(digest)]
        case Phase.DRAINING:
            return [Discard(digest)] if slot.running == 0 or now_s >= slot.drain_until_s else []
        case Phase.STOPPING:
            return []
        case _:
            return [Discard(digest)]


def backoff_s(failures: int, *, first_s: float, most_s: float) -> float:
    """Return the pause before the next attempt after ``failures`` in a row, at least one."""
    return min(most_s, first_s * 2.0 ** min(max(failures, 1) - 1, 32))
