"""`fairway simulate` runs the simulator as a process and passes on what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.lab import runner

BROKEN = '''"""A plan that says that something was violated."""
from dataclasses import replace
from simulator.lab.scenario import Options, Scenario, Script, Step
from simulator.lab.scenarios import load

def scenario(options: Options) -> Scenario:
    made = load("steady", Options(workers=1, duration_s=2.0, rate_per_s=2.0, preset="h100"))
    step = Step(0.5, lambda fleet: fleet.violations.add("tokens", "request-1: two came twice"))
    return replace(made, plans=(Script((step,)),))
'''
ROOT = Path(__file__).resolve().parents[3]


def fairway(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "fairway.cli.main", "simulate", *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_scenarios_are_listed() -> None:
    said = fairway("--list").stdout
    assert "whale" in said
    assert "network-cuts" in said


def test_a_scenario_is_run_and_its_report_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = fairway(
        "steady", "--workers", "2", "--seed", "4", "--duration", "4s", "--rate", "3", "--preset", "h100",
        "--out", str(out),
    ).stdout  # fmt: skip
    assert "TTFT p50" in said
    report = json.loads((out / "report.json").read_text())
    assert report["header"]["seed"] == 4
    assert report["header"]["duration_s"] == 4.0


def test_wrong_uses_of_the_command_end_with_2() -> None:
    assert "--list shows the scenarios" in fairway(code=2).stderr
    reason, next_step = fairway("steadi", code=2).stderr.splitlines()
    assert reason.startswith("error SIMULATION: there is no scenario 'steadi'; there are ")
    assert next_step.startswith("next: `fairway simulate --list`")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "name a scenario; --list shows those"),
        (("steady", "--preset", "abacus"), "abacus is neither a preset"),
        (("steady", "--workers", "0"), "workers is 0, and must be above 0"),
        (("steady", "--duration", "-3"), "duration_s is -3.0"),
        (("steady", "--rate", "nan"), "rate_per_s is nan"),
    ],
)
def test_wrong_uses_say_what_is_right(
    arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(arguments) == 2
    assert what in capsys.readouterr().err


def test_a_report_with_violations_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BROKEN)
    assert runner.main([str(path)]) == 1


def test_traces_come_from_the_option_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRWAY_TRACES", "/tmp/recorded")
    assert runner.traces_folder(None) == Path("/tmp/recorded")
    assert runner.traces_folder(Path("given")) == Path("given")
    monkeypatch.delenv("FAIRWAY_TRACES")
    assert runner.traces_folder(None) is None
