"""`fairway bench` runs suites, keeps what they print, compares and plots it, and names what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.results import print_result
from bench.serving import Load, aiperf_figures, guidellm, guidellm_figures
from bench.store.records import BenchStore, StoreError
from bench.store.running import start, values_of_lines
from bench.store.suites import BenchSuite

ROOT = Path(__file__).parents[3]
# A benchmark whose values grow with each start; ``{factor}`` is what a source tree changes.
MODULE = """
import os, pathlib, sys
from bench.results import print_result
count = pathlib.Path(os.environ["COUNT"])
start = len(count.read_text()) if count.exists() else 0
with count.open("a") as file:
    file.write("x")
pathlib.Path(__file__).with_name("starts.txt").write_text(str(start))
print("working")
rates = [{factor} * (100 + start + n) for n in range(3)]
print_result({{"rate": rates, "nested": {{"ms": 4.0 + start % 2}}}})
sys.exit({status})
"""
SUITES = "[fake]\nmodule = 'fakebench'\nhigher = ['rate']\n[fake.parameters]\n"


def bench(*arguments: str, path: Path, status: int = 0, module: str = "bench") -> tuple[str, str]:
    """Return what the command wrote to stdout and stderr. Its relative paths are below ``path``."""
    paths = os.pathsep.join([str(ROOT), str(path)])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        # A module written twice within a second, equally long, would be taken from its first bytecode.
        env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "COUNT": str(path / "count")},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def fairway(*arguments: str, path: Path, status: int = 0) -> tuple[str, str]:
    """Return what `fairway bench` wrote."""
    return bench("bench", *arguments, path=path, status=status, module="fairway.cli.main")


def fake(folder: Path, *, factor: float = 1.0, status: int = 0) -> Path:
    """Return the file of suites of a benchmark that stands in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fakebench.py").write_text(MODULE.format(factor=factor, status=status))
    (folder / "suites.toml").write_text(SUITES)
    return folder / "suites.toml"


def test_medians_and_samples_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(
        {"a": [3.0, 1.0, 2.00000001], "b": 7, "none": None, "in": {"c": [0.5], "text": "x"}, "d": []}
    )
    samples, result = capsys.readouterr().out.splitlines()
    assert samples == 'SAMPLES {"a": [3.0, 1.0, 2.0]}'
    assert result == 'RESULT {"a": 2.0, "b": 7, "none": null, "in": {"c": 0.5, "text": "x"}, "d": null}'
    found = values_of_lines({"SAMPLES ": samples, "RESULT ": result})
    assert found == {"a": [3.0, 1.0, 2.0], "b": [7.0], "in.c": [0.5]}


@pytest.mark.parametrize("line", ["RESULT [1]", "RESULT {", 'RESULT {"a": null}', 'RESULT {"a": "fast"}'])
def test_a_result_without_figures_is_refused(line: str) -> None:
    with pytest.raises(StoreError, match="RESULT"):
        values_of_lines({"RESULT ": line})


def test_a_suite_is_recorded_compared_and_plotted(tmp_path: Path) -> None:
    suites = fake(tmp_path / "bench-of-a-user")
    at = suites.parent
    store = ("--store", "records")
    for _ in range(2):
        out, err = bench(
            "run", "fake", "--suites", str(suites), "--record", "records", "--starts", "5",
            "--", "--size", "3", path=at,
        )  # fmt: skip
        assert out.count("working") == 5
        assert "recorded fake-" in err
    records = BenchStore(at / "records").records
    assert [len(record.runs) for record in records] == [5, 5]
    assert records[0].runs[1] == {"rate": [101.0, 102.0, 103.0], "nested.ms": [5.0]}
    assert records[0].parameters == {"size": "3"}
    assert records[0].machine.cores
    listed, _ = bench("list", *store, path=at)
    assert all(record.id in listed for record in records)
    document = json.loads(bench("compare", "fake", *store, "-o", "json", path=at)[0])
    assert (document["a"], document["b"]) == (records[0].id, records[1].id)
    verdicts = {figure["name"]: figure["verdict"] for figure in document["figures"]}
    assert verdicts == {"rate": "better", "nested.ms": "no difference"}
    table, _ = bench("compare", records[0].id, records[1].id, *store, path=at)
    assert "better (5 starts)" in table
    assert "bootstrap-t" in table
    plotted, _ = bench("plot", "fake", "--out", "pictures", *store, path=at)
    assert "rate: 2 records, changes at: none" in plotted
    assert (at / "pictures" / "fake-rate.svg").read_text().startswith("<svg")
    suites.write_text(SUITES.replace("[fake.parameters]", "arguments = ['more']"))
    bench("run", "fake", "--suites", str(suites), "--record", "records", "--", "--size", "3", path=at)
    (more,) = BenchStore(at / "records").records[2:]
    assert more.parameters == records[1].parameters
    assert "command: " in bench("compare", records[1].id, more.id, *store, path=at, status=2)[1]


