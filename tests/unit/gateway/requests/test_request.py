"""A request ends in exactly one terminal event, whatever its workers do, and frees what it held."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest
from msgspec import structs

from services.adapters.quarantine import MemoryQuarantine
from services.core import errors
from services.core.generation import (
    AnyGrant,
    FinishReason,
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    PlaceSpec,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
    Usage,
)
from services.core.poison.fingerprint import fingerprint_of
from services.core.poison.suspicion import LossCause, StepRole
from services.core.records import ApiKey, KeyRole, Meta, Tenant
from services.core.usage import RequestUsage
from services.gateway.catalog import Waking
from services.gateway.events import Accepted, Finished, Received
from services.gateway.idempotency.record_codec import AcceptedTerms
from services.gateway.poison import PoisonGate
from services.gateway.policy.claims import Payer
from services.gateway.requests.egress import StreamEgress
from services.gateway.requests.request import MAX_ROUTES, Request
from services.gateway.requests.sequences import Sequences
from services.gateway.requests.terms import Admitted, Charge, RunTerms
from services.gateway.safety.requests import RequestSafety
from services.gateway.service_types import GatewayLimits, Ports
from services.ports.limiter import Reservation
from services.ports.worker import SequenceSink
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter
from tests.support.waiting import until

CLOCK = SystemClock()


@dataclass
class Sink:
    """Keeps what it heard; complains about anything after the end."""

    accepted: list[Accepted] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    end: Finished | errors.FairwayError | None = None

    def on_accepted(self, accepted: Accepted) -> None:
        assert self.end is None
        self.accepted.append(accepted)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert self.end is None
        got = self.tokens.setdefault(choice, [])
        assert offset == len(got)
        got.extend(ids)
        self.text[choice] = self.text.get(choice, "") + text

    def on_finished(self, finished: Finished) -> None:
        assert self.end is None
        self.end = finished

    def on_failed(self, error: errors.FairwayError) -> None:
        assert self.end is None
        self.end = error


@dataclass
class KeptRecord:
    """The settlement of a request with a key. It keeps the acceptances without their time."""

    accepted: list[AcceptedTerms] = field(default_factory=list)
    settled: list[Charge | None] = field(default_factory=list)

    async def accept(self, terms: AcceptedTerms) -> None:
        self.accepted.append(structs.replace(terms, received_unix_us=0))

    async def finish(
        self, end: Finished | errors.FairwayError, charge: Charge | None
    ) -> Finished | errors.FairwayError:
        self.settled.append(charge)
        return end


class Placement:
    def __init__(self) -> None:
        self.asked: list[PlaceSpec] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.only_worker = ""
        self.refusal: errors.FairwayError = errors.QueueTimeout("no other worker took it")

    async def place(self, spec: PlaceSpec) -> Grant:
        self.asked.append(spec)
        await self.hold.wait()
        if self.only_worker in spec.excluded_workers:
            raise self.refusal
        return Grant("w0", "127.0.0.1:1", 1, 1, len(self.asked), 4, 5.0, spec.version_digest)

    def give_back(self, grant: AnyGrant) -> None: ...

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None: ...


Script = Callable[[StartSpec, SequenceSink], None]


class Workers:
    """Each start takes the next script; a script that does nothing leaves the sequence running."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.started: list[StartSpec] = []
        self.cancelled = 0
        self.credits: list[int] = []

    def start(self, spec: StartSpec, sink: SequenceSink) -> "Workers":
        self.started.append(spec)
        asyncio.get_running_loop().call_soon(self.scripts.pop(0), spec, sink)
        return self

    def credit(self, tokens: int) -> None:
        self.credits.append(tokens)

    def cancel(self) -> None:
        self.cancelled += 1


