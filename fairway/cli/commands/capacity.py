"""`fairway capacity`, which runs in the simulator's own process: it plans with the services' estimates."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fairway.cli.commands.simulate import run_simulator

app = typer.Typer(no_args_is_help=True, help="Plan the nodes that a load needs.")


class PlanFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


def _repeated(flag: str, text: str) -> Any:
    return typer.Option(flag, help=f"{text} Repeatable.", show_default=False)


Texts = list[str] | None
_RATES: Final = "CLASS:RATE:PROMPT:OUTPUT[:CACHED]: requests/s, tokens, cached share."
_TYPES: Final = "File of node types; else the shipped one."


@app.command()
def plan(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Azure or Mooncake trace; its peak minute decides.")
    ] = None,
    rates: Annotated[Texts, _repeated("--rates", _RATES)] = None,
    node_types: Annotated[Path | None, typer.Option("--node-types", help=_TYPES)] = None,
    types: Annotated[Texts, _repeated("--types", "Type to plan, else all of one model.")] = None,
    preset: Annotated[str, typer.Option("--preset", help="Preset or file of `fairway calibrate`.")] = "",
    zones: Annotated[int, typer.Option("--zones", min=1, max=64, help="Zones; one may be lost.")] = 1,
    ttft: Annotated[Texts, _repeated("--ttft", "[CLASS:]TIME to the first token, such as 2s.")] = None,
    itl: Annotated[Texts, _repeated("--itl", "[CLASS:]TIME between tokens, such as 50ms.")] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Share the load over several types.")] = False,
    now: Annotated[Texts, _repeated("--now", "TYPE=NODES that run now; with --mix.")] = None,
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
    repeated = {"--rates": rates, "--types": types, "--ttft": ttft, "--itl": itl, "--now": now}
    for flag, values in repeated.items():
        given += [f"{flag}={value}" for value in values or ()]
    run_simulator(
        "capacity", given, reason="CAPACITY", next_step="`fairway capacity plan --help` shows the options"
    )
