"""Timelines from their parts, with parts that are missing, and what a tenant sees of one."""

from typing import Any

import pytest
from prometheus_client import generate_latest

from fairway.timelines import chrome_trace, lines_of
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import scheduler_pb2, worker_pb2
from services.controlplane.diagnosis.store import SampleStore
from services.controlplane.timelines.collector import Timelines, TimelineSources
from services.controlplane.timelines.join import visible_to
from services.core.arms import SliReport
from services.core.errors import FairwayError, NoLeader, NotFound, Unavailable
from services.core.estimates.finished import FinishedRequest, FinishedRequests
from services.core.generation import NO_RUN, RunFacts, StageClock, Usage
from services.core.records import Priority
from services.runtime.telemetry.metrics import Metrics
from tests.support.clocks import HandClock
from tests.support.memory_ledger import MemoryLedger
from tests.support.metrics import values

START_US = 1_700_000_000_000_000
OWN, OTHER = "req_own", "req_other"


def ended(
    request_id: str = OWN, *, decode_us: int = 50_000, reason: str = "FINISHED", run: RunFacts = NO_RUN
) -> FinishedRequest:
    """20 ms in the queue, 1 ms of dispatch, 2 ms of engine wait, 10 ms of prefill."""
    clock = StageClock(START_US, 1000, 1000, 20_000, 1000, 2000, 10_000, decode_us, 100)
    return FinishedRequest(
        request_id,
        "http",
        "acme",
        "chat",
        "sha256:a",
        Priority.STANDARD,
        reason,
        clock,
        Usage(64, 0, 5),
        run=run,
    )


def explained(*workers: str, skew_us: int = 0) -> scheduler_pb2.ExplainResponse:
    found = scheduler_pb2.ExplainResponse()
    for worker in workers:
        one = found.decisions.add(tenant="acme", outcome="GRANTED", worker_id=worker)
        one.ranked.add(worker_id=worker, score=1.0)
        one.queued_time.FromMicroseconds(START_US + 2500 + skew_us)
        one.wait.FromMicroseconds(18_000)
    found.since.FromMicroseconds(START_US - 10**9)
    return found


def page(*, skew_us: int = 0, since_us: int = -(10**9), next_step: int = 0) -> worker_pb2.ReadStepsResponse:
    """Two steps with another tenant's request, 23 ms after the receipt of the own one."""
    at_us = START_US + 23_000 + skew_us
    return worker_pb2.ReadStepsResponse(
        sequences=[
            worker_pb2.RecordedSequence(
                number=5,
                engine=1,
                request_id=OWN,
                tenant="acme",
                accepted_unix_us=at_us,
                first_token_unix_us=at_us + 12_000,
                ended_unix_us=at_us + 60_000,
                moments=[worker_pb2.RecordedMoment(kind="PREEMPTED", unix_us=at_us + 30_000)],
            ),
            worker_pb2.RecordedSequence(
                number=2, engine=1, request_id=OTHER, tenant="beta", accepted_unix_us=at_us - 5
            ),
        ],
        engines=[worker_pb2.RecordedEngine(number=1, version_digest="sha256:a", kv_blocks_total=64)],
        steps=[
            worker_pb2.RecordedStep(
                number=number,
                engine=1,
                start_unix_us=at_us + 5_000 * (number - 39),
                took_us=12_000,
                predicted_us=11_000,
                prefill_tokens=64 + 480,
                kv_blocks_used=7,
                running=2,
                size=2,
                members=[2, 5],
                prefilled=[480, 64],
                sampled=[1, 1],
            )
            for number in (41, 43)
        ],
        next_step=next_step,
        since_unix_us=START_US + since_us,
        now_unix_us=at_us + 10**6,
    )


