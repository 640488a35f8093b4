"""The gateway's service as the faces see it; its implementations are stacked by ``app/roles``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fairway.v1 import inference_pb2
from services.core.errors import Draining, FairwayError
from services.core.generation import Principal
from services.gateway.catalog import Route
from services.gateway.events import Event, Handle, Received, RequestSink
from services.gateway.requests.streaming import BufferedStream, Completion, complete
from services.gateway.service_types import GatewayLimits
from services.ports.clock import Clock


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the caller may use."""

    name: str
    version_digest: str
    max_context_tokens: int
    ready_replicas: int
    created_unix_s: int


class Generations(Protocol):
    """Whole requests: validates, admits, places and streams; raises the tree of ``core/errors.py``."""

    def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, ending with Finished; raise the error that ended it.

        Closing the generator cancels the request and frees all its resources.
        """

    async def complete(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Completion:
        """Return the whole answer. Cancelling the call cancels the request."""

    async def list_models(self, principal: Principal) -> Sequence[ServedModel]:
        """Return the models that the caller may use, by name."""


class GatewayInterface(Generations, Protocol):
    """Everything that the faces and the process call. Its implementations derive from it."""

    limits: GatewayLimits

    def submit(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        sink: RequestSink,
        *,
        received: Received,
        timeout_s: float | None = None,
        client_window: int | None = None,
    ) -> Handle:
        """Start a request; its sink receives accepted, tokens and one terminal event.

        ``client_window``: how many tokens of each choice the client takes before it allows more; None: no
        client window. Raises Draining, ShareExceeded and QueueFull at once.
        """

    def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        buffer = BufferedStream(self.limits.heartbeat_s)
        return buffer.events(
            lambda: self.submit(principal, generation, buffer, received=received, timeout_s=timeout_s)
        )

    async def complete(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Completion:
        return await complete(self.stream(principal, generation, received=received, timeout_s=timeout_s))

    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of tokens of the prompt for its model.

        Raises RequestRateExceeded: counting has its own rate, equal to the tenant's requests per minute.
        """

    @property
    def running(self) -> int:
        """Requests between receipt and terminal event."""

    @property
    def buffered_tokens(self) -> int:
        """Output tokens that arrived and that no transport has taken."""

    # --- the shutdown, in the order of ``drain`` ---------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected."""

    @property
    def busy(self) -> bool:
        """Whether a drain has requests or clients to wait for."""

    def reject_new(self) -> None:
        """Reject new requests from now on."""

    def cancel_all(self, error: FairwayError) -> int:
        """Cancel everything that runs. Returns how many requests were cut."""

    async def flush(self) -> None:
        """Retry once the writes that a store outage deferred: the process's end would lose them."""


class Authenticator(Protocol):
    def authenticate(self, credentials: str | None) -> Principal:
        """Return the principal of an authorization header's key. Raises Unauthenticated."""


class IdSource(Protocol):
    def request_id(self) -> str: ...

    def incident_id(self) -> str: ...


async def drain(service: GatewayInterface, clock: Clock, timeout_s: float) -> int:
    """Reject new requests, wait for the running ones, cancel the rest. Returns how many were cut."""
    service.reject_new()
    deadline_s = clock.monotonic_s() + timeout_s
    while service.busy and clock.monotonic_s() < deadline_s:
        await clock.sleep(0.05)
    cut = service.cancel_all(Draining("this gateway is shutting down; send it again", retry_after_s=1.0))
    while service.busy and clock.monotonic_s() < deadline_s + 5.0:
        await clock.sleep(0.01)
    await service.flush()
    return cut
