"""Decisions about one deployment: bounds, operators, starts from zero, and what happens without a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.controlplane.resources.deployments import check_scaling
from services.controlplane.scaling.policy.deployment import DeploymentScaler, Situation, replica_cost
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.controlplane.scaling.policy.signals import load_of, merged
from services.core.errors import InvalidInput
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import Deployment, LoadedVersion, Meta, Priority, VersionState, Worker
from services.core.scaling import Scaled, Scaling

DIGEST = "sha256:" + "a" * 64
IDLE = PoolLoad(())
HELD = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, 100.0, 100.0),), held=1)


def loaded(state: VersionState, **more: Any) -> LoadedVersion:
    return LoadedVersion("chat", "m", DIGEST, state, **more)


class Plane:
    """One leader that decides about ``chat``, with a fleet that a test changes."""

    def __init__(self, scaling: Scaling, replicas: int = 1, decided: Scaled | None = None) -> None:
        self.deployment = Deployment(Meta("chat"), "m", "latest", DIGEST, replicas, scaling=scaling)
        self.decided = decided
        self.scaler = DeploymentScaler(ScalerTuning(settle_s=60.0))
        self.fleet: dict[tuple[str, str], LoadedVersion | None] = {}
        self.now_s, self.writes = 1000.0, 0
        self.more: dict[str, Any] = {}

    def ready(self, count: int) -> None:
        self.fleet = {(f"w{n}", DIGEST): loaded(VersionState.READY) for n in range(count)}

    def bounds(self, **changes: Any) -> None:
        assert self.deployment.scaling is not None
        self.deployment = replace(self.deployment, scaling=replace(self.deployment.scaling, **changes))

    def decide(self, load: PoolLoad | None, seconds: float = 1.0) -> Scaled:
        """Return the decision after so many seconds, one decision in each."""
        found = self.decided
        for _ in range(int(seconds)):
            self.now_s += 1.0
            found = self.scaler.decide(
                Situation(
                    self.deployment, self.decided, self.fleet, load, 7, self.now_s, self.now_s, **self.more
                )
            )
            self.writes += found != self.decided
            self.decided = found
        assert found is not None
        return found

    @property
    def signal(self) -> str:
        return self.scaler.reasons[0].signal


def test_a_held_request_starts_the_first_replica_and_idleness_removes_the_last() -> None:
    plane = Plane(Scaling(0, 3, idle_s=90.0), replicas=0)
    assert plane.decide(IDLE).replicas == 0
    assert plane.decide(HELD).replicas == 1
    assert (plane.signal, plane.decided and plane.decided.epoch) == ("held", 7)
    plane.ready(1)
    writes = plane.writes
    assert plane.decide(IDLE, 80).replicas == 1
    assert plane.writes == writes, "a decision is written when it changes"
    assert plane.decide(IDLE, 20).replicas == 0
    assert plane.signal == "idle"


def test_the_idle_time_begins_at_the_end_of_the_last_request() -> None:
    """A sequence that runs for longer keeps its replica; nor is it idle memory that another may take."""
    plane = Plane(Scaling(0, 3, idle_s=90.0), decided=Scaled("chat", 1))
    plane.ready(1)
    assert plane.decide(replace(IDLE, running=1), 300).replicas == 1
    assert plane.scaler.visits.active_s == plane.now_s
    assert plane.decide(IDLE, 89).replicas == 1
    assert plane.decide(IDLE, 2).replicas == 0


def test_requests_keep_the_last_replica_before_any_rate_is_measured() -> None:
    plane = Plane(Scaling(0, 3, idle_s=20.0), decided=Scaled("chat", 1))
    plane.ready(1)
    for arrived in range(0, 2000, 10):
        load = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, 0.0, float(arrived)),))
        assert plane.decide(load).replicas == 1, "requests arrive, though none waits when it is reported"
    assert plane.decide(IDLE, 70).replicas == 0


def test_the_rate_of_past_arrivals_keeps_no_replica_beyond_the_idle_time() -> None:
    plane = Plane(Scaling(0, 3, idle_s=20.0), decided=Scaled("chat", 1))
    plane.ready(1)
    load = IDLE
    for arrived in range(0, 1500, 10):
        load = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, 0.0, float(arrived)),), rate=20.0)
        assert plane.decide(load).replicas >= 1
    assert plane.decide(load, 15).replicas >= 1
    assert plane.decide(load, 100).replicas == 0
    writes, plane.fleet = plane.writes, {}
    assert plane.decide(load, 100).replicas == 0, "and starts none again"
    assert plane.writes == writes


def test_without_a_report_only_operators_change_the_replicas() -> None:
    plane = Plane(Scaling(0, 5, idle_s=10.0), replicas=3)
    plane.ready(3)
    assert plane.decide(None, 1000).replicas == 3
    assert plane.signal == "unobserved"
    plane.bounds(max_replicas=2)
    assert plane.decide(None).replicas == 2
    plane.bounds(override_replicas=4)
    assert plane.decide(None).replicas == 4, "an override holds in place of the bounds"
    plane.bounds(frozen=True, override_replicas=None, max_replicas=1)
    assert plane.decide(None).replicas == 4


def test_a_new_leader_removes_nothing_for_the_time_in_which_replicas_settle() -> None:
    plane = Plane(Scaling(1, 5), decided=Scaled("chat", 4, epoch=6))
    plane.ready(4)
    assert plane.decide(IDLE, 55).replicas == 4
    assert plane.decide(IDLE, 10).replicas == 1


def test_an_override_ends_by_itself_and_a_freeze_keeps_what_is_wanted() -> None:
    plane = Plane(Scaling(1, 5), replicas=1)
    plane.ready(1)
    plane.bounds(override_replicas=5, override_until_unix_s=plane.now_s + 10)
    assert plane.decide(IDLE).replicas == 5
    plane.ready(5)
    assert plane.decide(IDLE, 100).replicas == 1
    plane.ready(2)  # one moves from a node that drains
    plane.bounds(frozen=True)
    assert plane.decide(HELD, 5).replicas == 1


def test_a_start_that_fails_is_repeated_after_times_that_double_and_says_why() -> None:
    plane = Plane(Scaling(0, 2), replicas=0)
    waits = []
    for failures in (1, 2, 3):
        began_s = plane.now_s
        while plane.decide(HELD).replicas == 0:
            assert plane.now_s - began_s < 1000
        waits.append(round(plane.now_s - began_s))
        broken = loaded(VersionState.FAILED, reason="BAD_CHECKPOINT", message="no tensor x")
        plane.fleet = {("w0", DIGEST): broken}
        found = plane.decide(HELD)
        plane.fleet = {}
        assert (found.replicas, found.failed_wakes) == (0, failures)
        assert found.failure == "BAD_CHECKPOINT no tensor x"
        assert found.retry_unix_s > plane.now_s
    assert waits == [1, pytest.approx(60, abs=2), pytest.approx(120, abs=2)]
    while plane.decide(HELD).replicas == 0:
        pass
    plane.ready(1)
    found = plane.decide(HELD)
    assert (found.failed_wakes, found.failure, found.retry_unix_s) == (0, "", 0.0)


def test_a_start_without_a_worker_ends_before_the_request_that_waits_for_it() -> None:
    plane = Plane(Scaling(0, 2), replicas=0)
    assert plane.decide(HELD).replicas == 1
    assert plane.decide(HELD, 143).replicas == 1
    found = plane.decide(HELD, 3)
    assert (found.replicas, found.failure) == (0, "no replica was READY within 145 s: no worker took it")
    assert Scaled("chat", 0).hold_s == 150.0


def test_a_start_that_a_deposed_leader_began_is_given_up_by_its_successor() -> None:
    plane = Plane(Scaling(0, 2), replicas=0)
    plane.decide(HELD)
    successor = Plane(Scaling(0, 2), decided=plane.decided)
    assert successor.decide(HELD, 160).failed_wakes == 1


def test_the_time_that_a_start_takes_is_learned_from_the_replicas_that_became_ready() -> None:
    plane = Plane(Scaling(1, 2), replicas=1)
    for _ in range(12):
        plane.fleet = {}
        plane.decide(IDLE)
        plane.fleet = {("w0", DIGEST): loaded(VersionState.LOADING)}
        plane.decide(IDLE, 20)
        plane.ready(1)
        plane.decide(IDLE)
    assert plane.scaler.starts.mean_s == pytest.approx(20.0, abs=2.0)


def test_a_rollout_loses_no_replica() -> None:
    plane = Plane(Scaling(1, 5), decided=Scaled("chat", 4))
    plane.ready(4)
    plane.more = {"in_rollout": True}
    assert plane.decide(IDLE, 200).replicas == 4


def test_money_bounds_the_replicas_and_says_so() -> None:
    busy = PoolLoad((ClassLoad(Priority.STANDARD, 1.0, 1e6, 1e6),), rate=10.0, request_work=10.0)
    plane = Plane(Scaling(1, 9, max_cost_per_hour=7.0), replicas=1)
    plane.ready(1)
    plane.more = {"replica_cost": 2.0}
    assert plane.decide(busy, 5).replicas == 3
    assert plane.signal == "budget"
    assert "cost up to 6 per hour, 7 is allowed" in plane.scaler.reasons[0].text


def test_a_rate_that_was_measured_is_used_while_no_replica_runs() -> None:
    load = PoolLoad((ClassLoad(Priority.STANDARD, 2.0, 1000.0, 1000.0),), held=10, request_work=100.0)
    plane = Plane(Scaling(0, 9), decided=Scaled("chat", 0, rate=10.0))
    assert plane.decide(load).replicas > 1, "the backlog asks for more than the first"


def test_contradicting_bounds_are_refused_by_field_with_the_mend() -> None:
    nodes = [Worker("w0", "a", cost_per_hour=2.0), Worker("w1", "b", labels={"gpu": "h100"}, cost_per_hour=9)]
    deployment = Deployment(Meta("chat"), "m", "latest", DIGEST, 1, node_selector={"gpu": "h100"})
    assert (replica_cost(deployment, nodes), replica_cost(replace(deployment, node_selector={}), nodes)) == (
        9,
        9,
    )

    def refused(scaling: Scaling, workers: list[Worker] = nodes) -> tuple[str, str]:
        with pytest.raises(InvalidInput) as raised:
            check_scaling(deployment, scaling, workers)
        return raised.value.metadata["field"], raised.value.message

    assert refused(Scaling(3, 2))[0] == "deployment.scaling.min_replicas"
    assert refused(Scaling(1, 2, idle_s=5.0))[0] == "deployment.scaling.idle"
    assert refused(Scaling(0, 2, override_until_unix_s=5.0))[0] == "deployment.scaling.override_until"
    field, message = refused(Scaling(2, 4, max_cost_per_hour=10.0))
    assert field == "deployment.scaling.max_cost_per_hour"
    assert "2 replicas cost up to 18 per hour" in message
    assert "COST_PER_HOUR" in refused(Scaling(0, 1, max_cost_per_hour=1.0), [Worker("w", "a")])[1]
    check_scaling(deployment, Scaling(0, 4, idle_s=60.0, max_cost_per_hour=9.0), nodes)
    check_scaling(deployment, Scaling(2, 4, max_cost_per_hour=1.0), [])


def test_the_load_of_two_versions_is_one() -> None:
    one = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, 5.0, 50.0),), rate=None, held=1, reporter=3)
    two = PoolLoad(
        (ClassLoad(Priority.STANDARD, 4.0, 1.0, 10.0), ClassLoad(Priority.BATCH, arrived=7.0)), rate=9.0
    )
    found = merged([one, two])
    assert (found.rate, found.held, found.reporter) == (9.0, 1, 3)
    assert set(found.classes) == {
        ClassLoad(Priority.STANDARD, 4.0, 6.0, 60.0),
        ClassLoad(Priority.BATCH, arrived=7.0),
    }


def test_the_version_that_a_deployment_gets_has_the_rate_that_counts() -> None:
    loads = {"sha256:0": PoolLoad((), 3.0), DIGEST: PoolLoad((), 9.0)}
    assert load_of(Deployment(Meta("chat"), "m", "latest", DIGEST, 1), loads).rate == 9.0


def test_an_idle_one_that_left_a_full_pool_is_at_zero_until_a_request() -> None:
    plane = Plane(Scaling(0, 1, idle_s=600.0), replicas=0)
    plane.decide(HELD)
    plane.ready(1)
    plane.decide(IDLE, 10)
    plane.more["leaving"] = "its memory was needed"
    assert plane.decide(IDLE).replicas == 1, "it is only the next to leave, and still has its worker"
    plane.fleet = {}
    assert (plane.decide(IDLE).replicas, plane.signal) == (0, "displaced")
    plane.more.clear()
    assert plane.decide(IDLE, 5).replicas == 0, "what it needed a minute ago starts nothing"
    assert (plane.decide(HELD).replicas, plane.signal) == (1, "held")


def test_a_request_that_comes_when_it_leaves_keeps_it_and_its_start_can_fail() -> None:
    plane = Plane(Scaling(0, 1, idle_s=600.0), replicas=0)
    plane.decide(HELD)
    plane.ready(1)
    plane.decide(IDLE, 10)
    plane.more["leaving"], plane.fleet = "its memory was needed", {}
    assert plane.decide(HELD).replicas == 1
    found = plane.decide(HELD, 200)
    assert (found.replicas, found.failed_wakes) == (0, 1), "it is not woken again and again"


def resident(plane: Plane) -> Any:
    decided = plane.decided
    assert decided is not None
    now = Situation(plane.deployment, decided, plane.fleet, IDLE, 7, plane.now_s, plane.now_s, **plane.more)
    return plane.scaler.resident(now, decided.replicas)


def test_it_yields_only_while_idle_ready_and_free() -> None:
    plane = Plane(Scaling(0, 2, idle_s=600.0), replicas=0)
    plane.decide(IDLE)
    assert resident(plane) is None, "it holds nothing at zero"
    plane.decide(HELD)
    assert not resident(plane).yields, "it starts"
    plane.ready(1)
    plane.decide(IDLE)
    assert not resident(plane).yields, "it was just loaded"
    plane.decide(IDLE, 130)
    assert resident(plane).yields
    plane.more["in_rollout"] = True
    assert not resident(plane).yields
    plane.more.clear()
    plane.fleet[("w1", DIGEST)] = loaded(VersionState.LOADING)
    assert not resident(plane).yields
    plane.ready(1)
    plane.bounds(frozen=True)
    assert not resident(plane).yields
    plane.bounds(frozen=False, min_replicas=1)
    assert resident(plane) is None


def test_the_first_observed_start_replaces_the_default() -> None:
    plane = Plane(Scaling(0, 1), replicas=0)
    plane.decide(HELD)
    plane.fleet = {("w0", DIGEST): None}
    plane.decide(HELD, 3)
    plane.ready(1)
    plane.decide(HELD)
    assert plane.scaler.starts.mean_s == pytest.approx(3.0)


def test_what_does_not_fit_yet_is_no_failed_start() -> None:
    """Idle deployments leave for it, and the worker loads it then."""
    plane = Plane(Scaling(0, 1), replicas=0)
    plane.decide(HELD)
    plane.fleet = {("w0", DIGEST): loaded(VersionState.FAILED, reason="DOES_NOT_FIT")}
    assert plane.decide(HELD, 20).replicas == 1
    assert plane.decide(HELD, 200).failed_wakes == 1, "but not for ever"
