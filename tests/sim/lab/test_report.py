"""Reports are complete, reproducible, and readable as text, JSON and a page of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.dom import minidom
from xml.etree import ElementTree

import pytest

from simulator.lab.command import write
from simulator.lab.report.scale import Axis, number, scale_of
from simulator.lab.report.svg import Line, Span, bar_plot, line_plot
from simulator.lab.report.table import seconds, text
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


def test_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    write(sample_report(names=("acme", '<script>alert("x")</script>')), tmp_path)
    said = (tmp_path / "report.html").read_text()
    minidom.parseString(said.removeprefix("<!DOCTYPE html>"))
    assert "<script" not in said
    assert "&lt;script&gt;" in said
    assert not re.search(r"(src|href)=|https?:|url\(|@import", said)
    assert said.count("<svg") == 8


def test_plots_draw_every_point_within_the_picture() -> None:
    lines = [
        Line("one", [(0.0, 1.0), (5.0, None), (10.0, 30.0)], 0),
        Line("two", [(0.0, 5.0), (10.0, 0.0)], 1),
    ]
    drawn = line_plot(
        lines, Axis("s", least=0.0), Axis("n", least=0.0), label="plot", spans=[Span("x", 2.0, 4.0)]
    )
    root = ElementTree.fromstring(drawn)
    paths = [each.get("d", "") for each in root.iter("path") if "line" in each.get("class", "").split()]
    assert len(paths) == 2
    assert paths[0].count("M") == 2  # a gap where there is no value
    for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", "".join(paths)):
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 250


def test_plots_of_nothing_say_so() -> None:
    for drawn in (line_plot([], Axis("x"), Axis("y"), label="none"), bar_plot([], Axis("y"), label="none")):
        assert "nothing to show" in drawn
        ElementTree.fromstring(drawn)


@pytest.mark.parametrize("values", [[0.0, 0.0], [5.0], [0.0, 1e-7], [1.0, 1e12], [3.0, 97.0]])
def test_scales_have_some_round_ticks_and_reach_over_the_values(values: list[float]) -> None:
    for axis in (Axis("x"), Axis("x", least=0.0)):
        scale = scale_of(axis, values, 0.0, 100.0)
        assert 1 <= len(scale.ticks) <= 9
        assert scale.most >= max(values)
        assert 0.0 <= scale.px(max(values)) <= 100.0


def test_logarithmic_scales_are_even_in_the_ratio() -> None:
    scale = scale_of(Axis("x", log=True), [0.01, 100.0], 0.0, 100.0)
    assert [scale.px(value) for value in (0.01, 0.1, 1.0, 10.0, 100.0)] == [0.0, 25.0, 50.0, 75.0, 100.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1234, "1234"),
        (12_345, "12.3k"),
        (2_500_000, "2.5M"),
        (3e9, "3G"),
        (1e-4, "0.0001"),
    ],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert number(value) == expected


def test_times_are_in_the_unit_that_reads_best() -> None:
    assert [seconds(value) for value in (None, 0.0421, 0.9994, 1.0, 12.345)] == [
        "-", "42 ms", "999 ms", "1.00 s", "12.35 s",
    ]  # fmt: skip
