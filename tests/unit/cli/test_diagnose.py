"""What `fairway diagnose` shows, which commands it names, and what it replays."""

from __future__ import annotations

import importlib.util
import shlex
import sys

import pytest
import typer

from fairway.cli import replay as replays
from fairway.cli.commands.diagnose import shown
from fairway.cli.main import app
from fairway.cli.replay import REPLAYED, replay
from services.controlplane.diagnosis.policy.diagnose import _NEXT
from services.controlplane.diagnosis.policy.suspects import CauseKind
from simulator.lab.window import WITHOUT
from tests.support.diagnoses import answer


def test_the_answer_is_shown_with_its_tree_and_its_causes() -> None:
    assert (
        shown(answer(("prompts_grew", "ann")))
        == """\
CAUSE_FOUND: prompts_grew (ann) explains 98% of the rise
window    2026-11-30T00:54:20Z to 2026-11-30T00:54:50Z: 60 requests, 60 sampled
baseline  2026-11-30T00:53:20Z to 2026-11-30T00:53:50Z: 60 requests, 60 sampled
note      2 reports of gateways are lost: their requests are missing in the samples

ttft p95 of chat: 100 ms, then 320 ms
  STAGE          BASELINE     WINDOW   SHARE
  engine wait       10 ms      20 ms      5%

TREE
  chat: p95 of ttft: 100 ms, then 320 ms
        prompts_grew (ann): without it 98% of the change goes

1. prompts_grew ann: score 0.98, explains 210 ms, without it 110 ms
   why
   next: fairway queue
"""
    )


@pytest.mark.parametrize("kind", CauseKind)
def test_the_next_command_of_each_cause_exists(kind: CauseKind) -> None:
    words = shlex.split(_NEXT[kind].format(subject="subject"))
    assert words.pop(0) == "fairway"
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= options


def test_the_simulator_has_each_cause_that_is_replayed() -> None:
    assert set(WITHOUT) == REPLAYED


def test_what_the_simulator_says_orders_the_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(("prompts_grew", "ann"), ("slow_worker", "worker-1"), ("quota_store_slow", "redis"))
    names = [f"without {one.kind} {one.subject}" for one in found.causes[:2]]
    quantiles = {"as it was": 0.3, names[0]: 0.29, names[1]: 0.1}
    monkeypatch.setattr(replays, "_quantiles", lambda *_: ("", quantiles))
    replay(found)
    assert [one.kind for one in found.causes] == ["slow_worker", "quota_store_slow", "prompts_grew"]
    assert found.causes[0].replayed_without_s == 0.1
    assert found.causes[2].score == pytest.approx(0.49)
    assert "the replay does not need it" in found.causes[2].evidence[-1]
    assert found.causes[1].evidence[-1] == "not replayed: the simulator has no such part"


def test_the_simulator_replays_the_window_without_its_cause() -> None:
    found = answer(("slow_worker", "worker-1"), ("prompts_grew", "ann"))
    replay(found)
    prompts, worker = found.causes
    assert (prompts.kind, worker.kind) == ("prompts_grew", "slow_worker")
    assert prompts.replayed_without_s < 0.5 * prompts.replayed_s
    assert worker.replayed_without_s > 0.9 * worker.replayed_s  # both workers are equally fast
    assert "the replay does not need it" in worker.evidence[-1]


def test_without_the_simulator_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(("prompts_grew", "ann"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    replay(found)
    (cause,) = found.causes
    assert cause.score == pytest.approx(0.98 * 0.9)
    assert "the simulator is not installed" in cause.evidence[-1]


def test_a_simulation_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(("prompts_grew", "ann"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    replay(found)
    assert found.causes[0].evidence[-1] == "not replayed: the simulation failed: nothing finished"
