"""The query strings of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.core.errors import InvalidInput
from services.gateway.faces.openai.exchange import Scope
from services.gateway.faces.transport.queries import ListQuery, list_query, query_fields, query_number

_MAX_ITEMS: Final = 100
_ITEMS: Final = 20


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """How a response is retrieved: as a stream of the events beyond a number, or whole."""

    stream: bool
    after: int


def stream_query(scope: Scope, last_event_id: str) -> StreamQuery:
    """Return the query of a retrieval. Raises InvalidInput.

    ``last_event_id``: the header that a client of server-sent events sends; the number is the id.
    """
    found = query_fields(scope, ("stream", "starting_after", "include", "include[]", "include_obfuscation"))
    stream = found.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidInput("stream must be true or false", field="stream")
    if "starting_after" in found and stream == "false":
        raise InvalidInput("starting_after needs stream=true", field="starting_after")
    name = "starting_after" if "starting_after" in found else "last-event-id"
    given = found.get("starting_after") or last_event_id
    return StreamQuery(stream == "true", query_number(given, name) if given else -1)


def items_query(scope: Scope) -> ListQuery:
    """Return the query of a list of items. Raises InvalidInput."""
    found = query_fields(scope, ("limit", "order", "after", "include", "include[]"))
    return list_query(found, _ITEMS, _MAX_ITEMS)
