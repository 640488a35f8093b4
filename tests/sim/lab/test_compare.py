"""The comparison's tables and ratios are those of the runs; cases are sized and seeded as they say."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from simulator.lab import compare
from simulator.lab.baselines import ABLATIONS, OURS, POLICIES
from simulator.lab.cases import GRAY, LONG, WHALE, WHALE_CAPPED, Case, Figures, run_case, scenario_of
from simulator.lab.cases import figures as figures_of
from simulator.lab.runner import run
from tests.sim.lab.test_traces import HEADER
from tests.support.sweep import daily

PLAIN = Figures(0.2, 1.0, 2.0, 0.5, 0.05, 8.0, 0.8, 2500.0, 2000.0, 0.1, 0.0, 0.9, 0.6, 4.0, 0.02)


def results(seeds: int = 3) -> compare.Results:
    return dict.fromkeys(compare.planned(seeds, 1.0, None), PLAIN)


def test_every_policy_runs_on_every_trace_and_seed() -> None:
    cases = compare.planned(2, 1.0, None)
    assert len(cases) == len(set(cases)) == 2 * (2 * len(POLICIES) + 4)


def test_ratios_are_ours_over_theirs_and_the_worse_trace_counts() -> None:
    found = results()
    for case, figures in found.items():
        if (case.workload, case.policy) == ("azure", "ours"):
            found[case] = replace(figures, ttft_mean_s=0.25, good_per_s=12.0)
        if (case.workload, case.policy) == ("mooncake", "ours"):
            found[case] = replace(figures, ttft_mean_s=0.4, good_per_s=10.0)
        if (case.workload, case.policy) == ("mooncake", "prefix-only"):
            found[case] = replace(figures, good_per_s=9.0)
        if (case.workload, case.policy) == (WHALE, "ours"):
            found[case] = replace(figures, minnow_ttft_p95_s=0.66, tokens_per_s=1960.0)
        if case.workload == GRAY:
            found[case] = replace(figures, found_after_s=3.0 + case.seed)
    assert compare.result(found) == {
        "ttft_vs_round_robin": 0.8,
        "goodput_vs_best_other": 1.111,
        "minnow_p95_ttft_ratio": 1.1,
        "throughput_vs_fcfs": 0.98,
        "gray_detect_s": 4.0,
    }


def test_the_whales_ratio_stands_beside_what_both_runs_asked_for() -> None:
    found = results(seeds=2)
    for case, figures in found.items():
        if (case.workload, case.policy) == (WHALE, "ours"):
            p95_s = 1.2 + 0.3 * case.seed
            found[case] = replace(figures, minnow_ttft_p95_s=p95_s, asked_tokens_per_s=2500.0)
        if case.workload == WHALE_CAPPED:  # what was served of it says nothing of the capacity
            found[case] = replace(figures, asked_tokens_per_s=1900.0, tokens_per_s=1800.0)
    text = "\n".join(compare.tables(found))
    assert "uncapped: 125%, 125% of what the saturated fleet served" in text
    assert "capped: 95%, 95% of what the saturated fleet served" in text
    assert "uncapped over capped, by seed: 2.00, 2.50" in text


def test_tables_have_every_policy_and_the_spread() -> None:
    text = "\n".join(compare.tables(results()))
    for expected in (
        *(policy.name for policy in POLICIES),
        "azure",
        "mooncake",
        "least",
        "most",
        "of grants",
    ):
        assert expected in text
    assert max(len(line) for line in text.splitlines()) < 160


def test_the_rules_are_left_out_one_at_a_time_and_compared_with_all() -> None:
    cases = compare.planned_ablations(2, 1.0, None)
    assert {case.policy for case in cases} == {OURS.name, *(policy.name for policy in ABLATIONS)}
    every = Figures(*[1.0] * len(fields(Figures)))
    slow = replace(every, ttft_p95_s=3.0, minnow_ttft_p95_s=2.0)
    rule = ABLATIONS[0].name
    lines, ratios = compare.ablated({case: slow if case.policy == rule else every for case in cases})
    assert len(lines) == 1 + len(cases) / 2
    assert ratios[f"{LONG}, {rule}"] == 3.0
    assert ratios[f"{WHALE}, {rule}"] == 2.0
    assert set(ratios.values()) == {1.0, 2.0, 3.0}


def test_a_worker_that_is_never_found_counts_as_never() -> None:
    found = {case: replace(PLAIN, found_after_s=float("inf")) for case in results()}
    line = json.dumps(compare.result(found), allow_nan=False)
    assert json.loads(line)["gray_detect_s"] is None
    text = "\n".join(compare.tables(found))
    assert "ejected after never (never to never)" in text
    once = {
        case: figures if case.seed else replace(figures, found_after_s=float("inf"))
        for case, figures in results().items()
    }
    assert compare.result(once)["gray_detect_s"] == PLAIN.found_after_s


def test_a_seed_replays_its_own_part_of_the_trace_at_the_stated_load() -> None:
    first, second = (scenario_of(Case("azure", "ours", seed, 1 / 3)) for seed in (0, 1))
    one, two = list(first.load()), list(second.load())
    assert len(one) == len(two) == 200
    assert [each.prompt_tokens for each in one] != [each.prompt_tokens for each in two]
    assert one == list(first.load())
    rate = 200 / first.duration_s
    assert 8 * 1.0 < rate < 8 * 2.5  # eight A10 near their capacity


def test_policies_get_the_same_requests() -> None:
    loads = [list(scenario_of(Case("mooncake", policy.name, 0, 0.05)).load()) for policy in POLICIES]
    assert all(load == loads[0] for load in loads)
    capped, whole = (list(scenario_of(Case(name, "ours", 0, 0.3)).load()) for name in (WHALE_CAPPED, WHALE))
    small = [[each for each in load if each.tenant != "whale"] for load in (capped, whole)]
    assert small[0] == small[1]
    assert len(capped) < len(whole)


def test_recorded_traces_are_taken_from_their_folder(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:{15 + at // 60:02}:{at % 60:02}.5,{300 + at},{20 + at % 7}" for at in range(60)]
    (tmp_path / "azure_llm_2023_conv.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    found = scenario_of(Case("azure", "ours", 0, 50 / 600, tmp_path))
    assert [each.prompt_tokens for each in found.load()] == list(range(300, 350))


@pytest.mark.parametrize("workload", daily(["azure", "mooncake"], ["azure"]))
def test_a_small_comparison_runs(workload: str) -> None:
    found = {policy: run_case(Case(workload, policy, 0, 0.05)) for policy in ("ours", "round-robin")}
    for figures in found.values():
        assert figures.ttft_p50_s > 0
        assert figures.tokens_per_s > 0
        assert figures.refused_ratio < 0.5


@pytest.mark.parametrize("workload", daily([WHALE, WHALE_CAPPED], [WHALE_CAPPED]))
def test_minnows_are_one_population_without_the_whale(workload: str) -> None:
    case = Case(workload, "ours", 0, 0.05)
    scenario = scenario_of(case)
    small = {tenant.name for tenant in scenario.fleet.tenants} - {WHALE}
    assert set(scenario.together) == small
    report = run(scenario)
    found = figures_of(report, case).minnow_ttft_p95_s
    assert found == report.figures["together_ttft_p95_s"]
    p95_s = [row.ttft_s.p95 or 0.0 for row in report.rows if row.tenant in small]
    assert min(p95_s) <= found <= max(p95_s)
