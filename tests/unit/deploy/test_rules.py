"""What the recording rules, alerts and panels evaluate to over scrapes of a gateway's own telemetry."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from random import Random

import pytest
import yaml
from prometheus_client import generate_latest

from fairway.tls import Leaf
from services.adapters.blobs.observed import ObservedBlobs
from services.adapters.quarantine import MemoryQuarantine
from services.controlplane.telemetry import MAX_NAMES, AlertTelemetry
from services.core.errors import FairwayError, IntegrityError, PoisonedInput
from services.core.faults import ERRORS, FINISHED, Fault
from services.core.generation import GenerationSpec, OutputLimits, Principal, Prompt, Sampling
from services.core.records import BurnAlert, KeyRole, Meta, Objective, Sli, SliStatus
from services.core.rollouts.routes import ROUTES
from services.core.safety import Intervention
from services.gateway.events import Received
from services.gateway.poison import PoisonGate
from services.gateway.safety.record import SafetyRecord
from services.gateway.slis import SliRecorder
from services.gateway.telemetry import GatewayTelemetry
from services.rpc.status import by_reason
from services.runtime.clock import SystemClock
from services.runtime.process.health import Check, Health
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support.memory_blobs import MemoryBlobs
from tests.support.metrics import ROOT, dashboard_expressions
from tests.support.promql import Scrapes, evaluate

RULES: dict[str, str] = {
    rule.get("record") or rule["alert"]: rule["expr"]
    for path in sorted((ROOT / "deploy" / "prometheus").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
}
RECORDED = [name for name in RULES if name.startswith("fairway:request_errors:")]
PANELS = {
    f"{path.stem}: {expression}": expression
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    for expression in dashboard_expressions(path)
    if expression != "prometheus" and not expression.startswith("label_values(")
}
SLOW, FAST, ACUTE = BurnAlert.SLOW, BurnAlert.FAST, BurnAlert.ACUTE
OURS = sorted(reason for reason, (fault, _) in ERRORS.items() if fault is Fault.OURS)
OTHERS = sorted(set(ERRORS) - set(OURS) - {FINISHED, "HTTP_PROBLEM"})


class Fleet:
    """One gateway that is scraped every 15 s, and the rules over it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.telemetry = GatewayTelemetry(self.metrics)
        self.scrapes = Scrapes()
        self.scrape()

    def scrape(self) -> None:
        text = generate_latest(self.metrics.registry).decode()
        self.scrapes.add(text, self.scrapes.now_s + 15.0, job="gateway", instance="gateway-0")
        for name in RECORDED:
            for labels, value in evaluate(RULES[name], self.scrapes).items():
                self.scrapes.put(name, dict(labels), value)

    def serve(self, finished: int, failed: Iterable[FairwayError] = ()) -> None:
        """End requests, scraped before their first and after their last."""
        received = Received(0.0, 1, "req_1", face="grpc")
        for _ in range(2):  # a series that just appeared has no rate
            for error in failed:
                self.telemetry.refused(received, error)
            for _ in range(finished):
                self.telemetry._requests.add("grpc", "finished", FINISHED, ERRORS[FINISHED][0])
            self.scrape()

    def ratios(self) -> list[float]:
        found = [evaluate(name, self.scrapes) for name in RECORDED]
        assert all(list(each) == [frozenset()] for each in found), f"a ratio is empty: {found}"
        return [value for each in found for value in each.values()]

    def fires(self, alert: str) -> bool:
        return bool(evaluate(RULES[alert], self.scrapes))


def test_the_error_ratio_is_zero_without_traffic_and_without_a_gateway() -> None:
    assert len(RECORDED) == 3
    fleet = Fleet()
    fleet.scrape()
    assert fleet.ratios() == [0.0] * 3
    assert [evaluate(RULES[name], Scrapes(60.0)) for name in RECORDED] == [{frozenset(): 0.0}] * 3


def test_the_error_ratio_is_zero_on_a_healthy_fleet_with_traffic() -> None:
    fleet = Fleet()
    fleet.serve(50)
    assert fleet.ratios() == [0.0] * 3
    assert not fleet.fires("FairwayErrorBudgetBurnsFast")


@pytest.mark.parametrize("reason", OURS)
def test_what_is_the_platforms_fault_counts_and_pages(reason: str) -> None:
    fleet = Fleet()
    fleet.serve(0, [by_reason(reason, "") for _ in range(50)])
    assert fleet.ratios() == [1.0] * 3
    assert fleet.fires("FairwayErrorBudgetBurnsFast")
    assert fleet.fires("FairwayErrorBudgetBurnsSlowly")


@pytest.mark.parametrize("reason", ["OVERLOADED", "DEADLINE_UNMEETABLE", "VERSION_FAILING", "TICKET_EXPIRED"])
def test_shedding_counts_against_availability(reason: str) -> None:
    assert reason in OURS


