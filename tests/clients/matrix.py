"""What the clients' scripts report, counted and written as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SERVED: Final = "served"
REFUSED: Final = "refused_by_name"
WRONG: Final = "wrong"
MIN_SERVED_RATIO: Final = 0.95
_CELLS: Final = {SERVED: "serves", REFUSED: "refuses", WRONG: "**wrong**"}
_HEAD: Final = """\
# Clients

<!-- Written by `make clients`. Do not edit. -->

Public clients at a pinned version, each in an environment of its own, against one installation of the bundled
model. *serves*: the client receives what it expects, checked by `tests/clients/scripts`. *refuses*: a status
of 400 to 499 whose message names the field. Empty: the client lacks the feature, or it is not tried.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    outcome: str
    evidence: str = ""


@dataclass
class Report:
    """What one client found. ``missing``: why it could not be installed, empty where it was."""

    name: str
    version: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    missing: str = ""


def read_outcomes(lines: Iterable[str], ended: str, known: Mapping[str, str]) -> dict[str, Outcome]:
    """Return the outcomes that a script printed. A feature without one is wrong, because of how it ``ended``.

    Other lines are what the client prints. Raises ValueError for a feature that no row has.
    """
    planned: list[str] = []
    found: dict[str, Outcome] = {}
    for line in lines:
        record = _record(line)
        if "features" in record:
            planned = record["features"]
        elif "outcome" in record:
            outcome = record["outcome"] if record["outcome"] in (SERVED, REFUSED) else WRONG
            found[record["feature"]] = Outcome(outcome, record["evidence"])
    if unknown := [name for name in (*planned, *found) if name not in known]:
        raise ValueError(f"no row of the matrix: {unknown}")
    if not planned:
        found["at_rest"] = Outcome(WRONG, f"the script reports no features: {ended}")
    for name in planned:
        found.setdefault(name, Outcome(WRONG, f"no outcome: {ended}"))
    return found


def _record(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def result_of(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the figures: clients that ran, cells, and how many have each outcome."""
    outcomes = [found.outcome for report in reports for found in report.outcomes.values()]
    return {
        "clients": sum(not report.missing for report in reports),
        "features": len(outcomes),
        "served": outcomes.count(SERVED),
        "refused_by_name": outcomes.count(REFUSED),
        "wrong": outcomes.count(WRONG),
        "not_installed": [report.name for report in reports if report.missing],
    }


def is_good(result: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong and 95 of 100 cells are served."""
    served_ratio = result["served"] / max(1, result["features"])
    return not result["wrong"] and served_ratio >= MIN_SERVED_RATIO and not result["not_installed"]


def page_of(reports: Sequence[Report], known: Mapping[str, str]) -> str:
    """Return the page: versions, then a row per feature and a column per client."""
    ran = [report for report in reports if not report.missing]
    lines = [_HEAD, "client | package", "--- | ---"]
    lines += [
        f"{one.name} | `{one.version}`" + (f", not installed: {one.missing}" if one.missing else "")
        for one in reports
    ]
    lines += ["", " | ".join(("feature", *(one.name for one in ran))), " | ".join(["---"] * (len(ran) + 1))]
    for name, title in known.items():
        cells = [_cell(one.outcomes.get(name)) for one in ran]
        if any(cells):
            lines.append(" | ".join((title, *cells)).rstrip())
    return "\n".join(lines) + "\n"


def _cell(outcome: Outcome | None) -> str:
    return "" if outcome is None else _CELLS[outcome.outcome]
