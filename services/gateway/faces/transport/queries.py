"""Query strings of the HTTP API, read as their declarations state, and the pages of its lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct, structs

from services.core.errors import InvalidInput
from services.gateway.faces.openai.exchange import Scope
from services.gateway.faces.openai.types import invalid_fields

_MAX_FIELDS: Final = 32
_MAX_NUMBER: Final = 2**53
T = TypeVar("T")
Query = TypeVar("Query", bound=Struct)


class PageQuery(Struct, frozen=True, kw_only=True):
    """Which items of a list are asked for: ``limit``, behind the item ``after`` unless that is empty.

    A list declares the bounds of ``limit``.
    """

    limit: int
    after: str = ""


class OrderedQuery(PageQuery, frozen=True, kw_only=True):
    order: Literal["asc", "desc"] = "desc"


def read_query(scope: Scope, kind: type[Query]) -> Query:
    """Return the query string, of a repeated field the last. Raises InvalidInput."""
    text = scope.get("query_string", b"").decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidInput("the query string is malformed or has too many fields") from None
    known = [field.encode_name for field in structs.fields(kind)]
    for name, _ in pairs:
        if name not in known:
            shown = name[:64]
            raise InvalidInput(f"unrecognized query field: {shown}", field=shown)
    try:
        return msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise invalid_fields(str(exc)) from None


def query_number(text: str, name: str) -> int:
    """Return a number of the query. Raises InvalidInput."""
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) < _MAX_NUMBER):
        raise InvalidInput(f"{name} must be a number", field=name)
    return int(text)


def page_of(items: Sequence[T], name: Callable[[T], str], query: PageQuery) -> tuple[Sequence[T], bool]:
    """Return the items of the page, and whether more follow; ``items`` are in order. Raises InvalidInput."""
    start = 0
    if query.after:
        names = [name(item) for item in items]
        if query.after not in names:
            raise InvalidInput("after is no id of this list", field="after")
        start = names.index(query.after) + 1
    page = items[start : start + query.limit]
    return page, start + len(page) < len(items)
