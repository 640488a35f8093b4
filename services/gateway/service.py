"""The gateway's main path: check, admit, validate, place, stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial

import structlog

from fairway.v1 import inference_pb2
from services.core.errors import (
    Draining,
    FairwayError,
    QueueFull,
    RequestRateExceeded,
    ShareExceeded,
    StoreUnavailable,
    UnsupportedFeature,
)
from services.core.generation import Principal
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import Event, Handle, Received, RequestSink
from services.gateway.idempotency.service import Idempotent, fingerprint, record_key
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.idempotency.types import KeyedPorts, Record, Resume
from services.gateway.requests.admission import Admission, RunTerms
from services.gateway.requests.buffered_stream import BufferedStream
from services.gateway.requests.completion import Completion, complete
from services.gateway.requests.request import Admitted, Request
from services.gateway.requests.stage_timer import StageTimer
from services.gateway.requests.validate import Validator
from services.gateway.service_types import GatewayLimits, Ports
from services.ports.limiter import Limiter
from services.rpc import bounds
from services.runtime.identity import KeyDirectory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
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
        self._validator = validator
        self._admission = Admission(validator, identity, ports, limits)
        self._identity = identity
        self._catalog = catalog
        self._ports = ports
        self._limits = limits
        self._requests: dict[Request, None] = {}  # in order of arrival
        self._per_tenant: Counter[str] = Counter()
        self._counting: Counter[str] = Counter()
        self._draining = False
        self._keyed = None
        if ports.idempotency is not None:
            keyed = KeyedPorts(
                store=ports.idempotency,
                limiter=ports.limiter,
                clock=ports.clock,
                telemetry=KeyedTelemetry(ports.telemetry.metrics),
                new_incident=ports.new_incident,
                owner=ports.gateway_id,
                window_tokens=limits.window_tokens,
                limits=limits.keyed,
            )
            self._keyed = Idempotent(keyed, ports.supervisor)

    @property
    def running(self) -> int:
        return len(self._requests)

    @property
    def buffered_tokens(self) -> int:
        """Output tokens that arrived and that no transport has taken."""
        return sum(request.buffered_tokens for request in self._requests)

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected."""
        return self._draining

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

        With an idempotency key, the sink follows the request of that key, which is started or joined.
        ``client_window``: how many tokens of each choice the client takes before it allows more; None: no
        client window. Raises Draining, ShareExceeded and QueueFull at once.
        """
        refusal = self._not_now(principal.tenant_id)
        if refusal is not None:
            self._ports.telemetry.refused(received, refusal)
            raise refusal
        terms = RunTerms(received, self._timeout_s(generation, timeout_s), client_window)
        if generation.idempotency_key:
            return self._attach(principal, generation, sink, terms)
        request, _ = self._start(principal, generation, sink, self._ports.limiter, terms)
        return request

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
        buffer = BufferedStream(self._limits.heartbeat_s)
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
        """Return the whole answer. Cancelling the call cancels the request."""
        return await complete(self.stream(principal, generation, received=received, timeout_s=timeout_s))

    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of tokens of the prompt for its model.

        Raises RequestRateExceeded: counting has its own rate, equal to the tenant's requests per minute.
        """
        route, generation = self._validator.check_count(principal, request)
        tenant_id, most = principal.tenant_id, self._limits.max_tenant_counts
        if self._counting[tenant_id] >= most:
            raise RequestRateExceeded(
                f"{most} calls of this tenant count tokens here, the most that may",
                retry_after_s=1.0,
                limit=most,
            )
        self._counting[tenant_id] += 1
        try:
            await self._admission.spend(principal)
            return route, await self._validator.count_tokens(principal, generation, route)
        finally:
            _subtract(self._counting, tenant_id)

    async def list_models(self, principal: Principal) -> list[ServedModel]:
        """Return the models that the caller may use, by name."""
        found = []
        for route in self._catalog.routes():
            if principal.models and route.model not in principal.models:
                continue
            found.append(
                ServedModel(
                    name=route.model,
                    version_digest=route.version_digest,
                    max_context_tokens=self._catalog.max_context_tokens(route.version_digest),
                    ready_replicas=route.ready_replicas,
                    created_unix_s=int(route.deployment.meta.create_unix_s),
                )
            )
        return found

    async def renew_forever(self) -> None:
        """Keep the reservations of running requests alive; a task of the process.

        The limiter is called even when nothing runs: it retries deferred settlements.
        """
        while True:
            await self._ports.clock.sleep(self._limits.renew_s)
            await self._renew()

    async def _renew(self) -> None:
        held = [request.reservation for request in self._requests if request.reservation is not None]
        for start in range(0, max(1, len(held)), self._limits.renew_batch):
            try:
                await self._ports.limiter.renew(held[start : start + self._limits.renew_batch])
            except StoreUnavailable as error:
                log.warning("reservations.renew_failed", count=len(held), reason=error.reason)
                break

    async def flush_forever(self) -> None:
        """Write the records of requests with keys behind their runs; a task of the process."""
        if self._keyed is not None:
            await self._keyed.flush_forever()

    async def drain(self, timeout_s: float) -> int:
        """Reject new requests, wait for the running ones, cancel the rest. Returns how many were cut.

        Requests with a key are released, so that another gateway continues them on the client's retry.
        """
        self._draining = True
        deadline_s = self._ports.clock.monotonic_s() + timeout_s
        while self._busy() and self._ports.clock.monotonic_s() < deadline_s:
            await self._ports.clock.sleep(0.05)
        left = list(self._requests)
        for request in left:
            request.cancel(Draining("this gateway is shutting down; send it again", retry_after_s=1.0))
        if self._keyed is not None:
            self._keyed.stop(Draining("this gateway is shutting down; send it again", retry_after_s=1.0))
        while self._busy() and self._ports.clock.monotonic_s() < deadline_s + 5.0:
            await self._ports.clock.sleep(0.01)
        # Writes deferred by a store outage would be lost with this process.
        if self._keyed is not None:
            await self._keyed.write_endings()
        await self._renew()
        return len(left)

    def _busy(self) -> bool:
        return bool(self._requests) or (self._keyed is not None and self._keyed.busy > 0)

    def _attach(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        sink: RequestSink,
        terms: RunTerms,
    ) -> Handle:
        """Join the request of the key. A caller without permission to run it receives nothing of it."""
        if self._keyed is None:
            raise UnsupportedFeature(
                "idempotency keys are not offered by this gateway", field="idempotency_key"
            )
        bounds.check(generation)
        self._identity.authorise_model(principal, generation.model)
        tenant_id = self._identity.still_valid(principal).meta.name
        received = terms.received
        return self._keyed.attach(
            record_key(tenant_id, generation.idempotency_key, received.part),
            fingerprint(generation, received),
            sink,
            partial(self._launch, principal, generation, received),
            timeout_s=terms.timeout_s,
            client_window=terms.client_window,
        )

    def _launch(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        received: Received,
        sink: RequestSink,
        limiter: Limiter,
        resume: Resume | None,
        record: Record,
    ) -> tuple[Request, asyncio.Task[None]]:
        """Start or resume a request with a key. Its clients have deadlines; the request has the server's.

        A resumed request keeps its terms, including those of a first run under pressure.
        """
        if resume is not None:
            pin, now_s = resume.pin, self._ports.clock.monotonic_s()
            received = replace(
                received, monotonic_s=now_s, unix_us=pin.received_unix_us, request_id=pin.request_id
            )
            asked, generation = generation, inference_pb2.Generation()
            generation.CopyFrom(asked)
            generation.model = pin.model
            generation.sampling.seed = pin.seed
            generation.max_output_tokens = pin.max_output_tokens
        terms = RunTerms(received, self._limits.max_timeout_s, None, resume, record)
        return self._start(principal, generation, sink, limiter, terms)

    def _start(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        sink: RequestSink,
        limiter: Limiter,
        terms: RunTerms,
    ) -> tuple[Request, asyncio.Task[None]]:
        ports = self._ports
        request = Request(
            terms.received,
            sink,
            limiter=limiter,
            clock=ports.clock,
            supervisor=ports.supervisor,
            new_incident=ports.new_incident,
            telemetry=ports.telemetry,
        )

        async def admit(timer: StageTimer) -> Admitted:
            return await self._admission.admit(principal, generation, timer, terms, request.telemetry)

        task = ports.supervisor.spawn(
            f"request {terms.received.request_id}", request.run(admit, terms.timeout_s)
        )
        request.bind(task)
        self._requests[request] = None
        self._per_tenant[principal.tenant_id] += 1

        def ended(_: asyncio.Task[None]) -> None:
            self._requests.pop(request, None)
            _subtract(self._per_tenant, principal.tenant_id)

        task.add_done_callback(ended)
        return request, task

    def _not_now(self, tenant_id: str) -> FairwayError | None:
        """The reason against a new request of the tenant, None when it can be accepted."""
        if self._draining:
            return Draining("this gateway is shutting down; send it to another", retry_after_s=1.0)
        most = self._limits.max_tenant_requests
        mine = self._per_tenant[tenant_id] + (self._keyed.followers_of(tenant_id) if self._keyed else 0)
        if mine >= most:
            return ShareExceeded(
                f"this gateway runs {mine} requests of this tenant, and at most {most} of one tenant; "
                "wait until some have ended, or send it to another gateway",
                retry_after_s=1.0,
                limit=most,
            )
        running = len(self._requests) + (self._keyed.followers if self._keyed is not None else 0)
        if running >= self._limits.max_requests:
            return QueueFull(
                f"this gateway runs {running} requests, its most; send it later or elsewhere",
                retry_after_s=1.0,
            )
        return None

    def _timeout_s(self, generation: inference_pb2.Generation, timeout_s: float | None) -> float:
        """The minimum of the server's bound, the RPC's deadline and the request's own timeout."""
        found = (
            self._limits.max_timeout_s if timeout_s is None else min(timeout_s, self._limits.max_timeout_s)
        )
        if generation.HasField("timeout"):
            asked_s = generation.timeout.seconds + generation.timeout.nanos / 1e9
            if asked_s > 0:
                found = min(found, asked_s)
        return found


def _subtract(counts: Counter[str], name: str) -> None:
    """Decrease a count; delete it at zero."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
