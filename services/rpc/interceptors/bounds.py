"""Every request message is within the bounds of the protos before a servicer gets it."""

from __future__ import annotations

from typing import Any, Final

from services.rpc import bounds
from services.rpc.interceptors.base import AroundInterceptor

# One bad generation of a session ends that generation, so the session checks its messages itself.
CHECKED_BY_SERVICER: Final = frozenset({"/fairway.v1.InferenceService/Session"})


class RequestBounds(AroundInterceptor):
    def on_request(self, method: str, message: Any) -> None:
        if method.startswith("/fairway.") and method not in CHECKED_BY_SERVICER:
            bounds.check(message)
