"""What the workers report of a rollout's arms. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.controlplane.rollouts.records import STABLE, Rollout
from services.core.records import LoadedVersion, VersionState, Worker

# Reason of a version whose answers will not do, however often it is probed.
PROBE_FAILED: Final = "PROBE_FAILED"


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm on the workers."""

    # Replicas that take requests.
    ready: int = 0
    # Workers that report it in any state.
    loaded: int = 0
    # Workers on which it failed for good; ``why`` is the reason of one of them.
    failed: int = 0
    why: str = ""
    engine_restarts: int = 0
    # The probe that its version fails on a worker.
    unanswered: str = ""
    # The objectives that its requests alone miss too fast.
    alarm: str = ""


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """``replicas`` are the deployment's, ``arms`` are by name. ``unplaced`` states why an arm lacks a worker,
    by name. ``measured``: the sums of the present step are complete, which they are not just after a
    failover. ``unmeasured`` names what the stable version has too little of for a comparison, empty for
    nothing.
    """

    replicas: int
    arms: Mapping[str, ArmFacts]
    unplaced: Mapping[str, str] = field(default_factory=dict)
    measured: bool = True
    unmeasured: str = ""

    def arm(self, name: str) -> ArmFacts:
        return self.arms.get(name, ArmFacts())


def facts_of(
    rollout: Rollout,
    replicas: int,
    workers: Sequence[Worker],
    unplaced: Mapping[str, str],
    alarms: Mapping[str, str],
) -> RolloutFacts:
    """Return the facts of the stable version and of each candidate. ``alarms`` are by name."""
    names = {rollout.stable_digest: STABLE, **{arm.version_digest: arm.name for arm in rollout.arms}}
    found: dict[str, ArmFacts] = {}
    for worker in workers:
        for version in worker.versions:
            name = names.get(version.version_digest)
            if name is not None and version.deployment == rollout.deployment:
                found[name] = _with(found.get(name, ArmFacts()), version, draining=worker.draining)
    arms = {name: replace(facts, alarm=alarms.get(name, "")) for name, facts in found.items()}
    return RolloutFacts(replicas, arms, unplaced)


def _with(facts: ArmFacts, version: LoadedVersion, *, draining: bool) -> ArmFacts:
    ready = version.state is VersionState.READY and not draining
    # A version without a scheduled attempt, or after several, is not expected to load.
    lost = version.state is VersionState.FAILED and (not version.retry_unix_s or version.failed_attempts >= 3)
    why = f"{version.reason or 'FAILED'}: {version.message}" if lost else facts.why
    return ArmFacts(
        facts.ready + ready,
        facts.loaded + 1,
        facts.failed + lost,
        why,
        facts.engine_restarts + version.engine_restarts,
        version.message if version.reason == PROBE_FAILED else facts.unanswered,
    )