@pytest.mark.parametrize("reason", OTHERS)
def test_what_is_not_the_platforms_fault_changes_no_ratio(reason: str) -> None:
    fleet = Fleet()
    fleet.serve(10, [by_reason("OVERLOADED", "")] * 10 + [by_reason(reason, "")] * 80)
    assert fleet.ratios() == [0.5] * 3


# The indicators by tenant, model and zone are in tests/prometheus, which evaluates them with Prometheus.
@pytest.mark.parametrize("alert", [name for name in RULES if not name.startswith("fairway:")])
def test_no_alert_but_that_of_missing_roles_fires_on_an_empty_prometheus(alert: str) -> None:
    assert bool(evaluate(RULES[alert], Scrapes(60.0))) is (alert == "FairwayRoleAway")


@pytest.mark.parametrize("panel", PANELS)
def test_panels_can_be_evaluated_and_one_number_is_never_empty(panel: str) -> None:
    """A count of what has not happened yet is 0. Levels and quantiles are empty without anybody to ask."""
    expression = re.sub(r"\$(tenant|worker|model)\b", ".*", PANELS[panel]).replace("$__rate_interval", "5m")
    found = evaluate(expression, Scrapes(60.0))
    is_count = re.search(r"\b(rate|increase)\(", expression) and "histogram_quantile" not in expression
    if is_count and not re.search(r"\bby \(", expression):
        assert found == {frozenset(): 0.0}


async def test_the_first_damaged_bytes_page() -> None:
    """The series is there before anything happens: a counter that appears with 1 has grown by nothing."""

    class Damaged(MemoryBlobs):
        async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
            raise IntegrityError("flipped")
            yield b""

    metrics, scrapes = Metrics(), Scrapes()
    blobs = ObservedBlobs(Damaged(), metrics)
    scrapes.add(generate_latest(metrics.registry).decode(), 15.0, job="registry", instance="registry")
    with pytest.raises(IntegrityError):
        async for _ in blobs.get("sha256:" + "0" * 64):
            pass
    scrapes.add(generate_latest(metrics.registry).decode(), 30.0, job="registry", instance="registry")
    assert evaluate(RULES["FairwayDamagedBytes"], scrapes)


@pytest.mark.parametrize(("left_days", "fires"), [(16, False), (14, True), (-1, True)])
def test_a_certificate_that_was_not_renewed_pages_before_it_expires(left_days: int, fires: bool) -> None:
    """It lives for 90 days; the process reports it in /readyz and serves on."""
    leaf = Leaf(None, 1, 0.0, 90 * 86400.0)
    metrics, scrapes = Metrics(), Scrapes()
    health = Health(metrics)
    health.open()
    now_s = (90 - left_days) * 86400.0
    health.add([Check("certificate", lambda: leaf.notice(now_s), withdraws=False)])
    scrapes.add(generate_latest(metrics.registry).decode(), 15.0, job="worker", instance="worker-0")
    assert bool(evaluate(RULES["FairwayCertificateExpires"], scrapes)) is fires
    assert bool(health.notices()) is fires
    assert not health.problems()


async def test_the_first_condemned_input_of_a_version_alerts() -> None:
    metrics, scrapes, clock = Metrics(), Scrapes(), SystemClock()
    supervisor = Supervisor(clock)
    gate = PoisonGate(
        MemoryQuarantine(clock),
        secret=b"s",
        clock=clock,
        supervisor=supervisor,
        telemetry=GatewayTelemetry(metrics),
    )
    spec = GenerationSpec(
        "r", "chat", "sha256:1", 1, Prompt([1]), Sampling(seed=1), OutputLimits(max_tokens=1)
    )
    gate.check(spec)
    scrapes.add(generate_latest(metrics.registry).decode(), 15.0, job="gateway", instance="gateway-0")
    assert not evaluate(RULES["FairwayInputCondemned"], scrapes)
    await gate.condemn(spec, 2)
    with pytest.raises(PoisonedInput):
        gate.check(spec)
    scrapes.add(generate_latest(metrics.registry).decode(), 30.0, job="gateway", instance="gateway-0")
    (labels,) = evaluate(RULES["FairwayInputCondemned"], scrapes)
    assert dict(labels) == {"model": "chat", "version": "sha256:1"}
    await supervisor.close()


