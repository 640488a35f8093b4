"""Diagnoses on the wire: which times are compared, and what limits the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from fairway.mirror import Mirror, Pair
from fairway.v1 import controlplane_pb2 as pb
from services.adapters.grpc.leader_calls import LeadingPlane
from services.adapters.threads import in_thread
from services.controlplane.diagnosis.policy.comparison import Evidence, SampledSpan
from services.controlplane.diagnosis.policy.diagnose import (
    LEAST_SAMPLES,
    Diagnosis,
    DiagnosisVerdict,
    LatencyCause,
    Rise,
    StageChange,
    TreeStep,
    change_in,
    diagnose,
)
from services.controlplane.diagnosis.policy.samples import Metric, samples_of
from services.controlplane.diagnosis.policy.suspects import CauseKind
from services.controlplane.diagnosis.store import Found, SampleStore, samples_message
from services.core.errors import InvalidInput, NoLeader, NotFound
from services.ports.clock import Clock
from services.rpc.convert.inference import timestamp

AUTO: Final = "auto"
DEFAULT_QUANTILE: Final = 0.95
LOOK_BACK_S: Final = 3600.0
LEAST_BASELINE_S: Final = 300.0  # the baseline before a window is three times as long, and at least this
_TIMES: Final = 3.0
_SUSPECTS: Final = 3  # depth of the steps that name suspects
_OF_MODEL: Final = (CauseKind.CACHE_HITS_FELL, CauseKind.BUCKETS_FRAGMENTED, CauseKind.CAPACITY_LOST)
# Their evidence has figures of their subject alone.
_OF_ONE_TENANT: Final = (
    CauseKind.ARRIVALS_GREW, CauseKind.PROMPTS_GREW, CauseKind.OUTPUTS_GREW, CauseKind.CACHE_HITS_FELL,
    CauseKind.READER_STALLED,
)  # fmt: skip
_OF_TENANTS: Final = (*_OF_ONE_TENANT, CauseKind.NOISY_NEIGHBOUR)


class Diagnoses:
    """Answers from the samples while this control plane leads, else forwards to the leader.

    One diagnosis is computed at a time, in a thread.
    """

    def __init__(
        self, samples: SampleStore, leader: LeadingPlane, clock: Clock, *, leads: Callable[[], bool]
    ) -> None:
        self._samples = samples
        self._leader = leader
        self._clock = clock
        self._leads = leads
        self._computing = asyncio.Lock()

    async def diagnose(
        self, request: pb.DiagnoseLatencyRequest, *, forwarded: bool
    ) -> pb.DiagnoseLatencyResponse:
        """Return why a quantile rose. Raises NoLeader, InvalidInput, NotFound for an unknown baseline."""
        if not self._leads():
            if forwarded:
                raise NoLeader("this control plane does not lead", retry_after_s=1.0)
            return await self._leader.ask(lambda plane: plane.DiagnoseLatency, request)
        begin_s, end_s = _span(request, self._clock.unix_s())
        async with self._computing:
            found = await self._find(begin_s or end_s - LOOK_BACK_S, end_s)
            metric = Metric(request.metric or Metric.TTFT)
            level = request.quantile or DEFAULT_QUANTILE
            chosen, usual_s = "", 0.0
            if not begin_s:
                rise, chosen = await in_thread(_changed, found, request, metric, level)
                begin_s, end_s, usual_s = rise
                found = await self._find(begin_s, end_s)
            own = [one for one in found.requests if request.tenant in ("", one.tenant)]
            baseline, problem = await self._baseline(request, replace(found, requests=own), usual_s)
            notes = [*([chosen] if chosen else []), *self._samples.notes(baseline.begin_s, end_s)]
            notes += self._samples.missing(baseline, found)
            diagnosis = await in_thread(_diagnosed, request, metric, level, baseline, found)
        if problem:
            differs = DiagnosisVerdict.BASELINE_DIFFERS
            diagnosis = replace(diagnosis, verdict=differs, message=problem, causes=(), stages=(), tree=())
        return _message(request, diagnosis, notes, baseline, found)

    async def save_baseline(
        self, request: pb.SaveLatencyBaselineRequest, *, forwarded: bool
    ) -> pb.SaveLatencyBaselineResponse:
        """Keep the samples of a time under a name. Raises NoLeader, InvalidInput or StoreUnavailable."""
        if not self._leads():
            if forwarded:
                raise NoLeader("this control plane does not lead", retry_after_s=1.0)
            return await self._leader.ask(lambda plane: plane.SaveLatencyBaseline, request)
        if request.name == AUTO:
            raise InvalidInput("auto is the baseline that is chosen without a name", field="name")
        begin_s, end_s = _span(request, self._clock.unix_s())
        found = await self._find(begin_s or end_s - LOOK_BACK_S, end_s)
        if len(found.requests) < LEAST_SAMPLES:
            raise InvalidInput(
                f"{len(found.requests)} sampled requests ended then; a baseline needs {LEAST_SAMPLES}",
                field="start_time",
            )
        await self._samples.save(request.name, found)
        requests = round(sum(one.weight for one in found.requests))
        span = SampledSpan(found.begin_s, found.end_s, requests, len(found.requests))
        return pb.SaveLatencyBaselineResponse(baseline=_span_message(span))

    async def _find(self, begin_s: float, end_s: float) -> Found:
        """Return the samples of a time. It begins no earlier than they do, for rates are per second of it."""
        return await in_thread(self._samples.find, max(begin_s, min(self._samples.began_s, end_s)), end_s)

    async def _baseline(
        self, request: pb.DiagnoseLatencyRequest, window: Found, usual_s: float
    ) -> tuple[Found, str]:
        """Return what the window is compared with, and why it must not be; empty if it may. The time just
        before is taken from ``usual_s`` on.
        """
        if request.baseline not in ("", AUTO):
            found = await self._samples.baseline(request.baseline)
            return found, _difference(request.baseline, found, window)
        lasted_s = max(LEAST_BASELINE_S, _TIMES * (window.end_s - window.begin_s))
        found = await self._find(max(window.begin_s - lasted_s, usual_s), window.begin_s)
        if sum(request.model in ("", one.model) for one in found.requests) >= LEAST_SAMPLES:
            return found, ""
        stored = await self._samples.hours_before(window.begin_s)
        return (found, "") if stored is None else (stored, _difference("of stored hours", stored, window))


def _span(
    request: pb.DiagnoseLatencyRequest | pb.SaveLatencyBaselineRequest, now_s: float
) -> tuple[float, float]:
    """Return begin and end; a begin of 0 is to be found. Raises InvalidInput."""
    begin_s = request.start_time.seconds + request.start_time.nanos / 1e9
    end_s = request.end_time.seconds + request.end_time.nanos / 1e9 or now_s
    if begin_s and begin_s >= end_s:
        raise InvalidInput("the start of the window is not before its end", field="start_time")
    if end_s > now_s + 60.0:
        raise InvalidInput("the end of the window is in the future", field="end_time")
    return begin_s, end_s


def _changed(
    found: Found, request: pb.DiagnoseLatencyRequest, metric: Metric, level: float
) -> tuple[Rise, str]:
    """Return the window, and how it was chosen."""
    table = samples_of(found.requests, found.zones)
    asked = table.asked("model", request.model) & table.asked("tenant", request.tenant)
    rise = change_in(table.where(asked), metric, level, found.begin_s, found.end_s)
    if rise is not None:
        until = " and ends where the latency fell back" if rise[1] < found.end_s else ""
        return rise, f"the window begins at the last rise that was found in the hour{until}"
    lasted_s = found.end_s - found.begin_s
    window_s = min(lasted_s / 2, max(60.0, lasted_s / 4))
    text = f"no rise was found in the hour: its last {window_s:.0f} s are compared"
    return Rise(found.end_s - window_s, found.end_s, found.begin_s), text


def _difference(name: str, baseline: Found, window: Found) -> str:
    """Return why a baseline is of another fleet; empty if it may be compared."""
    if baseline.installation and window.installation and baseline.installation != window.installation:
        return f"the baseline {name} is of another installation: save one here"
    if baseline.devices and window.devices and baseline.devices != window.devices:
        had, has = ", ".join(baseline.devices), ", ".join(window.devices)
        return f"the baseline {name} is of workers with {had}, the fleet has {has}: save one of this fleet"
    models = {one.model for one in window.requests}
    if models and not models & {one.model for one in baseline.requests}:
        return (
            f"the baseline {name} has no request of {', '.join(sorted(models)[:4])}: save one of this traffic"
        )
    return ""


def evidence_of(baseline: Found, window: Found) -> tuple[Evidence, Evidence]:
    """Return the columns of both times. The zones of workers are those known in either."""
    zones = {**baseline.zones, **window.zones}
    sides = [
        Evidence(one.begin_s, one.end_s, samples_of(one.requests, zones), one.moments, one.covered)
        for one in (baseline, window)
    ]
    return sides[0], sides[1]


def _diagnosed(
    request: pb.DiagnoseLatencyRequest, metric: Metric, level: float, baseline: Found, window: Found
) -> Diagnosis:
    sides = evidence_of(baseline, window)
    return diagnose(*sides, model=request.model, metric=metric, level=level, tenant=request.tenant)


def _span_message(span: SampledSpan) -> pb.DiagnosedSpan:
    message = pb.DiagnosedSpan(requests=span.requests, samples=span.samples, to=timestamp(span.end_s))
    message.covered_s = span.covered_s
    getattr(message, "from").CopyFrom(timestamp(span.begin_s))
    return message


async def answer_for_tenant(
    answer: Awaitable[pb.DiagnoseLatencyResponse], tenant: str
) -> pb.DiagnoseLatencyResponse:
    """Return the answer as a tenant may read it. Raises NotFound, without the names of saved baselines."""
    try:
        return for_tenant(await answer, tenant)
    except NotFound:
        raise NotFound("no baseline of this name is saved") from None


def for_tenant(answer: pb.DiagnoseLatencyResponse, tenant: str) -> pb.DiagnoseLatencyResponse:
    """Return the answer as a tenant may read it: without samples, the fleet's names and others' figures."""
    for name in ("window_samples", "baseline_samples", "notes", "step_prices"):
        answer.ClearField(name)
    tree = [step for step in answer.tree if step.depth < _SUSPECTS]
    answer.ClearField("tree")
    answer.tree.extend(tree)
    for cause in answer.causes:
        of_model = cause.subject == answer.model and cause.kind in _OF_MODEL
        is_own = cause.subject == tenant and cause.kind in _OF_TENANTS
        if is_own and not of_model and cause.kind in _OF_ONE_TENANT:
            continue
        if not (is_own or of_model):
            cause.subject = "other tenants" if cause.kind in _OF_TENANTS else ""
        cause.next = "report it to the operator, with the times of the window"
        cause.ClearField("evidence")
    if answer.causes:
        first = answer.causes[0]
        answer.message = f"{first.kind} of {first.subject or 'the fleet'} explains most of the rise"
    elif answer.verdict == DiagnosisVerdict.BASELINE_DIFFERS:
        answer.message = "the baseline is of another fleet or of other traffic: name another one"
    return answer


_ANSWER: Final = Mirror(
    Diagnosis,
    pb.DiagnoseLatencyResponse,
    {
        "level": Pair("quantile"),
        "window": Pair("window", _span_message, unread=True),
        "baseline": Pair("baseline", _span_message, unread=True),
        "stages": Mirror(StageChange, pb.DiagnosedStage).each("stages"),
        "tree": Mirror(TreeStep, pb.DiagnosedStep).each("tree"),
        "causes": Mirror(LatencyCause, pb.DiagnosedCause).each("causes"),
        "prices": Pair("step_prices"),
    },
    apart=("baseline_s", "window_s"),
)


def _message(
    request: pb.DiagnoseLatencyRequest, found: Diagnosis, notes: list[str], baseline: Found, window: Found
) -> pb.DiagnoseLatencyResponse:
    quantiles = pb.DiagnoseLatencyResponse.DiagnosedQuantiles(
        baseline_s=found.baseline_s, window_s=found.window_s
    )
    message = _ANSWER.to_proto(found, quantiles=quantiles, notes=notes)
    if request.samples:
        message.window_samples.CopyFrom(samples_message(window))
        message.baseline_samples.CopyFrom(samples_message(baseline))
    return message
