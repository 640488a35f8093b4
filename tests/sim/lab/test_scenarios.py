"""Every scenario runs on a small fleet and gives sane outcomes; equal runs give equal reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.lab import scenarios
from simulator.lab.report.report import LabReport
from simulator.lab.runner import run
from simulator.lab.scenario import Options, ScenarioError

NAMES = (
    "burst", "diurnal", "failover", "flapping-worker", "long-prompts", "network-cuts", "shared-prefixes",
    "slow-worker", "steady", "whale", "zone-loss",
)  # fmt: skip
OWN = '''"""A scenario of one's own."""
from simulator.fleet.spec import TenantSpec
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import Fixed
from simulator.lab.load.load import Stream, merged
from simulator.lab.scenario import Options, Scenario, fleet_of

def scenario(options: Options) -> Scenario:
    fleet = fleet_of(options, (TenantSpec("acme"),))
    stream = Stream("acme", Poisson(4.0), Fixed(64), Fixed(8))
    load = lambda: merged([stream], seed=options.seed, duration_s=2.0)
    return Scenario("own", "a small load", fleet, load, duration_s=2.0)
'''


def short(name: str, *, seed: int = 1, workers: int = 2) -> LabReport:
    options = Options(workers=workers, seed=seed, duration_s=8.0, preset="h100", load_ratio=0.08)
    return run(scenarios.load(name, options))


def test_all_scenarios_are_listed_with_what_they_show() -> None:
    assert tuple(scenarios.names()) == NAMES
    assert all(len(scenarios.summary(name)) > 30 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_scenario_runs_and_every_request_ends(name: str) -> None:
    report = short(name)
    assert report.violations == ()
    assert report.total.sent == sum(report.total.ended_by.values()) > 5
    assert report.total.finished >= 0.7 * report.total.sent
    assert report.total.output_tokens > 0
    assert report.total.ttft_s.p50 is not None
    assert 0 < report.total.ttft_s.p50 < 10
    assert 0 < report.busy_ratio <= 1
    assert sum(worker.share_ratio for worker in report.workers) == pytest.approx(1.0)
    assert len(report.series.waiting) > 10


def test_same_seed_same_report_and_another_seed_another() -> None:
    first = short("steady")
    assert first.digest == short("steady").digest
    assert first.digest != short("steady", seed=2).digest


def test_shared_prefixes_are_found_in_the_caches() -> None:
    assert short("shared-prefixes").cache_hit_ratio > 0.1
    assert short("steady").cache_hit_ratio < 0.02


def test_a_scenario_of_ones_own_is_taken_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    report = run(scenarios.load(str(path), Options(workers=1, seed=5)))
    assert (report.header.scenario, report.rows[0].tenant) == ("own", "acme")
    assert report.total.finished == report.total.sent


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\n", "has no function scenario"),
        ("def scenario(options):\n    return 5\n", "returned int, and must return a Scenario"),
        ("import no_such_module\n", "failed while it was read: ModuleNotFoundError"),
        ("def scenario(:\n", "failed while it was read: SyntaxError"),
    ],
)
def test_a_file_that_is_no_scenario_is_said_to_be_none(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=what):
        scenarios.load(str(path), Options())


def test_wrong_names_and_options_are_said() -> None:
    with pytest.raises(ScenarioError, match=r"no scenario 'steadi'; there are .*steady"):
        scenarios.load("steadi", Options())
    with pytest.raises(ScenarioError, match=r"there is no file absent\.py"):
        scenarios.load("absent.py", Options())
    with pytest.raises(ScenarioError, match="workers is 0"):
        Options(workers=0)
    with pytest.raises(ScenarioError, match="abacus is neither a preset"):
        scenarios.load("steady", Options(preset="abacus"))


def test_loads_are_the_same_at_each_call_and_sized_by_the_options() -> None:
    made = scenarios.load("steady", Options(seed=3, duration_s=20.0, rate_per_s=50.0))
    first = list(made.load())
    assert first == list(made.load())
    assert len(first) == pytest.approx(1000, rel=0.15)
    assert max(request.arrival_s for request in first) < 20.0
    arrivals = [request.arrival_s for request in first]
    assert arrivals == sorted(arrivals)
    double = scenarios.load("steady", replace(Options(), load_ratio=1.4))
    single = scenarios.load("steady", replace(Options(), load_ratio=0.7))
    assert len(list(double.load())) == pytest.approx(2 * len(list(single.load())), rel=0.1)
