"""A cutover: acknowledged once every live worker refuses earlier routes, with a version to return to."""

from __future__ import annotations

from dataclasses import replace

from services.controlplane.policy.assign import KeptVersion
from services.controlplane.rollouts.policy.advance import advance, unfenced_on
from services.controlplane.rollouts.policy.effects import deployment_of, kept_versions
from services.controlplane.rollouts.policy.operate import revert
from services.controlplane.rollouts.records import RolloutPhase
from services.core.records import AssignedVersion, Assignment, LoadedVersion, VersionState, Worker
from tests.unit.controlplane.policy.test_update import NEW, OLD, deployment
from tests.unit.controlplane.rollouts.policy.driven import Driven, rollout

OTHER = "sha256:2"


def test_it_is_cut_over_once_every_live_worker_confirms_the_fence() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.FINISHING)
    fences, facts = driven.fleet.workers["w1"].fences, driven.facts
    for _ in range(20):
        fences.clear()  # its assignment has the fence, and it does not report it
        facts = driven.facts
        assert facts.route_revision
        assert "w1" in facts.unfenced
        driven.rollout = advance(driven.rollout, facts, {}, driven.now_s)
        assert (driven.phase, driven.rollout.cutover_revision) == (RolloutPhase.FINISHING, 0)
        assert "not yet confirmed by" in driven.rollout.message
        assert "w1" in driven.rollout.message
    driven.until(RolloutPhase.COMPLETED)
    assert driven.rollout.cutover_revision == facts.route_revision
    assert driven.rollout.history[-1].what == "CUT_OVER"
    held = [one for each in driven.fleet.assignments.values() for one in each.versions]
    old = [one for one in held if one.version_digest == OLD]
    assert old, "the fence outlives the route, as long as the version is there"
    assert {(one.least_route_revision, one.successor_digest) for one in old} == {(facts.route_revision, NEW)}


def test_a_worker_without_a_lease_is_not_waited_for_and_an_assigned_one_is() -> None:
    found = rollout(phase=RolloutPhase.FINISHING)
    old = AssignedVersion("d", "m", OLD)
    loaded = LoadedVersion("d", "m", OLD, VersionState.RETIRING)
    assigned = [Assignment("w0", (old,)), Assignment("gone", (old,))]
    assert unfenced_on(found, [Worker("w0", "")], assigned, 9) == ("w0",)
    fenced = [Assignment("w0", (replace(old, least_route_revision=9),))]
    assert unfenced_on(found, [Worker("w0", "", versions=(loaded,))], fenced, 9) == ("w0",)
    earlier = replace(loaded, least_route_revision=8)
    assert unfenced_on(found, [Worker("w0", "", versions=(earlier,))], fenced, 9) == ("w0",)
    confirmed = replace(loaded, least_route_revision=9)
    assert unfenced_on(found, [Worker("w0", "", versions=(confirmed,))], fenced, 9) == ()
    other = replace(loaded, deployment="e")
    assert unfenced_on(found, [Worker("w0", "", versions=(other,))], [], 9) == ()


def test_a_revert_is_acknowledged_once_every_live_worker_confirms_the_fence_of_the_candidate() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.COMPLETED)
    driven.operate(lambda one: revert(one, "", driven.now_s))
    assert (driven.phase, driven.routes[-1]) == (RolloutPhase.RESTORING, None)
    driven.until(RolloutPhase.WITHDRAWING)
    assert driven.fleet.ready(OLD) == 2
    assert driven.weight_bp() == 0
    held = [one for each in driven.fleet.assignments.values() for one in each.versions if one.retiring]
    revision = driven.facts.route_revision
    fences = {(one.version_digest, one.least_route_revision, one.successor_digest) for one in held}
    assert fences == {(NEW, revision, OLD)}
    driven.fleet.workers["w1"].fences.clear()  # its assignment has the fence, and it does not report it
    waiting = advance(driven.rollout, driven.facts, {}, driven.now_s)
    assert (waiting.phase, "by 1 workers: w1" in waiting.message) == (RolloutPhase.WITHDRAWING, True)
    driven.until(RolloutPhase.REVERTED)
    assert driven.whats()[-3:] == ["REVERTED_BY_OPERATOR", "RESTORED", "REVERTED"]
    driven.tick(20)
    assert (driven.fleet.digests(), driven.fleet.ready(OLD), driven.routes[-1]) == ({OLD}, 2, None)


