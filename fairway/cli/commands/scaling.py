"""`fairway scaling`: replicas that follow the load, and what operators decide instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import EtagOption, Format, OutputOption, span_s
from fairway.cli.terminal.cells import duration, enum_name, moment, priority, show_span
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import out, plain
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import scheduler_pb2

app = typer.Typer(help="Scaling: replicas that follow the load.", no_args_is_help=True)
NameArgument = Annotated[
    str, typer.Argument(help="A deployment with scaling bounds.", autocompletion=completion.deployments)
]


def _bounds(found: cp.DeploymentScaling) -> str:
    bounds = found.scaling
    text = f"{bounds.min_replicas}-{bounds.max_replicas}"
    return f"{text}, {bounds.max_cost_per_hour:g}/h" if bounds.max_cost_per_hour else text


def _decisive(found: cp.DeploymentScaling) -> str:
    reasons = found.present_reasons or found.reasons
    return f"{reasons[0].signal}: {reasons[0].text}" if reasons else ""


SCALING: Final[Resource[cp.DeploymentScaling]] = Resource(
    "deployment",
    "deployments",
    Server.CONTROLPLANE,
    (
        Column("name", lambda found: found.deployment),
        Column("replicas", lambda found: f"{found.ready_replicas}/{found.replicas}"),
        Column("bounds", _bounds),
        Column("why", _decisive, least=40),
        Column("start", lambda found: duration(found.start), wide=True),
        Column(
            "decided",
            lambda found: moment(found.decide_time) if found.HasField("decide_time") else "",
            wide=True,
        ),
    ),
)


@command(app, "list", to=Server.CONTROLPLANE, examples=("fairway scaling list",))
async def list_(connection: Connection, output: OutputOption = Format.TABLE) -> None:
    """List the deployments whose replicas follow their load, each with the decisive reason."""
    SCALING.write_list(await _found(connection, ""), output)


@command(
    app,
    "explain",
    to=Server.CONTROLPLANE,
    examples=("fairway scaling explain chat", "fairway scaling explain chat -o json"),
)
async def explain(connection: Connection, name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Show what was decided for a deployment, why, and the figures of every signal with their age."""
    (found,) = await _found(connection, name)
    if output in DOCUMENTS:
        write_document(document_of(found), output)
    else:
        plain(out(), "\n".join(explanation(found, time.time())))


@command(
    app,
    "override",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway scaling override chat 8 --for 2h",
        "fairway scaling override chat 0",
        "fairway scaling override chat --end",
    ),
)
async def override(
    connection: Connection,
    name: NameArgument,
    replicas: Annotated[int | None, typer.Argument(min=0, max=10000, help="Number of replicas.")] = None,
    lasting: Annotated[
        float | None,
        typer.Option("--for", parser=span_s, metavar="TIME", help="Until its end; default: until --end."),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="Follow the load again.")] = False,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Set the number of replicas in place of every signal and bound, for a time."""
    if end == (replicas is not None):
        raise typer.BadParameter("give a number of replicas, or --end")

    def change(scaling: cp.Scaling) -> None:
        scaling.ClearField("override_replicas")
        scaling.ClearField("override_until")
        if replicas is not None:
            scaling.override_replicas = replicas
            if lasting is not None:
                scaling.override_until.CopyFrom(Timestamp(seconds=int(time.time() + lasting)))

    await _change(connection, name, change, etag, output)


@command(app, "freeze", to=Server.CONTROLPLANE, examples=("fairway scaling freeze chat",))
async def freeze(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Keep the replicas as they are, whatever the load."""
    await _change(connection, name, lambda scaling: setattr(scaling, "frozen", True), etag, output)


@command(app, "unfreeze", to=Server.CONTROLPLANE, examples=("fairway scaling unfreeze chat",))
async def unfreeze(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Let the replicas follow the load again."""
    await _change(connection, name, lambda scaling: setattr(scaling, "frozen", False), etag, output)


async def _found(connection: Connection, name: str) -> Sequence[cp.DeploymentScaling]:
    what = f"cannot explain the scaling of {name}" if name else "cannot list the scaling"
    return await checked(connection.admin.scaling.list(name), what=what)


async def _change(
    connection: Connection,
    name: str,
    change: Callable[[cp.Scaling], None],
    etag: str,
    output: Format,
) -> None:
    def of_deployment(deployment: cp.Deployment) -> None:
        if not deployment.HasField("scaling"):
            raise typer.BadParameter(
                f"{name} has no scaling bounds; "
                f"`fairway deployments update {name} --max-replicas N` sets them"
            )
        change(deployment.scaling)

    changing = connection.admin.deployments.change(name, of_deployment, etag=etag)
    await checked(changing, what=f"cannot change the scaling of {name}")
    SCALING.write_list(await _found(connection, name), output)


def explanation(found: cp.DeploymentScaling, unix_s: float) -> list[str]:
    """Return the lines that explain a decision."""

    def ago(time_: Timestamp) -> str:
        return f"{show_span(max(0.0, unix_s - time_.ToMicroseconds() / 1e6))} ago"

    bounds = found.scaling
    lines = [
        f"{found.deployment}: {found.replicas} replicas, {found.ready_replicas} ready, "
        f"{found.starting_replicas} starting",
        f"bounds: {_bounds(found)}" + ("; frozen" if bounds.frozen else ""),
    ]
    if bounds.HasField("override_replicas"):
        until = f" until {moment(bounds.override_until)}" if bounds.HasField("override_until") else ""
        lines.append(f"override: {bounds.override_replicas}{until}")
    if found.HasField("decide_time"):
        lines.append(f"decided {ago(found.decide_time)} by epoch {found.epoch}:")
        lines += _reasons(found.reasons)
    if found.failed_wakes:
        lines.append(
            f"{found.failed_wakes} starts from zero failed: {found.failure}; next {moment(found.retry_time)}"
        )
    if found.present_reasons:
        lines.append("the signals now ask for:")
        lines += _reasons(found.present_reasons)
    if found.zones:
        lines.append("zones: " + ", ".join(f"{one.replicas} in {one.zone}" for one in found.zones))
    if found.HasField("load"):
        lines.append(f"signals of {ago(found.observe_time)}:")
        lines += _load(found.load)
    else:
        lines.append("signals: none, because no control plane leads or no scheduler has reported")
    lines.append(f"a start is expected to take {duration(found.start)}")
    return lines


def _reasons(reasons: Sequence[cp.ScalingReason]) -> list[str]:
    return [f"  {one.replicas:>4}  {one.signal}: {one.text}" for one in reasons]


def _load(load: scheduler_pb2.PoolLoad) -> list[str]:
    rate = f"{load.rate:.4g} per second" if load.rate else "not measured"
    if load.rate_bound:
        rate += f", bound by {enum_name(scheduler_pb2.RateBound.Name, load.rate_bound, 'RATE_BOUND_')}"
    lines = [
        f"  a replica's rate: {rate}; the mean request: {load.request_work:.4g}; held: {load.held}",
    ]
    for one in load.classes:
        target = f", target {duration(one.target)}" if one.HasField("target") else ""
        burn = f", budget spent {one.burn_ratio:.3g} times too fast" if one.burn_ratio else ""
        lines.append(
            f"  {priority(one.priority)}: {one.waiting:.4g} waiting, {one.arrived:.6g} arrived{target}{burn}"
        )
        if one.due:
            work, first = sum(part.work for part in one.due), duration(one.due[0].left)
            lines.append(f"    lines of batches: {work:.4g} left, the first are due in {first}")
    return lines
