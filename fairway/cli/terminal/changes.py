"""Confirmation before a change of shared state, and the output after a deletion."""

from __future__ import annotations

import sys

import typer

from fairway.cli.errors import CliError
from fairway.cli.flags import Format
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import out, plain


def confirm(question: str, *, yes: bool) -> None:
    """Return once the user agrees; without a terminal, at once. Raises CliError for a no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, err=True):
        raise CliError("NOT_CONFIRMED", "nothing was changed", next_step="add --yes to go ahead unasked")


def show_deleted(name: str, output: Format) -> None:
    """Print that ``name`` was deleted."""
    if output in DOCUMENTS:
        write_document({"name": name, "deleted": True}, output)
    else:
        plain(out(), name)
