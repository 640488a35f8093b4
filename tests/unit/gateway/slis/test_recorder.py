"""Each ended request counts once, where it belongs, in bounded memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from services.core.arms import ArmKey, GateWindow, SliKey, SliReport, SliSums, cluster_of, session_hash
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind
from services.core.generation import Sampling, Usage
from services.core.records import Priority
from services.core.rollouts.routes import SHADOW_TENANT
from services.gateway.slis import (
    MAX_MODELS,
    MAX_SERIES,
    OTHER_TENANTS,
    RequestEnd,
    RequestLatencies,
    SliRecorder,
    SliSubject,
    sampling_kind,
)
from services.runtime.telemetry.metrics import Metrics
from tests.support.metrics import values

KEY = SliKey(ArmKey("chat", "sha256:1"), "acme", Priority.STANDARD, "a")
SESSION = session_hash("acme", "s1")


def latencies(*ttft_s: float) -> RequestLatencies:
    found = RequestLatencies()
    found.ttft_s += ttft_s
    if ttft_s:
        found.gap(0.02, 9)
    return found


def end(reason: str, *ttft_s: float, device_s: float = 0.5) -> RequestEnd:
    return RequestEnd(reason, Usage(100, 10, 40, device_s), latencies(*ttft_s), total_s=1.5)


def cut(recorder: SliRecorder) -> SliReport:
    report = recorder.cut(1000.0)
    assert report is not None
    return report


def exported(metrics: Metrics, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return values(generate_latest(metrics.registry).decode(), name)


def sums_of(one: RequestEnd) -> SliSums:
    recorder = SliRecorder()
    recorder.ended(SliSubject(KEY), one)
    return cut(recorder).series[KEY]


@pytest.mark.parametrize(
    ("one", "counts"),
    [
        (end("FINISHED", 0.2), (1, 0, 0, 1, 0, 1)),
        (end("OVERLOADED"), (1, 1, 0, 0, 0, 0)),  # refused for want of capacity: ours
        (end("STREAM_BROKEN", 0.2), (1, 0, 0, 1, 1, 0)),  # broken after the first token
        (end("OVER_QUOTA"), (0, 0, 0, 0, 0, 0)),  # the caller's limit
        (end("INVALID_INPUT"), (0, 0, 0, 0, 0, 0)),
        (end("CANCELLED", 0.2), (0, 0, 0, 0, 0, 0)),
        (end("POISONED_INPUT"), (1, 1, 1, 0, 0, 0)),
        (end("POISONED_INPUT", 0.2), (1, 0, 1, 1, 1, 0)),
        (end("FINISHED"), (1, 0, 0, 0, 0, 0)),  # from the cache of answers: no arm served it
    ],
)
def test_how_a_request_counts(one: RequestEnd, counts: tuple[int, ...]) -> None:
    sums = sums_of(one)
    assert (
        sums.requests, sums.errors, sums.poisoned, sums.started, sums.broken, sums.finished
    ) == counts  # fmt: skip


def test_use_counts_for_every_request_that_ran() -> None:
    assert (sums_of(end("CANCELLED", 0.2)).tokens, sums_of(end("CANCELLED", 0.2)).device_s) == (110, 0.5)
    assert sums_of(end("FINISHED")).tokens == 0


def test_the_total_latency_is_of_requests_that_finish() -> None:
    metrics = Metrics()
    recorder = SliRecorder(metrics)
    for one in (end("FINISHED", 0.2), end("STREAM_BROKEN", 0.2), end("CANCELLED", 0.2), end("FINISHED")):
        recorder.ended(SliSubject(KEY), one)
    sums = cut(recorder).series[KEY]
    assert (sums.total.count, sums.total.total) == (2, 3.0), "a stored answer has a latency too"
    assert (sums.prompt_tokens, sums.cached_tokens) == (300, 120), "of those that ran"
    assert list(exported(metrics, "fairway_sli_total_seconds_count").values()) == [2.0]
    assert exported(metrics, "fairway_sli_tenant_device_seconds_total") == {
        (("model", "chat"), ("tenant", "acme")): 1.5
    }


def test_a_step_of_a_rollout_counts_by_cluster_of_sessions() -> None:
    recorder, window = SliRecorder(), GateWindow("chat", "r1/2")
    recorder.ended(SliSubject(KEY, SESSION, "r1/2"), end("FINISHED", 0.2))
    recorder.ended(SliSubject(KEY, SESSION, "r1/2"), end("OVERLOADED"))
    recorder.ended(SliSubject(KEY, SESSION, "r1/2"), end("INVALID_INPUT"))
    recorder.ended(SliSubject(KEY, SESSION), end("FINISHED", 0.2))
    report = cut(recorder)
    arm = report.windows[window]["sha256:1"]
    assert list(arm.clusters) == [cluster_of(SESSION)]
    assert (arm.requests, arm.sessions) == (2, 1)
    assert report.series[KEY].requests == 3
    assert recorder.cut(1001.0) is None, "nothing counts twice"


def test_shapes_of_finished_requests_are_recorded_by_model_without_content() -> None:
    recorder = SliRecorder()
    two = SliSubject(KEY, shapes=(RequestShape(100, 0, SamplingKind.SAMPLED),) * 2)
    recorder.ended(two, end("FINISHED", 0.2))
    for reason in ("STREAM_BROKEN", "CANCELLED", "POISONED_INPUT"):
        recorder.ended(two, end(reason, 0.2))
    recorder.ended(two, end("FINISHED"))  # from the cache of answers: no engine saw it
    copy = SliSubject(replace(KEY, tenant=SHADOW_TENANT), shapes=two.shapes)
    recorder.ended(copy, end("FINISHED", 0.2))
    shapes = cut(recorder).shapes
    assert {model: dict(one.items()) for model, one in shapes.items()} == {
        "chat": {RequestShape(100, 5, SamplingKind.SAMPLED): 2.0}
    }


def test_models_with_shapes_are_bounded() -> None:
    recorder = SliRecorder()
    shapes = (RequestShape(1, 0, SamplingKind.GREEDY),)
    for number in range(MAX_MODELS + 5):
        key = replace(KEY, arm=ArmKey(f"m{number}", "sha256:1"))
        recorder.ended(SliSubject(key, shapes=shapes), end("FINISHED", 0.2))
    assert len(cut(recorder).shapes) == MAX_MODELS


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (Sampling(1, temperature=0.0), SamplingKind.GREEDY),
        (Sampling(1), SamplingKind.SAMPLED),
        (Sampling(1, frequency_penalty=0.1), SamplingKind.PENALISED),
        (Sampling(1, logit_bias=((1, 2.0),)), SamplingKind.PENALISED),
        (Sampling(1, frequency_penalty=0.1, logprobs=0), SamplingKind.LOGPROBS),
    ],
)
def test_kinds_of_sampling(sampling: Sampling, kind: SamplingKind) -> None:
    assert sampling_kind(sampling) is kind


def test_further_tenants_share_one_series() -> None:
    recorder = SliRecorder()
    for number in range(MAX_SERIES + 50):
        recorder.ended(SliSubject(SliKey(KEY.arm, f"t{number}", KEY.priority)), end("FINISHED", 0.2))
    series = cut(recorder).series
    assert len(series) == MAX_SERIES + 1
    assert series[SliKey(KEY.arm, OTHER_TENANTS, KEY.priority)].requests == 50


def test_the_same_figures_are_exported() -> None:
    metrics = Metrics()
    recorder = SliRecorder(metrics)
    recorder.ended(SliSubject(KEY), end("FINISHED", 0.2))
    recorder.ended(SliSubject(KEY), end("STREAM_BROKEN", 0.2))
    for ttft_s in ((), (0.2,)):
        recorder.ended(SliSubject(KEY), end("POISONED_INPUT", *ttft_s))
    found = exported(metrics, "fairway_sli_requests_total")
    by_result = {dict(labels)["result"]: count for labels, count in found.items()}
    assert by_result == {"good": 1.0, "broken": 2.0, "poisoned": 1.0}
    assert sum(exported(metrics, "fairway_sli_ttft_seconds_count").values()) == 3.0
    assert sum(exported(metrics, "fairway_sli_itl_seconds_count").values()) == 27.0
