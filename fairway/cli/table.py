"""Tables: which columns a resource has, and its rows for a terminal or for a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table
from rich.text import Text

from fairway.cli.output import out, plain, write_rich

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """``wide``: only in the wide table, where it stands after the others."""

    header: str
    cell: Callable[[T], str]
    wide: bool = False


def visible(columns: Sequence[Column[T]], *, wide: bool) -> tuple[Column[T], ...]:
    """Return the columns of one table: those of the narrow one come first in both."""
    narrow = tuple(column for column in columns if not column.wide)
    return (*narrow, *(column for column in columns if column.wide)) if wide else narrow


def show_rows(columns: Sequence[Column[T]], items: Iterable[T], *, wide: bool = False) -> None:
    """Write a table to stdout: aligned under headers on a terminal, else tab-separated lines alone."""
    shown = visible(columns, wide=wide)
    if out().is_terminal:
        write_rich(table_of(shown, items))
        return
    for item in items:
        plain(out(), line_of(shown, item))


def line_of(columns: Sequence[Column[T]], item: T) -> str:
    """Return the cells of one item between tabs; a cell's own tabs and line ends are blanks."""
    return "\t".join(" ".join(column.cell(item).split()) for column in columns)


def table_of(columns: Sequence[Column[T]], items: Iterable[T]) -> Table:
    """Return a table for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.header.upper(), overflow="fold")
    for item in items:
        table.add_row(*(Text(column.cell(item)) for column in columns))  # a cell's brackets are no markup
    return table
