"""`--watch`: the present resources, then every change, as rows, a redrawn table, or documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message
from rich.live import Live

from fairway.cli.calls import admin_error
from fairway.cli.connection import Connection
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_part
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.terminal.table import Column, line_of, table_of, visible
from fairway.client import Changed, Deleted, FairwayError, Snapshot
from fairway.client.admin.watch import OnLost, WatchUpdate

T = TypeVar("T", bound=Message)

_POLL_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Watch(Generic[T]):
    """How to follow one kind of resource. ``field`` is its name in a document."""

    field: str
    what: str
    updates: Callable[[Connection, OnLost], AsyncGenerator[WatchUpdate[T], None]]


async def follow(
    connection: Connection, watch: Watch[T], columns: Sequence[Column[T]], output: Format
) -> None:
    """Print the present resources and then every change, until the task is cancelled.

    A lost connection is reopened, and the changes since then are printed. Raises CliError when the first
    connection fails, or when the server rejects the watch.
    """
    seen: dict[str, T] = {}
    shown = visible(columns, wide=output is Format.WIDE)
    what = f"cannot watch {watch.what}"
    with _Screen(watch, shown, output) as screen:
        try:
            async with aclosing(watch.updates(connection, report_lost(what))) as updates:
                async for update in updates:
                    screen.show(_changes(update, seen), seen)
        except FairwayError as exc:
            raise admin_error(exc, what=what) from exc


def report_lost(what: str) -> OnLost:
    """Return a function that reports an interrupted watch to the user."""

    def report(error: FairwayError, pause_s: float) -> None:
        plain(err(), f"{admin_error(error, what=what).message}; again in {pause_s:g} s")

    return report


def polled(
    field: str,
    what: str,
    name_of: Callable[[T], str],
    listed: Callable[[Connection], Awaitable[Sequence[T]]],
) -> Watch[T]:
    """Return a watch of resources that a server only lists; polls each second. ``listed`` raises CliError."""

    async def updates(connection: Connection, _: OnLost) -> AsyncGenerator[WatchUpdate[T], None]:
        began, pause_s = False, _FIRST_PAUSE_S
        while True:
            try:
                items = await listed(connection)
            except CliError as error:
                if not began or error.exit_code is not ExitCode.UNAVAILABLE:
                    raise
                plain(err(), f"{error.message}; again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            began, pause_s = True, _FIRST_PAUSE_S
            yield Snapshot({name_of(item): item for item in items})
            await asyncio.sleep(_POLL_S)

    return Watch(field, what, updates)


def _changes(update: WatchUpdate[T], seen: dict[str, T]) -> list[Changed[T] | Deleted[T]]:
    """Update ``seen`` and return the changes."""
    found: list[Changed[T] | Deleted[T]]
    if isinstance(update, Snapshot):
        found = [Deleted(name, item) for name, item in seen.items() if name not in update.items]
        found += [Changed(name, item) for name, item in update.items.items() if seen.get(name) != item]
    elif isinstance(update, Deleted):
        found = [update] if update.name in seen else []
    else:
        found = [update] if seen.get(update.name) != update.item else []
    for change in found:
        if isinstance(change, Deleted):
            del seen[change.name]
        else:
            seen[change.name] = change.item
    return found


class _Screen(Generic[T]):
    """Prints changes in one format. On a terminal a table is redrawn in place."""

    def __init__(self, watch: Watch[T], columns: Sequence[Column[T]], output: Format) -> None:
        self._watch = watch
        self._columns = columns
        self._output = output
        redrawn = output not in DOCUMENTS and out().is_terminal
        self._live = Live(console=out(), auto_refresh=False) if redrawn else None

    def __enter__(self) -> _Screen[T]:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, changes: Sequence[Changed[T] | Deleted[T]], seen: dict[str, T]) -> None:
        if self._live is not None:
            items = [item for _, item in sorted(seen.items())]
            self._live.update(table_of(self._columns, items), refresh=True)
            return
        for change in changes:
            deleted = isinstance(change, Deleted)
            if self._output in DOCUMENTS:
                item = document_of(change.item)
                write_part({"deleted": deleted, self._watch.field: item}, self._output)
            else:
                line = f"{change.name}\tdeleted" if deleted else line_of(self._columns, change.item)
                plain(out(), line)
