"""The HTTP API of an Alertmanager (version 2), as far as it takes alerts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairway.http_json import FetchFailed, post_json
from services.adapters.threads import in_thread
from services.core.errors import Unavailable


class Alertmanager:
    """``url`` is its base, with the prefix that it serves under."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/api/v2/alerts"

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Return once it has the alerts. Raises Unavailable, with its URL and the cause, within seconds."""
        try:
            await in_thread(post_json, self._url, list(alerts))
        except FetchFailed as error:
            raise Unavailable(f"alerts are not taken: {error}") from error
