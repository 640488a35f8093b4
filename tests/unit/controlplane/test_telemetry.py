"""Rounds of the control plane as its operators see them."""

from __future__ import annotations

from prometheus_client import generate_latest

from services.controlplane.telemetry import STALLED_S, WRITTEN, AlertTelemetry, ReconcilerTelemetry
from services.runtime.telemetry.metrics import Metrics
from tests.support.clocks import HandClock
from tests.support.metrics import values


def test_a_round_that_does_not_end_is_a_problem_and_one_that_ends_is_timed() -> None:
    clock, metrics = HandClock(), Metrics()
    leads = [True]
    rounds = ReconcilerTelemetry(clock, metrics, leads=lambda: leads[0])

    def counted(name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return values(generate_latest(metrics.registry).decode(), name)

    clock.now_s += 10 * STALLED_S
    assert rounds.problem() == "", "who does not lead has no rounds"
    rounds.round_began()
    clock.now_s += STALLED_S
    assert rounds.problem() == ""
    clock.now_s += 1.0
    assert rounds.problem() == "a round has run for 31 s"
    rounds.round_ended(WRITTEN)
    assert rounds.problem() == ""
    assert counted("fairway_controlplane_round_seconds_sum") == {(): STALLED_S + 1.0}
    assert counted("fairway_controlplane_rounds_total") == {(("outcome", WRITTEN),): 1.0}
    rounds.unplaced(2)
    rounds.acted("assign", "done")
    assert counted("fairway_controlplane_unplaced_deployments") == {(): 2.0}
    leads[0] = False
    assert counted("fairway_controlplane_unplaced_deployments") == {(): 0.0}, "its last round is history"
    assert counted("fairway_controlplane_actions_total") == {(("kind", "assign"), ("outcome", "done")): 1.0}


def test_a_budget_whose_spending_is_unknown_stays_as_it_was() -> None:
    telemetry = AlertTelemetry(metrics := Metrics())
    telemetry.spent([("acme", "month", 99, 100), ("other", "day", None, 100)])
    version, (alert,) = telemetry.alerts.version, telemetry.alerts.payload(0.0)
    telemetry.spent([("acme", "month", None, 100), ("other", "day", None, 100)])
    assert (telemetry.alerts.version, telemetry.alerts.payload(0.0)) == (version, [alert])
    text = generate_latest(metrics.registry).decode()
    assert 'fairway_budget_spent_ratio{budget="acme",period="month"} 0.99' in text
    telemetry.spent([])
    telemetry.spent([("acme", "month", None, 100)])
    text = generate_latest(metrics.registry).decode()
    assert "fairway_budget_spent_ratio{" not in text, "of what was deleted nothing is known"
