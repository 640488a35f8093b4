"""Every request message is within the bounds of the protos before a servicer gets it."""

from __future__ import annotations

from typing import Any

from services.rpc import bounds
from services.rpc.interceptors.base import AroundInterceptor


class RequestBounds(AroundInterceptor):
    def on_request(self, method: str, message: Any) -> None:
        if method.startswith("/fairway."):
            bounds.check(message)
