"""`fairway capacity`, which runs in the simulator's own process: it plans with the services' estimates."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.commands.simulate import run_simulator

app = typer.Typer(no_args_is_help=True, help="Plan the nodes that a load needs.")


class PlanFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


@app.command()
def plan(
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Azure or Mooncake trace; its peak minute decides.", show_default=False),
    ] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            "--rates",
            help="CLASS:RATE:PROMPT:OUTPUT[:CACHED]: requests/s, tokens, cached share. Repeatable.",
            show_default=False,
        ),
    ] = None,
    node_types: Annotated[
        Path | None,
        typer.Option("--node-types", help="File of node types; else the shipped one.", show_default=False),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--types", help="Type to plan, else all of one model. Repeatable.", show_default=False),
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="A preset or a file of `fairway calibrate` instead of types.")
    ] = "",
    zones: Annotated[
        int, typer.Option("--zones", min=1, max=64, help="Zones, of which any one may be lost.")
    ] = 1,
    ttft: Annotated[
        list[str] | None,
        typer.Option("--ttft", help="[CLASS:]TIME to the first token, such as 2s.", show_default=False),
    ] = None,
    itl: Annotated[
        list[str] | None,
        typer.Option("--itl", help="[CLASS:]TIME between tokens, such as 50ms.", show_default=False),
    ] = None,
    mix: Annotated[
        bool, typer.Option("--mix", help="Share the load over several types at the least price.")
    ] = False,
    now: Annotated[
        list[str] | None,
        typer.Option("--now", help="TYPE=NODES that run now, for few moves; with --mix.", show_default=False),
    ] = None,
    output: Annotated[PlanFormat, typer.Option("-o", "--output", help="Output format.")] = PlanFormat.TABLE,
) -> None:
    """Show how many nodes a load needs, by type, what bounds them and what they cost.

    Prefill and decode are nodes' worth of time; headroom covers arrivals that vary. Prices are those of the
    file of node types, where each figure is published, assumed or calibrated.

    \b
    Examples:
      fairway capacity plan --rates interactive:20:512:256:0.3 --ttft 2s --itl 50ms --zones 3
      fairway capacity plan --trace recorded/conversation.csv --ttft 2s --types a10 --types h100
      fairway capacity plan --trace recorded/conversation.jsonl --ttft 20s --mix --now a10=4
    """
    given = ["--zones", str(zones), "--output", output.value, "--preset", preset]
    given += ["--mix"] if mix else []
    for flag, paths in (("--trace", trace), ("--node-types", node_types)):
        given += [flag, str(paths)] if paths is not None else []
    lists: tuple[tuple[str, Sequence[str] | None], ...] = (
        ("--rates", rates),
        ("--types", types),
        ("--ttft", ttft),
        ("--itl", itl),
        ("--now", now),
    )
    for flag, values in lists:
        given += [f"{flag}={value}" for value in values or ()]
    run_simulator(
        "capacity", given, reason="CAPACITY", next_step="`fairway capacity plan --help` shows the options"
    )
