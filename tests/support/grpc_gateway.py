"""A gateway with its gRPC face over a real socket, and workers that emit what a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.core import errors
from services.core.generation import (
    AnyGrant,
    FinishReason,
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    PlaceSpec,
    Principal,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
)
from services.core.limits import Price
from services.core.records import ApiKey, Deployment, KeyRole, Meta, Priority, Tenant
from services.gateway.catalog import PinnedVersion, Route
from services.gateway.events import Received
from services.gateway.faces.grpc.servicer import InferenceServicer
from services.gateway.policy.claims import RequestBounds
from services.gateway.requests.validate import Checked
from services.gateway.service import GatewayService
from services.gateway.service_types import GatewayLimits, Ports
from services.ports.worker import SequenceSink
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import by_reason
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter

CLOCK = SystemClock()
DIGEST = "sha256:x"
AUTH = (("authorization", "Bearer key"),)


def checked_of(model: str, version: PinnedVersion) -> Checked:
    """Return a valid generation's route to a version."""
    deployment = Deployment(Meta(model), model, "", version.version_digest, replicas=1)
    route = Route(model, deployment, version.version_digest, version.route_revision, ready_replicas=1)
    return Checked(route, Priority.STANDARD)


class Validator:
    """Takes the prompt's length for its tokens; refuses the model "none"."""

    def of(self, identity: object) -> Validator:
        return self

    def check(self, principal: Principal, generation: pb.Generation, *, pinned: None = None) -> Checked:
        model = generation.model
        if model == "none":
            raise errors.ModelNotFound("no model none", model="none")
        return checked_of(model, PinnedVersion(DIGEST, 1))

    def resolve_short(self, *_: Any) -> None:
        return None

    async def resolve(
        self,
        principal: Principal,
        generation: pb.Generation,
        request_id: str,
        checked: Checked,
        request_bounds: RequestBounds,
        accepted: None = None,
    ) -> GenerationSpec:
        return GenerationSpec(
            request_id=request_id,
            model=generation.model,
            version_digest=DIGEST,
            route_revision=1,
            prompt=Prompt(list(range(len(generation.prompt)))),
            sampling=Sampling(generation.sampling.seed),
            limits=OutputLimits(generation.max_output_tokens or 8),
            choices=max(1, generation.choices),
        )


class Identity:
    """One tenant, whose key may be taken away."""

    def __init__(self) -> None:
        self.revoked = False

    def still_valid(self, principal: Principal) -> Tenant:
        if self.revoked:
            raise errors.Unauthenticated("the API key is not valid any more")
        return Tenant(Meta(principal.tenant_id), max_concurrency=40)

    def tenant_and_key(self, principal: Principal) -> tuple[Tenant, ApiKey]:
        tenant = self.still_valid(principal)
        return tenant, ApiKey(Meta(principal.key_id), KeyRole.TENANT, "h", principal.tenant_id)


class Prices:
    """A catalog that has every model, in which nothing costs and no version has a shadow."""

    def has(self, model: str) -> bool:
        return True

    def named(self, model: str) -> str:
        return model

    def price(self, model: str, priority: Priority) -> Price:
        return Price()

    def model_of(self, version_digest: str) -> str:
        return "m"

    def shadow_of(self, tenant: str, spec: GenerationSpec) -> None:
        return None


class Placement:
    def __init__(self) -> None:
        self.attempts: list[int] = []

    async def place(self, spec: PlaceSpec) -> Grant:
        self.attempts.append(spec.attempt)
        return Grant("w0", "127.0.0.1:1", 1, 1, 1, 4, 5.0, spec.version_digest)

    def give_back(self, grant: AnyGrant) -> None: ...

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None: ...


