"""`--watch`: what is there, then every change, as rows, as a table that redraws itself, or as documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from rich.live import Live

from fairway.cli.calls import to_cli_error
from fairway.cli.connection import Connection
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format
from fairway.cli.formats import DOCUMENTS, document_of, write_part
from fairway.cli.output import err, out, plain
from fairway.cli.table import Column, line_of, table_of, visible
from fairway.v1 import controlplane_pb2 as cp

T = TypeVar("T", bound=Message)

_POLL_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """``item`` is now as it is here; ``deleted``: it is gone, and only what names it is set."""

    name: str
    item: T
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Changes that are told together. ``complete``: what is not among them is not there."""

    changes: tuple[Change[T], ...]
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Watch(Generic[T]):
    """How to follow one kind of thing. ``field`` is its name in a document."""

    field: str
    what: str
    changes: Callable[[Connection], AsyncGenerator[Batch[T], None]]


async def follow(
    connection: Connection, watch: Watch[T], columns: Sequence[Column[T]], output: Format
) -> None:
    """Write what is there and then every change, until the task is cancelled.

    A connection that is lost is made again, and what changed meanwhile is told then. Raises CliError when
    the first connection fails, or when the server refuses the watch.
    """
    began, pause_s = False, _FIRST_PAUSE_S
    seen: dict[str, T] = {}
    shown = visible(columns, wide=output is Format.WIDE)
    with _Screen(watch, shown, output) as screen:
        while True:
            try:
                async with aclosing(watch.changes(connection)) as batches:
                    async for batch in batches:
                        began, pause_s = True, _FIRST_PAUSE_S
                        screen.show(_news(batch, seen), seen)
            except grpc.aio.AioRpcError as exc:
                error = to_cli_error(exc, what=f"cannot watch {watch.what}")
                if not began or error.exit_code is not ExitCode.UNAVAILABLE:
                    raise error from exc
                plain(err(), f"{error.message}; again in {pause_s:g} s")
            except CliError as error:
                if not began or error.exit_code is not ExitCode.UNAVAILABLE:
                    raise
                plain(err(), f"{error.message}; again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _news(batch: Batch[T], seen: dict[str, T]) -> list[Change[T]]:
    """Bring ``seen`` up to date and return what of the batch changed it."""
    news: list[Change[T]] = []
    if batch.complete:
        there = {change.name for change in batch.changes}
        news += [Change(name, item, True) for name, item in seen.items() if name not in there]
    news += [change for change in batch.changes if change.deleted or seen.get(change.name) != change.item]
    for change in news:
        if change.deleted:
            seen.pop(change.name, None)
        else:
            seen[change.name] = change.item
    return news


class _Screen(Generic[T]):
    """Writes changes in one format. The table of a terminal is one that is redrawn."""

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

    def show(self, changes: Sequence[Change[T]], seen: dict[str, T]) -> None:
        if self._live is not None:
            items = [item for _, item in sorted(seen.items())]
            self._live.update(table_of(self._columns, items), refresh=True)
            return
        for change in changes:
            if self._output in DOCUMENTS:
                item = document_of(change.item)
                write_part({"deleted": change.deleted, self._watch.field: item}, self._output)
            else:
                line = f"{change.name}\tdeleted" if change.deleted else line_of(self._columns, change.item)
                plain(out(), line)


def resources(
    field: str, what: str, kind: cp.ResourceKind.ValueType, name_of: Callable[[T], str]
) -> Watch[T]:
    """Return a watch of one kind of resource of the control plane."""

    async def changes(connection: Connection) -> AsyncGenerator[Batch[T], None]:
        request = cp.WatchResourcesRequest(kinds=[kind])
        call = connection.control.WatchResources(request, metadata=connection.metadata)
        first: list[Change[T]] | None = []
        try:
            async for answer in call:
                found = [
                    Change(name_of(item), item, change.deleted)
                    for change in answer.changes
                    if change.WhichOneof("resource") == field and (item := getattr(change, field))
                ]
                if first is None:
                    yield Batch(tuple(found))
                else:
                    first += found
                    if answer.snapshot_end:
                        yield Batch(tuple(first), complete=True)
                        first = None
        finally:
            call.cancel()

    return Watch(field, what, changes)


def polled(
    field: str,
    what: str,
    name_of: Callable[[T], str],
    listed: Callable[[Connection], Awaitable[Sequence[T]]],
) -> Watch[T]:
    """Return a watch of what the server only lists: asked once a second."""

    async def changes(connection: Connection) -> AsyncGenerator[Batch[T], None]:
        while True:
            items = await listed(connection)
            yield Batch(tuple(Change(name_of(item), item) for item in items), complete=True)
            await asyncio.sleep(_POLL_S)

    return Watch(field, what, changes)
