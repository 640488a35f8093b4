"""`fairway bench`, which runs in a process of the source tree's benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import fairway
from fairway.cli.commands.capacity import PlanFormat
from fairway.cli.commands.simulate import run_child
from fairway.cli.errors import CliError

app = typer.Typer(no_args_is_help=True, help="Run benchmarks, keep their records, compare them over months.")
TREE: Final = Path(fairway.__path__[0]).resolve().parent


def _run(command: str, arguments: Sequence[str]) -> None:
    if not (TREE / "bench" / "__main__.py").exists():
        raise CliError(
            "NO_BENCHMARKS",
            "the benchmarks are not installed beside this command: they are part of the source tree",
            next_step="run `make setup-dev` in the source tree, then this command by its .venv/bin/fairway",
        )
    run_child(
        [sys.executable, "-m", "bench", command, *arguments],
        reason="BENCH",
        next_step=f"`fairway bench {command} --help` shows the options",
        folder=TREE,
    )


StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help="Folder of records; default: bench/records of the source tree."),
]
BenchOutput = Annotated[PlanFormat, typer.Option("-o", "--output", help="Output format.")]


def _given(store: Path | None, output: PlanFormat) -> list[str]:
    return ["--output", output.value, *_path("--store", store)]


def _path(flag: str, path: Path | None) -> list[str]:
    return [] if path is None else [flag, os.path.abspath(path)]


@app.command(context_settings={"allow_interspersed_args": True})
def run(
    suite: Annotated[str, typer.Argument(help="Suite of bench/suites.toml, or of --suites.")],
    given: Annotated[
        list[str] | None,
        typer.Argument(help="After --: arguments of the suite's command.", show_default=False),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Folder to append a record to; else none is kept.")
    ] = None,
    starts: Annotated[
        int | None, typer.Option("--starts", min=1, help="Starts of the command for one record.")
    ] = None,
    suites: Annotated[
        Path | None, typer.Option("--suites", help="File of suites in place of the shipped.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="NAME=VALUE,VALUE: one variant for each value. Repeatable.", show_default=False
        ),
    ] = None,
    beside: Annotated[
        Path | None, typer.Option("--beside", help="Another source tree, whose starts alternate with ours.")
    ] = None,
    state: Annotated[str, typer.Option("--state", help="What else the machine does, such as shared.")] = "",
) -> None:
    """Run a suite in all its variants; with --record, keep machine, versions and raw samples of each.

    \b
    Examples:
      fairway bench run scheduler --record bench/records
      fairway bench run serving --starts 5 --set concurrency=1,32 --record records
      fairway bench run overhead --starts 5 --beside ../before --record records
      fairway bench run scheduler --record records -- --workers 16
    """
    options = [*_path("--record", record), *_path("--suites", suites), *_path("--beside", beside)]
    options += ["--starts", str(starts)] if starts is not None else []
    options += [f"--state={state}"] if state else []
    options += [f"--set={value}" for value in values or ()]
    _run("run", [suite, *options, "--", *(given or ())])


@app.command("list")
def list_records(
    suite: Annotated[str, typer.Argument(help="Records of this suite alone.", show_default=False)] = "",
    store: StoreOption = None,
    output: BenchOutput = PlanFormat.TABLE,
) -> None:
    """List the records of a store, oldest first.

    \b
    Examples:
      fairway bench list
      fairway bench list overhead --store records -o json
    """
    _run("list", [*([suite] if suite else []), *_given(store, output)])


@app.command()
def compare(
    records: Annotated[
        list[str], typer.Argument(help="Two ids or beginnings of ids, or a suite: its two newest records.")
    ],
    store: StoreOption = None,
    output: BenchOutput = PlanFormat.TABLE,
) -> None:
    """Show what changed from one record to another: better, worse or no difference, with intervals.

    Both must have been recorded under equal conditions: machine, device, parameters. Otherwise the fields
    that differ are listed and nothing is compared.

    \b
    Examples:
      fairway bench compare scheduler --store records
      fairway bench compare scheduler-20261130T0830 scheduler-20261201T0915 -o json
    """
    _run("compare", [*records, *_given(store, output)])


@app.command()
def plot(
    suite: Annotated[str, typer.Argument(help="Suite whose series are searched.")],
    figure: Annotated[str, typer.Argument(help="One figure; default: all.", show_default=False)] = "",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for an SVG picture of each series.")
    ] = None,
    store: StoreOption = None,
    output: BenchOutput = PlanFormat.TABLE,
) -> None:
    """Show at which records the figures of a suite changed, and draw their series.

    \b
    Examples:
      fairway bench plot scheduler --store records --out pictures
      fairway bench plot scheduler placements_per_s_256 -o json
    """
    _run("plot", [suite, *([figure] if figure else []), *_path("--out", folder), *_given(store, output)])
