"""Tables: the columns of a resource, and its rows for a terminal or a pipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fairway.cli.terminal.output import out, plain, write_rich

T = TypeVar("T")

_GAP: Final = 2
_SHORT: Final = 20
_DIGEST: Final = re.compile(r"(?:sha256:)?([0-9a-f]{12})[0-9a-f]{52}\b")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table.

    A terminal that is too narrow omits columns: wide ones first, then keys that all rows share, then those
    with the highest ``drop``, the rightmost first. The first column always stays.
    """

    header: str
    cell: Callable[[T], str]
    wide: bool = False  # only in the wide table, after the others
    drop: int = 0
    key: bool = False  # rows may differ in it alone
    least: int = _SHORT  # a cell up to this width is never cut; a reason has more than others


def visible(columns: Sequence[Column[T]], *, wide: bool) -> tuple[Column[T], ...]:
    """Return the columns of one table; the narrow ones come first in the wide table."""
    narrow = tuple(column for column in columns if not column.wide)
    return (*narrow, *(column for column in columns if column.wide)) if wide else narrow


def show_rows(columns: Sequence[Column[T]], items: Iterable[T], *, wide: bool = False) -> None:
    """Print a table to stdout: aligned under headers on a terminal, else tab-separated lines only.

    A wide table that a terminal has no room for becomes a block of lines per item: nothing is left out.
    """
    shown, items = visible(columns, wide=wide), list(items)
    if out().is_terminal:
        if not wide or _total(dict(enumerate(_natural(shown, _rows(shown, items))))) <= out().width:
            write_rich(table_of(shown, items))
        else:
            plain(out(), blocks_of(shown, items), end="")
        return
    for item in items:
        plain(out(), line_of(shown, item))


def line_of(columns: Sequence[Column[T]], item: T) -> str:
    """Return the cells of one item separated by tabs; tabs and newlines in a cell become blanks."""
    return "\t".join(" ".join(column.cell(item).split()) for column in columns)


def blocks_of(columns: Sequence[Column[T]], items: Iterable[T]) -> str:
    """Return the cells of each item as `HEADER  cell` lines, with an empty line between items."""
    width = max(len(column.header) for column in columns) + _GAP
    blocks = []
    for item in items:
        cells = [(column.header.upper(), " ".join(column.cell(item).split())) for column in columns]
        blocks.append("".join(f"{header:<{width}}{cell}\n" for header, cell in cells if cell))
    return "\n".join(blocks)


def table_of(columns: Sequence[Column[T]], items: Iterable[T], *, width: int | None = None) -> Table:
    """Return a table of at most ``width`` cells, by default the terminal's, with one line per item.

    Digests are shortened to 12 hex digits. A column narrower than its content ends its cells with an
    ellipsis; headers are never cut.
    """
    headers = [column.header.upper() for column in columns]
    rows = _rows(columns, items)
    shared = {at for at, column in enumerate(columns) if column.key and len({row[at] for row in rows}) == 1}
    widths = _fit(columns, _natural(columns, rows), shared, out().width if width is None else width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for at, column_width in widths.items():
        table.add_column(headers[at], width=column_width, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in widths))  # brackets in a cell are not markup
    return table


def _rows(columns: Sequence[Column[T]], items: Iterable[T]) -> list[list[str]]:
    return [[_shown(column.cell(item)) for column in columns] for item in items]


def _natural(columns: Sequence[Column[T]], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column's longest cell or header."""
    return [
        max(len(column.header), *(cell_len(row[at]) for row in rows), 0) for at, column in enumerate(columns)
    ]


def _shown(cell: str) -> str:
    return _DIGEST.sub(r"\1", " ".join(cell.split()))


def _fit(
    columns: Sequence[Column[T]], natural: Sequence[int], shared: Collection[int], width: int
) -> dict[int, int]:
    """Return the width of each column that stays, by its index. ``shared``: keys that all rows share."""

    def later(at: int) -> tuple[bool, bool, int, bool, int]:
        return columns[at].wide, at in shared, columns[at].drop, not columns[at].key, at

    least = {at: max(len(one.header), min(natural[at], one.least)) for at, one in enumerate(columns)}
    for at in sorted(range(1, len(columns)), key=later, reverse=True):
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
