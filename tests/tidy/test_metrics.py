"""Alerts and dashboards ask for metrics that exist, by labels that they have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.core import errors
from tests.support.metrics import ROOT, dashboard_expressions, documented, named

RULES = sorted((ROOT / "deploy" / "prometheus").glob("*.yml"))
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
KNOWN = documented(frozenset({"all"}))
# What Prometheus adds to every series.
TARGET_LABELS = {"job", "instance", "le"}
RECORDED = re.compile(r"\bfairway:[a-z0-9_:]+")


def _rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def _expressions() -> list[str]:
    boards = [expression for path in DASHBOARDS for expression in dashboard_expressions(path)]
    return [*(rule["expr"] for rule in _rules()), *boards]


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (metric, [(label, value)]) of each selector of an expression."""
    found = []
    for name, inside in re.findall(r"\b(fairway_[a-z0-9_]+)(?:\{([^}]*)\})?", expression):
        pairs = re.findall(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', inside)
        found.append((re.sub(r"_(bucket|count|sum)$", "", name), pairs))
    return found


def test_there_are_alerts_and_dashboards() -> None:
    assert len(_rules()) > 10
    assert {path.stem for path in DASHBOARDS} == {"fleet", "tenants", "workers", "control", "usage"}


def test_expressions_name_metrics_that_exist() -> None:
    asked = {name for expression in _expressions() for name in named(expression)}
    assert asked - set(KNOWN) == set()


def test_expressions_use_labels_that_the_metrics_have() -> None:
    wrong = [
        f"{name}{{{label}}}"
        for expression in _expressions()
        for name, pairs in selectors(expression)
        for label, _ in pairs
        if label not in KNOWN[name].labels | TARGET_LABELS
    ]
    assert wrong == []


def test_sums_keep_labels_that_exist() -> None:
    wrong = []
    for expression in _expressions():
        had = {label for name in named(expression) for label in KNOWN[name].labels} | TARGET_LABELS
        for kept in re.findall(r"\bby \(([^)]*)\)", expression):
            wrong += [f"{label} in {expression}" for label in re.split(r",\s*", kept) if label not in had]
    assert wrong == []


def test_recorded_series_are_recorded() -> None:
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    asked = {name for expression in _expressions() for name in RECORDED.findall(expression)}
    assert asked <= recorded


def test_reasons_in_alerts_are_of_the_error_tree() -> None:
    tree = {
        kind.reason for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "reason")
    }
    asked = {
        reason
        for expression in _expressions()
        for name, pairs in selectors(expression)
        for label, value in pairs
        if label == "reason" and name == "fairway_gateway_requests_total"
        for reason in value.split("|")
    }
    assert asked <= tree


def test_every_alert_says_what_to_do() -> None:
    for rule in _rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["action"]


def test_every_alert_names_a_page_and_a_section_that_exist() -> None:
    for rule in _rules():
        if "alert" in rule:
            path, _, section = rule["annotations"]["runbook_url"].partition("#")
            heads = re.findall(r"^#+ (.+)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            assert not section or section in anchors, f"{rule['alert']}: {path}#{section}"


@pytest.mark.parametrize("path", [*RULES, *DASHBOARDS], ids=lambda path: path.name)
def test_brackets_of_expressions_close(path: Path) -> None:
    expressions = (
        dashboard_expressions(path) if path.suffix == ".json" else (rule["expr"] for rule in _rules())
    )
    for expression in expressions:
        depth = 0
        for character in re.sub(r'"[^"]*"', "", expression):
            depth += (character in "([{") - (character in ")]}")
            assert depth >= 0, expression
        assert depth == 0, expression
