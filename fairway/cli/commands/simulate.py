"""`fairway simulate`: a scenario or a trace on a simulated fleet, in the simulator's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.simulator import run_simulator
from fairway.cli.terminal.durations import parse_span

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
    listed: Annotated[bool, typer.Option("--list", help="Name the scenarios and what each shows.")] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, max=4096, help="Workers of the fleet.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same run.")] = 0,
    duration: Annotated[
        str, typer.Option("--duration", help="How long requests arrive, in simulated time, such as 2m.")
    ] = "",
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests per second; else what the scenario or trace has.")
    ] = None,
    load: Annotated[
        float | None, typer.Option("--load", help="The rate as a share of the most that the fleet can serve.")
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="Device of the workers, or a file of `fairway calibrate`.")
    ] = "a10",
    traces: Annotated[
        Path | None,
        typer.Option("--traces", help="Folder in which a trace is looked for; else FAIRWAY_TRACES."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder to write report.json and report.html to.")
    ] = None,
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
        raise typer.BadParameter("name a scenario; --list shows those that there are")
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
