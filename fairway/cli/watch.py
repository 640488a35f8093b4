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
from fairway.client import AdminClient, Changed, DeadlineExceeded, Deleted, FairwayError, Snapshot, WaitFailed
from fairway.client.admin.watch import OnLost, WatchUpdate, remaining_versions, state_name, wanted_replicas
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import worker_pb2

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


# Name, progress (0..1, None: unknown), current work.
Show = Callable[[str, float | None, str], None]

_STEPS: Final = {
    "NOT_READY_IN_TIME": (
        "it continues to load; see `fairway nodes list -o wide`, or wait with a longer --timeout"
    ),
    "NOT_DRAINED_IN_TIME": (
        "it continues; add a worker, uncordon one, lower the replicas with `fairway deployments scale`, or "
        "wait with a longer --timeout; `fairway nodes uncordon {name}` ends it"
    ),
    "DRAIN_ENDED": "`fairway nodes drain {name}` starts it again",
}
_FAILED: Final = (
    "`fairway deployments show {name}` shows the details; change it with `update`, or `delete` it"
)


async def until_deployed(
    admin: AdminClient, name: str, report: Callable[[cp.Deployment], None], *, timeout_s: float
) -> cp.Deployment:
    """Return the deployment once it has exactly its replicas, all READY. Raises CliError.

    MODEL_FAILED, or the replica's own reason, as soon as one fails permanently; NOT_READY_IN_TIME.
    """
    try:
        return await admin.deployments.wait_ready(name, timeout_s=timeout_s, report=report)
    except FairwayError as error:
        raise _wait_error(error, name, what=f"cannot show the deployment {name}") from error


async def until_drained(admin: AdminClient, name: str, show: Show, *, timeout_s: float) -> cp.Node:
    """Return the node once it has no assignment and no running sequence. Raises CliError."""
    try:
        return await admin.nodes.wait_drained(name, timeout_s=timeout_s, report=show_drain(show))
    except FairwayError as error:
        raise _wait_error(error, name, what=f"cannot show the node {name}") from error


def show_replicas(show: Show) -> Callable[[cp.Deployment], None]:
    """Return a function that passes each replica, and the reason for missing ones, to ``show``."""

    def report(deployment: cp.Deployment) -> None:
        status = deployment.status
        for replica in status.replicas:
            detail = ", ".join(filter(None, (state_name(replica.state), replica.message)))
            is_ready = replica.state == worker_pb2.VERSION_STATE_READY
            show(replica.worker_id, 1.0 if is_ready else replica.progress_ratio or None, detail)
        if len(status.replicas) < wanted_replicas(deployment):
            show(deployment.metadata.name, None, status.message or "waiting for a worker")

    return report


def show_drain(show: Show) -> Callable[[cp.Node], None]:
    """Return a function that passes the progress of a drain to ``show``."""

    def report(node: cp.Node) -> None:
        if node.drain.done:
            show(node.metadata.name, 1.0, "drained")
        elif node.draining:
            show(node.metadata.name, None, "; ".join((remaining_versions(node), *node.drain.waiting_for)))

    return report


def _wait_error(error: FairwayError, name: str, *, what: str) -> CliError:
    is_over = isinstance(error, WaitFailed) or (
        isinstance(error, DeadlineExceeded) and error.reason in _STEPS
    )
    if not is_over:
        return admin_error(error, what=what)
    step = _STEPS.get(error.reason, _FAILED).format(name=name)
    return CliError(error.reason, error.message, next_step=step, exit_code=ExitCode.FAILED)
