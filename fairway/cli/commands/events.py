"""`fairway events`: recent events of the fleet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

import typer

from fairway.cli.calls import admin_error, checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import Format, OutputOption, WatchOption, parse_past
from fairway.cli.terminal.cells import enum_name, moment, resource_kind
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_part
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.terminal.table import Column, line_of, visible
from fairway.cli.watch import report_lost
from fairway.client import FairwayError, Missed
from fairway.v1 import controlplane_pb2 as cp

_MESSAGE: Final = 58  # cells that the message has beside the time in 80 columns
COLUMNS: Final[tuple[Column[cp.Event], ...]] = (
    Column("time", lambda event: moment(event.time)),
    Column(
        "severity", lambda event: enum_name(cp.EventSeverity.Name, event.severity, "EVENT_SEVERITY_"), drop=3
    ),
    Column("resource", lambda event: f"{resource_kind(event.kind)}/{event.resource}", drop=1),
    Column("reason", lambda event: event.reason, drop=2),
    Column("message", lambda event: event.message, least=_MESSAGE),
    Column("name", lambda event: event.name, wide=True),
)
EVENTS: Final = Resource("event", "events", Server.CONTROLPLANE, COLUMNS)
_PAGE: Final = 1000
_NEWEST: Final = 20


class KindName(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL = "model"
    LEADER = "leader"
    BUDGET = "budget"
    ROLLOUT = "rollout"
    OBJECTIVE = "objective"
    PROCESS = "process"

    @property
    def proto(self) -> cp.ResourceKind.ValueType:
        return cp.ResourceKind.Value(f"RESOURCE_KIND_{self.name}")


def add(app: typer.Typer) -> None:
    """Add the command `events` to ``app``."""

    @command(
        app,
        "events",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway events",
            "fairway events --since 10m --kind node",
            "fairway events --watch -o json | jq 'select(.severity == \"EVENT_SEVERITY_WARNING\")'",
        ),
    )
    async def events(
        connection: Connection,
        since: Annotated[
            datetime | None,
            typer.Option(
                "--since",
                parser=parse_past,
                metavar="WHEN",
                help="Only events since then: a time span such as 10m, or a time.",
            ),
        ] = None,
        kinds: Annotated[
            list[KindName] | None, typer.Option("--kind", help="Only events of this kind. Repeatable.")
        ] = None,
        resource: Annotated[
            str, typer.Option("--resource", help="Only events of the resource with this name.")
        ] = "",
        limit: Annotated[
            int, typer.Option("--limit", min=1, max=10000, help="Maximum number of events, the newest ones.")
        ] = 100,
        output: OutputOption = Format.TABLE,
        watch: WatchOption = False,
    ) -> None:
        """Show the fleet's events, the newest last. Events are retained for about an hour."""
        wanted = [each.proto for each in kinds or ()]
        if watch:
            await _follow(connection, wanted, resource, since, output)
            return
        found = await _newest(connection, wanted, resource, since, limit)
        EVENTS.write_list(found, output)


async def _newest(
    connection: Connection,
    kinds: list[cp.ResourceKind.ValueType],
    resource: str,
    since: datetime | None,
    limit: int,
) -> list[cp.Event]:
    """Return at most ``limit`` events, the oldest of them first."""
    listing = connection.admin.events.list(kinds=kinds, resource=resource, limit=limit)
    found = await checked(listing, what="cannot list the events")
    return [event for event in reversed(found) if _is_since(event, since)]


async def _follow(
    connection: Connection,
    kinds: list[cp.ResourceKind.ValueType],
    resource: str,
    since: datetime | None,
    output: Format,
) -> None:
    """Print the newest events and every further one, until the task is cancelled.

    A lost connection is reopened at its last position. Raises CliError when the first connection fails.
    """
    show, what = _printer(output), "cannot watch the events"
    watch = connection.admin.events.watch(
        kinds=kinds, resource=resource, newest=_PAGE if since else _NEWEST, on_lost=report_lost(what)
    )
    try:
        async with aclosing(watch) as updates:
            async for event in updates:
                if isinstance(event, Missed):
                    plain(err(), "events may be missing here")
                elif _is_since(event, since):
                    show(event)
    except FairwayError as exc:
        raise admin_error(exc, what=what) from exc


def _printer(output: Format) -> Callable[[cp.Event], None]:
    if output in DOCUMENTS:
        return lambda event: write_part(document_of(event), output)
    columns = visible(COLUMNS, wide=output is Format.WIDE)
    between = "  " if out().is_terminal else "\t"
    return lambda event: plain(out(), line_of(columns, event).replace("\t", between))


def _is_since(event: cp.Event, since: datetime | None) -> bool:
    return since is None or event.time.ToDatetime(tzinfo=UTC) >= since
