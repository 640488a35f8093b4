"""Maps domain errors to rich statuses, and bugs to INTERNAL with an incident id and no text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog
from grpc._cython import cygrpc

from services.core.errors import FairwayError, InternalError, Unimplemented
from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.rpc.status import to_grpc_status
from services.runtime.telemetry.logging import LineBudget

log = structlog.get_logger()
_NOT_OURS: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class ErrorStatus(AroundInterceptor):
    def __init__(self, new_incident: Callable[[], str], lines: LineBudget | None = None) -> None:
        """``lines`` bounds the log lines about rejections, because any client can cause them."""
        super().__init__()
        self._new_incident = new_incident
        self._lines = lines

    async def around(self, method: str, call: Call, context: Context) -> Any:
        try:
            return await self._answered(method, call, context)
        except cygrpc.ExecuteBatchError:
            # The caller has disconnected, and grpc has not cancelled this task yet: grpc would log the error.
            if self._lines is None or self._lines.take():
                log.info("rpc.undelivered", method=method)
            raise asyncio.CancelledError from None

    async def _answered(self, method: str, call: Call, context: Context) -> Any:
        try:
            return await call()
        except FairwayError as error:
            if isinstance(error, InternalError) and "incident" not in error.metadata:
                await self._crashed(method, error, context)
            if self._lines is None or self._lines.take():
                log.info("rpc.rejected", method=method, reason=error.reason)
            await context.abort_with_status(to_grpc_status(error))
        except (grpc.aio.AbortError, grpc.aio.UsageError, cygrpc.ExecuteBatchError, *_NOT_OURS):
            raise
        except NotImplementedError:  # raised by the generated base class
            await context.abort_with_status(to_grpc_status(Unimplemented(f"{method} is not implemented")))
        except BaseException as error:  # a native library's panic is not an Exception
            await self._crashed(method, error, context)

    async def _crashed(self, method: str, error: BaseException, context: Context) -> None:
        """End the RPC with an incident id, which is logged with the error. Always raises."""
        incident = self._new_incident()
        log.error("rpc.crashed", method=method, incident=incident, exc_info=error)
        bug = InternalError("internal error; quote the incident id to the operator", incident=incident)
        await context.abort_with_status(to_grpc_status(bug))
