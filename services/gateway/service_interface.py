"""The gateway's service as the faces see it. ``GatewayService`` and the tests' fakes have this shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from fairway.v1 import inference_pb2
from services.core.generation import Principal, TokenLogprobs
from services.gateway.events import Accepted, Event, Finished, Received


class Completed(Protocol):
    """A whole answer. Position i of each list belongs to choice i."""

    @property
    def accepted(self) -> Accepted: ...

    @property
    def texts(self) -> Sequence[str]: ...

    @property
    def logprobs(self) -> Sequence[Sequence[TokenLogprobs]]: ...

    @property
    def finished(self) -> Finished: ...


class Served(Protocol):
    """A model that the caller may use."""

    @property
    def name(self) -> str: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def created_unix_s(self) -> int: ...


class Generations(Protocol):
    """Validates, admits, places and streams; raises the tree of ``core/errors.py``."""

    def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request. Closing the generator cancels it and frees everything."""

    async def complete(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Completed:
        """Return the whole answer. Cancelling the call cancels the request."""

    async def list_models(self, principal: Principal) -> Sequence[Served]: ...


class Identity(Protocol):
    def authenticate(self, credentials: str | None) -> Principal:
        """Return the principal of an authorization header's key. Raises Unauthenticated."""


class IdSource(Protocol):
    def request_id(self) -> str: ...

    def incident_id(self) -> str: ...
