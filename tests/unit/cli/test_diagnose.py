"""What `fairway diagnose` shows, which commands it names, and what it replays."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys

import pytest
import typer

from fairway.cli import replay as replays
from fairway.cli.commands.diagnose import shown
from fairway.cli.main import app
from fairway.cli.replay import replay, window_of
from fairway.v1 import common_pb2, slis_pb2
from fairway.v1 import controlplane_pb2 as cp
from services.controlplane.diagnosis.policy.diagnose import _NEXT
from services.controlplane.diagnosis.policy.suspects import CauseKind

BEGIN_S = 1_796_000_000


def answer(*causes: tuple[str, str]) -> cp.DiagnoseLatencyResponse:
    """An answer with requests of the tenants ann and bob: ann's are longer in the window."""
    found = cp.DiagnoseLatencyResponse(
        verdict="CAUSE_FOUND",
        message="prompts_grew (ann) explains 98% of the rise",
        model="chat",
        metric="ttft",
        quantile=0.95,
        notes=["2 reports of gateways are lost: their requests are missing in the samples"],
        step_prices=[0.01, 5e-5, 1e-4, 0.0],
    )
    for span, begin_s, tokens, samples in (
        (found.baseline, BEGIN_S, 100, found.baseline_samples),
        (found.window, BEGIN_S + 60, 1600, found.window_samples),
    ):
        getattr(span, "from").FromSeconds(begin_s)
        span.to.FromSeconds(begin_s + 30)
        span.requests = span.samples = 60
        for number in range(60):
            samples.requests.append(request(number, begin_s + number / 2, tokens if number % 2 else 100))
    found.quantiles.baseline_s, found.quantiles.window_s = 0.1, 0.32
    found.stages.add(stage="engine_wait", baseline_s=0.01, window_s=0.02, share=0.05)
    found.stages.add(stage="decode")
    found.tree.add(depth=0, text="chat: p95 of ttft: 100 ms, then 320 ms")
    found.tree.add(depth=3, text="prompts_grew (ann): without it 98% of the change goes")
    for kind, subject in causes:
        found.causes.add(
            kind=kind,
            subject=subject,
            score=0.98,
            share_s=0.21,
            counterfactual_s=0.11,
            evidence=["why"],
            next="fairway queue",
        )
    return found


def request(number: int, received_s: float, tokens: int) -> slis_pb2.FinishedRequest:
    steps = slis_pb2.StepSums(steps=2, step_us=40_000, prefill_tokens=tokens, decode_tokens=2)
    return slis_pb2.FinishedRequest(
        request_id=f"req_{number}",
        tenant="ann" if number % 2 else "bob",
        model="chat",
        reason="FINISHED",
        priority=common_pb2.PRIORITY_BATCH if number % 3 else common_pb2.PRIORITY_INTERACTIVE,
        received_unix_us=round(received_s * 1e6),
        stages_us=[100, 100, 100, 100, 100, 20_000, 40_000, 100],
        prompt_tokens=tokens,
        output_tokens=5,
        weight=1.0,
        run=slis_pb2.RunFacts(worker_id=f"worker-{number % 2}", before=steps),
    )


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


def test_the_window_is_replayed_with_and_without_a_cause() -> None:
    found = answer(("prompts_grew", "ann"), ("arrivals_grew", "bob"), ("slow_worker", "worker-1"))
    window = window_of(found, found.causes)
    was, prompts, arrivals, worker = window["runs"]
    assert len(was["requests"]) == 60
    assert {one["prompt"] for one in was["requests"] if one["tenant"] == "ann"} == {1600}
    assert {one["prompt"] for one in prompts["requests"]} == {100}
    assert [one["at_s"] for one in was["requests"]][:3] == [0.0, 0.5, 1.0]
    assert {one["priority"] for one in was["requests"]} == {"batch", "interactive"}
    assert len(arrivals["requests"]) == 60  # bob sends no more than in the baseline
    assert was["workers"] != worker["workers"]
    assert worker["workers"][0] == worker["workers"][1] == was["workers"][0]
    json.dumps(window)


def test_more_arrivals_are_replayed_at_the_rate_of_the_baseline() -> None:
    found = answer(("arrivals_grew", "ann"))
    kept = [one for one in found.baseline_samples.requests if one.tenant == "bob"]
    del found.baseline_samples.requests[:]
    found.baseline_samples.requests.extend(kept)
    was, without = window_of(found, found.causes)["runs"]
    assert {one["tenant"] for one in without["requests"]} == {"bob"}
    assert len(was["requests"]) == 2 * len(without["requests"])


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
