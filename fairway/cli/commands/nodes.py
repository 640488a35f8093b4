"""`fairway nodes`: the workers, and taking them out of service and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import typer

from fairway.cli.bars import Bars
from fairway.cli.changes import confirm, show_deleted
from fairway.cli.connection import Connection, Server, command, new_request_id
from fairway.cli.durations import show_bytes
from fairway.cli.flags import EtagOption, Format, NameArgument, OutputOption, WaitOption, YesOption
from fairway.cli.listing import PAGE, Resource, add_list, add_show
from fairway.cli.table import Column
from fairway.cli.waiting import until_drained
from fairway.cli.watch import resources
from fairway.cli.words import labels, version_state
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Workers: what they run, and taking them out of service.", no_args_is_help=True)


def _state(node: cp.Node) -> str:
    lost = node.state == cp.NODE_STATE_LOST
    service = "draining" if node.draining else "cordoned" if node.cordoned else "open"
    if node.draining and node.drain.done:
        service = "drained"
    return f"lost,{service}" if lost else service


def _versions(node: cp.Node) -> str:
    return " ".join(f"{loaded.deployment}:{version_state(loaded.state)}" for loaded in node.versions)


async def _page(connection: Connection, token: str) -> tuple[Sequence[cp.Node], str]:
    request = cp.ListNodesRequest(page_size=PAGE, page_token=token)
    answer = await connection.call(connection.control.ListNodes, request, what="cannot list the nodes")
    return answer.nodes, answer.next_page_token


async def _get(connection: Connection, name: str) -> cp.Node:
    request = cp.GetNodeRequest(name=name)
    answer = await connection.call(connection.control.GetNode, request, what=f"cannot show the node {name}")
    return answer.node


NODES: Final[Resource[cp.Node]] = Resource(
    singular="node",
    plural="nodes",
    server=Server.CONTROLPLANE,
    columns=(
        Column("name", lambda node: node.metadata.name),
        Column("address", lambda node: node.address),
        Column("device", lambda node: node.device),
        Column("state", _state),
        Column("versions", _versions),
        Column("zone", lambda node: node.zone, wide=True),
        Column("labels", lambda node: labels(node.metadata), wide=True),
        Column("memory", lambda node: show_bytes(node.memory_bytes), wide=True),
        Column("free", lambda node: show_bytes(node.memory_free_bytes), wide=True),
        Column("running", lambda node: str(sum(loaded.running for loaded in node.versions)), wide=True),
        Column("waiting", lambda node: str(sum(loaded.waiting for loaded in node.versions)), wide=True),
        Column("incarnation", lambda node: str(node.incarnation), wide=True),
    ),
    page=_page,
    get=_get,
    watch=resources("node", "the nodes", cp.RESOURCE_KIND_NODE, lambda node: node.metadata.name),
)
add_list(app, NODES, about="List the workers and what they have loaded.")
add_show(app, NODES, about="Show a worker with its versions, its memory and how far a drain is.")


@command(app, "cordon", to=Server.CONTROLPLANE, examples=("fairway nodes cordon worker-1",))
async def cordon(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Give a node no new work; what it has stays."""
    request = cp.CordonNodeRequest(name=name, etag=etag, request_id=new_request_id())
    what = f"cannot cordon the node {name}"
    NODES.write_one((await connection.call(connection.control.CordonNode, request, what=what)).node, output)


@command(app, "uncordon", to=Server.CONTROLPLANE, examples=("fairway nodes uncordon worker-1",))
async def uncordon(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Let a node have work again. A drain that goes on ends."""
    request = cp.UncordonNodeRequest(name=name, etag=etag, request_id=new_request_id())
    what = f"cannot uncordon the node {name}"
    NODES.write_one((await connection.call(connection.control.UncordonNode, request, what=what)).node, output)


@command(
    app,
    "drain",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway nodes drain worker-1",
        "fairway nodes drain worker-1 --wait --timeout 30m && sudo reboot",
    ),
)
async def drain(
    connection: Connection,
    name: NameArgument,
    wait: WaitOption = False,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Give a node no new work and move what it has to others. No request fails by it.

    A version leaves once its replacement is READY elsewhere. Without --wait it returns at once.
    """
    request = cp.DrainNodeRequest(name=name, etag=etag, request_id=new_request_id())
    what = f"cannot drain the node {name}"
    node = (await connection.call(connection.control.DrainNode, request, what=what)).node
    if wait:
        with Bars() as bars:
            node = await until_drained(
                lambda: _get(connection, name), bars.update, timeout_s=connection.wait_s
            )
    NODES.write_one(node, output)


@command(
    app,
    "delete",
    to=Server.CONTROLPLANE,
    examples=("fairway nodes delete worker-9", "fairway nodes delete worker-9 -y"),
)
async def delete(
    connection: Connection,
    name: NameArgument,
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Forget a node that is gone, and what was assigned to it. Refused while it lives."""
    confirm(f"Forget the node {name}?", yes=yes)
    request = cp.DeleteNodeRequest(name=name, etag=etag, request_id=new_request_id())
    await connection.call(connection.control.DeleteNode, request, what=f"cannot delete the node {name}")
    show_deleted(name, output)
