"""Tables: the columns of a resource, and its rows for a terminal or a pipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fairway.cli.terminal.output import out, plain, write_rich

T = TypeVar("T")

_GAP: Final = 2
_SHORT: Final = 20  # a cell up to this width is never truncated
_DIGEST: Final = re.compile(r"(?:sha256:)?([0-9a-f]{12})[0-9a-f]{52}\b")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table.

    A terminal that is too narrow omits columns: wide ones first, then those with the highest ``drop``, the
    rightmost first. The first column always stays.
    """

    header: str
    cell: Callable[[T], str]
    wide: bool = False  # only in the wide table, after the others
    drop: int = 0


def visible(columns: Sequence[Column[T]], *, wide: bool) -> tuple[Column[T], ...]:
    """Return the columns of one table; the narrow ones come first in the wide table."""
    narrow = tuple(column for column in columns if not column.wide)
    return (*narrow, *(column for column in columns if column.wide)) if wide else narrow


def show_rows(columns: Sequence[Column[T]], items: Iterable[T], *, wide: bool = False) -> None:
    """Print a table to stdout: aligned under headers on a terminal, else tab-separated lines only."""
    shown = visible(columns, wide=wide)
    if out().is_terminal:
        write_rich(table_of(shown, items))
        return
    for item in items:
        plain(out(), line_of(shown, item))


def line_of(columns: Sequence[Column[T]], item: T) -> str:
    """Return the cells of one item separated by tabs; tabs and newlines in a cell become blanks."""
    return "\t".join(" ".join(column.cell(item).split()) for column in columns)


def table_of(columns: Sequence[Column[T]], items: Iterable[T], *, width: int | None = None) -> Table:
    """Return a table of at most ``width`` cells, by default the terminal's, with one line per item.

    Digests are shortened to 12 hex digits. A column narrower than its content ends its cells with an
    ellipsis; headers are never cut.
    """
    headers = [column.header.upper() for column in columns]
    rows = [[_shown(column.cell(item)) for column in columns] for item in items]
    natural = [
        max(cell_len(header), *(cell_len(row[at]) for row in rows), 0) for at, header in enumerate(headers)
    ]
    widths = _fit(columns, natural, out().width if width is None else width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for at, column_width in widths.items():
        table.add_column(headers[at], width=column_width, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in widths))  # brackets in a cell are not markup
    return table


def _shown(cell: str) -> str:
    return _DIGEST.sub(r"\1", " ".join(cell.split()))


def _fit(columns: Sequence[Column[T]], natural: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column that stays, by its index."""
    least = {at: max(len(column.header), min(natural[at], _SHORT)) for at, column in enumerate(columns)}
    for at in sorted(range(1, len(columns)), key=lambda at: (columns[at].wide, columns[at].drop, at))[::-1]:
        if _total(least) <= width:
            break
        del least[at]
    widths = {at: natural[at] for at in least}
    while (excess := _total(widths) - width) > 0:
        room = {at: size for at, size in widths.items() if size > least[at]}
        if not room:
            return {at: min(size, width) for at, size in widths.items()}  # one column is left
        widest = max(room, key=lambda at: room[at])
        rest = max((size for at, size in room.items() if at != widest), default=0)
        target = max(least[widest], min(rest, room[widest] - 1), room[widest] - excess)
        widths[widest] = target
    return widths


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)
