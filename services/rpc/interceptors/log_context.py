"""Log events of an RPC carry its method and the caller's request id."""

from __future__ import annotations

from typing import Any

from structlog.contextvars import bound_contextvars

from services.rpc.interceptors.base import AroundInterceptor, Call, Context


class LogContext(AroundInterceptor):
    async def around(self, method: str, call: Call, context: Context) -> Any:
        metadata = dict(context.invocation_metadata() or ())
        request_id = metadata.get("x-request-id", "")
        with bound_contextvars(rpc=method, client_request_id=str(request_id)[:64]):
            return await call()
