"""What costs is admitted first: nothing is tokenised for a request, or a count, that the quotas refuse."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fairway.v1 import inference_pb2
from services.adapters.quarantine import MemoryQuarantine
from services.core.errors import (
    ConcurrencyExceeded,
    FairwayError,
    InvalidInput,
    PoisonedInput,
    PromptTooLong,
    RequestRateExceeded,
    ShareExceeded,
    TokenRateExceeded,
    VersionGone,
)
from services.core.generation import (
    Constraint,
    NotAdmittedReason,
    Principal,
    StartSpec,
    Usage,
)
from services.core.limits import Claim, Limit, LimitKind, Price
from services.core.poison.fingerprint import fingerprint_of
from services.core.records import KEYS, TENANTS, ApiKey, KeyRole, Meta, Tenant
from services.core.rollouts.routes import ROUTES, WHOLE_BP, split
from services.core.usage import RequestUsage
from services.gateway.catalog import PinnedVersion
from services.gateway.events import Finished, Received
from services.gateway.poison import PoisonGate
from services.gateway.requests.request import Request
from services.gateway.requests.terms import Produced, Resume, RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.service import GatewayService
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import GatewayTelemetry
from services.gateway.text.text_model import Conversation, EncodedText, OpenFolder, TextModel, Texts
from services.ports.limiter import NO_PRICE, Reservation
from services.ports.worker import SequenceSink
from services.rpc.status import by_reason, http_status
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.indexes import TenantBudgets
from services.runtime.secrets import Ticket
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.waiting import until
from tests.unit.gateway import test_splits
from tests.unit.gateway.conftest import View
from tests.unit.gateway.requests.test_request import KeptRecord, Placement, Sink, Workers, emit, ended

DIGEST = "sha256:" + "ab" * 32
CLOCK = SystemClock()
SECRET = b"of the quarantine"
RATE = Limit(LimitKind.TOKENS, 1000)
LONG = "far too long for the context " * 8  # more tokens than fit, and bytes that might


def who(tenant: str = "acme") -> Principal:
    return Principal(f"key-{tenant}", KeyRole.TENANT, tenant, secret_hash="h")


class CountedTexts:
    """Texts that are counted when they are read, and are read when the gate is open."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.encoded = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        return await self._texts.load(version_digest, folder)

    def unload(self, version_digest: str) -> None:
        self._texts.unload(version_digest)

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Conversation, *, size_bytes: int
    ) -> EncodedText:
        self.encoded += 1
        await self.gate.wait()
        return await self._texts.read(model, tenant_id, text, size_bytes=size_bytes)

    async def check(self, model: TextModel, tenant_id: str, constraint: Constraint) -> Constraint:
        return await self._texts.check(model, tenant_id, constraint)


