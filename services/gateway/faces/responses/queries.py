"""The query strings of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

from services.core.errors import InvalidInput
from services.gateway.faces.openai.exchange import Scope

_MAX_FIELDS: Final = 32
_MAX_ITEMS: Final = 100
_ITEMS: Final = 20
_MAX_NUMBER: Final = 2**53


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """How a response is retrieved: as a stream of the events beyond a number, or whole."""

    stream: bool
    after: int


@dataclass(frozen=True, slots=True)
class ItemsQuery:
    """Which input items are listed: ``limit`` of them, behind the item ``after`` unless that is empty."""

    limit: int
    after: str
    descending: bool


def stream_query(scope: Scope, last_event_id: str) -> StreamQuery:
    """Return the query of a retrieval. Raises InvalidInput.

    ``last_event_id``: the header that a client of server-sent events sends; the number is the id.
    """
    found = _fields(scope, ("stream", "starting_after", "include", "include[]", "include_obfuscation"))
    stream = found.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidInput("stream must be true or false", field="stream")
    if "starting_after" in found and stream == "false":
        raise InvalidInput("starting_after needs stream=true", field="starting_after")
    name = "starting_after" if "starting_after" in found else "last-event-id"
    given = found.get("starting_after") or last_event_id
    return StreamQuery(stream == "true", _number(given, name) if given else -1)


def items_query(scope: Scope) -> ItemsQuery:
    """Return the query of a list of items. Raises InvalidInput."""
    found = _fields(scope, ("limit", "order", "after", "include", "include[]"))
    limit = _number(found["limit"], "limit") if "limit" in found else _ITEMS
    if not 1 <= limit <= _MAX_ITEMS:
        raise InvalidInput(f"limit must be 1 to {_MAX_ITEMS}", field="limit")
    order = found.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("order must be asc or desc", field="order")
    return ItemsQuery(limit, found.get("after", ""), order == "desc")


def _fields(scope: Scope, known: tuple[str, ...]) -> dict[str, str]:
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


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) < _MAX_NUMBER):
        raise InvalidInput(f"{name} must be a number", field=name)
    return int(text)
