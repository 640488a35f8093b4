"""What the metrics of batches show."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.runtime.telemetry.metrics import Metrics
from services.worker.batcher.telemetry import BatcherTelemetry, BatchInstruments


def values(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name,
            *(value for label, value in sorted(sample.labels.items()) if label != "le"),
        ): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_two_versions_share_the_instruments_and_not_their_counts() -> None:
    metrics = Metrics()
    instruments = BatchInstruments(metrics)
    first, second = BatcherTelemetry(instruments, "a"), BatcherTelemetry(instruments, "b")
    first.ran(lengths=[10, 30], width=40, most_rows=100, cause="idle", waited_s=0.25, run_s=0.375)
    first.ended("answered")
    second.ran(lengths=[0], width=0, most_rows=100, cause="full")
    second.searched("serving")
    second.sacrificed()
    found = values(metrics.registry)
    assert found["fairway_worker_batch_rows_sum", "a"] == 2
    assert found["fairway_worker_batch_fill_ratio_sum", "a"] == 0.02
    assert found["fairway_worker_batch_padding_ratio_sum", "a"] == 0.5
    assert found["fairway_worker_batch_padding_ratio_count", "b"] == 0
    assert found["fairway_worker_batch_starts_total", "idle", "a"] == 1
    assert found["fairway_worker_batch_starts_total", "full", "b"] == 1
    assert found["fairway_worker_row_seconds_total", "a", "waiting"] == 0.25
    assert found["fairway_worker_row_seconds_total", "a", "computing"] == 0.75
    assert found["fairway_worker_rows_ended_total", "a", "answered"] == 1
    assert found["fairway_worker_isolation_runs_total", "b", "serving"] == 1
    assert found["fairway_worker_sacrificed_processes_total", "b"] == 1
