"""Reports become panels; without matplotlib, or with another file, the error names the next step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.plot_simulation import EXIT_USAGE, main, panels_of
from tests.sim.lab.records import sample_report

SCRIPT = Path(__file__).parents[3] / "scripts" / "plot_simulation.py"


def test_a_report_has_eight_panels_of_finite_points() -> None:
    panels = panels_of(json.loads(json.dumps(sample_report().as_json())))
    assert len(panels) == 8
    assert len({panel["title"] for panel in panels}) == 8
    for panel in panels:
        assert panel.get("lines") or panel.get("bars")
        for points in panel.get("lines", {}).values():
            assert all(len(point) == 2 for point in points)
    assert panels[1]["spans"] == [["a fault", 10.0, 20.0]]


def test_without_matplotlib_the_error_names_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    source = tmp_path / "report.json"
    source.write_text(json.dumps(sample_report().as_json()))
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(source), str(tmp_path / "report.png")],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == EXIT_USAGE
    assert ended.stderr == "error: plots need matplotlib; next: python -m pip install matplotlib\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"series": 3}', '{"series": {}, "header": {"marks": []}}'])
def test_another_file_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "other.json"
    source.write_text(text)
    assert main([str(source), str(tmp_path / "report.png")]) == EXIT_USAGE
    assert "is no report of a simulation" in capsys.readouterr().err


def test_a_missing_file_and_missing_arguments_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.json"), "x.png"]) == EXIT_USAGE
    assert "No such file" in capsys.readouterr().err
    assert main([]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("usage: ")
