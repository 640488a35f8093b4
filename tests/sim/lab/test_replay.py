"""A recorded trace is replayed by its path, in both formats; what is wrong with it is said before the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.lab import runner
from simulator.lab.load import replay
from simulator.lab.load.traces import TraceError
from simulator.lab.report.report import LabReport
from simulator.lab.runner import run
from simulator.lab.scenario import Options, Scenario, ScenarioError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,374,44
2023-11-16 18:15:46.5000000,396,19
2023-11-16 18:15:47.0000000,879,55
2023-11-16 18:15:48.0000000,91,16
2023-11-16 18:15:50.0000000,90000,100
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1500, "output_length": 8, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 3, 4]}
{"timestamp": 2000, "input_length": 2000, "output_length": 6, "hash_ids": [0, 1, 2, 5]}
{"timestamp": 3000, "input_length": 2500, "output_length": 7, "hash_ids": [0, 1, 2, 5, 6]}
{"timestamp": 4000, "input_length": 600, "output_length": 4, "hash_ids": [0, 7]}
"""


def trace(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def one(name: str, **options: object) -> Scenario:
    return replay.scenario(name, Options(workers=1, preset="h100", **options))  # type: ignore[arg-type]


def ran(made: Scenario) -> LabReport:
    report = run(made)
    assert report.violations == ()
    return report


def test_an_azure_trace_is_replayed_as_recorded(tmp_path: Path) -> None:
    made = one(trace(tmp_path, AZURE))
    requests = [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in made.load()]
    recorded = [(0.0, 374, 44), (0.5, 396, 19), (1.0, 879, 55), (2.0, 91, 16), (4.0, 90_000, 100)]
    assert requests == recorded
    report = ran(made)
    assert (report.header.scenario, report.header.duration_s) == ("trace.csv", 4.0)
    assert report.total.ended_by == {"finished": 5}
    assert report.total.output_tokens == sum(output for _, _, output in recorded)


def test_a_mooncake_trace_is_replayed_with_its_prefixes(tmp_path: Path) -> None:
    report = ran(one(trace(tmp_path, MOONCAKE, "trace.jsonl")))
    assert report.total.ended_by == {"finished": 5}
    assert report.total.output_tokens == 30
    assert report.total.prompt_tokens == 7700
    # Row 3 begins with the blocks of row 1, row 4 with those of row 3; all five share the first.
    assert report.total.cached_tokens >= 1024 + 1536


def test_prompts_that_fit_no_worker_are_left_out_and_counted(tmp_path: Path) -> None:
    made = replay.scenario(trace(tmp_path, AZURE), Options(workers=1, preset="a10"))
    assert len(list(made.load())) == 4
    assert made.notes[0].startswith("1 rows are left out: their prompts are above ")
    long = "\n".join(line for line in AZURE.splitlines() if "90000" in line or "TIME" in line)
    with pytest.raises(ScenarioError, match=r"every prompt of .* choose a --preset with more memory"):
        replay.scenario(trace(tmp_path, long), Options(preset="a10"))


def test_a_rate_scales_the_time_and_a_duration_cuts_it(tmp_path: Path) -> None:
    path = trace(tmp_path, AZURE)
    twice = one(path, rate_per_s=2.5)  # five rows in four seconds are 1.25 a second
    assert [each.arrival_s for each in twice.load()] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert twice.duration_s == 2.0
    short = one(path, rate_per_s=2.5, duration_s=0.9)
    assert [each.arrival_s for each in short.load()] == [0.0, 0.25, 0.5]
    assert short.duration_s == 0.9
    assert one(path, duration_s=60.0).duration_s == 4.0
    half, full = (one(path, load_ratio=ratio).duration_s for ratio in (0.05, 0.1))
    assert half == pytest.approx(2 * full)


def test_rows_of_one_instant_have_no_rate(tmp_path: Path) -> None:
    path = trace(tmp_path, "\n".join(AZURE.splitlines()[:2]) + "\n")
    assert one(path).duration_s == replay.LEAST_S
    with pytest.raises(ScenarioError, match="no rate to scale"):
        one(path, rate_per_s=2.0)


def test_a_trace_is_looked_for_in_the_folder_of_traces(tmp_path: Path) -> None:
    trace(tmp_path, AZURE)
    assert replay.find("trace.csv", tmp_path) == tmp_path / "trace.csv"
    with pytest.raises(ScenarioError, match=r"no trace absent\.csv or .*absent\.csv; give its path"):
        replay.find("absent.csv", tmp_path)


def test_what_is_wrong_with_a_line_is_said_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 5: TIMESTAMP is 'yesterday'"):
        one(trace(tmp_path, AZURE.replace("2023-11-16 18:15:48.0000000", "yesterday")))
    with pytest.raises(TraceError, match="line 3: output_length is 0"):
        one(trace(tmp_path, MOONCAKE.replace(": 6,", ": 0,"), "trace.jsonl"))


def test_the_command_replays_a_path_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(tmp_path, MOONCAKE, "trace.jsonl")
    out = tmp_path / "out"
    given = ("--workers", "1", "--preset", "h100", "--traces", str(tmp_path), "--out", str(out))
    assert runner.main(("trace.jsonl", *given)) == 0
    assert "trace.jsonl: 5 rows over 4 s, replayed as recorded" in capsys.readouterr().out
    assert json.loads((out / "report.json").read_text())["total"]["finished"] == 5
    assert runner.main(("absent.jsonl", *given)) == 2
    assert "error: there is no trace absent.jsonl or " in capsys.readouterr().err
    assert runner.main((trace(tmp_path, "when,what\n1,2\n"), *given)) == 2
    assert "line 1: neither a JSON object nor the header" in capsys.readouterr().err
