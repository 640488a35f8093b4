"""`fairway events`: what happened in the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

import grpc
import typer

from fairway.cli.calls import to_cli_error
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import ExitCode
from fairway.cli.flags import Format, OutputOption, WatchOption, past
from fairway.cli.formats import DOCUMENTS, document_of, write_document, write_part
from fairway.cli.output import err, out, plain
from fairway.cli.table import Column, line_of, show_rows, visible
from fairway.cli.words import kind, moment, word
from fairway.v1 import controlplane_pb2 as cp

COLUMNS: Final[tuple[Column[cp.Event], ...]] = (
    Column("time", lambda event: moment(event.time)),
    Column("severity", lambda event: word(cp.EventSeverity.Name, event.severity, "EVENT_SEVERITY_")),
    Column("resource", lambda event: f"{kind(event.kind)}/{event.resource}"),
    Column("reason", lambda event: event.reason),
    Column("message", lambda event: event.message),
    Column("name", lambda event: event.name, wide=True),
)
_PAGE: Final = 1000
_NEWEST: Final = 20
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 10.0


class KindName(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL = "model"
    LEADER = "leader"

    @property
    def proto(self) -> cp.ResourceKind.ValueType:
        return cp.ResourceKind.Value(f"RESOURCE_KIND_{self.name}")


def add(app: typer.Typer) -> None:
    """Give ``app`` the command `events`."""

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
                "--since", parser=past, metavar="WHEN", help="Not older: a span like 10m, or a time."
            ),
        ] = None,
        kinds: Annotated[
            list[KindName] | None, typer.Option("--kind", help="Only of these. Repeatable.")
        ] = None,
        resource: Annotated[str, typer.Option("--resource", help="Only of what has this name.")] = "",
        limit: Annotated[int, typer.Option("--limit", min=1, max=10000, help="The newest so many.")] = 100,
        output: OutputOption = Format.TABLE,
        watch: WatchOption = False,
    ) -> None:
        """Show what happened in the fleet, the newest last. Events are kept for about an hour."""
        wanted = [each.proto for each in kinds or ()]
        if watch:
            await _follow(connection, wanted, resource, since, output)
            return
        found = await _newest(connection, wanted, resource, since, limit)
        if output in DOCUMENTS:
            write_document({"events": [document_of(event) for event in found]}, output)
        else:
            show_rows(COLUMNS, found, wide=output is Format.WIDE)


async def _newest(
    connection: Connection,
    kinds: list[cp.ResourceKind.ValueType],
    resource: str,
    since: datetime | None,
    limit: int,
) -> list[cp.Event]:
    """Return at most ``limit`` events, the oldest of them first."""
    found: list[cp.Event] = []
    token = ""
    while len(found) < limit:
        request = cp.ListEventsRequest(
            page_size=min(_PAGE, limit - len(found)), page_token=token, kinds=kinds, resource=resource
        )
        answer = await connection.call(connection.control.ListEvents, request, what="cannot list the events")
        recent = [event for event in answer.events if _is_since(event, since)]
        found += recent
        token = answer.next_page_token
        if not token or len(recent) < len(answer.events):
            break
    return found[::-1]


async def _follow(
    connection: Connection,
    kinds: list[cp.ResourceKind.ValueType],
    resource: str,
    since: datetime | None,
    output: Format,
) -> None:
    """Write the newest events and every further one, until the task is cancelled.

    A connection that is lost is made again where it was. Raises CliError when the first one fails.
    """
    show = _shower(output)
    revision, began, pause_s = 0, False, _FIRST_PAUSE_S
    newest = _PAGE if since else _NEWEST
    while True:
        request = cp.WatchEventsRequest(
            kinds=kinds, resource=resource, newest=newest, after_revision=revision
        )
        call = connection.control.WatchEvents(request, metadata=connection.metadata)
        try:
            async for answer in call:
                began, pause_s = True, _FIRST_PAUSE_S
                for event in answer.events:
                    if _is_since(event, since):
                        show(event)
                revision = answer.revision
        except grpc.aio.AioRpcError as exc:
            error = to_cli_error(exc, what="cannot watch the events")
            if began and exc.code() is grpc.StatusCode.FAILED_PRECONDITION and revision:
                plain(err(), f"{error.message}; events may be missing here")
                revision = 0
            elif not began or error.exit_code is not ExitCode.UNAVAILABLE:
                raise error from exc
            else:
                plain(err(), f"{error.message}; again in {pause_s:g} s")
        finally:
            call.cancel()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _shower(output: Format) -> Callable[[cp.Event], None]:
    if output in DOCUMENTS:
        return lambda event: write_part(document_of(event), output)
    columns = visible(COLUMNS, wide=output is Format.WIDE)
    between = "  " if out().is_terminal else "\t"
    return lambda event: plain(out(), line_of(columns, event).replace("\t", between))


def _is_since(event: cp.Event, since: datetime | None) -> bool:
    return since is None or event.time.ToDatetime(tzinfo=UTC) >= since
