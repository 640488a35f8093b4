"""A copy for a shadow version leaves its request, its tenant and the other versions as they are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from prometheus_client import generate_latest

from fairway.v1 import inference_pb2
from services.adapters.quarantine import MemoryQuarantine
from services.core.arms import GateWindow
from services.core.errors import FailedPrecondition, QueueTimeout
from services.core.generation import (
    FinishReason,
    Grant,
    NotAdmittedReason,
    PlaceSpec,
    Principal,
    SequenceEnd,
    StartSpec,
    Usage,
)
from services.core.limits import Claim, Price
from services.core.poison.suspicion import StepRole
from services.core.records import KEYS, TENANTS, ApiKey, KeyRole, Meta, Priority, Tenant
from services.core.rollouts.routes import (
    ROUTES,
    SHADOW_TENANT,
    WHOLE_BP,
    ModelRoute,
    RouteArm,
    Shadow,
    SplitRules,
)
from services.core.usage import RequestUsage
from services.gateway.catalog import PinnedVersion
from services.gateway.events import Received
from services.gateway.poison import PoisonGate
from services.gateway.requests.streaming import Completion
from services.gateway.requests.terms import Resume, RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.service import GatewayService, drain
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.shadow import MAX_PRESSURE
from services.gateway.telemetry import GatewayTelemetry
from services.ports.limiter import Reservation
from services.ports.worker import SequenceSink
from services.rpc.status import by_reason
from services.runtime.clock import SystemClock
from services.runtime.secrets import Ticket
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from simulator.stores.limiter import MemoryLimiter
from tests.support.metrics import values
from tests.support.waiting import until
from tests.unit.gateway.conftest import TEMPLATE
from tests.unit.gateway.requests.test_request import Placement, Script, Sink, Workers, crashed, emit, ended
from tests.unit.gateway.test_splits import NEW, OLD, load

CLOCK = SystemClock()
SHADOW = Shadow("canary", WHOLE_BP)


class VersionPlacement(Placement):
    """Places; what ``failing`` holds is raised for the shadow version."""

    failing: BaseException | None = None

    async def place(self, spec: PlaceSpec) -> Grant:
        if self.failing is not None and spec.version_digest == NEW:
            raise self.failing
        return await super().place(spec)

    def of(self, digest: str) -> list[PlaceSpec]:
        return [spec for spec in self.asked if spec.version_digest == digest]


class VersionWorkers(Workers):
    """Each version does what its script says, every time."""

    def __init__(self) -> None:
        super().__init__()
        self.credited: Counter[str] = Counter()
        self.script = {OLD: emit(2, ended(2)), NEW: emit(2, ended(2))}

    def start(self, spec: StartSpec, sink: SequenceSink) -> Workers:
        digest = spec.generation.version_digest
        self.scripts.append(self.script[digest])
        super().start(spec, sink)
        return Running(self, digest)

    def of(self, digest: str) -> list[StartSpec]:
        return [spec for spec in self.started if spec.generation.version_digest == digest]


class Running(Workers):
    """One sequence of a version."""

    def __init__(self, workers: VersionWorkers, digest: str) -> None:
        super().__init__()
        self._workers = workers
        self._digest = digest

    def credit(self, tokens: int) -> None:
        self._workers.credited[self._digest] += tokens

    def cancel(self) -> None:
        self._workers.cancelled += 1


class RecordingLimiter(MemoryLimiter):
    """Records the callers."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.calls: list[tuple[str, str]] = []

    async def admit(self, tenant_id: str, request_id: str, *rest: Any, **named: Any) -> Reservation:
        self.calls.append(("admit", request_id))
        return await super().admit(tenant_id, request_id, *rest, **named)

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        self.calls.append(("reserve", reservation.request_id))
        return await super().reserve(reservation, claims, price)

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        self.calls.append(("settle", reservation.request_id))
        await super().settle(reservation, usage, spooled=spooled)


