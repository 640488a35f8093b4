"""The run of a large fleet, on a small one: it ends well, says what it held, and fails when memory grows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from simulator.fleet import scale
from simulator.fleet.fleet import simulate


@pytest.mark.sweep
def test_a_small_run_is_whole_and_says_what_it_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--workers", "20", "--requests", "800", "--seed", "3"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    result = json.loads(last.removeprefix("RESULT "))
    assert (result["requests"], result["finished"], result["violations"]) == (800, 800, 0)
    assert list(result["rss_mib_at_percent"]) == ["25", "50", "75", "100"]
    assert 0 < max(result["rss_mib_at_percent"].values()) <= result["peak_rss_mib"] + 1
    assert result["cpu_ms_per_request"] > 0


def test_a_run_with_a_request_that_did_not_finish_is_not_whole() -> None:
    report = simulate(scale.scale_spec(1, 0), scale.scale_load(5, workers=1, seed=0))
    assert scale.is_whole(report)
    assert not scale.is_whole(replace(report, outcomes={"finished": 4, "OVERLOADED": 1}))
    assert not scale.is_whole(replace(report, outcomes={"finished": 4}))


@pytest.mark.parametrize(
    ("rss_mib", "bounded"),
    [
        ({25: 300, 50: 400, 75: 410, 100: 420}, True),
        ({50: 400, 100: 500}, True),
        ({50: 400, 100: 501}, False),
        ({25: 100, 50: 200, 75: 300, 100: 400}, False),
        ({50: 400, 100: 300}, True),
        ({}, True),
        ({100: 900}, True),
    ],
)
def test_memory_may_grow_by_a_quarter_over_the_second_half(rss_mib: dict[int, int], bounded: bool) -> None:
    assert scale.is_bounded(rss_mib) is bounded
