"""Query strings of the HTTP API, and the pages of its lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import parse_qsl

from services.core.errors import InvalidInput
from services.gateway.faces.openai.exchange import Scope

_MAX_FIELDS: Final = 32
_MAX_NUMBER: Final = 2**53
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which items of a list are asked for: ``limit``, behind the item ``after`` unless that is empty."""

    limit: int
    after: str
    descending: bool


def query_fields(scope: Scope, known: Collection[str]) -> dict[str, str]:
    """Return the fields of the query string, of a repeated one the last. Raises InvalidInput."""
    text = scope.get("query_string", b"").decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidInput("the query string is malformed or has too many fields") from None
    for name, _ in pairs:
        if name not in known:
            shown = name[:64]
            raise InvalidInput(f"unrecognized query field: {shown}", field=shown)
    return dict(pairs)


def query_number(text: str, name: str) -> int:
    """Return a number of the query. Raises InvalidInput."""
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) < _MAX_NUMBER):
        raise InvalidInput(f"{name} must be a number", field=name)
    return int(text)


def list_query(fields: Mapping[str, str], usual: int, most: int) -> ListQuery:
    """Return ``limit``, ``after`` and ``order`` of a query; ``usual`` and ``most`` are items of a page.

    Raises InvalidInput.
    """
    limit = query_number(fields["limit"], "limit") if "limit" in fields else usual
    if not 1 <= limit <= most:
        raise InvalidInput(f"limit must be 1 to {most}", field="limit")
    order = fields.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("order must be asc or desc", field="order")
    return ListQuery(limit, fields.get("after", ""), order == "desc")


def page_of(items: Sequence[T], name: Callable[[T], str], query: ListQuery) -> tuple[Sequence[T], bool]:
    """Return the items of the page, and whether more follow; ``items`` are in order. Raises InvalidInput."""
    start = 0
    if query.after:
        names = [name(item) for item in items]
        if query.after not in names:
            raise InvalidInput("after is no id of this list", field="after")
        start = names.index(query.after) + 1
    page = items[start : start + query.limit]
    return page, start + len(page) < len(items)
