"""`fairway objectives`: what the requests of a model and class are promised, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    LabelOption,
    NameArgument,
    OutputOption,
    PriorityName,
    key_values,
    replace_labels,
    span_s,
)
from fairway.cli.terminal.cells import age, enum_name, labels, priority
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, resource
from fairway.cli.terminal.output import err, plain
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Objectives: what requests are promised, and error budgets.", no_args_is_help=True)


def _ratio(text: str | float) -> float:
    """Return an option's share; `99.9%` is 0.999. Raises BadParameter."""
    number, percent, _ = str(text).partition("%")
    try:
        found = round(float(number) / (100 if percent else 1), 12)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is no share such as 0.999 or 99.9%") from exc
    if not 0 <= found < 1:
        raise typer.BadParameter("a share is at least 0 and below 1")
    return found


AvailabilityOption = Annotated[
    float | None,
    typer.Option(
        "--availability", parser=_ratio, metavar="SHARE", help="Requests without our errors. 0: none."
    ),
]
CompletionOption = Annotated[
    float | None,
    typer.Option(
        "--completion", parser=_ratio, metavar="SHARE", help="Begun streams that we do not break. 0: none."
    ),
]
TtftOption = Annotated[
    float | None,
    typer.Option("--ttft", parser=span_s, metavar="TIME", help="Time to first token. 0s: none."),
]
ItlOption = Annotated[
    float | None,
    typer.Option("--itl", parser=span_s, metavar="TIME", help="Time between tokens. 0s: none."),
]
QuantileOption = Annotated[
    float | None,
    typer.Option("--quantile", parser=_ratio, metavar="SHARE", help="Of both latencies; 0.95 by default."),
]


ShapeOption = Annotated[
    bool | None,
    typer.Option(
        "--shape/--observe",
        help="Whether its latencies replace the targets of admission, shedding, degrading and prefill.",
    ),
]


def _write(made: cp.Objective, output: Format) -> None:
    """Print the objective, and on stderr what it does to requests."""
    for warning in made.warnings:
        plain(err(), f"warning: {warning}")
    OBJECTIVES.write_one(made, output)


def _promises(found: cp.Objective) -> str:
    parts = []
    if found.availability:
        parts.append(f"available {found.availability:.5g}")
    if found.completion:
        parts.append(f"complete {found.completion:.5g}")
    for name, target in (("ttft", found.ttft), ("itl", found.itl)):
        if target.seconds:
            parts.append(f"{name} p{100 * target.quantile:g} {target.seconds:g}s")
    if found.shapes_serving:
        parts.append("shapes serving")
    return ", ".join(parts)


def _by_sli(show: Callable[[cp.SliStatus], str]) -> Callable[[cp.Objective], str]:
    def cell(found: cp.Objective) -> str:
        parts = [(enum_name(cp.Sli.Name, one.sli, "SLI_"), show(one)) for one in found.status.slis]
        return ", ".join(f"{name} {text}" for name, text in parts if text) or "-"

    return cell


def _alert(one: cp.SliStatus) -> str:
    found = enum_name(cp.BurnAlert.Name, one.alert, "BURN_ALERT_")
    return "" if found == "none" else found


OBJECTIVES: Final[Resource[cp.Objective]] = resource(
    "objective",
    (
        Column("name", lambda found: found.metadata.name),
        Column("model", lambda found: found.model),
        Column("class", lambda found: priority(found.priority)),
        Column("promise", _promises),
        Column("budget left", _by_sli(lambda one: f"{one.budget_left_ratio:.1%}")),
        Column("burning", _by_sli(_alert)),
        Column("bad events", _by_sli(lambda one: f"{one.bad_events}/{one.events}"), wide=True),
        Column("labels", lambda found: labels(found.metadata), wide=True),
        Column("age", lambda found: age(found.metadata), wide=True),
        Column("etag", lambda found: found.metadata.etag, wide=True),
    ),
    lambda admin: admin.objectives,
)
add_list(app, OBJECTIVES, about="List the objectives and what is left of their error budgets.")
add_show(app, OBJECTIVES, about="Show an objective with all that was measured of it.")


@command(
    app,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway objectives create chat --model chat --availability 99.9% --ttft 2s --itl 100ms",
        "fairway objectives create chat-batch --model chat --class batch --completion 0.99",
    ),
)
async def create(
    connection: Connection,
    name: NameArgument,
    model: Annotated[
        str, typer.Option("--model", help="The deployment.", autocompletion=completion.deployments)
    ],
    priority_class: Annotated[
        PriorityName, typer.Option("--class", help="Class of the requests.")
    ] = PriorityName.STANDARD,
    availability: AvailabilityOption = None,
    completion_share: CompletionOption = None,
    ttft: TtftOption = None,
    itl: ItlOption = None,
    quantile: QuantileOption = None,
    shape: ShapeOption = None,
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Promise something to the requests of a model and class. It is measured, alerts and stops rollouts.

    With --shape its latencies also decide who is refused, shed and degraded.
    """
    wanted = cp.Objective(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")),
        model=model,
        priority=priority_class.proto,
        availability=availability or 0.0,
        completion=completion_share or 0.0,
        ttft=cp.LatencyTarget(seconds=ttft or 0.0, quantile=quantile or 0.0),
        itl=cp.LatencyTarget(seconds=itl or 0.0, quantile=quantile or 0.0),
        shapes_serving=bool(shape),
    )
    made = connection.admin.objectives.create(wanted)
    _write(await checked(made, what=f"cannot create the objective {name}"), output)


@command(
    app,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway objectives update chat --availability 99.95%",
        "fairway objectives update chat --itl 0s",
        "fairway objectives update chat --shape",
    ),
)
async def update(
    connection: Connection,
    name: NameArgument,
    availability: AvailabilityOption = None,
    completion_share: CompletionOption = None,
    ttft: TtftOption = None,
    itl: ItlOption = None,
    quantile: QuantileOption = None,
    shape: ShapeOption = None,
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the promises and keep the rest. What was counted before stays as it was counted.

    --label replaces all present labels.
    """

    def change(found: cp.Objective) -> None:
        if availability is not None:
            found.availability = availability
        if completion_share is not None:
            found.completion = completion_share
        for target, seconds in ((found.ttft, ttft), (found.itl, itl)):
            if seconds is not None:
                target.seconds = seconds
            if quantile is not None:
                target.quantile = quantile
        if shape is not None:
            found.shapes_serving = shape
        replace_labels(found.metadata, label)

    changed = connection.admin.objectives.change(name, change, etag=etag)
    _write(await checked(changed, what=f"cannot change the objective {name}"), output)


add_delete(
    app,
    OBJECTIVES,
    question="Delete the objective {name}? Its alerts end.",
    about="Delete an objective.",
    examples=("fairway objectives delete chat", "fairway objectives delete chat --yes"),
)
