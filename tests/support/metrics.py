"""What the tests read of metrics: the documented ones, the exported ones, those that an expression names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from scripts.metric_list import ALL, metric_list

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"\bfairway_[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Described:
    """One metric; ``roles`` are those that export it, ``labels`` without a histogram's own."""

    kind: str
    text: str
    labels: frozenset[str]
    roles: frozenset[str]


def documented(everyone: frozenset[str]) -> dict[str, Described]:
    """Return the metrics of docs/reference/metrics.md by name; those of all roles are of ``everyone``."""
    return {
        metric.name: Described(
            metric.kind,
            metric.text,
            frozenset(metric.labels),
            everyone if metric.role == ALL else frozenset(metric.role.split(" and ")),
        )
        for metric in metric_list()
    }


def exported(text: str) -> dict[str, Described]:
    """Return what one process exports by name; labels are known only of what has a value."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        found[name] = Described(family.type, family.documentation, labels, frozenset())
    return found


def values(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of a metric by their labels, sorted."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def named(expression: str) -> set[str]:
    """Return the metrics that an expression is about."""
    return {re.sub(r"_(bucket|count|sum)$", "", found) for found in _NAME.findall(expression)}


def dashboard_expressions(path: Path) -> Iterator[str]:
    board: dict[str, Any] = json.loads(path.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        yield variable["query"]
