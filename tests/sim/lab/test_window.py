"""The window of a diagnosis is replayed with and without its causes; what cannot be read is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairway.cli.terminal.formats import document_of
from fairway.v1 import controlplane_pb2 as cp
from services.core.records import Priority
from simulator.lab.window import MAX_REQUESTS, main, runs_of
from tests.support.diagnoses import answer


def test_the_window_is_replayed_with_and_without_a_cause() -> None:
    found = answer(("prompts_grew", "ann"), ("arrivals_grew", "bob"), ("slow_worker", "worker-0"))
    was, prompts, arrivals, worker = runs_of(found).values()
    assert len(was.load) == 60
    assert {one.prompt_tokens for one in was.load if one.tenant == "ann"} == {1600}
    assert {one.prompt_tokens for one in prompts.load} == {100}
    assert [one.arrival_s for one in was.load][:3] == [0.0, 0.5, 1.0]
    assert {one.priority for one in was.load} == {Priority.BATCH, Priority.INTERACTIVE}
    assert len(arrivals.load) == 60  # bob sends no more than in the baseline
    assert was.workers["worker-0"] > 2 * was.workers["worker-1"]
    assert set(worker.workers.values()) == {was.workers["worker-1"]}


def test_more_arrivals_are_replayed_at_the_rate_of_the_baseline() -> None:
    found = answer(("arrivals_grew", "ann"))
    kept = [one for one in found.baseline_samples.requests if one.tenant == "bob"]
    del found.baseline_samples.requests[:]
    found.baseline_samples.requests.extend(kept)
    was, without = runs_of(found).values()
    assert {one.tenant for one in without.load} == {"bob"}
    assert len(was.load) == 2 * len(without.load)


def test_a_baseline_has_the_rate_of_the_seconds_that_samples_cover() -> None:
    found = answer(("arrivals_grew", "ann"))
    getattr(found.baseline, "from").seconds -= 72 * 3600
    (_, dropped) = runs_of(found).values()
    assert len(dropped.load) < 35
    found.baseline.covered_s = 30.0
    was, kept = runs_of(found).values()
    assert len(kept.load) == len(was.load)


def test_too_many_arrivals_are_replayed_as_close_together_as_they_were() -> None:
    found = answer()
    for one in found.window_samples.requests:
        one.weight = 300.0  # 300 arrivals every half second, each up to a second later
    (was,) = runs_of(found).values()
    assert len(was.load) == MAX_REQUESTS
    arrivals = [one.arrival_s for one in was.load]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(MAX_REQUESTS / 600, rel=0.05)


def test_requests_that_began_before_the_window_arrive_when_they_did() -> None:
    found = answer()
    getattr(found.window, "from").seconds += 10
    (was,) = runs_of(found).values()
    assert [one.arrival_s for one in was.load] == [number / 2 for number in range(60)]


def test_cache_hits_return_for_the_requests_that_had_none() -> None:
    found = answer(("cache_hits_fell", "bob"))
    for one in found.baseline_samples.requests:
        one.cached_tokens = 64
    was, without = runs_of(found).values()
    assert {one.prefix_tokens for one in was.load} == {0}
    hits = {(one.tenant, one.prefix_id, one.prefix_tokens) for one in without.load}
    assert hits == {("ann", 1, 0), ("bob", 2, 64)}


def test_prompts_and_workers_decide_the_quantile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causes = ("prompts_grew", "ann"), ("slow_worker", "worker-1"), ("quota_store_slow", "redis")
    found, path = answer(*causes), tmp_path / "samples.json"
    for one in found.window_samples.requests:
        if one.run.worker_id == "worker-1":
            one.run.before.step_us *= 10
    path.write_text(json.dumps(document_of(found)))
    assert main([str(path)]) == 0
    quantiles = json.loads(capsys.readouterr().out)
    assert set(quantiles) == {"as it was", "without prompts_grew ann", "without slow_worker worker-1"}
    assert quantiles["as it was"] > quantiles["without prompts_grew ann"] + 0.05
    assert quantiles["as it was"] > 2 * quantiles["without slow_worker worker-1"]


def changed(**fields: object) -> str:
    found = answer(*[("prompts_grew", f"tenant-{number}") for number in range(9)])
    found.MergeFrom(cp.DiagnoseLatencyResponse(**fields))  # type: ignore[arg-type]
    return json.dumps(document_of(found))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no diagnosis"),
        ("{}", "has 0 prices"),
        (changed(model="another"), "has 0 workers"),
        (changed(), "has 10 runs"),
    ],
)
def test_what_is_no_window_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "window.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert why in capsys.readouterr().err
    assert main([]) == 2
    assert main([str(tmp_path / "missing.json")]) == 2