def test_two_trees_take_turns_and_are_compared_in_pairs(tmp_path: Path) -> None:
    """Both sides grow with each start, which pairs of neighbouring starts see and unpaired ones do not."""
    suites = fake(tmp_path / "ours", factor=1.5)
    theirs = tmp_path / "theirs"
    fake(theirs)
    (theirs / "starts.txt").write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(theirs)]
        subprocess.run([*git, *words], check=True)
    (theirs / "bench").symlink_to(ROOT / "bench")
    bench(
        "run", "fake", "--suites", str(suites), "--record", "records", "--starts", "6",
        "--beside", str(theirs), path=suites.parent,
    )  # fmt: skip
    other, ours = BenchStore(suites.parent / "records").records
    assert ours.session == other.session != ""
    assert re.fullmatch(
        "[0-9a-f]{12}", other.versions["fairway"]
    )  # the starts changed a file after it was read
    # One count for both: ours first, theirs twice, ours twice.
    assert [run["nested.ms"] for run in ours.runs[:3]] == [[4.0], [5.0], [4.0]]
    found = json.loads(bench("compare", "fake", "--store", "records", "-o", "json", path=suites.parent)[0])
    assert found["paired"]
    assert {each["name"]: each["verdict"] for each in found["figures"]}["rate"] == "better"


def test_failures_are_named_and_leave_no_record(tmp_path: Path) -> None:
    suites = fake(tmp_path / "a", status=5)
    run = ("run", "fake", "--suites", str(suites), "--record", "records")
    _, err = bench(*run, path=suites.parent, status=2)
    assert "ended with status 5" in err
    assert not (suites.parent / "records").exists()
    fake(tmp_path / "a", status=3)
    assert "SKIPPED fake" in bench(*run, path=suites.parent, status=3)[1]
    fake(tmp_path / "a", status=1)  # an aim was missed: measured all the same
    bench(*run, path=suites.parent, status=1)
    (record,) = BenchStore(suites.parent / "records").records
    assert "missed" in record.note


HANGING = """
import subprocess, sys, time
print("RESULT {}", flush=True)
trapped = ["sh", "-c", "trap '' INT TERM; echo $$ > $0; sleep 60", sys.argv[1]]
outside = subprocess.Popen(["sh", "-c", "echo $$ > $0; exec sleep 60", sys.argv[2]], start_new_session=True)
subprocess.Popen(trapped)
time.sleep(60)
"""


def test_a_start_ends_at_its_time_limit_with_its_children(tmp_path: Path) -> None:
    """One child ignores signals, one has a session of its own, and both keep the output open."""
    (tmp_path / "hanging.py").write_text(HANGING)
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    began_s = time.monotonic()
    with pytest.raises(StoreError, match="took more than 3 s"):
        start(BenchSuite(module="hanging", timeout_s=3), [str(inside), str(outside)], tmp_path)
    assert time.monotonic() - began_s < 30.0
    os.kill(int(outside.read_text()), signal.SIGKILL)
    command = Path("/proc", inside.read_text().strip(), "cmdline")
    deadline_s = time.monotonic() + 10.0
    while command.exists() and command.read_bytes():  # a zombie's is empty
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_fresh_user_learns_what_to_do(tmp_path: Path) -> None:
    out, _ = fairway("list", "--store", str(tmp_path / "none"), path=tmp_path)
    assert "There are no records" in out
    assert "fairway bench run SUITE --record" in out
    assert "no suite 'nothing'" in bench("run", "nothing", path=tmp_path, status=2)[1]
    err = bench("compare", "overhead-20261124", "overhead-20261129-published-1", path=tmp_path, status=2)[1]
    assert "no raw samples" in err