class Parts:
    """Fakes of every source; ``page`` or ``explanation`` may be an error."""

    def __init__(self) -> None:
        self.leads = True
        self.requests = FinishedRequests()
        self.explanation: scheduler_pb2.ExplainResponse | FairwayError = explained("w1")
        self.page: worker_pb2.ReadStepsResponse | FairwayError = page()
        self.addresses = {"w1": "host:1"}
        self.forwarded: list[str] = []
        self.reads = 0
        self.clock = HandClock(START_US / 1e6 + 1.0)
        self.metrics = Metrics()
        self.samples = SampleStore(MemoryLedger(), self.clock)
        sources = TimelineSources(self, self, self, lambda name: self.addresses.get(name, ""), self)
        self.timelines = Timelines(sources, self.clock, self.metrics)

    async def explain(self, request_id: str) -> scheduler_pb2.ExplainResponse:
        if isinstance(self.explanation, FairwayError):
            raise self.explanation
        return self.explanation

    async def read(self, address: str, request_id: str) -> list[worker_pb2.ReadStepsResponse]:
        self.reads += 1
        if isinstance(self.page, FairwayError):
            raise self.page
        return [self.page]

    async def ask(self, rpc: object, request: Any) -> Any:
        self.forwarded.append(request.request_name)
        return pb.GetTimelineResponse(request_id="elsewhere")

    async def get(self, name: str = OWN, *, forwarded: bool = False) -> pb.GetTimelineResponse:
        return await self.timelines.get(pb.GetTimelineRequest(request_name=name), forwarded=forwarded)


async def test_the_parts_are_joined() -> None:
    parts = Parts()
    parts.requests.add([ended()])
    found = await parts.get(f"chatcmpl-{OWN}")
    assert (found.request_id, found.finished.tenant, len(found.decisions)) == (OWN, "acme", 1)
    (host,) = found.workers
    assert [one.request_id for one in host.sequences] == [OWN, OTHER]
    assert host.clock.offset_us == 0, "the clocks agree"
    assert not found.notes
    assert host.steps[0].start_unix_us + host.steps[0].took_us <= host.steps[1].start_unix_us


@pytest.mark.parametrize("skew_us", [-3_600_000_000, -20_000, 20_000, 7_000_000])
async def test_hosts_whose_clocks_differ_are_moved_to_the_gateways(skew_us: int) -> None:
    parts = Parts()
    parts.requests.add([ended()])
    parts.page, parts.explanation = page(skew_us=skew_us), explained("w1", skew_us=skew_us)
    found = await parts.get()
    host = found.workers[0]
    assert abs(host.clock.offset_us + skew_us) <= host.clock.error_us <= 1000
    own = host.sequences[0]
    dispatched_us, first_us = START_US + 22_000, START_US + 35_000
    assert dispatched_us <= own.accepted_unix_us <= own.first_token_unix_us <= first_us
    assert own.accepted_unix_us < own.moments[0].unix_us < own.ended_unix_us
    queued_us = found.decisions[0].queued_time.ToMicroseconds()
    assert START_US + 2000 <= queued_us <= queued_us + 18_000 <= START_US + 22_000
    assert abs(found.scheduler_clock.offset_us + skew_us) <= 1000


async def test_an_ordinary_request_has_its_stages_from_the_samples() -> None:
    parts = Parts()
    drawn = [
        ended("req_ow"),
        ended(),
        ended("req_own2"),
        ended("req_two-1"),
        ended("req_two-2", decode_us=90_000),
    ]
    parts.samples.add("one", [SliReport(parts.clock.now_s, {}, {}, sampled=drawn)], lost=0)
    found = await parts.get()
    assert (found.finished.request_id, found.finished.stages_us[2]) == (OWN, 20_000)
    assert not found.notes
    found = await parts.get("req_two")
    assert found.finished.request_id == "req_two-2"
    assert "1 other requests of req_two ended; this is the slowest" in found.notes
    for unknown in ("req", "req_", "req_tw", "wn", "x" * 128):
        assert not parts.samples.ended(unknown)
    parts.samples.add("one", [SliReport(parts.clock.now_s, {}, {}, sampled=[ended("y" * 128)])], lost=0)
    assert len(parts.samples.ended("y" * 128)) == 1


