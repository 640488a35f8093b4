"""`fairway calibrate`: a cost model of a running worker, measured in the simulator's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.simulator import run_simulator
from fairway.cli.state import StateDir


def calibrate(
    output: Annotated[Path, typer.Option("--output", help="File to write the cost model to.")] = Path(
        "cost-model.json"
    ),
    worker: Annotated[str, typer.Option("--worker", help="Process to measure; the only one if empty.")] = "",
    model: Annotated[
        str, typer.Option("--model", help="Model to ask for; the installation's own if empty.")
    ] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the cost model.")] = "calibrated",
    like: Annotated[
        str, typer.Option("--like", help="Preset whose sizes of weights and KV it has.")
    ] = "tiny-cpu",
    max_context: Annotated[
        int, typer.Option("--max-context", min=0, help="Tokens of prompt and output together; 0: no limit.")
    ] = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Send a fourth of the requests: done sooner, with a worse fit.")
    ] = False,
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="Of the installation that `fairway up` runs.")
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