def test_a_revert_waits_for_the_version_before_and_ends_where_the_deployment_got_another() -> None:
    driven = Driven(rollout(keep_warm_s=0.0))
    driven.until(RolloutPhase.COMPLETED)
    driven.tick(30)
    assert driven.fleet.digests() == {NEW}
    driven.operate(lambda one: revert(one, "", driven.now_s))
    driven.tick()
    assert driven.phase is RolloutPhase.RESTORING
    assert "0 of 2 replicas of the version before are READY" in driven.rollout.message
    updated = advance(driven.rollout, replace(driven.facts, version_digest=OTHER), {}, driven.now_s)
    assert (updated.phase, updated.history[-1].what) == (RolloutPhase.REVERTED, "REVERTED")
    assert "another version" in updated.message
    assert deployment_of(updated, deployment(OTHER, 2)).version_digest == OTHER
    driven.until(RolloutPhase.REVERTED)


def test_the_version_before_is_kept_while_its_rollout_is_the_newest_final_one() -> None:
    first = rollout(phase=RolloutPhase.COMPLETED, phase_unix_s=100.0, keep_warm_s=60.0)
    serving = [deployment(NEW, 2)]
    assert kept_versions([first], serving) == {"d": KeptVersion(OLD, 160.0)}
    later = replace(first, stable_digest=OTHER, phase_unix_s=200.0)
    assert kept_versions([later, first], serving)["d"] == KeptVersion(OTHER, 260.0)
    for ended in (RolloutPhase.REVERTED, RolloutPhase.ABORTED, RolloutPhase.SOAKING):
        assert kept_versions([replace(first, phase=ended)], serving) == {}
    assert kept_versions([first], [deployment(OLD, 2)]) == {}, "an update replaced it"


def test_the_version_before_is_pinned_and_warm_and_a_revert_opens_it_again() -> None:
    driven = Driven(rollout(keep_warm_s=600.0))
    driven.until(RolloutPhase.FINISHING)
    driven.fleet.step()
    held = list(driven.fleet.assignments.values())
    assert [[one.version_digest for one in each.pinned] for each in held] == [[OLD], [OLD]]
    until = {one.warm_until_unix_s for each in held for one in each.versions if one.version_digest == OLD}
    assert until == {driven.rollout.phase_unix_s + 600.0}
    driven.until(RolloutPhase.COMPLETED)
    driven.operate(lambda one: revert(one, "", driven.now_s))
    driven.tick()
    opened = [one for each in driven.fleet.assignments.values() for one in each.versions]
    assert {(one.retiring, one.least_route_revision) for one in opened if one.version_digest == OLD} == {
        (False, 0)
    }
    driven.tick(20)
    assert (driven.fleet.serving(), driven.fleet.digests()) == ((OLD, 2), {OLD})
    assert not any(each.pinned for each in driven.fleet.assignments.values()), "nothing is final"


def test_a_withdrawn_version_that_restarts_never_serves_again() -> None:
    """With the rule of an update alone, it would where the engine of its successor restarts too."""
    driven = Driven(rollout(keep_warm_s=600.0))
    driven.until(RolloutPhase.COMPLETED)
    for worker in driven.fleet.workers.values():
        worker.versions = dict.fromkeys((OLD, NEW), (VersionState.RESTARTING, 30))
    driven.tick(2)
    held = [one for each in driven.fleet.assignments.values() for one in each.versions]
    assert not any(one.version_digest == OLD and not one.least_route_revision for one in held)
    assert all(one.version_digest != OLD or not one.served for one in held)
