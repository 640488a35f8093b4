"""Gateways in this process on one Redis; the tokens of their workers depend on seed, choice and position."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fairway.v1 import inference_pb2 as pb
from services.adapters.keys.tenant_keys import TenantKeys
from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.record_cipher import EncryptedRecords
from services.adapters.redis.idempotency import RedisIdempotency
from services.adapters.redis.limiter import RedisLimiter
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
    TokenLogprobs,
)
from services.core.outputs.forms import OutputForm
from services.core.records import ApiKey, Degrade, KeyRole, Meta, Tenant
from services.gateway.catalog import PinnedVersion
from services.gateway.events import Accepted, Finished, Received, Tokens
from services.gateway.idempotency.records import KeyedRecords
from services.gateway.idempotency.service import IdempotentService
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.idempotency.types import KeyedLimits, KeyedPorts
from services.gateway.policy.claims import RequestBounds
from services.gateway.requests.egress import EgressGate
from services.gateway.requests.validate import Checked
from services.gateway.response_cache import ResponseCache, count_lookups
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import GatewayTelemetry
from services.ports.idempotency import IdempotencyStore, RecordLimits
from services.ports.worker import SequenceSink
from services.rpc.status import by_reason
from services.runtime.audit import AuditRecorder
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support.grpc_gateway import Prices, checked_of
from tests.support.metered import MeteredLimiter
from tests.support.safety import FixedPacks, ScriptedClassifiers, desk_of
from tests.support.tenant_keys import record_cipher, tenant_keys

CLOCK = SystemClock()
NAMES_SECRET = b"n" * 32


def token(seed: int, choice: int, position: int) -> int:
    return Random(f"{seed} {choice} {position}").randrange(50_000)


@dataclass
class Fleet:
    """What the gateways of a test share: the versions that are served, and what engines did."""

    tenant: str = field(default_factory=lambda: f"acme-{uuid.uuid4().hex}")
    digest: str = "sha256:one"
    gone: set[str] = field(default_factory=set)
    step_s: float = 0.002
    engine_tokens: int = 0
    is_current: bool = True
    seeds: Random = field(default_factory=lambda: Random(0))
    max_concurrency: int = 0
    egress_tokens_per_second: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    # Output offset at which engines wait for ``hold``; None: they do not.
    hold_at: int | None = None
    place_error: errors.FairwayError | None = None
    diverge: bool = False
    # How hard each version is pressed, what the tenant allows then, and the versions of other models.
    pressure: dict[str, float] = field(default_factory=dict)
    degrade: Degrade = field(default_factory=Degrade)
    digests: dict[str, str] = field(default_factory=dict)
    # How outputs are written.
    form: OutputForm | None = None
    keys: TenantKeys = field(default_factory=tenant_keys)
    # The safety packs that requests obey, what judges by them, and the text of a token.
    packs: FixedPacks = field(default_factory=FixedPacks)
    classifiers: ScriptedClassifiers = field(default_factory=ScriptedClassifiers)
    audit: AuditRecorder | None = None
    text_of: Callable[[int, int], str] = lambda position, found: f"{found} "


class Validator:
    """Takes the prompt's length for its tokens; refuses the model "none"."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def of(self, identity: object) -> Validator:
        return self

    def authorise(self, principal: Principal, asked: str) -> None:
        if principal.models and asked not in principal.models:
            raise errors.ModelNotFound(f"no model {asked}")

    def check(
        self, principal: Principal, generation: pb.Generation, *, pinned: PinnedVersion | None = None
    ) -> Checked:
        model = generation.model
        if model == "none":
            raise errors.ModelNotFound("no model none", model="none")
        version = pinned or PinnedVersion(self._fleet.digests.get(model, self._fleet.digest), 1)
        if version.version_digest in self._fleet.gone:
            raise errors.VersionGone("the version is gone", version_digest=version.version_digest)
        return checked_of(model, version)

    def resolve_short(self, *_: Any) -> None:
        return None

    async def decoded(self, tenant_id: str, version_digest: str, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    async def resolve(
        self,
        principal: Principal,
        generation: pb.Generation,
        request_id: str,
        checked: Checked,
        request_bounds: RequestBounds,
        accepted: OutputForm | None = None,
    ) -> GenerationSpec:
        digest = checked.route.version_digest
        asked, form = generation.sampling, accepted or self._fleet.form
        return GenerationSpec(
            request_id=request_id,
            model=generation.model,
            version_digest=digest,
            route_revision=checked.route.route_revision,
            prompt=Prompt(list(range(len(generation.prompt)))),
            sampling=Sampling(
                asked.seed if asked.HasField("seed") else self._fleet.seeds.getrandbits(63),
                temperature=asked.temperature if asked.HasField("temperature") else 1.0,
                logprobs=generation.logprobs if generation.HasField("logprobs") else None,
            ),
            limits=OutputLimits(generation.max_output_tokens or generation.default_output_tokens or 8),
            choices=max(1, generation.choices),
            form=form if generation.parts else None,
            constrained_form=None if generation.parts else form,
        )


class Identity:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def still_valid(self, principal: Principal) -> Tenant:
        return self.record(principal.tenant_id)

    def record(self, tenant_id: str) -> Tenant:
        fleet = self._fleet
        return Tenant(
            Meta(tenant_id),
            max_concurrency=fleet.max_concurrency,
            degrade=fleet.degrade,
            egress_tokens_per_second=fleet.egress_tokens_per_second,
        )

    def tenant_and_key(self, principal: Principal) -> tuple[Tenant, ApiKey]:
        key = ApiKey(Meta(principal.key_id), KeyRole.TENANT, "h", principal.tenant_id)
        return self.still_valid(principal), key


class Placement:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def place(self, spec: PlaceSpec) -> Grant:
        if self._fleet.place_error is not None:
            raise self._fleet.place_error
        return Grant("w0", "127.0.0.1:1", 1, 1, 1, 4, 5.0, spec.version_digest)

    def give_back(self, grant: AnyGrant) -> None: ...

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None: ...


@dataclass
class Running:
    """Emits a token per step within its credit."""

    spec: StartSpec
    sink: SequenceSink
    fleet: Fleet
    workers: Workers
    credits: int
    live: bool = True

    def credit(self, tokens: int) -> None:
        self.credits += tokens

    def cancel(self) -> None:
        self.live = False

    async def run(self) -> None:
        self.sink.on_accepted()
        generation, choice = self.spec.generation, self.spec.choice
        position = len(self.spec.produced_ids)
        text_of = self.fleet.text_of
        chars = sum(len(text_of(at, each)) for at, each in enumerate(self.spec.produced_ids))
        assert chars == self.spec.delivered_chars, "a resume that would repeat or lose text"
        while self.live and position < generation.limits.max_tokens:
            await asyncio.sleep(self.fleet.step_s)
            if self.credits <= 0 or self._held(position):
                continue
            if not self.live:
                return
            self._emit(position, token(generation.sampling.seed, choice, position) + self.fleet.diverge)
            position += 1
        if self.live:
            self.sink.on_finished(SequenceEnd(FinishReason.LENGTH, output_tokens=position))

    def _held(self, position: int) -> bool:
        held_at = self.fleet.hold_at
        return held_at is not None and position >= held_at and not self.fleet.hold.is_set()

    def _emit(self, position: int, found: int) -> None:
        self.credits -= 1
        self.fleet.engine_tokens += 1
        text = self.fleet.text_of(position, found)
        top = TokenLogprobs(-0.5, (found,), (-0.5,), (text,), text)
        logprobs = (top,) if self.spec.generation.sampling.logprobs is not None else ()
        self.sink.on_tokens(position, [found], text, logprobs)


class Workers:
    def __init__(self, fleet: Fleet, supervisor: Supervisor) -> None:
        self._fleet = fleet
        self._supervisor = supervisor
        self.started: list[Running] = []

    def start(self, spec: StartSpec, sink: SequenceSink) -> Running:
        running = Running(spec, sink, self._fleet, self, spec.initial_credit_tokens)
        self.started.append(running)
        self._supervisor.spawn("run", running.run())
        return running


@dataclass
class Answer:
    """What one client received."""

    accepted: Accepted | None = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finished: Finished | None = None
    error: errors.FairwayError | None = None

    @property
    def request_id(self) -> str:
        assert self.accepted is not None
        return self.accepted.request_id

    def same_as(self, other: Answer) -> bool:
        """Whether both are one result: tokens, text, log probabilities, ids, usage, reasons."""
        assert self.accepted is not None
        assert other.accepted is not None
        assert self.finished is not None
        assert other.finished is not None
        mine, theirs = self.accepted, other.accepted
        return (
            (self.ids, self.text, self.logprobs) == (other.ids, other.text, other.logprobs)
            and (mine.request_id, mine.seed, mine.version_digest, mine.prompt_tokens)
            == (theirs.request_id, theirs.seed, theirs.version_digest, theirs.prompt_tokens)
            and (mine.model, mine.degradations) == (theirs.model, theirs.degradations)
            and self.finished == other.finished
        )


@dataclass
class Gateway:
    name: str
    fleet: Fleet
    service: IdempotentService
    workers: Workers
    supervisor: Supervisor
    store: RedisIdempotency
    limiter: RedisLimiter
    metrics: Metrics
    requests: int = 0

    def stream(
        self,
        key: str,
        *,
        tenant: str = "",
        timeout_s: float = 60.0,
        models: tuple[str, ...] = (),
        face: str = "grpc",
        **values: Any,
    ) -> Any:
        self.requests += 1
        generation = pb.Generation(
            **{"model": "m", "prompt": "hello", "max_output_tokens": 20, "idempotency_key": key, **values}
        )
        return self.service.stream(
            Principal("k", KeyRole.TENANT, tenant or self.fleet.tenant, models),
            generation,
            received=Received(CLOCK.monotonic_s(), 1, f"req_{self.name}_{self.requests}", face),
            timeout_s=timeout_s,
        )

    async def ask(self, key: str, *, until: int | None = None, **values: Any) -> Answer:
        """Read a response to its end, or leave once ``until`` tokens came."""
        answer = Answer()
        try:
            async with aclosing(self.stream(key, **values)) as events:
                async for event in events:
                    if isinstance(event, Accepted):
                        before = answer.accepted
                        replaced = before is not None and before.version_digest != event.version_digest
                        assert before is None or replaced, "accepted twice"
                        answer.accepted = event
                    elif isinstance(event, Tokens):
                        _add(answer, event)
                        if until is not None and sum(map(len, answer.ids.values())) >= until:
                            return answer
                    elif isinstance(event, Finished):
                        answer.finished = event
        except errors.FairwayError as error:
            answer.error = error
        return answer

    @property
    def keyed(self) -> KeyedRecords:
        return self.service.records

    def counted(self, name: str, **labels: str) -> float:
        """Return a metric of this gateway, summed over the labels that are not named."""
        return sum(
            sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def at_rest(self, timeout_s: float = 20.0) -> None:
        """Return once nothing runs here and no slot is held."""
        async with asyncio.timeout(timeout_s):
            while self.service.running or self.keyed.busy or await self._slots():
                await asyncio.sleep(0.01)
        self.keyed.check_integrity()

    async def _slots(self) -> int:
        """Return how many slots are held; one while the count is unavailable."""
        try:
            return await self.limiter.concurrency(self.fleet.tenant)
        except errors.StoreUnavailable:
            return 1


def _add(answer: Answer, event: Tokens) -> None:
    got = answer.ids.setdefault(event.choice, [])
    assert event.offset == len(got), "tokens repeated or lost"
    got.extend(event.ids)
    answer.text[event.choice] = answer.text.get(event.choice, "") + event.text
    answer.logprobs.setdefault(event.choice, []).extend(event.logprobs)


def keyed_limits(**changes: Any) -> KeyedLimits:
    return KeyedLimits(**{"flush_s": 0.02, "renew_s": 0.3, "poll_s": 0.01, **changes})


@dataclass(frozen=True, slots=True)
class Options:
    """Of one gateway."""

    keyed: KeyedLimits
    records: RecordLimits
    window_tokens: int
    timeout_s: float
    max_requests: int = 4096
    # Bounds of cached answers; None: there are none.
    responses: RecordLimits | None = None


@asynccontextmanager
async def gateways(
    url: str,
    fleet: Fleet,
    count: int,
    *,
    keyed: KeyedLimits | None = None,
    records: RecordLimits | None = None,
    window_tokens: int = 256,
    timeout_s: float = 2.0,
    wrap: Callable[[IdempotencyStore], IdempotencyStore] = lambda store: store,
    max_requests: int = 4096,
    responses: RecordLimits | None = None,
) -> AsyncIterator[list[Gateway]]:
    """Yield gateways that share a Redis; check on the way out that no task of theirs crashed.

    ``timeout_s`` bounds each call of Redis. ``wrap``: what stands between a gateway and its records.
    """
    records = records or RecordLimits(lease_s=1.0)
    options = Options(keyed or keyed_limits(), records, window_tokens, timeout_s, max_requests, responses)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(_gateway(url, fleet, f"g{number}", options, wrap))
            for number in range(count)
        ]


def _judged(fleet: Fleet, supervisor: Supervisor, metrics: Metrics) -> dict[str, Any]:
    desk = desk_of(fleet.classifiers, supervisor=supervisor, metrics=metrics, audit=fleet.audit)
    return {"packs": fleet.packs, "safety": desk}


@asynccontextmanager
async def _gateway(
    url: str,
    fleet: Fleet,
    name: str,
    options: Options,
    wrap: Callable[[IdempotencyStore], IdempotencyStore],
) -> AsyncIterator[Gateway]:
    supervisor = Supervisor(CLOCK)
    limiter = RedisLimiter(url, CLOCK, timeout_s=options.timeout_s)
    store = RedisIdempotency(url, CLOCK, options.records, timeout_s=options.timeout_s)
    metrics, workers = Metrics(), Workers(fleet, supervisor)
    cipher = record_cipher(keys=fleet.keys)
    cached = RedisIdempotency(url, CLOCK, options.responses, timeout_s=options.timeout_s)
    records = EncryptedRecords(cached, cipher)
    cache = ResponseCache(records, NAMES_SECRET, name, count_lookups(metrics), lambda: fleet.is_current)
    gateway_limiter = GatewayLimiter(MeteredLimiter(limiter), CLOCK)
    ports = Ports(
        limiter=gateway_limiter,
        placement=Placement(fleet),
        workers=workers,
        clock=CLOCK,
        supervisor=supervisor,
        rng=Random(0),
        sign_ticket=lambda ticket: b"t",
        new_incident=lambda: "inc_1",
        error_of=by_reason,
        telemetry=GatewayTelemetry(metrics, clock=CLOCK),
        pressure=lambda digest: fleet.pressure.get(digest, 0.0),
        responses=cache if options.responses is not None else None,
        gate=EgressGate(Identity(fleet).record, lambda: 1, CLOCK, metrics),
        **_judged(fleet, supervisor, metrics),
    )
    keyed = KeyedPorts(
        store=wrap(EncryptedRecords(store, cipher)),
        limiter=gateway_limiter,
        clock=CLOCK,
        telemetry=KeyedTelemetry(metrics),
        new_incident=ports.new_incident,
        names_secret=NAMES_SECRET,
        owner=name,
        window_tokens=options.window_tokens,
        limits=options.keyed,
    )
    service = IdempotentService(
        keyed,
        validator=Validator(fleet),  # type: ignore[arg-type]
        identity=Identity(fleet),  # type: ignore[arg-type]
        catalog=Prices(),  # type: ignore[arg-type]
        ports=ports,
        limits=GatewayLimits(max_requests=options.max_requests, window_tokens=options.window_tokens),
    )
    supervisor.spawn(f"flush {name}", service.flush_forever())
    try:
        yield Gateway(name, fleet, service, workers, supervisor, store, limiter, metrics)
        assert supervisor.healthy, supervisor.failures
    finally:
        await supervisor.close()
        for store_client in (store, cached, limiter):
            await store_client.close()
