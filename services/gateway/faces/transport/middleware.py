"""What applies before the route of an HTTP request: the spelling of its path, pages of other origins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from services.gateway.faces.openai.exchange import Receive, Send

_MAX_AGE_S: Final = 600
_SLASH: Final = "%2F"
# Headers of an answer that a page may read.
_EXPOSED: Final = (
    "retry-after",
    "retry-after-ms",
    "request-id",
    "x-request-id",
    "x-client-request-id",
    "x-should-retry",
    "x-fairway-cache",
    "idempotent-replayed",
    "x-fairway-degraded",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)


class SpelledPath:
    """Routes a path by its own slashes, except one at its end. Access depends on the route alone.

    An encoded slash stays encoded, so that it separates nothing: only ``model_of`` decodes it.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if b"%2f" in (raw := scope.get("raw_path") or b"").lower():
            parts = raw.decode("ascii", "replace").split("/")
            path = "/".join(unquote(part).replace("/", _SLASH) for part in parts)
        if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
            path = path[:-1]
        await self._app({**scope, "path": path}, receive, send)


def model_of(scope: Any) -> str:
    """Return the model's name in the path, which may have slashes of both spellings."""
    name: str = scope["path_params"]["model"]
    return name.replace(_SLASH, "/")


def cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """Return what lets web pages of these origins call the server; nothing without one.

    No cookies: a page sends its key itself.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(_EXPOSED),
            max_age=_MAX_AGE_S,
        )
    ]