class Shadowed:
    """A gateway whose model has a shadow version."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.placement, self.workers = VersionPlacement(), VersionWorkers()
        self.supervisor, self.limiter = Supervisor(CLOCK), RecordingLimiter()
        self.metrics, self.pressure = Metrics(), 0.0
        self.telemetry = GatewayTelemetry(self.metrics, clock=CLOCK)
        self.quarantine = MemoryQuarantine(CLOCK)
        self.tickets: list[Ticket] = []
        self.reported: list[RequestUsage] = []
        self.requests = 0
        poisons = PoisonGate(
            self.quarantine,
            secret=b"of the quarantine",
            clock=CLOCK,
            supervisor=self.supervisor,
            telemetry=self.telemetry,
        )
        self.service = GatewayService(
            validator=Validator(fleet.catalog, fleet.identity, Random(7)),
            identity=fleet.identity,
            catalog=fleet.catalog,
            ports=Ports(
                limiter=self.limiter,
                placement=self.placement,
                workers=self.workers,
                clock=CLOCK,
                supervisor=self.supervisor,
                rng=Random(0),
                sign_ticket=self._sign,
                report_usage=self.reported.append,
                pressure=lambda digest: self.pressure if digest == OLD else 0.0,
                new_incident=lambda: "inc_1",
                error_of=by_reason,
                telemetry=self.telemetry,
                poisons=poisons,
            ),
            limits=GatewayLimits(window_tokens=8),
        )
        self.shadow(SHADOW)

    def shadow(self, shadow: Shadow | None, *, rules: SplitRules | None = None, closed: bool = False) -> None:
        arms = (RouteArm("stable", OLD, WHOLE_BP), RouteArm("canary", NEW, 0, closed=closed))
        route = ModelRoute("chat-small", "salt", arms, rules or SplitRules(), shadow, step="r1/0")
        self.fleet.routes.put(ROUTES + "chat-small", route, 50)

    def _sign(self, ticket: Ticket) -> bytes:
        self.tickets.append(ticket)
        return b"t"

    @property
    def principal(self) -> Principal:
        return Principal("key-acme", KeyRole.TENANT, "acme", secret_hash="h")

    def received(self) -> Received:
        self.requests += 1
        return Received(CLOCK.monotonic_s(), 1, f"req_{self.requests}")

    async def send(self, **fields: Any) -> Completion:
        fields = {"model": "chat-small", "prompt": "hi", "max_output_tokens": 2, **fields}
        generation = inference_pb2.Generation(**fields)
        return await self.service.complete(
            self.principal, generation, received=self.received(), timeout_s=20.0
        )

    async def settled(self) -> None:
        await until(lambda: self.service.shadows.running == 0, timeout_s=5.0)

    def outcomes(self) -> dict[str, float]:
        text = generate_latest(self.metrics.registry).decode()
        found = values(text, "fairway_gateway_shadow_copies_total")
        return {dict(labels)["outcome"]: count for labels, count in found.items()}


@pytest.fixture
async def shadowed(fleet: Any) -> AsyncIterator[Shadowed]:
    load(fleet)
    fleet.tenants.put(
        TENANTS + "acme", Tenant(Meta("acme"), max_priority=Priority.INTERACTIVE, tokens_per_minute=9000)
    )
    fleet.keys.put(KEYS + "key-acme", ApiKey(Meta("key-acme"), KeyRole.TENANT, "h", tenant="acme"))
    found = Shadowed(fleet)
    yield found
    assert found.supervisor.healthy, found.supervisor.failures
    await found.supervisor.close()


def ends(device_us: int) -> Script:
    return emit(2, SequenceEnd(FinishReason.STOP, output_tokens=2, device_us=device_us))


async def test_a_copy_runs_on_the_shadow_version_in_the_lowest_class_for_no_tenant(
    shadowed: Shadowed,
) -> None:
    await shadowed.send(priority=3, user="ann", session_key="s1", timeout={"seconds": 9})
    await shadowed.settled()
    (copied,), (copy,) = shadowed.workers.of(OLD), shadowed.workers.of(NEW)
    (place,) = shadowed.placement.of(NEW)
    assert copied.generation.priority is Priority.INTERACTIVE
    assert (place.priority, place.tenant_id, copy.tenant_id) == (Priority.BATCH, SHADOW_TENANT, SHADOW_TENANT)
    assert (place.request_id, place.route_revision) == ("req_1-shadow", 50)
    assert place.deadline_left_s is not None
    assert place.deadline_left_s <= 9.0
    assert copy.generation.sampling.seed == copied.generation.sampling.seed
    assert copy.generation.step == copied.generation.step == "r1/0"
    assert copy.generation.session_key not in ("", "s1")
    assert [spec.version_digest for spec in shadowed.placement.asked] == [OLD, NEW]
    assert shadowed.outcomes() == {"FINISHED": 1}


async def test_a_copy_is_neither_reserved_nor_billed(shadowed: Shadowed) -> None:
    shadowed.workers.script[NEW] = ends(device_us=250_000)
    for _ in range(3):
        await shadowed.send()
    await shadowed.settled()
    requests = ["req_1", "req_2", "req_3"]
    assert shadowed.limiter.calls == [
        (call, name) for name in requests for call in ("admit", "reserve", "settle")
    ]
    assert [(one.request_id, one.version_digest) for one in shadowed.reported] == [
        (name, OLD) for name in requests
    ]
    assert Counter(one.tenant_id for one in shadowed.tickets) == {"acme": 3, SHADOW_TENANT: 3}
    text = generate_latest(shadowed.metrics.registry).decode()
    assert sum(values(text, "fairway_gateway_shadow_device_seconds_total").values()) == 0.75
    tenants = values(text, "fairway_gateway_tenant_requests_total")
    assert {dict(labels)["tenant"]: count for labels, count in tenants.items()} == {"acme": 3}


async def test_a_copy_counts_in_the_comparison_of_its_step_alone(shadowed: Shadowed) -> None:
    await shadowed.send()
    await shadowed.settled()
    shadowed.placement.failing = QueueTimeout("no capacity")  # says nothing about the version
    await shadowed.send()
    await shadowed.settled()
    report = shadowed.telemetry.slis.cut(1.0)
    assert report is not None
    windows = report.windows[GateWindow("chat-small", "r1/0")]
    assert {digest: window.requests for digest, window in windows.items()} == {OLD: 2, NEW: 1}
    assert [(key.tenant, sums.requests) for key, sums in report.series.items()] == [("acme", 2)]


async def test_a_copy_is_resolved_with_the_template_of_its_version(
    shadowed: Shadowed, make_folder: Callable[..., Any]
) -> None:
    shadowed.fleet.files.of_version[NEW] = make_folder(template=TEMPLATE.replace("trim", "upper"))
    message = inference_pb2.ChatMessage(role="user", content="hi there")
    await shadowed.send(prompt=None, chat=inference_pb2.Chat(messages=[message]))
    await shadowed.settled()
    (copied,), (copy,) = shadowed.workers.of(OLD), shadowed.workers.of(NEW)
    assert list(copied.generation.prompt.ids) != list(copy.generation.prompt.ids)


def failures(shadowed: Shadowed) -> dict[str, int]:
    """Return the failures that count in the comparison of the step, by version."""
    report = shadowed.telemetry.slis.cut(1.0)
    windows = {} if report is None else report.windows.get(GateWindow("chat-small", "r1/0"), {})
    return {digest: sum(one.errors for one in arm.clusters.values()) for digest, arm in windows.items()}


@pytest.mark.parametrize(("failing", "shadow"), [(OLD, None), (NEW, SHADOW)])
async def test_a_failure_before_a_request_is_accepted_counts_against_its_version(
    shadowed: Shadowed, make_folder: Callable[..., Any], failing: str, shadow: Shadow | None
) -> None:
    shadowed.shadow(shadow)
    shadowed.fleet.files.of_version[failing] = make_folder(template="{{ 1 / 0 }}")
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi there")])
    with nullcontext() if shadow else pytest.raises(FailedPrecondition, match="template"):
        await shadowed.send(prompt=None, chat=chat)
    await shadowed.settled()
    assert failures(shadowed)[failing] == 1


async def test_an_output_longer_than_the_window_is_taken(shadowed: Shadowed) -> None:
    shadowed.workers.script[NEW] = emit(40, ended(40))
    shadowed.workers.script[OLD] = emit(40, ended(40))
    await shadowed.send(max_output_tokens=40)
    await shadowed.settled()
    assert shadowed.outcomes() == {"FINISHED": 1}
    assert shadowed.workers.credited[NEW] >= 32


async def test_more_copies_than_the_bound_are_left_out(shadowed: Shadowed) -> None:
    shadowed.shadow(replace(SHADOW, max_concurrency=2))
    shadowed.workers.script[NEW] = emit(1, None)
    for _ in range(5):
        await shadowed.send()
    await until(lambda: len(shadowed.workers.of(NEW)) == 2, timeout_s=5.0)
    assert shadowed.outcomes() == {"SKIPPED_FULL": 3}
    assert shadowed.service.shadows.running == 2
    await until(lambda: shadowed.service.running == 0, timeout_s=5.0)  # copies do not count
    shadowed.service.shadows.stop()
    await shadowed.settled()


@pytest.mark.parametrize(("pressure", "outcome"), [(MAX_PRESSURE, "SKIPPED_PRESSURE"), (0.019, "FINISHED")])
async def test_no_copy_while_requests_wait(shadowed: Shadowed, pressure: float, outcome: str) -> None:
    shadowed.pressure = pressure
    await shadowed.send()
    await shadowed.settled()
    assert shadowed.outcomes() == {outcome: 1}


@pytest.mark.parametrize(
    ("failing", "script", "outcome"),
    [
        (QueueTimeout("no room"), None, "QUEUE_TIMEOUT"),
        (RuntimeError("a bug"), None, "INTERNAL"),
        (None, emit(1, SequenceEnd(FinishReason.ERROR, error_reason="INTERNAL")), "INTERNAL"),
        (None, emit(0, NotAdmittedReason.STALE_ROUTE), "STALE_ROUTE"),  # aborted: never on another version
    ],
)
async def test_a_copy_that_fails_is_counted(
    shadowed: Shadowed, failing: BaseException | None, script: Script | None, outcome: str
) -> None:
    shadowed.placement.failing = failing
    shadowed.workers.script[NEW] = script or shadowed.workers.script[NEW]
    answer = await shadowed.send()
    await shadowed.settled()
    assert answer.accepted.version_digest == OLD
    assert len(shadowed.placement.of(OLD)) == 1
    assert shadowed.outcomes() == {outcome: 1}


async def test_a_drain_ends_the_copies(shadowed: Shadowed) -> None:
    shadowed.workers.script[NEW] = emit(1, None)
    await shadowed.send()
    await until(lambda: len(shadowed.workers.of(NEW)) == 1, timeout_s=5.0)
    assert not shadowed.service.busy  # a drain does not wait for them
    assert await drain(shadowed.service, CLOCK, 0.0) == 0
    await shadowed.settled()
    assert shadowed.outcomes() == {"DRAINING": 1}
    assert shadowed.workers.cancelled == 1


async def test_a_request_that_is_accepted_during_a_drain_is_not_copied(shadowed: Shadowed) -> None:
    sending = asyncio.create_task(shadowed.send())
    await asyncio.sleep(0)
    shadowed.service.reject_new()
    assert (await sending).accepted.version_digest == OLD
    assert shadowed.outcomes() == {}


async def test_an_input_that_kills_the_shadow_version_is_refused_there_alone(shadowed: Shadowed) -> None:
    shadowed.workers.script[NEW] = emit(0, crashed(StepRole.ALONE))
    await shadowed.send()
    await shadowed.settled()
    assert shadowed.quarantine.count(NEW) == 1
    assert shadowed.quarantine.count(OLD) == 0
    runs = len(shadowed.workers.of(NEW))
    await shadowed.send()
    await shadowed.settled()
    assert shadowed.outcomes() == {"POISONED_INPUT": 2}
    assert len(shadowed.workers.of(NEW)) == runs


async def test_who_is_not_copied(shadowed: Shadowed) -> None:
    """A named version, a tenant that takes no part, a closed arm, no shadow, an old view."""
    await shadowed.send(version=OLD)
    shadowed.shadow(SHADOW, rules=SplitRules(deny=("acme",)))
    await shadowed.send()
    shadowed.shadow(SHADOW, closed=True)
    await shadowed.send()
    shadowed.shadow(None)
    await shadowed.send()
    shadowed.shadow(SHADOW)
    shadowed.fleet.routes.aged_s = 16.0
    await shadowed.send()
    assert shadowed.workers.of(NEW) == []
    assert shadowed.outcomes() == {}


async def test_a_resumed_run_is_not_copied_again(shadowed: Shadowed) -> None:
    resume = Resume(PinnedVersion(OLD, 50), (), ())
    generation = inference_pb2.Generation(model="chat-small", prompt="hi", max_output_tokens=2)
    terms = RunTerms(shadowed.received(), 20.0, resume=resume)
    sink = Sink()
    request, admit = shadowed.service.prepared(shadowed.principal, generation, sink, terms)
    await request.deliver(admit, sink)
    assert shadowed.outcomes() == {}
