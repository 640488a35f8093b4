"""What a request leaves behind: its clock to the end, its counts, its line, its spans."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from services.core import errors
from services.core.generation import GenerationSpec, OutputLimits, Prompt, Sampling, TokenLogprobs, Usage
from services.gateway.events import Accepted, Finished, Received
from services.gateway.requests.request import Request
from services.gateway.requests.sequences import Sequences
from services.gateway.requests.stage_timer import STAGE_NAMES, Stage
from services.gateway.requests.terms import Admitted, RunTerms
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import GatewayTelemetry
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.metrics import OTHER, LabelCap, Metrics
from services.runtime.telemetry.tracing import Tracing
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.metrics import values
from tests.unit.gateway.requests.test_request import Placement, Workers, emit, ended, payer

CLOCK = SystemClock()
SETTLE_S = 0.2
SPEC = GenerationSpec("req_1", "m", "sha256:x", 3, Prompt([1, 2, 3]), Sampling(7), OutputLimits(64))


class SlowSettling(MemoryLimiter):
    """A quota store that takes its time to answer a settlement."""

    def __init__(self) -> None:
        super().__init__(CLOCK)

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        await CLOCK.sleep(SETTLE_S)


class Ends:
    def __init__(self) -> None:
        self.finished: Finished | None = None
        self.error: errors.FairwayError | None = None

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None: ...

    def on_finished(self, finished: Finished) -> None:
        self.finished = finished

    def on_failed(self, error: errors.FairwayError) -> None:
        self.error = error


class Rig:
    def __init__(self, lines_per_s: float = 100.0) -> None:
        self.metrics = Metrics()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = GatewayTelemetry(
            self.metrics,
            clock=CLOCK,
            tracing=Tracing(CLOCK, provider.get_tracer("test")),
            lines=LineBudget(CLOCK.monotonic_s, lines_per_s),
        )
        self.sink, self.limiter, self.supervisor = Ends(), SlowSettling(), Supervisor(CLOCK)
        self.workers = Workers(emit(3, ended(3)))
        self.placement = Placement()
        self.refuse: errors.FairwayError | None = None

    async def run(self) -> float:
        """Run one request; return how long it took."""
        began_s = CLOCK.monotonic_s()
        ports = Ports(
            limiter=self.limiter,
            placement=self.placement,
            workers=self.workers,
            clock=CLOCK,
            supervisor=self.supervisor,
            rng=Random(0),
            sign_ticket=lambda *_: b"t",
            new_incident=lambda: "inc_1",
            error_of=lambda _, text: errors.InvalidInput(text),
            telemetry=self.telemetry,
        )
        terms = RunTerms(Received(began_s, 1, "req_1", face="http"), 30.0)
        request = Request(terms, ports)

        async def admit() -> Sequences:
            if self.refuse is not None:
                raise self.refuse
            request.timer.enter(Stage.ADMIT, CLOCK.monotonic_s())
            reservation = await self.limiter.admit("acme", "req_1", ())
            limits = GatewayLimits(window_tokens=8)
            admitted = Admitted(SPEC, reservation, payer(), b"t", terms, ports, limits, request.telemetry)
            return Sequences(admitted, self.sink, request)

        await self.supervisor.spawn("request", request.deliver(admit, self.sink))
        return CLOCK.monotonic_s() - began_s

    def counted(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return values(generate_latest(self.metrics.registry).decode(), name)


async def test_the_clock_holds_all_that_the_client_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CLOCK", HandClock())
    rig = Rig()
    elapsed_s = await rig.run()
    assert rig.sink.finished is not None
    clock = rig.sink.finished.clock
    total_s = sum(getattr(clock, f"{name}_us") for name in STAGE_NAMES) / 1e6
    assert clock.send_us >= SETTLE_S * 1e6 * 0.9
    assert total_s == pytest.approx(elapsed_s)


async def test_a_finished_request_is_counted_and_has_a_line_and_spans() -> None:
    rig = Rig()
    with capture_logs() as logs:
        await rig.run()
    face = (("face", "http"), ("fault", "none"), ("outcome", "finished"), ("reason", "FINISHED"))
    assert rig.counted("fairway_gateway_requests_total") == {face: 1.0}
    tokens = rig.counted("fairway_gateway_tokens_total")
    assert tokens[("kind", "output"), ("model", "m"), ("tenant", "acme")] == 3.0
    assert tokens[("kind", "prompt"), ("model", "m"), ("tenant", "acme")] == 3.0
    assert rig.counted("fairway_gateway_ttft_seconds_count") == {(("model", "m"),): 1.0}
    assert rig.counted("fairway_gateway_tpot_seconds_count") == {(("model", "m"),): 1.0}
    report = rig.telemetry.slis.cut(0.0)
    assert report is not None
    (noted,) = report.requests
    assert [one.request_id for one in report.sampled] == ["req_1"]
    assert (noted.request_id, noted.tenant, noted.model, noted.reason) == ("req_1", "acme", "m", "FINISHED")
    assert noted.usage.output_tokens == 3
    (line,) = [entry for entry in logs if entry["event"] == "request.finished"]
    assert noted.total_us / 1e3 == pytest.approx(line["total_ms"], abs=0.1)
    stages = sum(value for key, value in line.items() if key.endswith("_ms") and key != "total_ms")
    assert stages == pytest.approx(line["total_ms"], abs=0.1)
    spans = {span.name: span for span in rig.exporter.get_finished_spans()}
    root = spans.pop("request")
    assert root.parent is None
    assert {"validate", "admit", "queue", "dispatch", "decode", "send"} <= set(spans)
    assert {span.parent.span_id for span in spans.values() if span.parent} == {root.context.span_id}
    assert rig.workers.started[0].traceparent.split("-")[2] == f"{spans['dispatch'].context.span_id:016x}"


async def test_each_figure_is_of_its_own_interval() -> None:
    rig = Rig()
    await rig.run()
    assert rig.sink.finished is not None
    clock = rig.sink.finished.clock
    spent = rig.counted("fairway_gateway_stage_seconds_sum")
    assert spent == {
        (("stage", name),): pytest.approx(getattr(clock, f"{name}_us") / 1e6) for name in STAGE_NAMES
    }
    whole = rig.counted("fairway_gateway_request_seconds_sum")
    assert whole == {(("outcome", "finished"),): pytest.approx(sum(spent.values()))}
    assert rig.counted("fairway_gateway_request_seconds_count") == {(("outcome", "finished"),): 1.0}


def test_the_pace_of_a_choice_is_weighted_by_token() -> None:
    rig = Rig()
    request = rig.telemetry.begin(Received(10.0, 1, "req_1"))
    request.accepted("acme", SPEC)
    pace = request.pace()
    for count, now_s in ((1, 10.5), (4, 10.9), (1, 11.9)):
        pace.tokens(count, now_s)
    pace.finished(6, 11.9)
    label = (("model", "m"),)

    def figure(name: str) -> tuple[float, Any]:
        full = f"fairway_gateway_{name}_seconds"
        return rig.counted(f"{full}_count")[label], pytest.approx(rig.counted(f"{full}_sum")[label])

    assert figure("ttft") == (1.0, 0.5)
    assert figure("itl") == (5.0, 1.4)
    assert figure("tpot") == (1.0, 1.4 / 5)
    gaps = rig.counted("fairway_gateway_itl_seconds_bucket")
    assert gaps[("le", "0.15"), ("model", "m")] == 4.0, "four tokens in 0.4 s, then one after a second"
    request.pace().finished(1, 12.0)
    assert figure("tpot")[0] == 1.0, "one token has no pace"


def test_names_that_operators_make_are_bounded_and_kinds_of_tokens_are_apart() -> None:
    rig = Rig()
    rig.metrics.tenants = LabelCap(1)
    for tenant in ("acme", "umbrella"):
        request = rig.telemetry.begin(Received(CLOCK.monotonic_s(), 1, "req_1"))
        request.accepted(tenant, SPEC)
        clock = request.timer().finish(CLOCK.monotonic_s())
        request.finished(Finished((), Usage(prompt_tokens=7, output_tokens=3, cached_tokens=5), clock, 0))
    tokens = rig.counted("fairway_gateway_tokens_total")
    assert tokens == {
        (("kind", kind), ("model", "m"), ("tenant", tenant)): count
        for tenant in ("acme", OTHER)
        for kind, count in (("prompt", 7.0), ("cached", 5.0), ("output", 3.0))
    }


def test_what_is_refused_and_placed_again_is_counted_by_cause() -> None:
    rig = Rig()
    rig.telemetry.admission("ADMITTED")
    rig.telemetry.admission("OVER_QUOTA")
    rig.telemetry.begin(Received(0.0, 1, "req_1")).placed_again("LOST")
    assert rig.counted("fairway_gateway_admissions_total") == {
        (("outcome", "ADMITTED"),): 1.0,
        (("outcome", "OVER_QUOTA"),): 1.0,
    }
    assert rig.counted("fairway_gateway_placed_again_total") == {(("cause", "LOST"),): 1.0}


async def test_lines_are_within_their_budget() -> None:
    rig = Rig(lines_per_s=0.0)
    with capture_logs() as logs:
        await rig.run()
    assert not [entry for entry in logs if entry["event"] == "request.finished"]


async def test_a_refused_request_is_counted_by_its_reason_and_by_no_name_of_the_client() -> None:
    rig = Rig()
    rig.refuse = errors.ModelNotFound("no such model")
    with capture_logs() as logs:
        await rig.run()
    face = (("face", "http"), ("fault", "client"), ("outcome", "failed"), ("reason", "MODEL_NOT_FOUND"))
    assert rig.counted("fairway_gateway_requests_total") == {face: 1.0}
    assert rig.counted("fairway_gateway_tenant_requests_total") == {}
    (line,) = [entry for entry in logs if entry["event"] == "request.failed"]
    assert line["total_ms"] >= 0
    (root,) = [span for span in rig.exporter.get_finished_spans() if span.name == "request"]
    assert not root.status.is_ok