@dataclass
class Running:
    """Emits a token every millisecond within its credit; prompts of up to two characters never end, and
    those of two have tokens of 8 KiB."""

    spec: StartSpec
    sink: SequenceSink
    credits: int
    live: set[Running]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    produced: int = 0

    __hash__ = object.__hash__

    def credit(self, tokens: int) -> None:
        self.credits += tokens
        self.wake.set()

    def cancel(self) -> None:
        self.live.discard(self)

    async def stalled(self) -> None:
        """Return once it had no credit at 50 looks in a row, between which it had its turns to go on."""
        looks, seen = 0, -1
        while looks < 50:
            await asyncio.sleep(0.005)
            looks = looks + 1 if self.produced == seen == self.credits else 0
            seen = self.produced

    async def run(self) -> None:
        self.sink.on_accepted()
        limit, prompt = self.spec.generation.limits.max_tokens, len(self.spec.generation.prompt.ids)
        padding = "y" * 8192 if prompt == 2 else ""
        while self in self.live and (prompt <= 2 or self.produced < limit):
            if self.produced >= self.credits:
                self.wake.clear()
                await self.wake.wait()
                continue
            self.sink.on_tokens(self.produced, [self.produced], f"{self.produced} {padding}", ())
            self.produced += 1
            await asyncio.sleep(0.001)
        if self in self.live:
            self.live.discard(self)
            self.sink.on_finished(SequenceEnd(FinishReason.LENGTH, output_tokens=self.produced))


class Workers:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.live: set[Running] = set()
        self.started: list[Running] = []

    def start(self, spec: StartSpec, sink: SequenceSink) -> Running:
        running = Running(spec, sink, spec.initial_credit_tokens, self.live)
        self.live.add(running)
        self.started.append(running)
        self.supervisor.spawn("run", running.run())
        return running


@dataclass
class Gateway:
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    service: GatewayService
    workers: Workers
    limiter: MemoryLimiter
    identity: Identity
    port: int
    placement: Placement

    async def at_rest(self, timeout_s: float = 30.0) -> None:
        """Return once nothing runs and no slot is held."""
        async with asyncio.timeout(timeout_s):
            while self.workers.live or self.service.running or await self.limiter.concurrency("acme"):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_gateway() -> AsyncIterator[Gateway]:
    """Yield a served gateway. Nothing that it runs failed meanwhile."""
    supervisor = Supervisor(CLOCK)
    workers, limiter, identity = Workers(supervisor), MemoryLimiter(CLOCK), Identity()
    placement = Placement()
    numbers = iter(range(10**6))
    ports = Ports(
        limiter=limiter,
        placement=placement,
        workers=workers,
        clock=CLOCK,
        supervisor=supervisor,
        rng=Random(0),
        sign_ticket=lambda ticket: b"t",
        new_incident=lambda: "inc_1",
        error_of=by_reason,
    )
    parts: Any = {"validator": Validator(), "identity": identity, "catalog": Prices(), "ports": ports}
    service = GatewayService(**parts, limits=GatewayLimits(heartbeat_s=0.15, window_tokens=16))
    rows: Any = None  # no fixed-cost model is deployed

    def received() -> Received:
        return Received(CLOCK.monotonic_s(), 1, f"req_{next(numbers)}")

    server = RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["InferenceService"],
                inference_pb2_grpc.add_InferenceServiceServicer_to_server,
                InferenceServicer(service, rows, received, heartbeat_s=0.15, write_timeout_s=1.5),
            )
        ],
        listen="127.0.0.1:0",
        internal_token="i" * 32,
        new_incident=lambda: "inc_2",
        authenticate=lambda token: Principal("k", KeyRole.TENANT, "acme"),
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Gateway(
            inference_pb2_grpc.InferenceServiceStub(channel),
            service,
            workers,
            limiter,
            identity,
            server.port,
            placement,
        )
    await server.stop(0)
    assert supervisor.healthy, supervisor.failures
    await supervisor.close()


def generation(**values: Any) -> pb.Generation:
    return pb.Generation(**{"model": "m", "prompt": "hello", **values})


@asynccontextmanager
async def no_read_ahead(gateway: Gateway) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """Yield a stub whose transport takes no message before it is read."""
    options = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def received() -> Received:
    return Received(CLOCK.monotonic_s(), 1, "req_x")
