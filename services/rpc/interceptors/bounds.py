"""Every request message is within the bounds of the protos before a servicer gets it."""

from __future__ import annotations

from typing import Any, Final

from services.rpc import bounds
from services.rpc.interceptors.base import AroundInterceptor

# One bad entry of these streams ends that entry alone, so their servicers check the messages themselves.
CHECKED_BY_SERVICER: Final = frozenset(
    {
        "/fairway.v1.InferenceService/Session",
        "/fairway.v1.SchedulerService/Connect",
        "/fairway.v1.WorkerService/Execute",
    }
)


class RequestBounds(AroundInterceptor):
    def on_request(self, method: str, message: Any) -> None:
        if method.startswith("/fairway.") and method not in CHECKED_BY_SERVICER:
            bounds.check(message)