class SlotLimiter(MemoryLimiter):
    """Notes who holds a slot, and what was settled."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.running: set[str] = set()
        self.usage: list[Usage] = []

    async def admit(self, tenant_id: str, request_id: str, *rest: Any, **named: Any) -> Reservation:
        self.running.add(request_id)
        return await super().admit(tenant_id, request_id, *rest, **named)

    async def settle_now(self, reservation: Reservation, usage: Usage) -> None:
        await asyncio.sleep(0)
        self.running.remove(reservation.request_id)
        self.usage.append(usage)
        await super().settle_now(reservation, usage)


def payer() -> Payer:
    return Payer(Tenant(Meta("acme")), ApiKey(Meta("key"), KeyRole.TENANT, "h", "acme"))


def emit(tokens: int, end: SequenceEnd | str | NotAdmittedReason | None) -> Script:
    """Accept, produce ``tokens`` more, then end, be lost (a str), refuse, or go on for ever (None)."""

    def script(spec: StartSpec, sink: SequenceSink) -> None:
        if isinstance(end, NotAdmittedReason):
            sink.on_not_admitted(end)
            return
        sink.on_accepted()
        done = len(spec.produced_ids)
        for offset in range(done, done + tokens):
            sink.on_tokens(offset, [100 + offset], f"t{offset} ", ())
        if isinstance(end, SequenceEnd):
            sink.on_finished(end)
        elif end is not None:
            sink.on_lost(end)

    return script


def ended(output_tokens: int, reason: FinishReason = FinishReason.STOP, *, cached: int = 0) -> SequenceEnd:
    return SequenceEnd(reason, output_tokens=output_tokens, cached_tokens=cached)


class Harness:
    def __init__(self, *scripts: Script, choices: int = 1, timeout_s: float = 5.0) -> None:
        self.client_window: int | None = None
        self.reroute: Callable[[Admitted], Awaitable[Admitted]] | None = None
        self.copies = 0
        self.egress: StreamEgress | None = None
        self.safety: RequestSafety | None = None
        self.limits = GatewayLimits(queue_ttl_s=5.0, window_tokens=8, placed_prefix_blocks=0)
        self.reason_of: Callable[[str, str], errors.FairwayError] = lambda _, text: errors.InvalidInput(text)
        self.sink, self.placement, self.workers = Sink(), Placement(), Workers(*scripts)
        self.limiter, self.supervisor = SlotLimiter(), Supervisor(CLOCK)
        self.spec = GenerationSpec(
            "req_1", "m", "sha256:x", 3, Prompt([1, 2, 3]), Sampling(7), OutputLimits(64), choices=choices
        )
        self.ports = Ports(
            limiter=self.limiter,
            placement=self.placement,
            workers=self.workers,
            clock=CLOCK,
            supervisor=self.supervisor,
            rng=Random(0),
            sign_ticket=lambda *_: b"t",
            new_incident=lambda: "inc_7",
            error_of=lambda reason, text: self.reason_of(reason, text),
        )
        self.terms = RunTerms(Received(CLOCK.monotonic_s(), 1, "req_1"), timeout_s)
        self.request = Request(self.terms, self.ports)

    def use(self, ports: Ports) -> None:
        """Have the request act through these ports."""
        self.ports = ports
        self.request = Request(self.terms, ports)

    async def admit(self) -> Sequences:
        admitted = Admitted(
            self.spec,
            await self.limiter.admit("acme", "req_1", ()),
            payer(),
            b"t",
            replace(self.terms, client_window=self.client_window),
            self.ports,
            self.limits,
            self.request.telemetry,
            reroute=self.reroute,
            egress=self.egress,
            accepted=self.copy,
            safety=self.safety,
        )
        return Sequences(admitted, self.sink, self.request)

    def copy(self) -> None:
        self.copies += 1

    def start(self) -> asyncio.Task[None]:
        return self.supervisor.spawn("request", self.request.deliver(self.admit, self.sink))

    async def run(self) -> Finished | errors.FairwayError:
        await self.start()
        assert self.limiter.running == set(), "the slot was not given back"
        assert self.sink.end is not None
        return self.sink.end


def rerouted(harness: Harness, version: str, calls: list[str]) -> Callable[[Admitted], Awaitable[Admitted]]:
    """What resolves a request again, to another version with another prompt."""

    async def reroute(admitted: Admitted) -> Admitted:
        calls.append(admitted.spec.version_digest)
        spec = replace(admitted.spec, version_digest=version, route_revision=9, prompt=Prompt([1, 2]))
        return replace(admitted, spec=spec)

    return reroute


async def test_a_request_whose_version_is_withdrawn_is_resolved_again() -> None:
    harness, calls = Harness(emit(0, NotAdmittedReason.STALE_ROUTE), emit(3, ended(3))), list[str]()
    harness.reroute = rerouted(harness, "sha256:y", calls)
    harness.client_window = 2
    harness.request.allow(5)
    end = await harness.run()
    assert isinstance(end, Finished)
    assert calls == ["sha256:x"]
    assert harness.copies == 1, "it is copied for a shadow version when it is first accepted"
    assert [spec.version_digest for spec in harness.placement.asked] == ["sha256:x", "sha256:y"]
    assert [(one.version_digest, one.route_revision) for one in harness.sink.accepted] == [
        ("sha256:x", 3),
        ("sha256:y", 9),
    ]
    assert (end.usage.prompt_tokens, harness.sink.tokens) == (2, {0: [100, 101, 102]})
    assert [start.initial_credit_tokens for start in harness.workers.started] == [7, 7]


async def test_a_version_that_stays_withdrawn_ends_the_request_retryably() -> None:
    harness = Harness(*[emit(0, NotAdmittedReason.STALE_ROUTE)] * 99)
    harness.reroute = rerouted(harness, "sha256:x", [])
    end = await harness.run()
    assert isinstance(end, errors.StaleRoute)
    assert end.retry_after_s
    assert len(harness.workers.started) == MAX_ROUTES


async def test_a_request_that_is_returned_from_replaced_weights_starts_over_or_ends_by_name() -> None:
    refused = emit(0, NotAdmittedReason.STALE_ROUTE)
    returned = emit(0, ended(0, FinishReason.PREEMPTED))
    harness, calls = Harness(returned, refused, emit(3, ended(3))), list[str]()
    harness.reroute = rerouted(harness, "sha256:y", calls)
    assert isinstance(await harness.run(), Finished)
    assert calls == ["sha256:x"]
    begun, calls = Harness(emit(2, ended(2, FinishReason.PREEMPTED)), refused), list[str]()
    begun.reroute = rerouted(begun, "sha256:y", calls)
    end = await begun.run()
    assert isinstance(end, errors.VersionGone)
    assert begun.sink.tokens == {0: [100, 101]}
    assert not calls, "tokens of two versions in one stream"


async def test_output_of_another_choice_prevents_another_version() -> None:
    stale = emit(0, NotAdmittedReason.STALE_ROUTE)
    harness, calls = Harness(emit(2, None), stale, stale, choices=2), list[str]()
    harness.reroute = rerouted(harness, "sha256:y", calls)
    assert isinstance(await harness.run(), errors.StaleRoute)
    assert not calls


async def test_a_choice_whose_sibling_has_output_goes_on_with_the_withdrawn_version() -> None:
    """The start was on its way when the sibling's output came: the next one says so, and is admitted."""
    stale = emit(0, NotAdmittedReason.STALE_ROUTE)
    harness = Harness(emit(3, ended(3)), stale, emit(3, ended(3)), choices=2)
    assert isinstance(await harness.run(), Finished)
    assert [start.begun for start in harness.workers.started][1:] in ([False, True], [True, True])
    assert {start.generation.version_digest for start in harness.workers.started} == {"sha256:x"}