@pytest.mark.parametrize("seed", range(20))
def test_alerts_of_objectives_and_budgets_page_by_their_levels(seed: int) -> None:
    rng, metrics = Random(seed), Metrics()
    leads = [True]
    levels = AlertTelemetry(metrics, leads=lambda: leads[0])
    alerts = {f"o{number}": rng.choice(list(BurnAlert)) for number in range(rng.randint(1, 9))}
    spent = {f"b{number}": rng.randrange(0, 2000, 50) for number in range(rng.randint(1, 9))}
    levels.burns(
        (Objective(Meta(name), "chat"), [SliStatus(Sli.TTFT, 1.0, 9, 0, alert, ())])
        for name, alert in alerts.items()
    )
    levels.spent((name, "month", micros, 1000) for name, micros in spent.items())
    assert firing(metrics) == {
        (
            "FairwayObjectiveBurnsFast",
            frozenset(name for name, one in alerts.items() if one in (FAST, ACUTE)),
        ),
        ("FairwayObjectiveBurnsSlowly", frozenset(name for name, one in alerts.items() if one is SLOW)),
        ("FairwayBudgetSpent", frozenset(name for name, micros in spent.items() if micros >= 1000)),
        (
            "FairwayBudgetNearlySpent",
            frozenset(name for name, micros in spent.items() if 800 <= micros < 1000),
        ),
    }
    leads[0] = False
    assert {names for _, names in firing(metrics)} == {frozenset()}, "the next leader exports them"


def test_further_objectives_share_the_highest_level() -> None:
    metrics = Metrics()
    levels = AlertTelemetry(metrics)
    levels.burns(
        (Objective(Meta(f"o{number}"), "chat"), [SliStatus(Sli.TTFT, 1.0, 9, 0, alert, ())])
        for number, alert in enumerate([BurnAlert.NONE] * MAX_NAMES + [SLOW, ACUTE, FAST])
    )
    levels.spent((f"b{number}", "day", None if number % 2 else 1, number % 3) for number in range(9))
    text = generate_latest(metrics.registry).decode()
    assert text.count("fairway_objective_burn_level{") == MAX_NAMES + 1
    assert 'fairway_objective_burn_level{model="other",objective="other",sli="ttft"} 3.0' in text
    assert text.count("fairway_budget_spent_ratio{") == 3, "an unknown amount and no limit have no ratio"
    assert ("FairwayObjectiveBurnsFast", frozenset({"other"})) in firing(metrics)
    # Deleted objectives leave their labels to others.
    levels.burns([(Objective(Meta("new"), "chat"), [SliStatus(Sli.TTFT, 1.0, 9, 0, SLOW, ())])])
    text = generate_latest(metrics.registry).decode()
    assert 'fairway_objective_burn_level{model="chat",objective="new",sli="ttft"} 1.0' in text


def firing(metrics: Metrics) -> set[tuple[str, frozenset[str]]]:
    """Return the alerts of promises, each with the objectives or budgets that it names."""
    scrapes = Scrapes()
    scrapes.add(generate_latest(metrics.registry).decode(), 15.0, job="controlplane", instance="c")
    return {
        (
            alert,
            frozenset(
                dict(labels).get("objective") or dict(labels)["budget"]
                for labels in evaluate(RULES[alert], scrapes)
            ),
        )
        for alert in RULES
        if alert.startswith(("FairwayObjective", "FairwayBudget"))
    }


def test_interventions_that_jump_alert_and_steady_ones_do_not() -> None:
    rule, metrics, scrapes = RULES["FairwaySafetyInterventionsJump"], Metrics(), Scrapes()
    record = SafetyRecord(metrics, SliRecorder(Metrics()))
    caller = Principal("k", KeyRole.TENANT, "acme")
    found = Intervention("block", "insult", "output", 0, 3, "00")

    def minutes(first: int, last: int, each: int) -> None:
        for minute in range(first, last):
            for _ in range(each):
                record.add(caller, "req_1", "sha256:p", found)
            text = generate_latest(metrics.registry).decode()
            scrapes.add(text, 60.0 * minute, job="gateway", instance="g")

    minutes(0, 300, 3)
    assert evaluate(rule, scrapes) == {}
    minutes(300, 310, 40)
    assert set(evaluate(rule, scrapes)) == {frozenset({("tenant", "acme"), ("category", "insult")})}


def test_the_alert_of_a_faulty_route_names_its_whole_key() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "fairway.yml").read_text())["groups"]
    found = [one for group in rules for one in group["rules"] if one.get("alert") == "FairwayRouteFaulty"]
    assert f"delete {ROUTES}{{{{ $labels.model }}}} in etcd" in found[0]["annotations"]["action"]


def test_verdicts_that_are_missing_page() -> None:
    rule, metrics, scrapes = RULES["FairwaySafetyVerdictsMissing"], Metrics(), Scrapes()
    record = SafetyRecord(metrics, SliRecorder(Metrics()))
    for minute in range(3):
        for _ in range(4):
            record.no_verdict("guard", "LATE")
        scrapes.add(generate_latest(metrics.registry).decode(), 60.0 * minute, job="gateway", instance="g")
    assert set(evaluate(rule, scrapes)) == {frozenset({("model", "guard"), ("reason", "LATE")})}
