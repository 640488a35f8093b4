"""The two consoles of the command line: results go to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fairway.cli.errors import CliError


def out() -> Console:
    """Return a console on stdout, where results go."""
    return Console(highlight=False)


def err() -> Console:
    """Return a console on stderr, where progress and errors go."""
    return Console(stderr=True, highlight=False)


def plain(console: Console, text: str = "", *, end: str = "\n") -> None:
    """Write text as it is: no markup, no emoji codes, no wrapping, tabs kept, so that it can be pasted."""
    # Past ``Console.print``, which turns `:b:` into a picture, tabs into blanks, and drops carriage returns.
    console.file.write(text + end)
    console.file.flush()


def show_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table to stdout: aligned for a terminal, tab-separated lines otherwise."""
    console = out()
    if not console.is_terminal:
        for row in rows:
            plain(console, "\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a cell's brackets are no markup
    console.print(table)


def show_error(error: CliError) -> None:
    """Write the reason, the message and the next step to stderr."""
    console = err()
    console.print(f"[bold red]error[/] [bold]{error.reason}[/]: ", end="")
    plain(console, error.message)
    if error.next_step:
        console.print("[bold]next[/]: ", end="")
        plain(console, error.next_step)
