"""Less than what was asked for: only where the tenant allows it, only under pressure, and always said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fairway.v1 import common_pb2, inference_pb2
from services.core import errors
from services.core.generation import (
    GenerationSpec,
    Grant,
    OutputLimits,
    PlaceSpec,
    Principal,
    Prompt,
    Sampling,
)
from services.core.records import (
    DEPLOYMENTS,
    KEYS,
    TENANTS,
    WORKERS,
    ApiKey,
    Degrade,
    Deployment,
    KeyRole,
    LoadedVersion,
    Meta,
    Tenant,
    VersionState,
    Worker,
)
from services.gateway.catalog import PinnedVersion
from services.gateway.events import Received
from services.gateway.faces.grpc.messages import accepted_message
from services.gateway.idempotency.record_codec import AcceptedTerms, terms_of
from services.gateway.policy.degrade import (
    Degradation,
    DegradationKind,
    DegradeLevels,
    header_value,
    output_cap,
    smaller_model,
)
from services.gateway.requests.request import Request
from services.gateway.requests.streaming import Completion
from services.gateway.requests.terms import Admitted, Resume, RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.service import GatewayService
from services.gateway.service_types import GatewayLimits, Ports
from services.rpc.status import by_reason
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter
from tests.unit.gateway.requests.test_request import KeptRecord, Placement, Workers, emit, ended

DIGEST = "sha256:" + "ab" * 32
SMALL = "sha256:" + "cd" * 32
WHO = Principal("alpha", KeyRole.TENANT, "acme", secret_hash="h")
LEVELS = DegradeLevels()
SPEC = GenerationSpec("r", "big", DIGEST, 1, Prompt((1, 2)), Sampling(1), OutputLimits(100))
ALLOWED = Degrade(10, {"big": "small"})


def test_an_output_is_cut_from_its_level_on() -> None:
    assert output_cap(SPEC, ALLOWED, LEVELS.cap_from_ratio, LEVELS) == 10
    assert output_cap(SPEC, ALLOWED, LEVELS.cap_from_ratio - 0.01, LEVELS) is None
    assert output_cap(SPEC, Degrade(), 1.0, LEVELS) is None, "the tenant does not allow it"
    assert output_cap(replace(SPEC, limits=OutputLimits(10)), ALLOWED, 1.0, LEVELS) is None, "nothing changes"
    assert output_cap(replace(SPEC, limits=OutputLimits(100, 30)), ALLOWED, 1.0, LEVELS) == 30


def test_a_smaller_model_answers_from_its_level_on() -> None:
    assert smaller_model(SPEC, ALLOWED, LEVELS.smaller_from_ratio, LEVELS, by_ids=False) == "small"
    assert smaller_model(SPEC, ALLOWED, LEVELS.smaller_from_ratio - 0.01, LEVELS, by_ids=False) is None
    assert smaller_model(SPEC, Degrade(), 1.0, LEVELS, by_ids=False) is None
    assert smaller_model(replace(SPEC, model="other"), ALLOWED, 1.0, LEVELS, by_ids=False) is None


def test_what_names_tokens_keeps_its_model() -> None:
    assert smaller_model(SPEC, ALLOWED, 1.0, LEVELS, by_ids=True) is None
    stops = replace(SPEC, limits=OutputLimits(100, stop_token_ids=(5,)))
    assert smaller_model(stops, ALLOWED, 1.0, LEVELS, by_ids=False) is None
    biased = replace(SPEC, sampling=Sampling(1, logit_bias=((5, 1.0),)))
    assert smaller_model(biased, ALLOWED, 1.0, LEVELS, by_ids=False) is None
    scored = replace(SPEC, sampling=Sampling(1, prompt_logprobs=0))
    assert smaller_model(scored, ALLOWED, 1.0, LEVELS, by_ids=False) is None


def test_the_header_says_what_was_done() -> None:
    found = Degradation(DegradationKind.OUTPUT_CAPPED, "100", "10", 0.7)
    assert header_value([found]) == "output_capped; original=100; applied=10"


def test_levels_are_in_order() -> None:
    with pytest.raises(ValueError, match="before"):
        DegradeLevels(0.9, 0.8)


class Refusing(Placement):
    """Places, unless it is told not to."""

    refuse_all: errors.FairwayError | None = None

    async def place(self, spec: PlaceSpec) -> Grant:
        if self.refuse_all is not None:
            raise self.refuse_all
        return await super().place(spec)


class Gateway:
    """A service over a real validator and a scripted worker; the test says how hard versions are pressed."""

    def __init__(self, fleet: Any, executor: ThreadPoolExecutor, supervisor: Supervisor) -> None:
        self.pressure: dict[str, float] = {}
        self.placement, self.workers = Refusing(), Workers(*[emit(2, ended(2))] * 4)
        clock = SystemClock()
        self.service = GatewayService(
            validator=Validator(fleet.catalog, fleet.identity, Random(7), max_fanout_tokens=256),
            identity=fleet.identity,
            catalog=fleet.catalog,
            ports=Ports(
                limiter=MemoryLimiter(clock),
                placement=self.placement,
                workers=self.workers,
                clock=clock,
                supervisor=supervisor,
                rng=Random(0),
                sign_ticket=lambda ticket: b"t",
                new_incident=lambda: "inc_1",
                error_of=by_reason,
                pressure=lambda digest: self.pressure.get(digest, 0.0),
            ),
            limits=GatewayLimits(),
        )

    async def ask(self, attempt: int = 0, **fields: Any) -> Completion:
        values: dict[str, Any] = {"model": "chat-small", "prompt": "the quick", "max_output_tokens": 50}
        generation = inference_pb2.Generation(**{**values, **fields})
        received = Received(SystemClock().monotonic_s(), 1, "req_1", attempt=attempt)
        return await self.service.complete(WHO, generation, received=received, timeout_s=20.0)


@pytest.fixture
async def gateway(fleet: Any, executor: ThreadPoolExecutor) -> AsyncIterator[Gateway]:
    """``chat-small`` is asked for; ``chat-tiny`` answers instead."""
    other = Deployment(Meta("chat-tiny"), "tiny", "v2", SMALL, 1)
    fleet.deployments.put(DEPLOYMENTS + "chat-tiny", other, 43)
    version = LoadedVersion("chat-tiny", "tiny", SMALL, VersionState.READY, max_model_len=96)
    fleet.workers.put(WORKERS + "w9", Worker("w9", "w9:1", versions=(version,)))
    fleet.keys.put(KEYS + "alpha", ApiKey(Meta("alpha"), KeyRole.TENANT, "h", tenant="acme"))
    allow(fleet, Degrade(10, {"chat-small": "chat-tiny"}))
    supervisor = Supervisor(SystemClock())
    yield Gateway(fleet, executor, supervisor)
    assert supervisor.healthy, supervisor.failures
    await supervisor.close()


def allow(fleet: Any, degrade: Degrade) -> None:
    tenant = Tenant(Meta("acme"), degrade=degrade, weight=3.0, committed_tokens_per_minute=500)
    fleet.tenants.put(TENANTS + "acme", tenant)


async def test_without_pressure_nothing_is_changed(gateway: Gateway) -> None:
    answer = await gateway.ask()
    assert answer.accepted.degradations == ()
    assert gateway.workers.started[0].generation.limits.max_tokens == 50


async def test_a_smaller_model_answers_within_the_bounds_of_the_request(gateway: Gateway, fleet: Any) -> None:
    degrade = Degrade(smaller_models={"chat-small": "chat-tiny"})
    fleet.tenants.put(TENANTS + "acme", Tenant(Meta("acme"), degrade=degrade, max_output_tokens=7))
    gateway.pressure[DIGEST] = 0.99
    answer = await gateway.ask(max_output_tokens=None)
    assert answer.accepted.model == "chat-tiny"
    assert gateway.workers.started[0].generation.limits.max_tokens == 7


async def test_under_pressure_the_output_is_cut_and_it_is_said(gateway: Gateway) -> None:
    gateway.pressure[DIGEST] = 0.7
    answer = await gateway.ask()
    wanted = Degradation(DegradationKind.OUTPUT_CAPPED, "50", "10", 0.7)
    assert answer.accepted.degradations == (wanted,)
    assert gateway.workers.started[0].generation.limits.max_tokens == 10
    assert gateway.placement.asked[0].max_output_tokens == 10
    message = accepted_message(answer.accepted)
    assert message.degradations[0].kind == inference_pb2.DEGRADATION_KIND_OUTPUT_CAPPED
    assert (message.degradations[0].original, message.degradations[0].applied) == ("50", "10")


async def test_under_more_pressure_a_smaller_model_answers_too(gateway: Gateway) -> None:
    gateway.pressure[DIGEST] = 0.95
    answer = await gateway.ask()
    assert [found.kind for found in answer.accepted.degradations] == [
        DegradationKind.SMALLER_MODEL,
        DegradationKind.OUTPUT_CAPPED,
    ]
    assert (answer.accepted.model, answer.accepted.version_digest) == ("chat-tiny", SMALL)
    assert gateway.placement.asked[0].version_digest == SMALL


async def test_a_smaller_model_that_is_pressed_as_hard_is_no_help(gateway: Gateway) -> None:
    gateway.pressure = {DIGEST: 0.95, SMALL: 0.95}
    answer = await gateway.ask()
    assert answer.accepted.model == "chat-small"
    assert [found.kind for found in answer.accepted.degradations] == [DegradationKind.OUTPUT_CAPPED]


async def test_a_smaller_model_that_is_not_there_changes_nothing(gateway: Gateway, fleet: Any) -> None:
    allow(fleet, Degrade(0, {"chat-small": "gone"}))
    gateway.pressure[DIGEST] = 1.0
    answer = await gateway.ask()
    assert (answer.accepted.model, answer.accepted.degradations) == ("chat-small", ())


async def test_a_key_that_may_not_use_the_smaller_model_keeps_its_own(gateway: Gateway, fleet: Any) -> None:
    narrow = ApiKey(Meta("alpha"), KeyRole.TENANT, "h", tenant="acme", models=("chat-small",))
    fleet.keys.put(KEYS + "alpha", narrow)
    gateway.pressure[DIGEST] = 1.0
    answer = await gateway.ask()
    assert answer.accepted.model == "chat-small"


async def test_a_tenant_without_a_policy_is_served_as_asked(gateway: Gateway, fleet: Any) -> None:
    allow(fleet, Degrade())
    gateway.pressure[DIGEST] = 1.0
    answer = await gateway.ask()
    assert answer.accepted.degradations == ()


CAPPED = Degradation(DegradationKind.OUTPUT_CAPPED, "50", "10", 1.0)
SMALLER = Degradation(DegradationKind.SMALLER_MODEL, "chat-small", "chat-tiny", 1.0)


async def admitted(
    gateway: Gateway, resume: Resume | None = None, *, who: Principal = WHO, **fields: Any
) -> tuple[Admitted, list[AcceptedTerms]]:
    """Return a request under a key as it runs, and what was written down of it."""
    values: dict[str, Any] = {"model": "chat-small", "prompt": "the quick", "max_output_tokens": 50}
    generation = inference_pb2.Generation(**{**values, **fields})
    received = Received(SystemClock().monotonic_s(), 1, "req_1")
    record = KeptRecord()
    terms = RunTerms(received, 20.0, resume=resume, settlement=record)
    request = Request(terms, gateway.service._ports)
    return await gateway.service._admission.admit(who, generation, request), record.accepted


async def test_what_is_given_under_a_key_is_written_down_as_it_is_given(gateway: Gateway) -> None:
    gateway.pressure[DIGEST] = 1.0
    found, written = await admitted(gateway)
    assert found.degradations == (SMALLER, CAPPED)
    assert (found.spec.model, found.spec.limits.max_tokens) == ("chat-tiny", 10)
    assert written == [terms_of(found.spec, found.degradations, 0.0)]


async def test_what_goes_on_is_not_degraded_anew(gateway: Gateway) -> None:
    gateway.pressure[DIGEST] = 1.0
    found, written = await admitted(gateway, Resume(PinnedVersion(DIGEST, 1), (), ()))
    assert (found.spec.model, found.spec.limits.max_tokens) == ("chat-small", 50)
    assert written == [terms_of(found.spec, (), 0.0)]


async def test_what_was_degraded_goes_on_so_without_pressure(gateway: Gateway, fleet: Any) -> None:
    """Also for a key that is only for the model that was asked for: it may use that, so it may hear this."""
    narrow = ApiKey(Meta("alpha"), KeyRole.TENANT, "h", tenant="acme", models=("chat-small",))
    fleet.keys.put(KEYS + "alpha", narrow)
    resume = Resume(PinnedVersion(SMALL, 1), (), (SMALLER, CAPPED))
    found, _ = await admitted(gateway, resume, model="chat-tiny", max_output_tokens=10)
    assert found.degradations == (SMALLER, CAPPED)
    assert (found.spec.version_digest, found.spec.limits.max_tokens) == (SMALL, 10)


async def test_biased_sampling_keeps_its_model(gateway: Gateway) -> None:
    gateway.pressure[DIGEST] = 1.0
    answer = await gateway.ask(sampling=common_pb2.Sampling(logit_bias={5: 1.0}), max_output_tokens=5)
    assert answer.accepted.model == "chat-small"


async def test_the_scheduler_is_told_what_it_sheds_by(gateway: Gateway) -> None:
    await gateway.ask(attempt=2)
    asked = gateway.placement.asked[0]
    assert (asked.attempt, asked.tenant_weight, asked.committed_tokens_per_minute) == (2, 3.0, 500)
    assert asked.deadline_left_s is not None
    assert 10.0 < asked.deadline_left_s <= 20.0
    assert not asked.begun


async def test_what_had_a_place_says_so_when_it_is_placed_again(gateway: Gateway) -> None:
    gateway.workers.scripts = [emit(1, "the stream broke"), emit(1, ended(2))]
    await gateway.ask()
    assert [asked.begun for asked in gateway.placement.asked] == [False, True]


async def test_a_refusal_for_overload_reaches_the_client_with_its_time(gateway: Gateway) -> None:
    gateway.placement.refuse_all = errors.Overloaded("m is overloaded", retry_after_s=7.5)
    with pytest.raises(errors.Overloaded) as raised:
        await gateway.ask()
    assert raised.value.retry_after_s == 7.5
