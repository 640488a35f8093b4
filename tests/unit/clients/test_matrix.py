"""The matrix counts what scripts report, and nothing that they leave out is good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.catalog import CLIENTS, SCRIPTS
from tests.clients.features import FEATURES
from tests.clients.matrix import Outcome, Report, is_good, page_of, read_outcomes, result_of

KNOWN = {"chat": "chat", "echo": "`echo`", "at_rest": "rests"}
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from harness import Features, check, same

FEATURES = Features()

class Refused(Exception):
    status_code = 400

def show(name, error, *fields):
    @FEATURES.shows(name, *fields)
    def run():
        if error:
            raise error

show("chat", None)
show("echo", Refused("echo is not offered"), "echo")
show("stop", Refused("something is not offered"), "stop")
show("suffix", ValueError("suffix"), "suffix")
show("logprobs", None)
FEATURES.shows("choices", "choices")(lambda: same("choices", 2))
FEATURES.run()
"""

TARGET_FIELDS = (
    "url",
    "key",
    "model",
    "agent",
    "scripted",
    "embedder",
    "reranker",
    "limited_key",
    "paced_key",
    "checkpoint",
    "scratch",
)


def lines(*records: object) -> list[str]:
    return ["printed by the client", "{no json", *(json.dumps(record) for record in records)]


def test_a_feature_without_an_outcome_is_wrong() -> None:
    planned = {"features": ["chat", "echo"]}
    chat = {"feature": "chat", "outcome": "served", "evidence": ""}
    found = read_outcomes(lines(planned, chat), "exit code 1", KNOWN)
    assert found == {"chat": Outcome("served"), "echo": Outcome("wrong", "no outcome: exit code 1")}
    nothing = read_outcomes(lines(), "exit code 1", KNOWN)
    assert [one.outcome for one in nothing.values()] == ["wrong"]
    odd = {"feature": "chat", "outcome": "fine", "evidence": ""}
    assert read_outcomes(lines(planned, odd), "", KNOWN)["chat"].outcome == "wrong"
    with pytest.raises(ValueError, match="other"):
        read_outcomes(lines({"features": ["other"]}), "", KNOWN)


def test_95_of_100_are_served_and_none_is_wrong() -> None:
    served, refused, wrong = (Outcome(kind) for kind in ("served", "refused_by_name", "wrong"))
    report = Report("a", "a==1", {str(number): served for number in range(19)} | {"19": refused})
    assert result_of([report]) == {
        "clients": 1,
        "features": 20,
        "served": 19,
        "refused_by_name": 1,
        "wrong": 0,
        "not_installed": [],
    }
    assert is_good(result_of([report]))
    assert not is_good(result_of([report, Report("b", "b==1", missing="no network")]))
    report.outcomes["18"] = refused
    assert not is_good(result_of([report]))
    report.outcomes.update({str(number): served for number in range(99)}, x=wrong)
    assert not is_good(result_of([report]))


def test_the_page_has_a_row_per_feature_and_names_who_is_missing() -> None:
    reports = [
        Report("a", "a==1", {"chat": Outcome("served"), "echo": Outcome("refused_by_name")}),
        Report("b", "b==1", {"chat": Outcome("wrong", "why")}),
        Report("c", "c==1", missing="no network"),
    ]
    page = page_of(reports, KNOWN)
    assert "c | `c==1`, not installed: no network" in page
    assert page.endswith("feature | a | b\n--- | --- | ---\nchat | serves | **wrong**\n`echo` | refuses |\n")


def test_a_refusal_is_a_status_whose_message_names_the_field(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    target = json.dumps(dict.fromkeys(TARGET_FIELDS, "x"))
    command = [sys.executable, str(script), target, str(SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    found = read_outcomes(done.stdout.splitlines(), "", FEATURES)
    assert {name: one.outcome for name, one in found.items()} == {
        "chat": "served",
        "echo": "refused_by_name",
        "stop": "wrong",  # refused, but not by name
        "suffix": "wrong",  # an error without a status
        "logprobs": "served",
        "choices": "wrong",  # a wrong answer is no refusal
    }


def test_every_client_has_a_script_of_its_own() -> None:
    assert len({client.script for client in CLIENTS}) == len(CLIENTS)
    assert all((SCRIPTS / client.script).exists() for client in CLIENTS)
    assert all("==" in one or "@" in one for client in CLIENTS for one in client.packages)


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        (("hi", [], "stop"), True),
        (("hi", [], "length"), True),
        ((None, [("get_weather", '{"city":"Oslo","days":2}')], "tool_calls"), True),
        ((None, [("get_weather", '{"city":"Oslo","days":2}')], "stop"), False),
        ((None, [("get_weather", '{"city":"Oslo"}')], "tool_calls"), False),
        ((None, [("get_weather", '{"city":"Oslo","days":9}')], "tool_calls"), False),
        ((None, [("get_weather", '{"city":"Oslo","da')], "tool_calls"), False),
        ((None, [("other", "{}")], "tool_calls"), False),
        (("hi", [], "tool_calls"), False),
        (("", [], "stop"), False),
        ((None, [], "stop"), False),
    ],
)
def test_an_answer_to_tools_is_text_or_valid_calls(answer: tuple[object, ...], holds: bool) -> None:
    """As the feature tool_auto judges it."""
    script = """
import json, sys
sys.path.insert(0, sys.argv[2])
from harness import is_text_or_calls
content, calls, finish = json.loads(sys.argv[3])
is_text_or_calls(content, [tuple(each) for each in calls], finish)
"""
    target = dict.fromkeys(("url", "key", "model", "agent", "embedder", "reranker"), "")
    target |= dict.fromkeys(("scripted", "limited_key", "paced_key", "checkpoint", "scratch"), "")
    command = [sys.executable, "-c", script, json.dumps(target), str(SCRIPTS), json.dumps(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) is holds, done.stderr