class NotedLimiter(MemoryLimiter):
    """Notes what each admission returns."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.admitted: list[Reservation] = []

    async def admit(self, tenant_id: str, request_id: str, *rest: Any, **named: Any) -> Reservation:
        found = await super().admit(tenant_id, request_id, *rest, **named)
        self.admitted.append(found)
        return found


class Gateway:
    """A service over a real validator; counts what is tokenised."""

    def __init__(self, fleet: Any, limits: GatewayLimits) -> None:
        self.texts = fleet.catalog.texts = CountedTexts(fleet.catalog.texts)
        self.gate = self.texts.gate
        self.supervisor = Supervisor(CLOCK)
        self.limiter = NotedLimiter()
        self.requests = 0
        self.tickets: list[Ticket] = []
        self.budgets = View()
        self.unrecorded = ""
        self.workers = Workers(*[emit(1, ended(1))] * 100)
        self.reported: list[RequestUsage] = []
        self.quarantine = MemoryQuarantine(CLOCK)
        validator = Validator(fleet.catalog, fleet.identity, Random(7))
        self.service = GatewayService(
            validator=validator,
            identity=fleet.identity,
            catalog=fleet.catalog,
            ports=Ports(
                limiter=self.limiter,
                placement=Placement(),
                workers=self.workers,
                clock=CLOCK,
                supervisor=self.supervisor,
                rng=Random(0),
                sign_ticket=self._sign,
                budgets_of=TenantBudgets(self.budgets).of,
                unrecorded=lambda: self.unrecorded,
                report_usage=self.reported.append,
                new_incident=lambda: "inc_1",
                error_of=by_reason,
                poisons=PoisonGate(
                    self.quarantine,
                    secret=SECRET,
                    clock=CLOCK,
                    supervisor=self.supervisor,
                    telemetry=GatewayTelemetry(),
                ),
            ),
            limits=limits,
        )

    def _sign(self, ticket: Ticket) -> bytes:
        self.tickets.append(ticket)
        return b"t"

    @property
    def encoded(self) -> int:
        return self.texts.encoded

    def received(self) -> Received:
        self.requests += 1
        return Received(CLOCK.monotonic_s(), 1, f"req_{self.requests}")

    async def ask(
        self, prompt: str = "hi", tenant: str = "acme", *, caller: Principal | None = None, **fields: Any
    ) -> Any:
        generation = inference_pb2.Generation(
            **{"model": "chat-small", "prompt": prompt, "max_output_tokens": 2, **fields}
        )
        return await self.service.complete(
            caller or who(tenant), generation, received=self.received(), timeout_s=20.0
        )

    async def count(self, prompt: str = "hi", tenant: str = "acme") -> int:
        request = inference_pb2.CountTokensRequest(model="chat-small", prompt=prompt)
        _, tokens = await self.service.count_tokens(who(tenant), request)
        return tokens


@pytest.fixture
async def gateway(fleet: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(fleet, GatewayLimits(max_requests=6, max_tenant_counts=2))
    for tenant in (
        Tenant(Meta("acme"), requests_per_minute=3, max_concurrency=2),
        Tenant(Meta("free")),
        Tenant(Meta("tokens"), tokens_per_minute=1000),
    ):
        name = tenant.meta.name
        fleet.tenants.put(TENANTS + name, tenant)
        fleet.keys.put(KEYS + f"key-{name}", ApiKey(Meta(f"key-{name}"), KeyRole.TENANT, "h", tenant=name))
    yield gateway
    assert gateway.supervisor.healthy, gateway.supervisor.failures
    assert await gateway.limiter.concurrency("acme") == 0
    await gateway.supervisor.close()


async def refusals(gateway: Gateway, prompt: str, attempts: int) -> list[str]:
    found = []
    for _ in range(attempts):
        try:
            await gateway.ask(prompt)
        except FairwayError as error:
            found.append(error.reason)
    return found


async def test_refused_prompts_count_against_the_rate_and_then_cost_nothing(gateway: Gateway) -> None:
    found = await refusals(gateway, LONG, 20)
    assert found == [PromptTooLong.reason] * 3 + [RequestRateExceeded.reason] * 17
    assert gateway.encoded == 3
    assert await gateway.limiter.concurrency("acme") == 0, "a refused request holds no slot"


async def test_what_makes_no_sense_is_refused_before_the_quotas(gateway: Gateway) -> None:
    for _ in range(10):
        with pytest.raises(InvalidInput):
            await gateway.ask(max_output_tokens=1, stop=[""])
    assert gateway.encoded == 0
    await gateway.ask()


async def test_nothing_is_tokenised_without_a_slot(gateway: Gateway) -> None:
    gateway.gate.clear()
    prompts = ["a", "b"]
    running = [asyncio.create_task(gateway.ask(prompt, tenant="acme")) for prompt in prompts]
    await until(lambda: gateway.encoded == 2)
    with pytest.raises(ConcurrencyExceeded):
        await gateway.ask("c")
    assert gateway.encoded == 2
    gateway.gate.set()
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_request_that_is_cancelled_while_it_is_tokenised_gives_its_slot_back(
    gateway: Gateway,
) -> None:
    gateway.gate.clear()
    task = asyncio.create_task(gateway.ask("a"))
    await until(lambda: gateway.encoded == 1)
    assert await gateway.limiter.concurrency("acme") == 1
    task.cancel()
    gateway.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):
        while await gateway.limiter.concurrency("acme"):
            await asyncio.sleep(0.001)


async def test_counting_tokens_has_a_rate_of_its_own(gateway: Gateway) -> None:
    for number in range(3):
        await gateway.count(f"hi {number}")
    for _ in range(10):
        with pytest.raises(RequestRateExceeded) as caught:
            await gateway.count()
        assert caught.value.retry_after_s
    assert gateway.encoded == 3
    await gateway.ask()


async def test_a_tenant_without_limits_counts_a_few_at_once(gateway: Gateway) -> None:
    gateway.gate.clear()
    running = [asyncio.create_task(gateway.count(letter, "free")) for letter in "ab"]
    await until(lambda: gateway.encoded == 2)
    with pytest.raises(RequestRateExceeded):
        await gateway.count("c", "free")
    gateway.gate.set()
    await asyncio.gather(*running, return_exceptions=True)
    for _ in range(5):
        await gateway.count("hi", "free")


async def test_one_tenant_leaves_room_for_others(gateway: Gateway) -> None:
    gateway.gate.clear()
    running = [asyncio.create_task(gateway.ask(letter, "free")) for letter in "abc"]
    await until(lambda: gateway.service.running == 3)
    with pytest.raises(
        ShareExceeded, match="at most 3 of one tenant; send it to another gateway, or retry"
    ) as refused:
        await gateway.ask("hi", "free")
    assert refused.value.retry_after_s
    gateway.gate.set()
    await gateway.ask("hi", "acme")
    await asyncio.gather(*running, return_exceptions=True)
    await gateway.ask("hi", "free")


async def test_what_goes_on_is_not_counted_against_the_rate_again(gateway: Gateway) -> None:
    for _ in range(3):
        await gateway.ask()
    admission = gateway.service._admission
    generation = inference_pb2.Generation(model="chat-small", prompt="hi", max_output_tokens=2)
    terms = RunTerms(gateway.received(), 20.0, resume=Resume(PinnedVersion(DIGEST, 1), (), ()))
    admitted = await admission.admit(who(), generation, Request(terms, gateway.service._ports))
    await gateway.limiter.settle(admitted.reservation, Usage(1, 1))
    with pytest.raises(RequestRateExceeded):
        await gateway.ask()


@pytest.mark.parametrize("replaceable", [True, False])
async def test_only_what_has_no_output_leaves_a_version_that_is_gone(
    gateway: Gateway, replaceable: bool
) -> None:
    generation = inference_pb2.Generation(model="chat-small", prompt="hi", max_output_tokens=2)
    resume = Resume(PinnedVersion("sha256:" + "cd" * 32, 1), (), (), replaceable=replaceable)
    terms = RunTerms(gateway.received(), 20.0, resume=resume)
    admit = gateway.service._admission.admit(who(), generation, Request(terms, gateway.service._ports))
    if not replaceable:
        with pytest.raises(VersionGone):
            await admit
        return
    admitted = await admit
    assert admitted.spec.version_digest == DIGEST
    await gateway.limiter.settle(admitted.reservation, Usage(1, 1))


async def test_what_has_no_output_gets_the_arm_of_a_split_and_is_not_counted_in_its_step_again(
    gateway: Gateway, fleet: Any
) -> None:
    test_splits.load(fleet)
    test_splits.put(fleet, WHOLE_BP, revision=50)
    generation = inference_pb2.Generation(model="chat-small", prompt="hi", max_output_tokens=2)
    resume = Resume(PinnedVersion(test_splits.OLD, 1), (), (), replaceable=True)
    terms = RunTerms(gateway.received(), 20.0, resume=resume)
    admission = gateway.service._admission
    admitted = await admission.admit(who("free"), generation, Request(terms, gateway.service._ports))
    spec = admitted.spec
    assert (spec.version_digest, spec.route_revision, spec.step) == (test_splits.NEW, 50, "")
    await gateway.limiter.settle(admitted.reservation, Usage(1, 1))


async def test_a_resumed_request_is_charged_the_tokens_that_it_adds(gateway: Gateway) -> None:
    generation = inference_pb2.Generation(model="chat-small", prompt="hi", max_output_tokens=30)
    gateway.limiter._clock = HandClock(CLOCK.unix_s())  # nothing drains meanwhile
    earlier = Resume(PinnedVersion(DIGEST, 1), (Produced((7,) * 10, 10),), ())
    terms = RunTerms(gateway.received(), 20.0, resume=earlier)
    first = await gateway.limiter.admit("tokens", terms.received.request_id, ())
    first = await gateway.limiter.reserve(first, [Claim(RATE, 100)], NO_PRICE)
    await gateway.limiter.settle(first, Usage(3, 10), spooled=True)
    admission = gateway.service._admission
    admitted = await admission.admit(who("tokens"), generation, Request(terms, gateway.service._ports))
    assert len(admitted.spec.prompt.ids) == 3
    assert await tokens_left(gateway) == 967, "20 more than the earlier run's 13 are reserved"
    await gateway.limiter.settle(admitted.reservation, Usage(3, 30))
    assert await tokens_left(gateway) == 967


async def test_the_stages_of_a_request_sum_to_its_latency(gateway: Gateway) -> None:
    """Tokenising belongs to validation, though it comes after the quotas."""
    gateway.gate.clear()
    asking = asyncio.create_task(gateway.ask("a b " * 10))
    await until(lambda: gateway.encoded == 1)
    await asyncio.sleep(0.05)
    gateway.gate.set()
    answer = await asking
    clock = answer.finished.clock
    assert clock.validate_us >= 40_000


async def tokens_left(gateway: Gateway) -> int:
    """Return how many tokens the tenant ``tokens`` may reserve now; it reserves none."""
    low, high = 0, 1001
    while high - low > 1:
        middle = (low + high) // 2
        probe = Reservation("tokens", f"probe-{uuid.uuid4().hex}")
        try:
            held = await gateway.limiter.reserve(probe, [Claim(RATE, middle)], NO_PRICE)
        except TokenRateExceeded:
            high = middle
        else:
            low = middle
            await gateway.limiter.settle(held, Usage(0, 0))
    return low


async def test_an_ended_request_is_charged_the_tokens_that_it_used(gateway: Gateway) -> None:
    gateway.limiter._clock = HandClock(CLOCK.unix_s())  # nothing drains meanwhile
    done = await gateway.ask(tenant="tokens", max_output_tokens=20)
    used = done.finished.usage.prompt_tokens + done.finished.usage.output_tokens
    assert 0 < used < 100
    assert await tokens_left(gateway) == 1000 - used


async def test_a_request_above_the_token_rate_is_refused_without_a_slot_or_tokens(gateway: Gateway) -> None:
    held = await gateway.limiter.reserve(Reservation("tokens", "other"), [Claim(RATE, 950)], NO_PRICE)
    with pytest.raises(TokenRateExceeded) as caught:
        await gateway.ask(tenant="tokens", max_output_tokens=60)
    assert caught.value.retry_after_s
    await gateway.limiter.settle(held, Usage(0, 0))
    assert await gateway.limiter.concurrency("tokens") == 0
    assert await tokens_left(gateway) == 1000


async def test_the_predicted_output_yields_to_a_low_limit(gateway: Gateway, fleet: Any) -> None:
    fleet.tenants.put(TENANTS + "tokens", Tenant(Meta("tokens"), tokens_per_minute=30))
    await gateway.ask(tenant="tokens", max_output_tokens=20, choices=4)


async def test_a_prompt_longer_than_a_minutes_tokens_is_refused_for_good(
    gateway: Gateway, fleet: Any
) -> None:
    fleet.tenants.put(TENANTS + "tokens", Tenant(Meta("tokens"), tokens_per_minute=2))
    with pytest.raises(TokenRateExceeded, match="more than the limit of 2 per minute") as caught:
        await gateway.ask("a b c d e f", tenant="tokens")
    assert caught.value.retry_after_s is None


async def test_a_request_cancelled_while_it_reserves_returns_the_tokens(gateway: Gateway) -> None:
    reserve, reserving, go_on = gateway.limiter.reserve, asyncio.Event(), asyncio.Event()

    async def slowly(reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        reserving.set()
        await go_on.wait()
        return await reserve(reservation, claims, price)

    gateway.limiter.reserve = slowly  # type: ignore[method-assign]
    task = asyncio.create_task(gateway.ask(tenant="tokens", max_output_tokens=20))
    await reserving.wait()
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    gateway.limiter.reserve = reserve  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        while await gateway.limiter.concurrency("tokens"):
            await asyncio.sleep(0.001)
    assert await tokens_left(gateway) == 1000


async def test_a_request_of_an_aborted_version_is_resolved_again_and_recorded_again(
    gateway: Gateway, fleet: Any
) -> None:
    test_splits.load(fleet)
    route = test_splits.put(fleet, WHOLE_BP, revision=50)

    def abort(spec: StartSpec, sink: SequenceSink) -> None:
        arms = split(route, {}, closed=("canary",))
        fleet.routes.put(ROUTES + "chat-small", replace(route, arms=arms), 51)
        sink.on_not_admitted(NotAdmittedReason.STALE_ROUTE)

    gateway.workers.scripts.insert(0, abort)
    record = KeptRecord()
    generation = inference_pb2.Generation(model="chat-small", prompt="hi", max_output_tokens=2)
    terms = RunTerms(gateway.received(), 20.0, settlement=record)
    sink = Sink()
    request, admit = gateway.service.prepared(who("free"), generation, sink, terms)
    await request.deliver(admit, sink)
    assert isinstance(sink.end, Finished)
    digests = [test_splits.NEW, test_splits.OLD]
    assert [start.grant.version_digest for start in gateway.workers.started] == digests
    assert [start.generation.route_revision for start in gateway.workers.started] == [50, 51]
    assert [one.version_digest for one in sink.accepted] == digests
    assert [terms.version_digest for terms in record.accepted] == digests
    assert len({terms.seed for terms in record.accepted}) == 1, "the seed stays"


async def test_an_input_in_quarantine_is_refused_without_a_placement(gateway: Gateway, fleet: Any) -> None:
    """Another input of the same version runs, and so does the same one once its time is over."""
    quarantine = gateway.quarantine
    await gateway.ask("hi", tenant="free")
    (started,) = gateway.workers.started
    fingerprint = fingerprint_of(started.generation, SECRET)
    await quarantine.add(started.generation.version_digest, fingerprint, model="chat-small", deaths=2)
    with pytest.raises(PoisonedInput) as found:
        await gateway.ask("hi", tenant="free")
    assert found.value.retry_after_s is None
    assert http_status(found.value) == 422
    assert len(gateway.workers.started) == 1
    await gateway.ask("ho", tenant="free")
    quarantine.drop(started.generation.version_digest, fingerprint)
    await gateway.ask("hi", tenant="free")
