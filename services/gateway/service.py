"""The gateway's main path: validate, admit, place, stream."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import structlog

from fairway.v1 import inference_pb2
from services.core.errors import Draining, FairwayError, QueueFull, StoreUnavailable, UnsupportedFeature
from services.core.generation import GenerationSpec, Principal, TokenLogprobs, Usage
from services.core.records import Tenant
from services.gateway.buffered_stream import BufferedStream
from services.gateway.catalog import ModelCatalog, PinnedVersion, Route
from services.gateway.events import Accepted, Event, Finished, Handle, Received, RequestSink, Tokens
from services.gateway.idempotent import Idempotent, fingerprint, record_key
from services.gateway.keyed_types import KeyedLimits, KeyedPorts, Resume
from services.gateway.request import Admitted, Request
from services.gateway.sequence_run import RunContext
from services.gateway.stage_timer import Stage, StageTimer
from services.gateway.telemetry import GatewayTelemetry, RequestTelemetry
from services.gateway.validate import Validator
from services.ports.clock import Clock
from services.ports.idempotency import IdempotencyStore
from services.ports.limiter import Limiter, Limits, Reservation
from services.ports.placement import PlacementClient
from services.ports.worker import WorkerClient
from services.rpc import bounds
from services.runtime.identity import KeyDirectory
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of one gateway process. Times in seconds, windows in tokens."""

    max_requests: int = 4096
    queue_ttl_s: float = 30.0
    heartbeat_s: float = 5.0
    window_tokens: int = 256
    max_timeout_s: float = 3600.0
    renew_s: float = 20.0
    renew_batch: int = 512
    keyed: KeyedLimits = field(default_factory=KeyedLimits)


