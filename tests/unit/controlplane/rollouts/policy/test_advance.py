"""A rollout moves only forwards or back whole, with a version that serves all the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controlplane.objectives.policy.gates import GateMetric, Verdict
from services.controlplane.rollouts.policy.advance import ArmFacts, advance, facts_of
from services.controlplane.rollouts.policy.effects import MOST_LOAD_RATIO, load_ratio, replicas_for_weight
from services.controlplane.rollouts.policy.operate import Promotion, abort, pause, promote, resume, revert
from services.controlplane.rollouts.records import (
    ABORTABLE,
    FULL,
    MAX_HISTORY,
    GateSettings,
    Inconclusive,
    RolloutArm,
    RolloutEvent,
    RolloutPhase,
    RolloutStep,
    RolloutStrategy,
)
from services.core.errors import FailedPrecondition, InvalidInput
from services.core.records import LoadedVersion, Priority, VersionState, Worker
from services.core.rollouts.routes import (
    ModelRoute,
    RouteArm,
    Shadow,
    SplitCaller,
    SplitRules,
    choose_arm,
    split,
)
from tests.unit.controlplane.policy.test_update import NEW, OLD
from tests.unit.controlplane.rollouts.policy.driven import STEPS, Driven, rollout

OTHER = "sha256:2"
EVENTS = ("tick", "pass", "fail", "pause", "resume", "promote", "end", "lose")


def test_a_good_canary_goes_through_every_step_and_is_final() -> None:
    driven = Driven(rollout())
    weights: list[int] = []
    for _ in range(200):
        driven.tick()
        assert driven.fleet.ready(OLD) == 2 or driven.phase in (
            RolloutPhase.FINISHING,
            RolloutPhase.COMPLETED,
        )
        if not weights or weights[-1] != driven.weight_bp():
            weights.append(driven.weight_bp())
    assert weights == [0, 100, 500, 2500, 5000, 10_000]
    assert driven.phase is RolloutPhase.COMPLETED
    assert driven.fleet.digests() == {NEW}
    assert driven.whats() == ["STARTED", *["STEP"] * 4, "ALL_TRAFFIC", "FINAL", "CUT_OVER"]
    assert driven.routes[-1] is None


def test_no_traffic_before_the_candidate_is_ready_at_the_weight_s_replicas() -> None:
    driven = Driven(rollout())
    for _ in range(120):
        driven.tick()
        route = driven.routes[-1]
        if route is None or driven.phase is RolloutPhase.FINISHING:
            break
        if driven.weight_bp():
            assert driven.fleet.ready(NEW) >= (2 if driven.weight_bp() > 5000 else 1)


def test_the_replicas_of_the_next_step_wait_for_the_gate() -> None:
    """Else a replica of the candidate has less traffic than one of the stable version."""
    driven = Driven(rollout())
    while not (driven.phase is RolloutPhase.RUNNING and driven.rollout.step == 2):
        driven.tick()
    driven.verdict = Verdict.INCONCLUSIVE
    driven.tick(30)
    assert (driven.weight_bp(), driven.fleet.ready(NEW)) == (2500, 1)
    driven.verdict = Verdict.PASS
    driven.tick()
    driven.verdict = Verdict.INCONCLUSIVE  # what passed has passed
    driven.tick(10)
    assert (driven.weight_bp(), driven.fleet.ready(NEW)) == (5000, 2)


@pytest.mark.parametrize("step", range(4))
def test_a_failed_gate_rolls_every_step_back(step: int) -> None:
    driven = Driven(rollout())
    while not (driven.phase is RolloutPhase.RUNNING and driven.rollout.step == step):
        driven.tick()
    assert driven.weight_bp() > 0
    driven.verdict = Verdict.FAIL
    driven.tick()
    assert (driven.phase, driven.weight_bp()) == (RolloutPhase.ROLLING_BACK, 0)
    route = driven.routes[-1]
    assert route is not None
    assert route.arms[1].closed
    driven.until(RolloutPhase.ABORTED)
    assert driven.fleet.digests() == {OLD}
    assert driven.whats()[-2:] == ["GATE_FAILED", "ABORTED"]


def test_a_pause_holds_the_step_and_a_failed_gate_rolls_back_all_the_same() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.RUNNING)
    driven.operate(lambda one: pause(one, driven.now_s))
    driven.tick(60)
    assert (driven.rollout.step, driven.weight_bp()) == (0, 100)
    driven.operate(lambda one: resume(one, driven.now_s))
    driven.tick(5)
    assert driven.rollout.step == 0, "the hold begins anew"
    driven.tick(10)
    assert driven.rollout.step == 1
    driven.operate(lambda one: pause(one, driven.now_s))
    driven.verdict = Verdict.FAIL
    driven.tick()
    assert driven.phase is RolloutPhase.ROLLING_BACK


@pytest.mark.parametrize("phase", [RolloutPhase.LOADING, RolloutPhase.RUNNING, RolloutPhase.SOAKING])
def test_an_abort_moves_every_new_request_back_at_once(phase: RolloutPhase) -> None:
    driven = Driven(rollout())
    driven.until(phase)
    driven.operate(lambda one: abort(one, "looks odd", driven.now_s))
    assert driven.weight_bp() == 0
    driven.until(RolloutPhase.ABORTED)
    assert driven.fleet.digests() == {OLD}
    assert driven.fleet.ready(OLD) == 2
    assert "looks odd" in driven.rollout.history[-2].message


def test_what_is_final_is_not_aborted() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.FINISHING)
    for operation in (abort, lambda one, _why, now_s: pause(one, now_s)):
        with pytest.raises(FailedPrecondition):
            operation(driven.rollout, "", driven.now_s)


@pytest.mark.parametrize("phase", RolloutPhase)
def test_a_revert_is_possible_in_every_phase_and_a_version_serves_meanwhile(phase: RolloutPhase) -> None:
    if phase in (RolloutPhase.RESTORING, RolloutPhase.WITHDRAWING, RolloutPhase.REVERTED):
        return  # of a revert
    driven = Driven(rollout())
    driven.until(
        RolloutPhase.RUNNING if phase in (RolloutPhase.ROLLING_BACK, RolloutPhase.ABORTED) else phase
    )
    if phase in (RolloutPhase.ROLLING_BACK, RolloutPhase.ABORTED):
        driven.operate(lambda one: abort(one, "", driven.now_s))
        driven.until(phase)
    final = phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
    driven.operate(lambda one: revert(one, "odd answers", driven.now_s))
    assert driven.fleet.wanted.version_digest == OLD
    for _ in range(60):
        assert driven.fleet.ready(OLD) + driven.fleet.ready(NEW) >= 2
        driven.tick()
    assert driven.phase is (RolloutPhase.REVERTED if final else RolloutPhase.ABORTED)
    assert (driven.fleet.digests(), driven.fleet.ready(OLD), driven.routes[-1]) == ({OLD}, 2, None)
    if phase is not RolloutPhase.ABORTED and phase is not RolloutPhase.ROLLING_BACK:
        assert any("odd answers" in event.message for event in driven.rollout.history)
    assert revert(driven.rollout, "again", driven.now_s) is driven.rollout


@pytest.mark.parametrize("strategy", [RolloutStrategy.CANARY, RolloutStrategy.AB])
def test_a_pause_withdraws_a_promotion_that_waits_for_replicas(strategy: RolloutStrategy) -> None:
    arms = (RolloutArm("canary", "v2", NEW, weight_bp=1000 if strategy is RolloutStrategy.AB else 0),)
    driven = Driven(rollout(strategy, arms=arms))
    driven.until(RolloutPhase.RUNNING)
    driven.verdict = Verdict.INCONCLUSIVE
    promotion = Promotion(arm="canary") if strategy is RolloutStrategy.AB else Promotion(to_end=True)
    driven.operate(lambda one: promote(one, promotion, driven.now_s))
    driven.tick()
    weight_bp = driven.weight_bp()
    driven.operate(lambda one: pause(one, driven.now_s))
    driven.tick(60)
    assert (driven.phase, driven.weight_bp(), driven.rollout.preparing) == (
        RolloutPhase.RUNNING,
        weight_bp,
        False,
    )
    assert "promotion is withdrawn" in driven.rollout.history[-1].message
    driven.operate(lambda one: resume(one, driven.now_s))
    driven.tick(60)
    assert (driven.phase, driven.weight_bp()) == (RolloutPhase.RUNNING, weight_bp)
    driven.operate(lambda one: promote(one, promotion, driven.now_s))
    driven.until(RolloutPhase.SOAKING)


def test_a_long_pause_does_not_use_up_the_time_to_load() -> None:
    driven = Driven(rollout())
    while not driven.rollout.preparing:
        driven.tick()
    driven.operate(lambda one: pause(one, driven.now_s))
    driven.tick(200)
    assert driven.rollout.preparing, "its gate has passed"
    driven.operate(lambda one: resume(one, driven.now_s))
    driven.fleet.workers.clear()
    driven.tick(50)
    assert driven.phase is RolloutPhase.RUNNING
    driven.tick(60)
    assert "LOAD_TIMEOUT" in driven.whats()


def test_promotions_skip_the_hold_and_wait_for_replicas() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.RUNNING)
    driven.verdict = Verdict.INCONCLUSIVE
    driven.operate(lambda one: promote(one, Promotion(), driven.now_s))
    driven.tick()
    assert driven.rollout.step == 1
    driven.operate(lambda one: promote(one, Promotion(to_end=True), driven.now_s))
    driven.tick()
    assert driven.weight_bp() == 500, "one replica cannot take all traffic"
    driven.until(RolloutPhase.SOAKING)
    assert driven.fleet.ready(NEW) == 2
    driven.operate(lambda one: promote(one, Promotion(), driven.now_s))
    driven.tick()
    assert driven.phase is RolloutPhase.FINISHING


def test_a_promotion_does_not_override_a_failed_gate() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.RUNNING)
    driven.operate(lambda one: promote(one, Promotion(to_end=True), driven.now_s))
    driven.verdict = Verdict.FAIL
    driven.tick()
    assert driven.phase is RolloutPhase.ROLLING_BACK


def test_accepted_metrics_need_a_reason_that_is_kept() -> None:
    driven = Driven(rollout())
    driven.until(RolloutPhase.RUNNING)
    with pytest.raises(InvalidInput):
        promote(driven.rollout, Promotion(accepted={GateMetric.COST: " "}), 1.0)
    accepting = Promotion(accepted={GateMetric.COST: "better answers"})
    driven.operate(lambda one: promote(one, accepting, driven.now_s))
    assert driven.rollout.gate.accepted == {GateMetric.COST: "better answers"}
    assert driven.rollout.promote_to == 0
    assert "better answers" in driven.rollout.history[-1].message


@pytest.mark.parametrize("policy", Inconclusive)
def test_a_step_without_a_verdict_follows_its_policy(policy: Inconclusive) -> None:
    driven = Driven(rollout(gate=GateSettings(patience_s=5.0, inconclusive=policy)))
    driven.verdict = Verdict.INCONCLUSIVE
    driven.until(RolloutPhase.RUNNING)
    driven.tick(20)
    expected = {
        Inconclusive.WAIT: (RolloutPhase.RUNNING, 0),
        Inconclusive.PROMOTE: (RolloutPhase.RUNNING, 1),
        Inconclusive.ABORT: (RolloutPhase.ROLLING_BACK, 0),
    }[policy]
    assert (driven.phase, driven.rollout.step) == expected


@pytest.mark.parametrize("policy", [Inconclusive.PROMOTE, Inconclusive.ABORT])
def test_a_new_leader_decides_nothing_before_its_sums_are_complete(policy: Inconclusive) -> None:
    driven = Driven(rollout(gate=GateSettings(patience_s=5.0, inconclusive=policy)))
    driven.verdict, driven.measured = Verdict.INCONCLUSIVE, False
    driven.until(RolloutPhase.RUNNING)
    driven.tick(40)
    assert (driven.phase, driven.rollout.step) == (RolloutPhase.RUNNING, 0)
    driven.measured = True
    driven.tick(3)
    assert (driven.phase, driven.rollout.step) != (RolloutPhase.RUNNING, 0)


def test_a_failed_gate_rolls_back_also_before_the_sums_are_complete() -> None:
    driven = Driven(rollout())
    driven.measured = False
    driven.until(RolloutPhase.RUNNING)
    driven.verdict = Verdict.FAIL
    driven.tick()
    assert driven.phase is RolloutPhase.ROLLING_BACK


def test_the_history_names_a_step_without_a_verdict() -> None:
    """Also when the replicas of the next step were not READY yet."""
    driven = Driven(rollout(gate=GateSettings(patience_s=5.0, inconclusive=Inconclusive.PROMOTE)))
    driven.verdict = Verdict.INCONCLUSIVE
    driven.until(RolloutPhase.SOAKING)
    steps = [event.message for event in driven.rollout.history if event.what == "STEP"]
    assert len(steps) == len(STEPS) - 1
    assert all("no verdict within 5 s" in message for message in steps), steps


def test_without_any_report_nothing_is_promoted() -> None:
    driven = Driven(rollout())
    driven.verdict = None
    driven.until(RolloutPhase.RUNNING)
    driven.tick(100)
    assert (driven.rollout.step, driven.rollout.message) == (0, "no requests are reported yet")


def test_a_candidate_that_does_not_load_is_rolled_back_with_the_reason() -> None:
    driven = Driven(rollout())
    for worker in driven.fleet.workers.values():
        worker.unloadable = frozenset({NEW})
    driven.until(RolloutPhase.ABORTED)
    assert "LOAD_FAILED" in driven.whats()
    assert any("BAD_CHECKPOINT" in event.message for event in driven.rollout.history)
    assert driven.fleet.ready(OLD) == 2


@pytest.mark.parametrize("phase", [RolloutPhase.LOADING, RolloutPhase.RUNNING])
def test_a_probe_that_fails_on_one_worker_rolls_back_before_its_traffic(phase: RolloutPhase) -> None:
    """Also on a worker of the next step, while others serve the version."""
    driven = Driven(rollout())
    driven.until(phase)
    facts = replace(
        driven.facts, arms={"canary": ArmFacts(ready=1, loaded=2, unanswered="a prompt: nothing")}
    )
    found = advance(driven.rollout, facts, driven.reports, driven.now_s + 60.0)
    assert (found.phase, found.history[-1].what) == (RolloutPhase.ROLLING_BACK, "PROBE_FAILED")
    assert found.message == "canary: a prompt: nothing"
    if phase is RolloutPhase.LOADING:
        assert not any(event.what == "STARTED" for event in found.history)


def test_only_a_final_failure_of_a_probe_counts_at_once() -> None:
    def facts(reason: str, attempts: int) -> ArmFacts:
        version = LoadedVersion(
            "d", "m", NEW, VersionState.FAILED, "no answer", reason=reason, failed_attempts=attempts,
            retry_unix_s=0.0 if reason == "PROBE_FAILED" else 9.0,
        )  # fmt: skip
        return facts_of(rollout(), 1, [Worker("w", "w:1", versions=(version,))], {}, {}).arm("canary")

    assert facts("PROBE_FAILED", 1).unanswered == "no answer"
    assert (facts("PROBE_TIMEOUT", 1).unanswered, facts("PROBE_TIMEOUT", 1).failed) == ("", 0)
    assert facts("PROBE_CRASHED", 3).failed == 1


def test_a_candidate_without_room_never_costs_the_stable_version_a_replica() -> None:
    driven = Driven(rollout(load_timeout_s=30.0), rooms=(1, 1))
    for _ in range(80):
        driven.tick()
        assert driven.fleet.ready(OLD) == 2
    assert driven.phase is RolloutPhase.ABORTED


def test_the_time_to_load_the_next_step_counts_from_its_promotion() -> None:
    """Not from the step before, whose gate may take hours."""
    driven = Driven(rollout(load_timeout_s=30.0, gate=GateSettings(patience_s=5.0)))
    while not (driven.phase is RolloutPhase.RUNNING and driven.rollout.step == 2):
        driven.tick()
    driven.verdict = Verdict.INCONCLUSIVE
    driven.tick(500)
    driven.verdict = Verdict.PASS
    driven.until(RolloutPhase.SOAKING)
    assert "LOAD_TIMEOUT" not in driven.whats()


def test_replicas_of_the_next_step_that_never_load_roll_it_back() -> None:
    driven = Driven(rollout(load_timeout_s=30.0), rooms=(2, 1))
    while not driven.rollout.preparing:
        driven.tick()
    driven.tick(25)
    assert driven.phase is RolloutPhase.RUNNING
    driven.tick(10)
    assert driven.whats()[-1] == "LOAD_TIMEOUT"


def test_capped_classes_change_while_a_rollback_is_possible() -> None:
    driven = Driven(rollout(rules=SplitRules(class_caps_bp={Priority.INTERACTIVE: 500})))
    caller = SplitCaller("acme", "s", Priority.INTERACTIVE)
    driven.until(RolloutPhase.SOAKING)
    route = driven.routes[-1]
    assert route is not None
    assert choose_arm(route, caller) is route.arm("canary")
    driven.operate(lambda one: abort(one, "", driven.now_s))
    assert driven.weight_bp() == 0


@pytest.mark.parametrize("replicas", range(1, 21))
def test_a_replica_has_no_more_load_than_a_stable_one_while_there_are_as_many(replicas: int) -> None:
    """Up to half of the traffic; the cost counts in the step that halves it."""
    for weight_bp in (1, 100, 500, 2500, 3400, 5000):
        needed = replicas_for_weight(weight_bp, replicas)
        arms = (
            RouteArm("stable", OLD, 10_000 - weight_bp, replicas),
            RouteArm("canary", NEW, weight_bp, needed),
        )
        load = load_ratio(ModelRoute("d", "s", arms), "canary")
        assert load <= MOST_LOAD_RATIO
        assert weight_bp < 5000 or load >= 1 / MOST_LOAD_RATIO
    assert replicas_for_weight(7500, replicas) <= replicas


def test_engines_that_crash_roll_the_candidate_back() -> None:
    driven = Driven(rollout(gate=GateSettings(max_engine_restarts=2)))
    driven.until(RolloutPhase.RUNNING)
    facts = driven.facts
    arm = replace(facts.arm("canary"), engine_restarts=2)
    found = advance(driven.rollout, replace(facts, arms={**facts.arms, "canary": arm}), {}, 99.0)
    assert (found.phase, found.history[-1].what) == (RolloutPhase.ROLLING_BACK, "ENGINE_CRASHES")


@pytest.mark.parametrize("phase", [RolloutPhase.RUNNING, RolloutPhase.SOAKING])
def test_a_probe_that_fails_where_a_worker_loads_it_again_rolls_the_candidate_back(
    phase: RolloutPhase,
) -> None:
    driven = Driven(rollout())
    driven.until(phase)
    facts = driven.facts
    arm = replace(facts.arm("canary"), unanswered="no answer")
    found = advance(driven.rollout, replace(facts, arms={**facts.arms, "canary": arm}), {}, driven.now_s)
    assert (found.phase, found.history[-1].what) == (RolloutPhase.ROLLING_BACK, "PROBE_FAILED")


@pytest.mark.parametrize("phase", [RolloutPhase.RUNNING, RolloutPhase.SOAKING])
def test_a_burn_alert_of_the_candidate_rolls_it_back(phase: RolloutPhase) -> None:
    driven = Driven(rollout())
    driven.until(phase)
    driven.alarms = {"canary": "availability of standard"}
    driven.tick()
    assert (driven.phase, driven.weight_bp()) == (RolloutPhase.ROLLING_BACK, 0)
    assert driven.whats()[-1] == "BURN_RATE"


@pytest.mark.parametrize("strategy", FULL)
def test_blue_green_takes_all_traffic_once_every_replica_is_ready(strategy: RolloutStrategy) -> None:
    driven = Driven(rollout(strategy, soak_s=30.0))
    while driven.phase is RolloutPhase.LOADING:
        driven.tick()
        assert driven.weight_bp() == 0 or driven.fleet.ready(NEW) == 2
    assert driven.weight_bp() == 10_000
    if strategy is RolloutStrategy.BLUE_GREEN:
        driven.tick(20)
        assert (driven.phase, driven.fleet.ready(OLD)) == (RolloutPhase.SOAKING, 2)
    else:
        driven.tick()
        assert driven.phase is RolloutPhase.FINISHING, "its gate passes"
    driven.until(RolloutPhase.COMPLETED)
    driven.tick(10)
    assert driven.fleet.digests() == {NEW}


SOAKED = (RolloutStrategy.CANARY, *FULL)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("strategy", SOAKED)
def test_a_failed_gate_rolls_the_soak_back_onto_warm_replicas(
    strategy: RolloutStrategy, *, paused: bool
) -> None:
    driven = Driven(rollout(strategy))
    driven.verdict = Verdict.PASS if strategy is RolloutStrategy.CANARY else None
    driven.until(RolloutPhase.SOAKING)
    driven.verdict = Verdict.INCONCLUSIVE
    driven.tick(10)
    assert (driven.phase, driven.fleet.ready(OLD)) == (RolloutPhase.SOAKING, 2)
    if paused:
        driven.operate(lambda one: pause(one, driven.now_s))
    driven.verdict = Verdict.FAIL
    driven.tick()
    assert (driven.phase, driven.weight_bp(), driven.fleet.ready(OLD)) == (RolloutPhase.ROLLING_BACK, 0, 2)
    driven.until(RolloutPhase.ABORTED)
    assert driven.fleet.digests() == {OLD}
    assert driven.whats()[-2:] == ["GATE_FAILED", "ABORTED"]


@pytest.mark.parametrize("strategy", SOAKED)
@pytest.mark.parametrize("inconclusive", Inconclusive)
def test_the_soak_ends_without_a_verdict_as_its_policy_says(
    strategy: RolloutStrategy, inconclusive: Inconclusive
) -> None:
    driven = Driven(rollout(strategy, gate=GateSettings(inconclusive=inconclusive)))
    driven.verdict = Verdict.PASS if strategy is RolloutStrategy.CANARY else None
    driven.until(RolloutPhase.SOAKING)
    driven.verdict = Verdict.INCONCLUSIVE
    driven.tick(19)
    assert driven.phase is RolloutPhase.SOAKING
    driven.measured = False  # the leader is new: its sums are not complete
    driven.tick(5)
    assert driven.phase is RolloutPhase.SOAKING
    driven.measured = True
    driven.tick(1)
    aborts = inconclusive is Inconclusive.ABORT
    assert driven.phase is (RolloutPhase.ROLLING_BACK if aborts else RolloutPhase.FINISHING)
    assert driven.whats()[-1] == ("INCONCLUSIVE" if aborts else "FINAL")


@pytest.mark.parametrize("strategy", FULL)
def test_all_traffic_waits_a_bounded_time_for_a_baseline(strategy: RolloutStrategy) -> None:
    driven = Driven(rollout(strategy))
    driven.unmeasured = "the stable has 7 of 100 requests"
    driven.tick(50)
    assert driven.weight_bp() == 0
    assert driven.rollout.message.startswith("the stable has 7 of 100 requests; all traffic moves in ")
    driven.tick(10)
    assert driven.phase is RolloutPhase.SOAKING
    other = Driven(rollout(strategy))
    other.unmeasured = "the stable has 7 of 100 requests"
    other.tick(20)
    other.unmeasured = ""
    other.tick()
    assert other.phase is RolloutPhase.SOAKING


def test_the_soak_is_compared_with_what_was_counted_before_it() -> None:
    """The names of the windows: of the step before, or of the time in which the versions were loaded."""
    canary, green = Driven(rollout(salt="s")), Driven(rollout(RolloutStrategy.BLUE_GREEN, salt="s"))
    canary.until(RolloutPhase.SOAKING)
    green.until(RolloutPhase.SOAKING)
    assert [one.rollout.baseline for one in (canary, green)] == ["s/3", "s/loading"]
    for driven, before in ((canary, "s/3"), (green, "s/loading")):
        steps = [route.step for route in driven.routes if route is not None]
        assert steps[-2:] == [before, "s/soaking"]
    driven = canary
    driven.until(RolloutPhase.FINISHING)
    route = driven.routes[-1]
    assert route is not None
    assert route.step == ""


def test_an_ab_test_keeps_its_weights_until_an_operator_chooses() -> None:
    arms = (RolloutArm("b", "v2", NEW, 3000), RolloutArm("c", "v3", OTHER, 2000))
    driven = Driven(rollout(RolloutStrategy.AB, arms=arms), rooms=(4, 4))
    driven.until(RolloutPhase.RUNNING)
    driven.tick(100)
    route = driven.routes[-1]
    assert route is not None
    assert [arm.weight_bp for arm in route.arms] == [5000, 3000, 2000]
    with pytest.raises(InvalidInput):
        promote(driven.rollout, Promotion(arm="d"), driven.now_s)
    driven.operate(lambda one: promote(one, Promotion(arm="c"), driven.now_s))
    driven.until(RolloutPhase.COMPLETED)
    driven.tick(10)
    assert driven.fleet.digests() == {OTHER}


def test_a_shadow_takes_no_traffic_and_is_not_promoted() -> None:
    driven = Driven(rollout(RolloutStrategy.SHADOW, shadow=Shadow("canary", 5000)))
    driven.until(RolloutPhase.RUNNING)
    route = driven.routes[-1]
    assert route is not None
    assert (route.shadow, [arm.weight_bp for arm in route.arms]) == (Shadow("canary", 5000), [10_000, 0])
    with pytest.raises(FailedPrecondition):
        promote(driven.rollout, Promotion(), driven.now_s)
    driven.operate(lambda one: abort(one, "", driven.now_s))
    route = driven.routes[-1]
    assert route is not None
    assert route.shadow is None
    driven.until(RolloutPhase.ABORTED)


def test_the_history_is_bounded_and_keeps_its_beginning() -> None:
    found = rollout()
    for number in range(MAX_HISTORY + 10):
        found = found.noted(RolloutEvent(float(number), f"E{number}", ""))
    whats = [event.what for event in found.history]
    assert (len(whats), whats[0], whats[1], whats[-1]) == (MAX_HISTORY, "E0", "E11", f"E{MAX_HISTORY + 9}")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["tick", "pass", "fail", "pause", "resume", "promote", "end", "lose"]), max_size=40
    )
)
def test_whatever_happens_the_split_is_whole_and_a_version_serves(events: list[str]) -> None:
    """The stable version keeps its replicas until the rollout is final, and nothing is lost afterwards."""
    driven = Driven(
        rollout(steps=tuple(RolloutStep(bp, hold_s=3.0) for bp in (1000, 5000, 10_000)), soak_s=5.0)
    )
    for event in events:
        try:
            match event:
                case "pass" | "fail":
                    driven.verdict = Verdict.PASS if event == "pass" else Verdict.FAIL
                case "pause":
                    driven.operate(lambda one: pause(one, driven.now_s))
                case "resume":
                    driven.operate(lambda one: resume(one, driven.now_s))
                case "promote" | "end":
                    going = Promotion(to_end=event == "end")
                    driven.operate(lambda one, going=going: promote(one, going, driven.now_s))  # type: ignore[misc]
                case "lose":
                    for worker in driven.fleet.workers.values():
                        if NEW in worker.versions and driven.phase is not RolloutPhase.FINISHING:
                            worker.versions[NEW] = VersionState.RESTARTING, 3
                            break
        except FailedPrecondition:
            pass
        before = driven.phase
        driven.tick(3)
        final = (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
        if driven.phase not in final and before not in final:
            assert driven.fleet.ready(OLD) == 2
    driven.verdict = Verdict.PASS
    if driven.rollout.paused and driven.phase in ABORTABLE:
        driven.operate(lambda one: resume(one, driven.now_s))
    for _ in range(200):
        driven.tick()
    assert driven.phase in (RolloutPhase.COMPLETED, RolloutPhase.ABORTED)
    wanted = NEW if driven.phase is RolloutPhase.COMPLETED else OLD
    assert driven.fleet.digests() == {wanted}
    assert driven.fleet.ready(wanted) == 2


def test_the_load_of_an_arm_s_replicas_is_relative_to_the_stable_ones() -> None:
    arms = (RouteArm("stable", OLD, 6600, 2), RouteArm("canary", NEW, 3400))
    route = ModelRoute("d", "s", arms)
    assert load_ratio(route, "canary") == pytest.approx(1.03, abs=0.01)
    assert load_ratio(route, "gone") == 0.0
    assert load_ratio(replace(route, arms=split(route, {"canary": 10_000})), "canary") == 0.0
