"""Reports are complete, reproducible, and readable as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.lab.report.table import seconds, text
from simulator.lab.runner import write
from tests.sim.lab.records import sample_report


def test_rows_are_per_tenant_and_class_and_add_up() -> None:
    report = sample_report()
    assert [(row.tenant, row.priority) for row in report.rows] == [
        ("acme", "standard"),
        ("globex", "standard"),
    ]
    assert report.total.sent == sum(row.sent for row in report.rows) == 318
    assert report.total.ended_by == {"QUEUE_TIMEOUT": 18, "finished": 300}
    assert report.total.good == 0  # the first token comes half a second after the target
    assert report.total.ttft_s.p50 == pytest.approx(2.5, rel=0.01)
    assert report.cache_hit_ratio == pytest.approx(0.3)
    assert sum(worker.share_ratio for worker in report.workers) == pytest.approx(1.0)


def test_same_run_same_digest() -> None:
    assert sample_report().digest == sample_report().digest
    assert sample_report().digest != sample_report(seed=2).digest


def test_text_has_what_a_reader_asks_for() -> None:
    said = text(sample_report())
    facts = (
        "made-up",
        "acme",
        "globex",
        "TTFT p50",
        "QUEUE_TIMEOUT 18",
        "Jain",
        "bound 5,000",
        "cache: 30.0%",
    )
    others = ("10 to 20 s: a fault", "VIOLATION tokens were lost", "within 1%", "gray_detect_s: -")
    for expected in (*facts, *others):
        assert expected in said
    assert max(len(line) for line in said.splitlines()) < 160


def test_json_says_the_same_and_is_strict(tmp_path: Path) -> None:
    report = sample_report()
    write(report, tmp_path / "deep" / "out")
    found = json.loads((tmp_path / "deep" / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    assert found["total"]["sent"] == report.total.sent
    assert found["digest"] == report.digest
    assert found["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1}
    assert len(found["series"]["ttft_cdf"]["all"]) > 0


def test_times_are_in_the_unit_that_reads_best() -> None:
    assert [seconds(value) for value in (None, 0.0421, 0.9994, 1.0, 12.345)] == [
        "-", "42 ms", "999 ms", "1.00 s", "12.35 s",
    ]  # fmt: skip