@dataclass(frozen=True, slots=True)
class Ports:
    """What the service acts through. Without a store, idempotency keys are refused.

    ``gateway_id`` is this process and no other, also not the one before it at the same address.
    """

    limiter: Limiter
    placement: PlacementClient
    workers: WorkerClient
    clock: Clock
    supervisor: Supervisor
    rng: Random
    sign_ticket: Callable[[str, str, float], bytes]
    new_incident: Callable[[], str]
    error_of: Callable[[str, str], FairwayError]
    telemetry: GatewayTelemetry = field(default_factory=GatewayTelemetry)
    idempotency: IdempotencyStore | None = None
    gateway_id: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: per choice its text, token ids and log probabilities."""

    accepted: Accepted
    texts: list[str]
    ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    finished: Finished


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    version_digest: str
    max_context_tokens: int
    ready_replicas: int
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class _RunTerms:
    """How one request came and may run. ``client_window`` is in tokens, None without one.

    Under a key: what an earlier run left, and what writes down what the request is accepted as.
    """

    received: Received
    timeout_s: float
    client_window: int | None = None
    resume: Resume | None = None
    record: Callable[[GenerationSpec], Awaitable[None]] | None = None


class GatewayService:
    """Every face calls this and nothing below it; quotas and validation cannot be walked around."""

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
        self._identity = identity
        self._catalog = catalog
        self._ports = ports
        self._limits = limits
        self._requests: set[Request] = set()
        self._draining = False
        self._keyed = None
        if ports.idempotency is not None:
            keyed = KeyedPorts(
                store=ports.idempotency,
                limiter=ports.limiter,
                clock=ports.clock,
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
        """Output tokens that came and that no transport has taken."""
        return sum(request.buffered_tokens for request in self._requests)

    @property
    def draining(self) -> bool:
        """No new requests are taken."""
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
        """Start a request; its sink hears accepted, tokens and one terminal event.

        With an idempotency key, it is the request of that key that its sink hears, begun or joined.
        ``client_window``: how many tokens of each choice the client takes before it allows more; None: it
        does not say. Raises Draining and QueueFull at once.
        """
        refusal = self._not_now()
        if refusal is not None:
            self._ports.telemetry.refused(received, refusal)
            raise refusal
        terms = _RunTerms(received, self._timeout_s(generation, timeout_s), client_window)
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

        Closing the generator cancels the request and frees everything that it holds.
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
        # By choice, made as they come: nothing has checked yet how many were asked for.
        texts: defaultdict[int, list[str]] = defaultdict(list)
        ids: defaultdict[int, list[int]] = defaultdict(list)
        logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        accepted: Accepted | None = None
        events = self.stream(principal, generation, received=received, timeout_s=timeout_s)
        try:
            async for event in events:
                if isinstance(event, Tokens):
                    texts[event.choice].append(event.text)
                    ids[event.choice].extend(event.ids)
                    logprobs[event.choice].extend(event.logprobs)
                elif isinstance(event, Accepted):
                    accepted = event
                elif isinstance(event, Finished):
                    assert accepted is not None
                    choices = range(len(event.choices))
                    return Completion(
                        accepted,
                        ["".join(texts[choice]) for choice in choices],
                        [ids[choice] for choice in choices],
                        [logprobs[choice] for choice in choices],
                        event,
                    )
        finally:
            await events.aclose()
        raise AssertionError("a stream ended without a terminal event")

    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of prompt tokens that its model would be given."""
        return await self._validator.count_tokens(principal, request)

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

        The limiter is called even when nothing runs: it delivers settlements that it had to keep.
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
        """Write the records of requests under keys behind them; a task of the process."""
        if self._keyed is not None:
            await self._keyed.flush_forever()

    async def drain(self, timeout_s: float) -> int:
        """Take no new requests, wait for the running ones, cancel what is left. Returns how many were cut.

        What runs under a key is let go of, so that another gateway goes on with it when its client asks.
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
        await self._renew()  # what was kept for a store that was away would end with this process
        return len(left)

    def _busy(self) -> bool:
        return bool(self._requests) or (self._keyed is not None and self._keyed.busy > 0)

    def _attach(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        sink: RequestSink,
        terms: _RunTerms,
    ) -> Handle:
        """Join the request of the key. Who may not run it may not hear it either."""
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
        record: Callable[[GenerationSpec], Awaitable[None]],
    ) -> tuple[Request, asyncio.Task[None]]:
        """Start a request under a key, or go on with it: its clients have deadlines, it has the server's."""
        if resume is not None:
            pin, now_s = resume.pin, self._ports.clock.monotonic_s()
            received = replace(
                received, monotonic_s=now_s, unix_us=pin.received_unix_us, request_id=pin.request_id
            )
            asked, generation = generation, inference_pb2.Generation()
            generation.CopyFrom(asked)
            generation.sampling.seed = pin.seed
            generation.max_output_tokens = pin.max_output_tokens
        terms = _RunTerms(received, self._limits.max_timeout_s, None, resume, record)
        return self._start(principal, generation, sink, limiter, terms)

    def _start(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        sink: RequestSink,
        limiter: Limiter,
        terms: _RunTerms,
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
            return await self._admit(principal, generation, timer, terms, request.telemetry)

        task = ports.supervisor.spawn(
            f"request {terms.received.request_id}", request.run(admit, terms.timeout_s)
        )
        request.bind(task)
        self._requests.add(request)
        task.add_done_callback(lambda _: self._requests.discard(request))
        return request, task

    async def _admit(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        timer: StageTimer,
        terms: _RunTerms,
        telemetry: RequestTelemetry,
    ) -> Admitted:
        received, timeout_s, resume = terms.received, terms.timeout_s, terms.resume
        ports, limits = self._ports, self._limits
        if resume is None:
            spec = await self._validator.resolve(principal, generation, received.request_id)
        else:
            pinned = PinnedVersion(resume.pin.version_digest, resume.pin.route_revision)
            spec = await self._validator.resolve(principal, generation, received.request_id, pinned=pinned)
        timer.enter(Stage.ADMIT, ports.clock.monotonic_s())
        tenant = self._identity.still_valid(principal)
        reservation = await self._reserve(tenant, spec.request_id)
        if terms.record is not None:
            await self._write_down(terms.record, spec, reservation)
        context = RunContext(
            placement=ports.placement,
            workers=ports.workers,
            clock=ports.clock,
            rng=ports.rng,
            error_of=ports.error_of,
            tenant_id=tenant.meta.name,
            ticket=ports.sign_ticket(tenant.meta.name, spec.request_id, ports.clock.unix_s() + timeout_s),
            arrival_unix_us=received.unix_us,
            queue_ttl_s=min(limits.queue_ttl_s, timeout_s),
            deadline_s=received.monotonic_s + timeout_s,
            window_tokens=limits.window_tokens,
            telemetry=telemetry,
            client_window=terms.client_window,
        )
        return Admitted(spec, reservation, context, resume.produced if resume is not None else ())

    async def _write_down(
        self,
        record: Callable[[GenerationSpec], Awaitable[None]],
        spec: GenerationSpec,
        reservation: Reservation,
    ) -> None:
        """Return once it is written what the request was accepted as; else its slot is given back."""
        try:
            await record(spec)
        except BaseException:
            self._ports.supervisor.spawn(f"undo {spec.request_id}", self._give_back(reservation))
            raise

    async def _reserve(self, tenant: Tenant, request_id: str) -> Reservation:
        """Return the slot. A call that is cancelled while the store answers gives it back afterwards."""
        ports = self._ports
        limits = Limits(tenant.requests_per_minute, tenant.max_concurrency)
        admission = ports.supervisor.spawn(
            f"admit {request_id}", self._ask_limiter(tenant.meta.name, request_id, limits)
        )
        try:
            outcome = await asyncio.shield(admission)
        except asyncio.CancelledError:
            ports.supervisor.spawn(f"undo {request_id}", self._undo(admission))
            raise
        if isinstance(outcome, FairwayError):
            ports.telemetry.admission(outcome.reason)
            raise outcome
        ports.telemetry.admission("ADMITTED_LOCALLY" if outcome.local else "ADMITTED")
        return outcome

    async def _ask_limiter(
        self, tenant_id: str, request_id: str, limits: Limits
    ) -> Reservation | FairwayError:
        """Return a refusal as a value: an exception that leaves a task of the supervisor is a crash."""
        try:
            return await self._ports.limiter.admit(tenant_id, request_id, limits)
        except FairwayError as error:
            return error

    async def _undo(self, admission: asyncio.Task[Reservation | FairwayError]) -> None:
        outcome = await admission
        if not isinstance(outcome, FairwayError):
            await self._give_back(outcome)

    async def _give_back(self, reservation: Reservation) -> None:
        try:
            await self._ports.limiter.settle(reservation, Usage(prompt_tokens=0, output_tokens=0))
        except FairwayError as error:
            log.info("reservation.undo_failed", reason=error.reason)

    def _not_now(self) -> FairwayError | None:
        """Why no request can be taken, None when one can."""
        if self._draining:
            return Draining("this gateway is shutting down; send it to another", retry_after_s=1.0)
        running = len(self._requests) + (self._keyed.followers if self._keyed is not None else 0)
        if running >= self._limits.max_requests:
            return QueueFull(
                f"this gateway runs {running} requests, its most; send it later or elsewhere",
                retry_after_s=1.0,
            )
        return None

    def _timeout_s(self, generation: inference_pb2.Generation, timeout_s: float | None) -> float:
        """The least of the server's bound, the RPC's deadline and the request's own timeout."""
        found = (
            self._limits.max_timeout_s if timeout_s is None else min(timeout_s, self._limits.max_timeout_s)
        )
        if generation.HasField("timeout"):
            asked_s = generation.timeout.seconds + generation.timeout.nanos / 1e9
            if asked_s > 0:
                found = min(found, asked_s)
        return found
