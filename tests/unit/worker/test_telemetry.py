"""What Prometheus is told of engines, also where a deployment has two versions on one worker."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics
from services.worker.agent.device_telemetry import export_devices, peak_flops
from services.worker.agent.report import WorkerIdentity
from services.worker.engine_protocol import Stepped
from services.worker.telemetry import EngineLevels, WorkerTelemetry, export_levels
from tests.support.metrics import values

OLD = EngineLevels(
    model="chat",
    state="draining",
    kv_blocks_used=3,
    kv_blocks_reserved=4,
    kv_blocks_total=10,
    running=1,
    waiting=0,
    parked=0,
    queued_prefill_tokens=0,
    silent_s=0.1,
    rss_bytes=100,
    device_bytes=1000,
)
NEW = replace(OLD, state="ready", kv_blocks_used=1, kv_blocks_total=20, waiting=2, silent_s=2.0)


def scraped(*engines: EngineLevels) -> str:
    metrics = Metrics()
    export_levels(metrics, lambda: engines)
    return generate_latest(metrics.registry).decode()


def test_two_versions_of_a_deployment_make_one_series() -> None:
    text = scraped(OLD, NEW, replace(NEW, model="other", silent_s=0.0))
    for family in text_string_to_metric_families(text):
        series = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert len(series) == len(set(series)), f"{family.name} has a series twice"
    blocks = values(text, "fairway_worker_kv_blocks")
    assert blocks[("model", "chat"), ("state", "used")] == 4.0
    assert blocks[("model", "chat"), ("state", "total")] == 30.0
    assert blocks[("model", "other"), ("state", "total")] == 20.0
    sequences = values(text, "fairway_worker_sequences")
    assert sequences[("model", "chat"), ("state", "running")] == 2.0
    assert sequences[("model", "chat"), ("state", "waiting")] == 2.0
    states = values(text, "fairway_worker_version_state")
    assert states[("model", "chat"), ("state", "draining")] == 1.0
    assert states[("model", "chat"), ("state", "ready")] == 1.0
    assert values(text, "fairway_worker_engine_silence_seconds")[(("model", "chat"),)] == 2.0
    assert values(text, "fairway_worker_engine_rss_bytes")[(("model", "chat"),)] == 200.0


def test_two_versions_in_one_state_are_counted() -> None:
    states = values(scraped(OLD, OLD), "fairway_worker_version_state")
    assert states == {(("model", "chat"), ("state", "draining")): 2.0}


def test_restarts_are_counted_from_the_first_engine_on() -> None:
    metrics = Metrics()
    telemetry = WorkerTelemetry(metrics, clock=SystemClock())

    def restarts() -> dict[tuple[tuple[str, str], ...], float]:
        text = generate_latest(metrics.registry).decode()
        return values(text, "fairway_worker_engine_restarts_total")

    telemetry.version("chat")
    assert restarts() == {(("model", "chat"),): 0.0}
    telemetry.restarted("chat")
    telemetry.version("chat")
    assert restarts() == {(("model", "chat"),): 1.0}


def test_want_of_memory_is_counted_from_before_the_first_load_on() -> None:
    metrics = Metrics()
    telemetry = WorkerTelemetry(metrics, clock=SystemClock())

    def counts() -> dict[str, float]:
        found = values(generate_latest(metrics.registry).decode(), "fairway_worker_out_of_memory_total")
        return {dict(labels)["while"]: value for labels, value in found.items()}

    telemetry.expect("chat")
    assert counts() == {"load": 0.0, "serve": 0.0}
    telemetry.lacked_memory("chat", "load")
    assert counts() == {"load": 1.0, "serve": 0.0}


def test_the_operations_of_a_model_are_those_of_its_tokens() -> None:
    metrics = Metrics()
    telemetry = WorkerTelemetry(metrics, clock=SystemClock())
    known, unknown = telemetry.version("chat", 1000), telemetry.version("other")
    for version in (known, unknown):
        version.stepped(Stepped(1, 0.5, [1, 2], [5, 6], {}, 16, 0, 2, 0))
        version.stepped(Stepped(2, 0.5, [1], [5], {}, 0, 0, 2, 0))
    text = generate_latest(metrics.registry).decode()
    assert values(text, "fairway_worker_model_flops_total") == {(("model", "chat"),): 19_000.0}


@pytest.mark.parametrize(
    ("identity", "dtype", "stated", "peak"),
    [
        ({"device_type": "nvidia-h200"}, "bfloat16", 0.0, 989e12),
        ({"device_type": "nvidia-h200"}, "float32", 0.0, 0.0),
        ({"device_type": "nvidia-h200", "slice": "1g.18gb"}, "bfloat16", 0.0, 0.0),
        ({"device_type": "cpu"}, "bfloat16", 0.0, 0.0),
        ({"device_type": "cpu"}, "float32", 2e12, 2e12),
    ],
)
def test_a_peak_is_stated_or_published_or_absent(
    identity: dict[str, str], dtype: str, stated: float, peak: float
) -> None:
    metrics, found = Metrics(), WorkerIdentity("w", "a:1", devices=2, **identity)  # type: ignore[arg-type]
    export_devices(metrics, found, peak_flops(found, dtype, stated))
    text = generate_latest(metrics.registry).decode()
    assert list(values(text, "fairway_worker_peak_flops").values()) == ([2 * peak] if peak else [])
    assert list(values(text, "fairway_worker_devices").values()) == [2.0]
    assert list(values(text, "fairway_worker_cost_per_hour").values()) == []


def test_proposals_are_counted_and_a_sequence_once_a_step() -> None:
    metrics = Metrics()
    version = WorkerTelemetry(metrics, clock=SystemClock()).version("chat")
    columns = Stepped(1, 0.01, [1, 1, 1, 2], [5, 6, 7, 8], {}, 0, 0, 2, 0)
    version.stepped(msgspec.structs.replace(columns, proposed_tokens=5, accepted_tokens=2))
    version.stepped(columns)
    text = generate_latest(metrics.registry).decode()
    model = (("model", "chat"),)
    assert values(text, "fairway_worker_proposed_tokens_total")[model] == 5.0
    assert values(text, "fairway_worker_accepted_tokens_total")[model] == 2.0
    assert values(text, "fairway_worker_step_sequences_sum")[model] == 2.0 + 4.0
    assert values(text, "fairway_worker_tokens_total")[("kind", "output"), *model] == 8.0


def test_device_time_is_counted_by_what_it_was_spent_on() -> None:
    metrics = Metrics()
    version = WorkerTelemetry(metrics, clock=SystemClock()).version("chat")
    version.stepped(Stepped(1, 0.5, [], [], {}, 16, 0, 2, 0, attended_tokens=30, prefill_s=0.375))
    version.stepped(Stepped(2, 0.25, [1], [5], {}, 0, 0, 2, 0, attended_tokens=30))
    version.stepped(Stepped(3, 0.125, [], [], {}, 0, 0, 2, 0))
    text = generate_latest(metrics.registry).decode()
    found = values(text, "fairway_worker_device_seconds_total")
    by_kind = {dict(labels)["kind"]: value for labels, value in found.items()}
    assert by_kind == {"prefill": 0.375, "decode": 0.375, "unattributed": 0.125}
