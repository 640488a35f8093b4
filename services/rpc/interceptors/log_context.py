"""Log events of an RPC carry its method and the caller's request id."""

from __future__ import annotations

from typing import Any

from structlog.contextvars import bound_contextvars

from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.runtime.telemetry.logging import clean_id


class LogContext(AroundInterceptor):
    async def around(self, method: str, call: Call, context: Context) -> Any:
        metadata = dict(context.invocation_metadata() or ())
        client_id = clean_id(metadata.get("x-request-id", ""))
        names = {"client_request_id": client_id} if client_id else {}
        with bound_contextvars(rpc=method, **names):
            return await call()
