"""`fairway simulate` and `fairway calibrate`, which run in the simulator's own process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.state import StateDir
from fairway.cli.terminal.cells import parse_span
from fairway.cli.terminal.output import err, plain

_MARK: Final = "error: "
_KEPT_LINES: Final = 200


def run_simulator(command: str, arguments: Sequence[str], *, reason: str, next_step: str) -> None:
    """Run a command of the simulator with this terminal. Raises as ``run_child`` does."""
    if importlib.util.find_spec("simulator") is None:
        raise CliError(
            "NO_SIMULATOR",
            "the simulator is not installed beside this command",
            next_step="run `make setup-dev` in the source tree",
        )
    child = [sys.executable, "-P", "-m", "simulator", command, *arguments]
    run_child(child, reason=reason, next_step=next_step)


def run_child(child: Sequence[str], *, reason: str, next_step: str, folder: Path | None = None) -> None:
    """Run a process with this terminal, in ``folder`` if given.

    Raises CliError with the last error that it wrote, and typer.Exit if it failed without one: its report
    then contains the cause.
    """
    with subprocess.Popen(
        child, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", cwd=folder
    ) as process:
        assert process.stderr is not None
        lines = deque(process.stderr, maxlen=_KEPT_LINES)
    code = process.returncode
    text = "".join(lines)
    _, marked, message = text.rpartition(_MARK)
    exit_code = ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED
    if code and marked:
        raise CliError(reason, message.strip(), next_step=next_step, exit_code=exit_code)
    if text:
        plain(err(), text, end="")
    if code:
        raise typer.Exit(int(exit_code))


NEXT_STEP: Final = "`fairway simulate --list` shows the scenarios, `fairway simulate --help` the options"


def _span(text: str) -> str:
    try:
        return f"{parse_span(text):g}"
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
            help="A scenario by name, a Python file with one, or a trace to replay (.csv, .jsonl).",
            show_default=False,
        ),
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the scenarios and their purposes.")] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, max=4096, help="Workers of the fleet.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same run.")] = 0,
    duration: Annotated[
        str, typer.Option("--duration", help="How long requests arrive, in simulated time, such as 2m.")
    ] = "",
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests per second; default: the rate of the scenario or trace."),
    ] = None,
    load: Annotated[
        float | None, typer.Option("--load", help="The rate as a share of the fleet's maximum.")
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="Device of the workers, or a file of `fairway calibrate`.")
    ] = "a10",
    traces: Annotated[
        Path | None,
        typer.Option("--traces", help="Folder in which traces are searched; default: FAIRWAY_TRACES."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder to write report.json to.")] = None,
) -> None:
    """Run a scenario on a simulated fleet and report latencies, goodput and fairness.

    The fleet runs the services of this version on virtual time: nothing is started or changed. It can replay
    recorded traces: the CSV of the Azure LLM inference traces and the JSONL of Mooncake.

    \b
    Examples:
      fairway simulate --list
      fairway simulate steady --workers 16 --seed 3
      fairway simulate whale --preset h100 --duration 5m --out report
      fairway simulate my_scenario.py --load 0.9
      fairway simulate recorded/conversation.csv --load 0.7 --duration 10m
    """
    if not scenario and not listed:
        raise typer.BadParameter("name a scenario; --list shows the scenarios")
    given = [] if listed else [scenario, "--workers", str(workers), "--seed", str(seed), "--preset", preset]
    options = {
        "--duration": _span(duration) if duration else None,
        "--rate": rate,
        "--load": load,
        "--traces": traces,
        "--out": folder,
    }
    for flag, value in options.items():
        given += [flag, str(value)] if value is not None and not listed else []
    run_simulator("simulate", ["--list"] if listed else given, reason="SIMULATION", next_step=NEXT_STEP)


def calibrate(
    output: Annotated[Path, typer.Option("--output", help="File to write the cost model to.")] = Path(
        "cost-model.json"
    ),
    worker: Annotated[str, typer.Option("--worker", help="Process to measure; the only one if empty.")] = "",
    model: Annotated[
        str, typer.Option("--model", help="Model to request; the installation's own if empty.")
    ] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the cost model.")] = "calibrated",
    like: Annotated[
        str, typer.Option("--like", help="Preset that provides the sizes of weights and KV.")
    ] = "tiny-cpu",
    max_context: Annotated[
        int, typer.Option("--max-context", min=0, help="Tokens of prompt and output together; 0: no limit.")
    ] = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Send a fourth of the requests: faster, with a worse fit.")
    ] = False,
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="State folder of the installation that `fairway up` runs.")
    ] = Path(".fairway"),
) -> None:
    """Fit a cost model to a running worker and write it to a file.

    Sends about 160 requests, in phases of several lengths and concurrencies. A worker without other load
    gives the best fit; the error of the fit is printed.

    \b
    Examples:
      fairway calibrate --output tiny.json
      fairway calibrate --worker worker-1 --like a10 --max-context 2048
      fairway simulate steady --preset tiny.json
    """
    given = ["--endpoints", str(StateDir.at(state_dir).endpoints), "--output", str(output)]
    given += ["--name", name, "--like", like, "--max-context", str(max_context)]
    given += ["--worker", worker] if worker else []
    given += ["--model", model] if model else []
    given += ["--short"] if short else []
    run_simulator(
        "calibrate",
        given,
        reason="CALIBRATION",
        next_step="`fairway status` shows whether it serves, `fairway calibrate --help` the options",
    )
