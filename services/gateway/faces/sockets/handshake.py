"""Who may open a WebSocket: a caller with a key; a web page only from the origins in the setting.

Browsers set no headers here, so a page offers its key as a subprotocol in addition to the protocol's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.core.errors import PermissionDenied
from services.gateway.faces.openai.errors import Header, HttpProblem
from services.gateway.faces.openai.exchange import Headers, Scope

SUBPROTOCOL: Final = "fairway.v1"
KEY_PREFIX: Final = "fairway.key."


@dataclass(frozen=True, slots=True)
class Opening:
    """``subprotocol`` is what the answer selects; None: the client offered none."""

    credentials: str | None
    subprotocol: str | None

    @property
    def header(self) -> list[Header]:
        """The credentials as each request of the socket carries them."""
        return [] if self.credentials is None else [(b"authorization", self.credentials.encode("latin-1"))]


def opening_of(scope: Scope, origins: Sequence[str]) -> Opening:
    """Return what the client presented. Raises HttpProblem, PermissionDenied."""
    headers = Headers(scope)
    origin = headers.one(b"origin")
    if origin is not None and "*" not in origins and origin.decode("latin-1") not in origins:
        raise PermissionDenied("web pages of this origin may not connect; the operator permits origins")
    offered: Sequence[str] = scope["subprotocols"]
    if offered and SUBPROTOCOL not in offered:
        raise HttpProblem(400, f"of the subprotocols, {SUBPROTOCOL} is the protocol's; offer it too")
    keys = [each.removeprefix(KEY_PREFIX) for each in offered if each.startswith(KEY_PREFIX)]
    credentials = headers.credentials()
    if len(keys) + (credentials is not None) > 1:
        raise HttpProblem(400, "the API key is there more than once")
    return Opening(f"Bearer {keys[0]}" if keys else credentials, SUBPROTOCOL if offered else None)