async def test_a_request_that_ends_well() -> None:
    harness = Harness(emit(3, ended(3)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens == {0: [100, 101, 102]}
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (3, 3)
    assert harness.limiter.usage == [end.usage]
    assert [a.seed for a in harness.sink.accepted] == [7]


@pytest.mark.parametrize("placed", [0, 2, 9])
async def test_the_scheduler_hears_of_a_bounded_part_of_the_prefix_and_the_worker_of_all(placed: int) -> None:
    harness = Harness(emit(1, "gone"), emit(1, ended(2)))
    harness.spec = replace(harness.spec, prompt=Prompt([1, 2, 3], (7, 8, 9), 6))
    harness.limits = replace(harness.limits, placed_prefix_blocks=placed)
    assert isinstance(await harness.run(), Finished)
    assert [spec.prefix_hashes for spec in harness.placement.asked] == [(7, 8, 9)[:placed]] * 2
    assert [start.generation.prompt.prefix_hashes for start in harness.workers.started] == [(7, 8, 9)] * 2


async def test_choices_run_side_by_side() -> None:
    harness = Harness(emit(2, ended(2)), emit(1, ended(1)), emit(3, ended(3)), choices=3)
    end = await harness.run()
    assert isinstance(end, Finished)
    assert [result.output_tokens for result in end.choices] == [2, 1, 3]
    assert end.usage.output_tokens == 6
    assert [spec.choice for spec in harness.workers.started] == [0, 1, 2]


@pytest.mark.parametrize("loss", ["connection reset", ended(0, FinishReason.ENGINE_LOST)])
async def test_a_lost_stream_goes_on_where_it_was(loss: str | SequenceEnd) -> None:
    harness = Harness(emit(2, loss), emit(2, ended(4)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.resumes == 1
    assert harness.sink.tokens == {0: [100, 101, 102, 103]}
    resumed = harness.workers.started[1]
    assert resumed.produced_ids == (100, 101)
    assert resumed.delivered_chars == len("t0 t1 ")
    assert harness.placement.asked[1].excluded_workers == ("w0",)
    assert harness.placement.asked[1].prompt_tokens == 5
    assert harness.placement.asked[1].arrival_unix_us == harness.placement.asked[0].arrival_unix_us


class FastClock(SystemClock):
    """Twenty seconds in one."""

    def monotonic_s(self) -> float:
        return super().monotonic_s() * 20


@pytest.mark.parametrize("returns", [False, True])
async def test_a_stream_whose_version_is_gone_ends_soon(returns: bool) -> None:
    def lost(spec: StartSpec, sink: SequenceSink) -> None:
        harness.placement.hold.clear()
        emit(2, "gone")(spec, sink)

    harness, asked = Harness(lost, emit(2, ended(4))), list[tuple[str, str]]()
    clock = FastClock()
    harness.terms = RunTerms(Received(clock.monotonic_s(), 1, "req_1"), 600.0)

    def serves(model: str, digest: str) -> bool:
        asked.append((model, digest))
        if returns:
            harness.placement.hold.set()
        return False

    harness.use(replace(harness.ports, clock=clock, serves=serves))
    await harness.start()
    assert set(asked) == {("m", "sha256:x")}
    if returns:
        assert isinstance(harness.sink.end, Finished)
    else:
        assert isinstance(harness.sink.end, errors.VersionGone)
        assert harness.limiter.running == set()


NOT_FINITE = SequenceEnd(FinishReason.ENGINE_LOST, error_reason="NOT_FINITE")


async def test_a_version_without_finite_logits_is_named_after_bounded_tries() -> None:
    harness = Harness(emit(2, NOT_FINITE), emit(2, ended(4)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.placement.asked[1].excluded_workers == ("w0",)
    harness = Harness(*(emit(0, NOT_FINITE) for _ in range(4)))
    end = await harness.run()
    assert isinstance(end, errors.VersionFailing)
    assert "not finite on 3 tries: the version is faulty" in end.message
    assert len(harness.workers.started) == 3


@pytest.mark.parametrize(
    ("first", "again", "told"),
    [
        (ended(2, FinishReason.PREEMPTED, cached=64), ended(4, cached=96), 64),
        (ended(2, FinishReason.PREEMPTED), ended(4, cached=96), 0),
        (ended(0, FinishReason.ENGINE_LOST), ended(2, cached=32), 32),
    ],
)
async def test_what_a_request_computed_itself_is_not_told_as_cached(
    first: SequenceEnd, again: SequenceEnd, told: int
) -> None:
    harness = Harness(emit(first.output_tokens, first), emit(2, again))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == told


async def test_device_time_is_that_of_all_choices_and_runs_whose_end_was_reported() -> None:
    preempted = replace(ended(2, FinishReason.PREEMPTED), device_us=1_000_000)
    harness = Harness(
        emit(2, preempted),
        emit(1, replace(ended(1), device_us=20_000)),
        emit(1, "gone"),
        emit(1, replace(ended(4), device_us=300)),
        choices=2,
    )
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.usage.device_s == pytest.approx(1.0203)
    assert harness.limiter.usage[0].device_s == end.usage.device_s


@pytest.mark.parametrize("refusal", [errors.QueueTimeout, errors.NoWorkerAvailable, errors.NoLeader])
async def test_the_only_worker_is_taken_again_when_no_other_is_there(
    refusal: type[errors.FairwayError],
) -> None:
    harness = Harness(emit(2, "gone"), emit(1, ended(3)))
    harness.placement.only_worker = "w0"
    harness.placement.refusal = refusal("no other worker took it")
    end = await harness.run()
    assert isinstance(end, Finished)
    waits = [(spec.excluded_workers, spec.queue_ttl_s) for spec in harness.placement.asked]
    assert waits == [((), 5.0), (("w0",), 2.0), ((), 5.0)]


async def test_a_stream_that_has_begun_waits_until_its_deadline() -> None:
    harness = Harness(emit(1, ended(1, FinishReason.PREEMPTED)), emit(1, ended(2)), timeout_s=600.0)
    assert isinstance(await harness.run(), Finished)
    first, again = harness.placement.asked
    assert first.queue_ttl_s == 5.0
    assert 590 < again.queue_ttl_s <= 600


async def test_a_preempted_sequence_goes_back_without_blame() -> None:
    harness = Harness(emit(1, ended(1, FinishReason.PREEMPTED)), emit(1, ended(2)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.resumes == 0
    assert harness.placement.asked[1].excluded_workers == ()


async def test_a_refusal_is_no_retry() -> None:
    scripts = [emit(0, NotAdmittedReason.NO_ROOM)] * 5
    harness = Harness(*scripts, emit(1, ended(1)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.resumes == 0
    assert len(harness.placement.asked) == 6


async def test_a_start_that_no_worker_takes_is_a_bug_and_not_placed_again() -> None:
    harness = Harness(emit(0, NotAdmittedReason.INVALID))
    end = await harness.run()
    assert isinstance(end, errors.InternalError)
    assert end.metadata["incident"] == "inc_7"
    assert len(harness.placement.asked) == 1


async def test_losses_are_bounded() -> None:
    harness = Harness(*[emit(1, "gone")] * 3)
    end = await harness.run()
    assert isinstance(end, errors.StreamBroken)
    assert end.retry_after_s is not None
    assert harness.limiter.usage[0].output_tokens == 3


def crashed(role: StepRole, cause: LossCause = LossCause.FAULT, *, output_tokens: int = 0) -> SequenceEnd:
    return SequenceEnd(
        FinishReason.ENGINE_LOST, output_tokens=output_tokens, loss_cause=cause, step_role=role
    )


def poison_gate(harness: Harness) -> MemoryQuarantine:
    """Give the harness a quarantine, and return it."""
    quarantine = MemoryQuarantine(CLOCK)
    gate = PoisonGate(
        quarantine,
        secret=b"s",
        clock=CLOCK,
        supervisor=harness.supervisor,
        telemetry=harness.ports.telemetry,
    )
    harness.use(replace(harness.ports, poisons=gate))
    return quarantine


async def test_a_member_of_a_step_that_crashed_runs_apart_and_its_worker_is_not_charged() -> None:
    harness = Harness(emit(2, crashed(StepRole.SHARED)), emit(2, ended(4)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert (end.resumes, end.usage.output_tokens) == (1, 4)
    assert [start.apart_tokens for start in harness.workers.started] == [0, 2]
    assert harness.placement.asked[1].excluded_workers == ()


async def test_a_bystander_of_many_crashes_goes_on_and_is_no_suspect() -> None:
    harness = Harness(*[emit(1, crashed(StepRole.BYSTANDER))] * 5, emit(1, ended(6)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert {start.apart_tokens for start in harness.workers.started} == {0}


async def test_who_crashes_alone_twice_is_condemned_for_the_fleet() -> None:
    harness = Harness(
        emit(2, crashed(StepRole.SHARED)), emit(1, crashed(StepRole.ALONE)), emit(1, crashed(StepRole.ALONE))
    )
    quarantine = poison_gate(harness)
    end = await harness.run()
    assert isinstance(end, errors.PoisonedInput)
    assert end.retry_after_s is None
    assert end.metadata["version_digest"] == "sha256:x"
    assert harness.limiter.usage[0].output_tokens == 4
    await asyncio.sleep(0)
    assert quarantine.count("sha256:x") == 1


async def test_a_kill_from_outside_condemns_nobody_however_alone_it_strikes() -> None:
    killed = crashed(StepRole.ALONE, LossCause.OUTSIDE)
    harness = Harness(emit(1, killed), emit(1, killed), emit(1, ended(3)))
    assert isinstance(await harness.run(), Finished)


async def test_a_suspect_is_not_run_again_once_another_request_with_its_input_was_condemned() -> None:
    harness = Harness(emit(2, crashed(StepRole.SHARED)))
    quarantine = poison_gate(harness)
    await quarantine.add("sha256:x", fingerprint_of(harness.spec, b"s"), model="m", deaths=2)
    end = await harness.run()
    assert isinstance(end, errors.PoisonedInput)
    assert len(harness.workers.started) == 1


async def test_without_a_quarantine_the_request_still_ends() -> None:
    harness = Harness(emit(0, crashed(StepRole.ALONE)), emit(0, crashed(StepRole.ALONE)))
    assert isinstance(await harness.run(), errors.PoisonedInput)


def unreached(spec: StartSpec, sink: SequenceSink) -> None:
    """The worker went away before it accepted."""
    sink.on_lost("no route")


async def test_workers_that_cannot_be_reached_are_no_losses() -> None:
    harness = Harness(emit(1, "gone"), *[unreached] * 5, emit(1, "gone"), emit(1, ended(3)), timeout_s=30.0)
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.resumes == 2
    assert harness.sink.tokens == {0: [100, 101, 102]}


async def test_workers_that_cannot_be_reached_for_long_end_the_request() -> None:
    harness = Harness(*[unreached] * 100, timeout_s=30.0)
    harness.limits = replace(harness.limits, queue_ttl_s=0.2)
    end = await harness.run()
    assert isinstance(end, errors.StreamBroken)
    assert "reached" in end.message


async def test_a_worker_that_skips_tokens_is_treated_as_lost() -> None:
    def skipping(spec: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        sink.on_tokens(5, [1], "x", ())

    harness = Harness(skipping, emit(1, ended(1)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens == {0: [100]}
    assert harness.workers.cancelled == 1


async def test_an_error_of_the_sequence_ends_the_request() -> None:
    failed = SequenceEnd(FinishReason.ERROR, error_reason="INVALID_INPUT", error_message="no")
    harness = Harness(emit(0, failed))
    assert isinstance(await harness.run(), errors.InvalidInput)


async def test_one_failed_choice_cancels_the_others() -> None:
    harness = Harness(emit(1, None), emit(1, ended(1, FinishReason.SLOW_READER)), choices=2)
    assert isinstance(await harness.run(), errors.SlowReader)
    assert harness.workers.cancelled == 1


@pytest.mark.parametrize("where", ["queued", "running"])
async def test_cancelling_frees_everything(where: str) -> None:
    harness = Harness(emit(1, None))
    if where == "queued":
        harness.placement.hold.clear()
    task = harness.start()
    await asyncio.sleep(0.02)
    harness.request.cancel()
    await task
    assert isinstance(harness.sink.end, errors.RequestCancelled)
    assert harness.workers.cancelled == (1 if where == "running" else 0)
    assert harness.limiter.running == set()


class HastyClock(SystemClock):
    """Sleeps for one turn of the event loop."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("by_its_task", [False, True])
async def test_a_cancellation_at_any_turn_ends_it_once_and_settles_it_once(by_its_task: bool) -> None:
    ends = set()
    for turns in range(1, 40):
        harness, reported = Harness(emit(0, NotAdmittedReason.STALE_ROUTE), emit(3, ended(3))), list[Usage]()
        harness.reroute = rerouted(harness, "sha256:y", [])
        report = lambda event, to=reported: to.append(event.usage)  # noqa: E731
        harness.use(replace(harness.ports, clock=HastyClock(), report_usage=report))
        task = harness.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        at_once = by_its_task and not task.done()
        if by_its_task:
            task.cancel()
        else:
            harness.request.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == at_once, "a cancellation of its task stays one"
        await until(lambda found=harness: not found.limiter.running)  # type: ignore[misc]
        assert harness.sink.end is not None, turns
        assert reported == harness.limiter.usage, turns
        assert len(reported) == 1, turns
        harness.request.cancel()  # It has ended, so nothing follows.
        ends.add(type(harness.sink.end))
    assert ends == {errors.RequestCancelled, Finished}


async def test_the_deadline_ends_a_running_request() -> None:
    harness = Harness(emit(1, None), timeout_s=0.5)
    assert isinstance(await harness.run(), errors.DeadlineExceeded)
    assert harness.workers.cancelled == 1


class Panic(BaseException):
    """What PyO3 raises where a native library panics."""


@pytest.mark.parametrize("bug", [KeyError("secret detail"), Panic("secret detail")])
async def test_a_bug_becomes_an_incident_not_a_text(bug: BaseException) -> None:
    harness = Harness(emit(1, None))

    async def broken() -> Sequences:
        raise bug

    await harness.request.deliver(broken, harness.sink)
    end = harness.sink.end
    assert isinstance(end, errors.InternalError)
    assert "secret" not in end.message
    assert end.metadata["incident"] == "inc_7"


async def test_cancelling_before_the_task_began_is_a_terminal_event_too() -> None:
    harness = Harness()
    task = harness.start()
    harness.request.cancel()
    await task
    assert isinstance(harness.sink.end, errors.RequestCancelled)
    assert harness.placement.asked == []


async def test_an_error_inside_the_worker_is_an_incident_not_a_text() -> None:
    failed = SequenceEnd(FinishReason.ERROR, error_reason="INTERNAL", error_message="/srv/models at 0x7f")
    harness = Harness(emit(0, failed))
    harness.reason_of = lambda _, text: errors.InternalError(text)
    end = await harness.run()
    assert isinstance(end, errors.InternalError)
    assert "/srv" not in end.message
    assert end.metadata["incident"] == "inc_7"


@pytest.mark.parametrize("end", [ended(1), "cancelled"])
async def test_a_record_settles_in_place_of_the_limiter_whatever_ends_the_request(
    end: SequenceEnd | str,
) -> None:
    reported: list[RequestUsage] = []
    harness, record = Harness(emit(1, end if isinstance(end, SequenceEnd) else None)), KeptRecord()
    harness.terms = replace(harness.terms, settlement=record)
    harness.use(replace(harness.ports, report_usage=reported.append))
    task = harness.start()
    if end == "cancelled":
        await until(lambda: bool(harness.sink.tokens))
        harness.request.cancel()
    await task
    (charge,) = record.settled
    assert charge is not None
    reservation, event = charge
    assert (reservation.request_id, event.usage.output_tokens) == ("req_1", 1)
    assert (harness.limiter.usage, reported) == ([], []), "the record's owner does both"


async def test_a_settlement_that_fails_is_no_crash_of_the_gateway() -> None:
    harness = Harness(emit(1, ended(1)))

    async def away(reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        harness.limiter.running.clear()
        raise errors.StoreUnavailable("Redis did not answer")

    harness.limiter.settle = away  # type: ignore[method-assign]
    assert isinstance(await harness.run(), Finished)
    assert harness.supervisor.healthy


async def test_a_request_of_a_deployment_at_zero_waits_for_the_first_replica() -> None:
    harness = Harness(emit(1, ended(1)), timeout_s=60.0)
    harness.use(replace(harness.ports, waking=lambda model: Waking(90.0) if model == "m" else None))
    assert isinstance(await harness.run(), Finished)
    assert 59 < harness.placement.asked[0].queue_ttl_s <= 60, "its own deadline is shorter"
    harness = Harness(emit(1, ended(1)), timeout_s=600.0)
    harness.use(replace(harness.ports, waking=lambda _: Waking(90.0)))
    assert isinstance(await harness.run(), Finished)
    assert harness.placement.asked[0].queue_ttl_s == 90.0


def _waking_of(owner: str, _: str) -> Waking:
    return Waking(90.0, tenant=owner)


async def test_a_request_waits_for_a_node_of_its_tenant_that_it_starts() -> None:
    for owner in ("acme", "beta", ""):
        harness = Harness(emit(1, ended(1)))
        harness.use(replace(harness.ports, waking=partial(_waking_of, owner)))
        assert isinstance(await harness.run(), Finished)
        assert harness.placement.asked[0].isolation_waits == (owner == "acme")


async def test_a_held_request_ends_with_the_reason_why_the_start_failed() -> None:
    harness = Harness(timeout_s=600.0)
    harness.placement.hold.clear()
    failures: list[errors.FairwayError | None] = [None, None, errors.NoWorkerAvailable("m: no tensor x")]

    def waking(model: str) -> Waking:
        return Waking(600.0, failures.pop(0) if len(failures) > 1 else failures[0])

    harness.use(replace(harness.ports, clock=FastClock(), waking=waking))
    end = await harness.run()
    assert isinstance(end, errors.NoWorkerAvailable)
    assert end.message == "m: no tensor x"