async def test_what_is_missing_is_stated() -> None:
    parts = Parts()
    found = await parts.get()
    assert [note.split(":")[0] for note in found.notes] == ["its end is not known"]
    parts.requests.add([ended()])
    parts.addresses.clear()
    assert (await parts.get()).notes == ["the steps on worker w1 are gone: it has left the fleet"]
    parts.addresses["w1"] = "host:1"
    parts.page = Unavailable("the worker at host:1 does not answer")
    (note,) = (await parts.get()).notes
    assert note == "the steps on worker w1 are not known: the worker at host:1 does not answer"
    parts.page = page(since_us=40_000)
    (note,) = (await parts.get()).notes
    assert note.endswith("earlier steps are overwritten")
    parts.page = worker_pb2.ReadStepsResponse(since_unix_us=START_US + 10**7)
    (note,) = (await parts.get()).notes
    assert "it has restarted" in note
    parts.page = page(next_step=9)
    (note,) = (await parts.get()).notes
    assert "more steps" in note
    parts.explanation, parts.page = NoLeader("no scheduler leads"), page()
    parts.requests.add([ended(run=RunFacts("w1"))])
    found = await parts.get()
    assert found.notes == ["its placement is not known: no scheduler leads"]
    assert found.workers[0].steps, "its end names the worker"


async def test_a_request_without_any_record_is_not_found() -> None:
    parts = Parts()
    parts.explanation = scheduler_pb2.ExplainResponse()
    with pytest.raises(NotFound, match="no record of the request req_none"):
        await parts.get("req_none")


async def test_another_leader_answers() -> None:
    parts = Parts()
    parts.leads = False
    assert (await parts.get()).request_id == "elsewhere"
    assert parts.forwarded == [OWN]
    with pytest.raises(NoLeader):
        await parts.get(forwarded=True)


async def test_slow_and_failed_requests_are_kept_before_their_steps_are_overwritten() -> None:
    parts = Parts()
    parts.requests.add([ended(), ended("req_failed", reason="INTERNAL")])
    await parts.timelines._round()
    parts.page = worker_pb2.ReadStepsResponse(since_unix_us=START_US + 10**7)
    parts.addresses.clear()
    found = await parts.get()
    assert found.HasField("kept_time")
    assert len(found.workers[0].steps) == 2
    assert (await parts.get("req_failed")).finished.reason == "INTERNAL"
    reads = parts.reads
    await parts.timelines._round()
    assert parts.reads == reads, "it is collected once"
    counts = values(generate_latest(parts.metrics.registry).decode(), "fairway_controlplane_timelines_total")
    assert counts == {(("outcome", "kept"),): 1.0, (("outcome", "incomplete"),): 1.0}


async def test_the_slowest_part_stands_for_a_request_of_several() -> None:
    parts = Parts()
    parts.requests.add([ended(f"{OWN}-{number}", decode_us=number) for number in (5, 900, 7)])
    found = await parts.get()
    assert found.request_id == f"{OWN}-900"
    assert "2 other requests of req_own ended; this is the slowest" in found.notes


async def test_a_tenant_sees_of_others_their_number_alone() -> None:
    parts = Parts()
    parts.requests.add([ended()])
    whole = await parts.get()
    seen = visible_to(whole, "acme")
    text = str(seen)
    assert not [word for word in ("beta", OTHER, "w1", "ranked", "kv_blocks", "running") if word in text]
    (host,) = seen.workers
    assert [(list(step.members), step.size) for step in host.steps] == [([1], 2), ([1], 2)]
    assert [list(step.prefilled) for step in host.steps] == [[64], [64]]
    assert [step.prefill_tokens for step in host.steps] == [64, 64], "not those of others"
    assert not any(step.predicted_us for step in host.steps), "others' tokens are computed from it"
    assert [step.number for step in host.steps] == [1, 2], "not how many steps others had between"
    assert [one.number for one in host.sequences] == [1], "not how many sequences others had before"
    assert "960 prompt tokens of others" in str(lines_of(whole))
    assert "prompt tokens of others" not in str(lines_of(seen))
    bars = [event["args"] for event in chrome_trace(seen)["traceEvents"] if event["name"] == "step of 2"]
    assert [(bar["prefill_tokens"], bar["predicted_us"]) for bar in bars] == [(64, 0), (64, 0)]
    assert seen.finished == whole.finished
    assert seen.decisions[0].wait.ToMicroseconds() == 18_000
    assert "beta" in str(whole), "the answer to operators is another one"
    with pytest.raises(NotFound, match="no record of the request"):
        visible_to(whole, "beta")
