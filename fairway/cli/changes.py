"""What commands that change something share: the question before, and the way of a read-and-change."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import typer

from fairway.cli.errors import CliError
from fairway.cli.flags import Format
from fairway.cli.formats import DOCUMENTS, write_document
from fairway.cli.output import out, plain

T = TypeVar("T")
_TRIES: Final = 4


def confirm(question: str, *, yes: bool) -> None:
    """Return once the user agrees. Without a terminal nobody is asked. Raises CliError for a no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, err=True):
        raise CliError("NOT_CONFIRMED", "nothing was changed", next_step="add --yes to go ahead unasked")


def show_deleted(name: str, output: Format) -> None:
    """Write that ``name`` is gone."""
    if output in DOCUMENTS:
        write_document({"name": name, "deleted": True}, output)
    else:
        plain(out(), name)


async def read_and_change(
    etag: str,
    read: Callable[[], Awaitable[T]],
    write: Callable[[T, str], Awaitable[T]],
    etag_of: Callable[[T], str],
) -> T:
    """Return what ``write`` made of what ``read`` found, with nobody's change in between lost.

    Without an etag of the user's, a change by someone else in between is read and the own one made again.
    """
    for attempt in range(1, _TRIES + 1):
        found = await read()
        try:
            return await write(found, etag or etag_of(found))
        except CliError as error:
            if etag or error.reason != "ETAG_MISMATCH" or attempt == _TRIES:
                raise
    raise AssertionError("the last try returns or raises")
