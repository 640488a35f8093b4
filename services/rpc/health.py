"""grpc.health.v1: serving status by name. A watcher that does not read delays only itself."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.core.errors import NotFound
from services.rpc.bounded_writes import BoundedWrites

Context = grpc.aio.ServicerContext[Any, Any]
_Response = health_pb2.HealthCheckResponse
_UNREAD_S = 10.0


class HealthServicer(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()

    def set(self, name: str, serving: bool | None) -> None:
        """Set the status of this name; None removes the name."""
        if self._serving.get(name) is serving:
            return
        if serving is None:
            del self._serving[name]
        else:
            self._serving[name] = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            raise NotFound("there is no such service here")
        return _response(self._serving[request.service])

    async def List(self, request: Any, context: Context) -> Any:  # newer than the published type stubs
        found = {name: _response(serving) for name, serving in self._serving.items()}
        return health_pb2.HealthListResponse(statuses=found)  # type: ignore[attr-defined]

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        with BoundedWrites(context, _UNREAD_S) as writes:
            sent = None
            while True:
                changed, answer = self._changed, _response(self._serving.get(request.service))
                if answer != sent:
                    await writes.write(answer)
                    sent = answer
                await changed.wait()


def _response(serving: bool | None) -> health_pb2.HealthCheckResponse:
    if serving is None:
        return _Response(status=_Response.SERVICE_UNKNOWN)
    return _Response(status=_Response.SERVING if serving else _Response.NOT_SERVING)
