"""Every log term, event, reason and alert that the troubleshooting page names is one that the code has."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from services.core.faults import ERRORS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations" / "troubleshooting.md").read_text()
NAMED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
LOG_TERM = re.compile(r"[a-z]+\.[a-z]+_?[a-z_]*")
NO_LOG = (".md", ".log", ".yml")


@cache
def sources() -> str:
    folders = ("services", "fairway/cli")
    return "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def log_terms(text: str) -> list[str]:
    """Return the terms of lines that name a log: there, a word with a dot is an event of it."""
    return [name for name in re.findall(r"`([^`\n]+)`", text) if LOG_TERM.fullmatch(name)]


@pytest.mark.parametrize("term", sorted(set(log_terms(PAGE))))
def test_a_log_term_is_an_event_of_the_code(term: str) -> None:
    assert f'"{term}"' in sources()


def test_every_alert_exists() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "fairway.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    assert {name for name in NAMED if name.startswith("Fairway")} <= alerts


def test_every_reason_and_event_exists() -> None:
    words = {name for name in NAMED if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", name)}
    settings = {name for name in words if name.startswith("FAIRWAY_")}
    own = {name for name in words - settings if name not in ERRORS and f'"{name}"' not in sources()}
    assert own == set()


def test_a_term_that_the_code_lacks_is_found() -> None:
    assert log_terms("search for `engine.lost_it` in `logs/x.log`") == ["engine.lost_it"]
    assert '"engine.lost_it"' not in sources()