def test_the_schedulers_benchmark_is_recorded_twice_and_compared(tmp_path: Path) -> None:
    tiny = ("--", "--workers", "4", "--placements", "200")
    for _ in range(2):
        bench("run", "scheduler", "--record", "records", *tiny, path=tmp_path)
    found = json.loads(bench("compare", "scheduler", "--store", "records", "-o", "json", path=tmp_path)[0])
    assert {figure["verdict"] for figure in found["figures"]} == {"too few values"}
    assert "placements_per_s_4" in {figure["name"] for figure in found["figures"]}


def test_figures_of_public_load_generators() -> None:
    quantiles = {"p50": 10.0, "p95": 20.0}
    export = {
        "request_count": {"avg": 8.0},
        "time_to_first_token": quantiles,
        "inter_token_latency": quantiles,
        "output_token_throughput": {"avg": 90.0},
    }
    wanted = {
        "ttft_p50_ms": 10.0,
        "ttft_p95_ms": 20.0,
        "itl_p50_ms": 10.0,
        "itl_p95_ms": 20.0,
        "output_tokens_per_s": 90.0,
    }
    assert aiperf_figures(export, 8) == wanted
    with pytest.raises(SystemExit, match="8 of 9 requests"):
        aiperf_figures(export, 9)
    metrics: dict[str, Any] = {
        "request_totals": {"successful": 8, "errored": 0},
        "time_to_first_token_ms": {"successful": {"percentiles": quantiles}},
        "inter_token_latency_ms": {"successful": {"percentiles": quantiles}},
        "output_tokens_per_second": {"successful": {"mean": 90.0}},
    }
    assert guidellm_figures({"benchmarks": [{"metrics": metrics}]}, 8) == wanted
    metrics["request_totals"]["errored"] = 1
    with pytest.raises(SystemExit, match="guidellm"):
        guidellm_figures({"benchmarks": [{"metrics": metrics}]}, 8)


GUIDELLM = """
import json, pathlib, sys
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
seed = float(given["--seed"].removeprefix("kind=static,value="))
quantiles = {"successful": {"percentiles": {"p50": seed, "p95": seed}}}
metrics = {
    "request_totals": {"successful": 8, "errored": 0},
    "time_to_first_token_ms": quantiles,
    "inter_token_latency_ms": quantiles,
    "output_tokens_per_second": {"successful": {"mean": 9.0}},
}
report = {"benchmarks": [{"metrics": metrics}]}
pathlib.Path(given["--output"].removeprefix("kind=json,path=")).write_text(json.dumps(report))
"""


def test_each_round_of_guidellm_has_prompts_of_its_own(tmp_path: Path) -> None:
    """Equal seeds are equal prompts, which the round before has left in the prefix cache."""
    path = tmp_path / "bin" / "guidellm"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}{GUIDELLM}")
    path.chmod(0o755)
    load = Load("http://127.0.0.1:1", "key", "tiny", tmp_path, 1, 4, 4, 8)
    seeds = [guidellm(load, tmp_path, tmp_path, seed)["ttft_p50_ms"] for seed in (1, 2)]
    assert seeds == [1.0, 2.0]


def test_an_absent_load_generator_is_skipped_by_name(tmp_path: Path) -> None:
    out, err = bench(
        "run", "serving", "--", "--driver", "aiperf", "--peers", str(tmp_path), path=tmp_path, status=3
    )
    assert "SKIPPED aiperf: it is not installed" in out
    assert "SKIPPED serving" in err
