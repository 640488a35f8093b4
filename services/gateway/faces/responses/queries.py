"""The query strings of the Responses API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from services.core.errors import InvalidInput
from services.gateway.faces.openai.exchange import Scope
from services.gateway.faces.openai.types import About
from services.gateway.faces.transport.queries import OrderedQuery, query_number, read_query

_MAX_NUMBER = 2**53 - 1


class StreamQuery(Struct, frozen=True, kw_only=True):
    """How a response is retrieved: whole, or as a stream of the events beyond a number."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=_MAX_NUMBER)] | None = None
    include: Annotated[str | None, About("No effect.")] = None
    included: Annotated[str | None, About("No effect.")] = field(default=None, name="include[]")
    include_obfuscation: Annotated[bool | None, About("No effect.")] = None


class ItemsQuery(OrderedQuery, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    include: Annotated[str | None, About("No effect.")] = None
    included: Annotated[str | None, About("No effect.")] = field(default=None, name="include[]")


def stream_query(scope: Scope, last_event_id: str) -> tuple[bool, int]:
    """Return whether a response is retrieved as a stream, and beyond which number. Raises InvalidInput.

    ``last_event_id``: the header that a client of server-sent events sends; the number is the id.
    """
    found = read_query(scope, StreamQuery)
    if found.starting_after is not None:
        if not found.stream:
            raise InvalidInput("starting_after needs stream=true", field="starting_after")
        return True, found.starting_after
    return found.stream, query_number(last_event_id, "last-event-id") if last_event_id else -1
