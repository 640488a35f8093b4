"""``python -m simulator simulate``: run one scenario or replay one trace, write its report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from simulator.lab.load import replay
from simulator.lab.load.traces import TraceError
from simulator.lab.report.report import LabReport
from simulator.lab.report.table import aligned, text
from simulator.lab.runner import run
from simulator.lab.scenario import Options, Scenario, ScenarioError
from simulator.lab.scenarios import catalog

TRACES: Final = "FAIRWAY_TRACES"


def main(arguments: Sequence[str]) -> int:
    """Run the command; the result is its exit status: 2 for a wrong use, 1 for violated invariants."""
    parsed = _parser().parse_args(arguments)
    if parsed.list:
        rows = [(name, catalog.summary(name)) for name in catalog.names()]
        print("\n".join(aligned(rows)))
        print("A path that ends in .csv or .jsonl is replayed: an Azure LLM inference or a Mooncake trace.")
        return 0
    if not parsed.scenario:
        print("error: name a scenario; --list shows those that there are", file=sys.stderr)
        return 2
    try:
        report = run(_scenario(parsed.scenario, _options(parsed)))
        print(text(report), end="")
        if parsed.out is not None:
            write(report, parsed.out)
    except (ScenarioError, TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if report.violations else 0


def _scenario(name: str, options: Options) -> Scenario:
    return replay.scenario(name, options) if replay.is_trace(name) else catalog.load(name, options)


def traces_folder(given: Path | None) -> Path | None:
    """Return the folder of recorded traces: the given one, else that of FAIRWAY_TRACES, else none."""
    if given is not None:
        return given
    named = os.environ.get(TRACES)
    return Path(named) if named else None


def write(report: LabReport, folder: Path) -> None:
    """Write report.json into ``folder``, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "report.json"
    target.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    print(target)


def _options(parsed: argparse.Namespace) -> Options:
    return Options(
        workers=parsed.workers,
        seed=parsed.seed,
        duration_s=parsed.duration,
        rate_per_s=parsed.rate,
        load_ratio=parsed.load,
        preset=parsed.preset,
        traces=traces_folder(parsed.traces),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator simulate", description=__doc__)
    parser.add_argument(
        "scenario",
        nargs="?",
        default="",
        help="a scenario by name, a Python file with one, or a trace to replay (.csv, .jsonl)",
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and what each shows")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--duration", type=float, help="seconds during which requests arrive")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--load", type=float, help="the rate as a share of what the fleet can serve at most")
    parser.add_argument(
        "--preset", default="a10", help="a cost model by name, or a file of fairway calibrate"
    )
    parser.add_argument("--traces", type=Path, help=f"a folder in which traces are looked for; else {TRACES}")
    parser.add_argument("--out", type=Path, help="a folder for report.json")
    return parser
