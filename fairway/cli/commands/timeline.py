"""`fairway timeline`: a request over time, with the other requests of its engine steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError
from fairway.cli.flags import Format, OutputOption
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.terminal.table import Column, show_rows
from fairway.timelines import Neighbour, TimelineRow, chrome_trace, lines_of, neighbours_of
from fairway.v1 import controlplane_pb2 as cp

_MOST_NEIGHBOURS: Final = 20


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1e3:.1f} ms"


LINES: Final[tuple[Column[TimelineRow], ...]] = (
    Column("at", lambda line: _ms(line.at_us)),
    Column("took", lambda line: _ms(line.took_us) if line.took_us else ""),
    Column("what", lambda line: line.what),
    Column("where", lambda line: line.where, drop=1),
    Column("detail", lambda line: line.detail, least=36),
)
NEIGHBOURS: Final[tuple[Column[Neighbour], ...]] = (
    Column("request", lambda one: one.request_id or "(not recorded)", least=28),
    Column("tenant", lambda one: one.tenant),
    Column("steps", lambda one: str(one.steps)),
    Column("prefilled", lambda one: str(one.prefilled_tokens)),
    Column("output", lambda one: str(one.output_tokens)),
    Column("worker", lambda one: one.worker_id, drop=1),
)


def clock_notes(found: cp.GetTimelineResponse) -> list[str]:
    """Return how the clocks of hosts were corrected."""
    clocks = [(f"worker {one.worker_id}", one.clock) for one in found.workers]
    if found.HasField("scheduler_clock"):
        clocks.insert(0, ("the scheduler", found.scheduler_clock))
    return [
        f"the clock of {whose} was corrected by {_ms(clock.offset_us)}, within {_ms(clock.error_us)}"
        for whose, clock in clocks
        if clock.offset_us
    ]


def add(app: typer.Typer) -> None:
    """Add the command `timeline` to ``app``."""

    @command(
        app,
        "timeline",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway timeline req_0123456789",
            "fairway timeline chatcmpl-req_0123456789 --perfetto slow.json",
            "fairway timeline req_0123456789 -o json | jq '.workers[].steps'",
        ),
    )
    async def timeline(
        connection: Connection,
        request_id: Annotated[
            str, typer.Argument(metavar="REQUEST_ID", help="Id of the response, or its x-request-id.")
        ],
        perfetto: Annotated[
            Path | None,
            typer.Option("--perfetto", metavar="FILE", help="Write a trace for https://ui.perfetto.dev."),
        ] = None,
        output: OutputOption = Format.TABLE,
    ) -> None:
        """Show a request over time: its stages, its placements, its engine steps and who shared them.

        Workers hold their last steps in 62 MiB; the control plane keeps the timelines of the slowest and of
        failed requests for an hour. A tenant sees its own requests, without the others of their steps.
        """
        reading = connection.admin.placements.timeline(request_id)
        try:
            found = await checked(reading, what="cannot show the timeline")
        except CliError as error:
            if error.reason == "NOT_FOUND":
                error.next_step = "`fairway requests list --slow` has those whose timelines are kept"
            raise
        if perfetto is not None:
            _write(perfetto, found)
        if output in DOCUMENTS:
            write_document(document_of(found), output)
        elif perfetto is None:
            _show(found, wide=output is Format.WIDE)


def _show(found: cp.GetTimelineResponse, *, wide: bool) -> None:
    show_rows(LINES, lines_of(found), wide=wide)
    neighbours: Sequence[Neighbour] = neighbours_of(found)
    if neighbours and out().is_terminal:
        plain(out(), f"\n{len(neighbours)} other requests in its steps:")
        show_rows(NEIGHBOURS, neighbours[:_MOST_NEIGHBOURS], wide=wide)
    for note in (*found.notes, *clock_notes(found)):
        plain(err(), f"note: {note}")


def _write(path: Path, found: cp.GetTimelineResponse) -> None:
    try:
        path.write_text(json.dumps(chrome_trace(found)), "utf-8")
    except OSError as exc:
        raise CliError(
            "TRACE_NOT_WRITTEN",
            f"cannot write {path}: {exc.strerror}",
            next_step="name a file in a folder that exists and is yours",
        ) from exc
    plain(err(), f"wrote {path}: open it at https://ui.perfetto.dev, which reads it in the browser")
