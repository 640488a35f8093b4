"""`fairway nodes`: lists the workers, takes them out of service and returns them to service."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import EtagOption, Format, NameArgument, OutputOption, WaitOption, span_s
from fairway.cli.terminal.cells import labels, moment, show_bytes
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, resource
from fairway.cli.terminal.output import Bars, err, plain
from fairway.cli.terminal.table import Column
from fairway.cli.watch import until_drained
from fairway.client.admin.watch import state_name
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Workers: what they run, and taking them out of service.", no_args_is_help=True)


def _state(node: cp.Node) -> str:
    lost = node.state == cp.NODE_STATE_LOST
    service = "draining" if node.draining else "cordoned" if node.cordoned else "open"
    if node.draining and node.drain.done:
        service = "drained"
    if node.HasField("end_time"):
        service += f",ends {moment(node.end_time)}"
    return f"lost,{service}" if lost else service


def _versions(node: cp.Node) -> str:
    return " ".join(f"{loaded.deployment}:{state_name(loaded.state)}" for loaded in node.versions)


NODES: Final[Resource[cp.Node]] = resource(
    "node",
    (
        Column("address", lambda node: node.address, drop=2),
        Column("device", lambda node: node.device, drop=3),
        Column("state", _state),
        Column("versions", _versions),
        Column("tenant", lambda node: node.tenant, wide=True),
        Column("slice", lambda node: node.slice, wide=True),
        Column("zone", lambda node: node.zone, wide=True),
        Column("labels", lambda node: labels(node.metadata), wide=True),
        Column("memory", lambda node: show_bytes(node.memory_bytes), wide=True),
        Column("free", lambda node: show_bytes(node.memory_free_bytes), wide=True),
        Column("running", lambda node: str(sum(loaded.running for loaded in node.versions)), wide=True),
        Column("waiting", lambda node: str(sum(loaded.waiting for loaded in node.versions)), wide=True),
        Column("incarnation", lambda node: str(node.incarnation), wide=True),
    ),
    lambda admin: admin.nodes,
)
add_list(app, NODES, about="List the workers and what they have loaded.")
add_show(app, NODES, about="Show a worker with its versions, its memory and the progress of a drain.")


@command(app, "cordon", to=Server.CONTROLPLANE, examples=("fairway nodes cordon worker-1",))
async def cordon(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Assign no new work to a node; its present work stays."""
    cordoned = connection.admin.nodes.cordon(name, etag=etag)
    NODES.write_one(await checked(cordoned, what=f"cannot cordon the node {name}"), output)


@command(app, "uncordon", to=Server.CONTROLPLANE, examples=("fairway nodes uncordon worker-1",))
async def uncordon(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Allow new work on a node again. This ends a running drain."""
    opened = connection.admin.nodes.uncordon(name, etag=etag)
    NODES.write_one(await checked(opened, what=f"cannot uncordon the node {name}"), output)


@command(
    app,
    "assign",
    to=Server.CONTROLPLANE,
    examples=("fairway nodes assign worker-1 --tenant acme", "fairway nodes assign worker-1"),
)
async def assign(
    connection: Connection,
    name: NameArgument,
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant that has it alone. Without it: all.")] = "",
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Assign a node to a tenant that is dedicated, or partitioned if the node declares a slice.

    Replicas of others leave the node at once. Requests of the tenant start when those of others have ended.
    """
    assigned = connection.admin.nodes.assign(name, tenant, etag=etag)
    NODES.write_one(await checked(assigned, what=f"cannot assign the node {name}"), output)


@command(
    app,
    "drain",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway nodes drain worker-1",
        "fairway nodes drain worker-1 --wait --timeout 30m && sudo reboot",
        "fairway nodes drain spot-7 --ends-in 30s",
    ),
)
async def drain(
    connection: Connection,
    name: NameArgument,
    wait: WaitOption = False,
    ends_in: Annotated[
        str, typer.Option("--ends-in", metavar="SPAN", help="Time until the node ends, as announced.")
    ] = "",
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Assign no new work to a node and move its present work to others. No request fails.

    A version is unloaded once its replacement is READY elsewhere; on a node that ends, 5 s before that in any
    case, and streams continue elsewhere with the same tokens. Without --wait it returns at once.
    """
    ends_in_s = span_s(ends_in) if ends_in else 0.0
    draining = connection.admin.nodes.drain(name, ends_in_s=ends_in_s, etag=etag)
    node = await checked(draining, what=f"cannot drain the node {name}")
    if wait:
        with Bars() as bars:
            node = await until_drained(connection.admin, name, bars.update, timeout_s=connection.wait_s)
    for why in node.drain.waiting_for:
        plain(err(), f"waiting: {why}")
    NODES.write_one(node, output)


add_delete(
    app,
    NODES,
    question="Delete the node {name}?",
    about="Delete a node that has disconnected, and its assignment. Rejected while the node is alive.",
    examples=("fairway nodes delete worker-9", "fairway nodes delete worker-9 -y"),
)
