"""The gateway's main path: check, admit, validate, place, stream."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec.structs import replace

from fairway.v1 import inference_pb2
from services.core.errors import Draining, FairwayError, QueueFull, RequestRateExceeded, StoreUnavailable
from services.core.generation import Principal
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import BATCH_FACE, Delivered, Event, Handle, Received, RequestSink, never
from services.gateway.requests.admission import RequestAdmission
from services.gateway.requests.parts import in_parts
from services.gateway.requests.request import Admit, Request, RequestWork
from services.gateway.requests.sequences import work_of
from services.gateway.requests.streaming import BufferedStream, Completion, complete
from services.gateway.requests.terms import RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.safety.requests import RequestSafety
from services.gateway.service_types import AnyRequest, GatewayLimits, Ports, RequestCapacity, subtract
from services.gateway.shadow import ShadowCopies
from services.ports.clock import Clock
from services.runtime.identity import KeyDirectory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the caller may use."""

    name: str
    version_digest: str
    max_context_tokens: int
    ready_replicas: int
    created_unix_s: int


class GatewayService:
    """The entry point of every face: no face can skip the quotas or the validation."""

    def __init__(
        self,
        *,
        validator: Validator,
        identity: KeyDirectory,
        catalog: ModelCatalog,
        ports: Ports,
        limits: GatewayLimits,
    ) -> None:
        self.capacity = RequestCapacity(limits.max_requests, limits.max_tenant_requests)
        self._validator = validator
        self._admission = RequestAdmission(validator, identity, catalog, ports, limits)
        self.shadows = ShadowCopies(validator, catalog, ports, limits)
        self._catalog = catalog
        self._ports = ports
        self.limits = limits
        self._requests: dict[Request, None] = {}  # running requests in order of arrival
        self._lines = 0  # lines of batches among them
        self._counting: Counter[str] = Counter()
        self._draining = False

    @property
    def running(self) -> int:
        """Requests between receipt and terminal event."""
        return len(self._requests)

    @property
    def serves_clients(self) -> bool:
        """Whether a request runs that is no line of a batch."""
        return len(self._requests) > self._lines

    @property
    def buffered_tokens(self) -> int:
        """Output tokens that arrived and that no transport has taken."""
        return sum(request.buffered_tokens for request in self._requests)

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected."""
        return self._draining

    @property
    def busy(self) -> bool:
        """Whether a drain has requests or clients to wait for, or calls that only tokenise or moderate."""
        return bool(self._requests) or bool(self._counting)

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
        self.check_open(principal.tenant_id, generation.model, received)
        longest_s = self.max_timeout_s(principal, generation)
        timeout_s = min(self.limits.timeout_of(generation, timeout_s), longest_s)
        # A client with a window of its own may not take a whole answer at once, as the cache would send it.
        cache = generation.cache and client_window is None
        terms = RunTerms(received, timeout_s, client_window, cache)
        request, admit = self.prepared(principal, generation, sink, terms)
        task = self._ports.supervisor.spawn(f"request {request.request_id}", request.deliver(admit, sink))
        leave = self.enter(principal.tenant_id, request)
        task.add_done_callback(lambda _: leave())
        return request

    def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
        withdraws: Callable[[], bool] = never,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, ending with Finished; raise the error that ended it.

        Closing the generator cancels the request and frees all its resources. One with an idempotency key
        runs on for a grace period, unless the caller then ``withdraws`` it.
        """
        buffer = BufferedStream(self.limits.heartbeat_s, withdraws=withdraws)
        delivered = received.delivered
        if generation.parts and delivered is not None:
            # Parts depend on the text before them, so that the output is needed from its beginning.
            received = replace(received, delivered=Delivered(delivered.request, ()))
        events = buffer.events(
            lambda: self.submit(principal, generation, buffer, received=received, timeout_s=timeout_s)
        )
        return in_parts(events, delivered) if generation.parts else events

    async def complete(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: float | None = None,
        withdraws: Callable[[], bool] = never,
    ) -> Completion:
        """Return the whole answer. Cancelling the call cancels the request. ``withdraws``: see ``stream``."""
        events = self.stream(
            principal, generation, received=received, timeout_s=timeout_s, withdraws=withdraws
        )
        return await complete(events, parts=generation.parts)

    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of tokens of the prompt for its model.

        Raises RequestRateExceeded: counting has its own rate, equal to the tenant's requests per minute.
        """
        route, generation = self._validator.check_count(principal, request)
        async with self.counted(principal):
            return route, await self._validator.count_tokens(principal, generation, route)

    async def token_ids(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, Sequence[int]]:
        """Return the route and the token ids of an input. Raises as ``count_tokens``, and PromptTooLong."""
        route, generation = self._validator.check_count(principal, request)
        async with self.counted(principal):
            return route, await self._validator.token_ids(principal, generation, route)

    async def text_of(self, principal: Principal, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids of a model. Raises as ``count_tokens``."""
        async with self.counted(principal):
            return await self._validator.text_of(principal, model, ids)

    async def judging(
        self,
        principal: Principal,
        request: inference_pb2.ModerateRequest,
        received: Received,
        timeout_s: float | None,
    ) -> RequestSafety:
        """Return what judges the texts by a safety pack as a request of the caller would get it; of no name,
        by its tenant's.

        Raises FailedPrecondition for a tenant without one, ModelNotFound, as ``SafetyPacks.terms``, and what
        refuses a tenant whose rates and budgets have no room for the pack's models.
        """
        longest_s = self._admission.max_timeout_s(principal, "")
        most_s = min(self.limits.max_timeout_s, longest_s if timeout_s is None else min(timeout_s, longest_s))
        return await self._admission.judging(principal, request, received, received.monotonic_s + most_s)

    def max_context_tokens(self, route: Route) -> int:
        """Return the most tokens of a prompt and its output together."""
        return self._catalog.max_context_tokens(route.version_digest)

    def deployment_of(self, model: str) -> str:
        """Return the deployment that a name stands for; the smallest of an alias of several."""
        alias = self._catalog.alias(model)
        return alias.sizes[0].deployment if alias is not None and alias.sizes else self._catalog.named(model)

    @asynccontextmanager
    async def counted(self, principal: Principal) -> AsyncIterator[None]:
        """Count a call that only tokenises, or moderates, against its bounds. Raises RequestRateExceeded."""
        tenant_id, most = principal.tenant_id, self.limits.max_tenant_counts
        if self._counting[tenant_id] >= most:
            raise RequestRateExceeded(
                f"{most} calls of this tenant count tokens at this gateway, the maximum",
                retry_after_s=1.0,
                limit=most,
            )
        self._counting[tenant_id] += 1
        try:
            await self._admission.spend(principal)
            yield
        finally:
            subtract(self._counting, tenant_id)

    async def list_models(self, principal: Principal) -> list[ServedModel]:
        """Return the models that the caller may use, by name, each followed by its further names."""
        found: list[ServedModel] = []
        routes = [
            route
            for route in self._catalog.routes()
            if not principal.models or route.model in principal.models
        ]
        for route in routes:
            found += [
                ServedModel(
                    name=name,
                    version_digest=route.version_digest,
                    max_context_tokens=self._catalog.max_context_tokens(route.version_digest),
                    ready_replicas=route.ready_replicas,
                    created_unix_s=int(route.deployment.meta.create_unix_s),
                )
                for name in (route.model, *self._catalog.aliases_of(route.model))
            ]
        by_name = {one.name: one for one in found}
        for alias in self._catalog.sized():
            sizes = [by_name[one.deployment] for one in alias.sizes if one.deployment in by_name]
            if sizes and alias.meta.name not in by_name:
                context = max(one.max_context_tokens for one in sizes)
                found.append(dataclasses.replace(sizes[0], name=alias.meta.name, max_context_tokens=context))
        return found

    def max_timeout_s(self, principal: Principal, generation: AnyRequest) -> float:
        """Return the longest time that the caller's limits allow. Raises Unauthenticated."""
        return self._admission.max_timeout_s(principal, generation.user)

    async def renew_forever(self) -> None:
        """Keep the reservations of running requests alive; a task of the process.

        The limiter is called even when nothing runs: it retries deferred settlements.
        """
        while True:
            await self._ports.clock.sleep(self.limits.renew_s)
            await self.flush()

    async def flush(self) -> None:
        """Renew the reservations once; the limiter also retries settlements that a store outage deferred."""
        limiter = self._ports.limiter
        assert limiter is not None, "only copies are not limited"
        held = [
            (request.reservation, request.usage)
            for request in self._requests
            if request.reservation is not None
        ]
        for start in range(0, max(1, len(held)), self.limits.renew_batch):
            try:
                await limiter.renew(held[start : start + self.limits.renew_batch])
            except StoreUnavailable as error:
                log.warning("reservations.renew_failed", count=len(held), reason=error.reason)
                break

    def reject_new(self) -> None:
        """Reject new requests from now on, and end the copies for shadow versions."""
        self._draining = True
        self.shadows.stop()

    def cancel_all(self, error: FairwayError) -> int:
        """Cancel everything that runs. Returns how many requests were cut."""
        left = list(self._requests)
        for request in left:
            request.cancel(error)
        return len(left)

    def check_open(self, tenant_id: str, model: str, received: Received) -> None:
        """Return if a new request of the tenant is accepted. Raises Draining, ShareExceeded, QueueFull."""
        refusal = self.capacity.refusal(tenant_id)
        if self._draining:
            refusal = Draining("this gateway is shutting down; send it to another", retry_after_s=1.0)
        if refusal is not None:
            self._ports.telemetry.refused(received, refusal)
            if isinstance(refusal, QueueFull) and self._catalog.has(model):
                self._ports.telemetry.full(tenant_id, model)
            raise refusal

    def prepared(
        self, principal: Principal, generation: inference_pb2.Generation, sink: RequestSink, terms: RunTerms
    ) -> tuple[Request, Admit]:
        """Return a request that is accepted, and its admission."""
        request = Request(terms, self._ports)
        return request, partial(self._admit, principal, generation, request, sink)

    def enter(self, tenant_id: str, request: Request) -> Callable[[], None]:
        """Count a request as running until the returned function is called, once."""
        self._requests[request] = None
        lines = int(request.terms.received.face == BATCH_FACE)
        self._lines += lines
        self.capacity.enter(tenant_id)

        def leave() -> None:
            self._requests.pop(request, None)
            self._lines -= lines
            self.capacity.leave(tenant_id)

        return leave

    async def _admit(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request: Request,
        sink: RequestSink,
    ) -> RequestWork:
        admitted = await self._admission.admit(principal, generation, request)
        return work_of(self.shadows.beside(admitted, generation), sink, request)


async def drain(service: GatewayService, clock: Clock, timeout_s: float) -> int:
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
