"""Calls of the control plane and the registry: deadline, failover, retries, pages, and streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration

from fairway.client.attempts import Attempts, Core, unary
from fairway.client.endpoints import Endpoint, Metadata
from fairway.client.errors import FailedPrecondition, connection_lost, from_rpc
from fairway.client.guard import Guard
from fairway.client.values import checked_timeout_s

PAGE: Final = 1000
MAX_ITEMS: Final = 100_000
# Limit of one attempt: a server may stop answering without closing its connection.
ATTEMPT_S: Final = 5.0

Stub = Any


class Service:
    """One gRPC service, at any of its servers that answers. Methods and fields have their proto names.

    Every call has a deadline, which includes its retries. An attempt without a response for a third of it,
    or for ``ATTEMPT_S``, is repeated at another server, if there is one.
    """

    def __init__(
        self, core: Core, guard: Guard, stub_of: Callable[[grpc.aio.Channel], Stub], messages: ModuleType
    ) -> None:
        self.core = core
        self.guard = guard
        self._stub_of = stub_of
        self._messages = messages

    def request(self, method: str, fields: dict[str, Any]) -> Any:
        return getattr(self._messages, f"{method}Request")(**fields)

    async def call(
        self, method: str, *, timeout_s: float | None = None, quick: bool = True, **fields: Any
    ) -> Any:
        """Return the response. Unless ``quick``, an attempt may take the whole time. Raises FairwayError."""
        self.guard.check()
        request = self.request(method, fields)

        def send(endpoint: Endpoint, attempt_s: float, metadata: Metadata) -> Any:
            found = getattr(self.stub(endpoint), method)
            return found(request, timeout=attempt_s, metadata=metadata)

        limit_s = self.timeout_s(timeout_s)
        attempt_s = attempt_of(limit_s) if quick else None
        return await self.guard.run(unary(self.core, send, limit_s, attempt_s=attempt_s))

    async def change(self, method: str, *, timeout_s: float | None = None, **fields: Any) -> Any:
        """Return the response of a call that changes state: applied once, however often it is sent."""
        return await self.call(method, timeout_s=timeout_s, request_id=secrets.token_hex(16), **fields)

    async def pages(
        self,
        method: str,
        field: str,
        *,
        limit: int | None = None,
        timeout_s: float | None = None,
        page_size: int = PAGE,
        most: int = MAX_ITEMS,
        **fields: Any,
    ) -> list[Any]:
        """Return ``field`` of all pages, or its first ``limit`` items; ``timeout_s`` applies to each page.

        Raises FailedPrecondition for more than ``most`` items.
        """
        if limit is not None and limit < 1:
            raise ValueError("limit must be at least 1")
        wanted = most + 1 if limit is None else min(limit, most)
        found: list[Any] = []
        token = ""
        while len(found) < wanted:
            size = min(page_size, wanted - len(found))
            answer = await self.call(method, timeout_s=timeout_s, page_size=size, page_token=token, **fields)
            found += getattr(answer, field)
            token = answer.next_page_token
            if not token:
                break
        if len(found) > most:
            raise FailedPrecondition(
                f"there are more than {most} {field}: request the first ones with limit=",
                reason="LIST_TOO_LONG",
                metadata={"limit": str(most)},
            )
        return found

    def timeout_s(self, requested_s: float | None) -> float:
        return self.core.options.timeout_s if requested_s is None else checked_timeout_s(requested_s)

    def stub(self, endpoint: Endpoint) -> Stub:
        return endpoint.stub_of(self._stub_of)

    async def open(self, method: str, request: Any, attempts: Attempts) -> Stream:
        """Return a stream of responses; the caller closes it. Raises NoGateway and DeadlineExceeded."""
        self.guard.check()
        return Stream(self, await self.guard.run(attempts.begin()), method, request)


def duration_of(seconds: float) -> Duration:
    found = Duration()
    found.FromMicroseconds(round(seconds * 1e6))
    return found


def attempt_of(timeout_s: float) -> float:
    """Return how long an attempt may take when another server is available."""
    return min(ATTEMPT_S, timeout_s / 3)


class Stream:
    """One attempt of a streaming call. Holds its endpoint until ``close``."""

    def __init__(self, service: Service, endpoint: Endpoint, method: str, request: Any) -> None:
        self.endpoint = endpoint
        self._service = service
        self._channel = endpoint.channel
        self._call = getattr(service.stub(endpoint), method)(request, metadata=service.core.metadata)

    @property
    def is_outdated(self) -> bool:
        """Whether the certificate was replaced since the call began."""
        return self.endpoint.channel is not self._channel

    async def read(self, within_s: float) -> Any:
        """Return the next response. Raises ConnectionLost if no message arrives in time."""
        return await self._service.guard.run(self._read(within_s))

    def close(self) -> None:
        """Cancel the call and release the endpoint."""
        self._call.cancel()
        self._service.core.pool.release(self.endpoint)

    async def _read(self, within_s: float) -> Any:
        try:
            async with asyncio.timeout(within_s):
                answer = await self._call.read()
        except TimeoutError:
            raise connection_lost(f"the server was silent for {within_s:g} s") from None
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc) from None
        if answer is grpc.aio.EOF:
            raise connection_lost("the server ended the stream")
        self._service.core.pool.succeeded(self.endpoint)
        return answer
