"""`fairway queue`: queued and running requests, from the leading scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import Format, OutputOption, WatchOption
from fairway.cli.terminal.cells import duration, priority, short_digest
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.table import Column
from fairway.cli.watch import polled
from fairway.v1 import controlplane_pb2 as cp


def _shares(found: cp.Queue) -> str:
    shares = " ".join(f"{each.tenant}/{priority(each.priority)}:{each.queued}" for each in found.pool.shares)
    return shares + (f" (+{found.pool.shares_left_off})" if found.pool.shares_left_off else "")


def _served(found: cp.Queue) -> str:
    """Return the served weighted tokens per tenant; within a class the least is served first."""
    counters = found.pool.counters
    return " ".join(
        f"{each.tenant_id}/{priority(each.priority)}:{each.virtual_tokens:.0f}" for each in counters
    )


def _predicted(found: cp.Queue) -> str:
    """Return the wait of each class, as refusals state it."""
    return " ".join(
        f"{priority(one.priority)}:"
        + (duration(one.predicted_wait) if one.HasField("predicted_wait") else "unknown")
        for one in found.pool.waits
    )


COLUMNS: Final[tuple[Column[cp.Queue], ...]] = (
    Column("pool", lambda found: ",".join(found.deployments) or short_digest(found.pool.version_digest)),
    Column("queued", lambda found: str(found.pool.queued)),
    Column(
        "oldest wait", lambda found: duration(found.pool.oldest_wait) if found.pool.queued else "", drop=2
    ),
    Column("predicted wait", _predicted, least=48),
    Column("pressure", lambda found: f"{found.pool.pressure_ratio:.2f}", drop=1),
    Column("running", lambda found: str(found.pool.running)),
    Column("workers", lambda found: f"{found.pool.serving_workers}/{found.pool.workers}"),
    Column("prompt tokens", lambda found: str(found.pool.queued_prompt_tokens), wide=True),
    Column("granted", lambda found: str(found.pool.granted), wide=True),
    Column("waiting", lambda found: str(found.pool.waiting), wide=True),
    Column("kv free", lambda found: f"{found.pool.kv_tokens_free}/{found.pool.kv_tokens_total}", wide=True),
    Column("shares", _shares, wide=True),
    Column("served", _served, wide=True),
    Column("digest", lambda found: found.pool.version_digest, wide=True),
)


def queues_of(tenant: str) -> Resource[cp.Queue]:
    """Return the pools, with the shares of one tenant or of all."""

    async def listed(connection: Connection) -> Sequence[cp.Queue]:
        return await checked(connection.admin.queues.list(tenant=tenant), what="cannot list the queues")

    watch = polled("queue", "the queues", lambda found: found.pool.version_digest, listed)
    return Resource("queue", "queues", Server.CONTROLPLANE, COLUMNS, listed, watch=watch)


def add(app: typer.Typer) -> None:
    """Add the command `queue` to ``app``."""

    @command(
        app,
        "queue",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway queue",
            "fairway queue -o wide --watch",
            "fairway queue --tenant acme -o json | jq '.queues[].pool.shares'",
        ),
    )
    async def queue(
        connection: Connection,
        tenant: Annotated[
            str,
            typer.Option("--tenant", help="Only this tenant's shares.", autocompletion=completion.tenants),
        ] = "",
        output: OutputOption = Format.TABLE,
        watch: WatchOption = False,
    ) -> None:
        """Show the queued and running requests by pool, one per model version."""
        await queues_of(tenant).show_all(connection, output, watch=watch)
