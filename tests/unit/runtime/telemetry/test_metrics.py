"""Counting: cells, bounds of labels, what Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from services.runtime.telemetry import metrics as module
from services.runtime.telemetry.metrics import OTHER, Metrics
from tests.support.metrics import values


def scraped(metrics: Metrics, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return values(generate_latest(metrics.registry).decode(), name)


def test_counters_count_by_label() -> None:
    metrics = Metrics()
    counter = metrics.counter("fairway_test_things_total", "Things", ("kind",))
    cell = counter.cell("a")
    cell.add()
    cell.add(2)
    counter.add("b", amount=0.5)
    assert scraped(metrics, "fairway_test_things_total") == {(("kind", "a"),): 3.0, (("kind", "b"),): 0.5}


def test_histograms_accumulate_and_count_the_bound_itself() -> None:
    metrics = Metrics()
    cell = metrics.histogram("fairway_test_wait_seconds", "Wait", bounds=(0.1, 1.0)).cell()
    for value in (0.1, 0.5, 5.0):
        cell.observe(value)
    cell.observe(0.05, times=3)
    buckets = scraped(metrics, "fairway_test_wait_seconds_bucket")
    assert buckets == {(("le", "0.1"),): 4.0, (("le", "1.0"),): 5.0, (("le", "+Inf"),): 6.0}
    assert scraped(metrics, "fairway_test_wait_seconds_count") == {(): 6.0}
    assert scraped(metrics, "fairway_test_wait_seconds_sum") == {(): pytest.approx(5.75)}


def test_levels_are_read_when_asked_for() -> None:
    metrics = Metrics()
    held = [1.0]
    metrics.level("fairway_test_level", "Level", lambda: held[0])
    held[0] = 7.0
    assert scraped(metrics, "fairway_test_level") == {(): 7.0}


def test_a_metric_without_a_sample_is_announced_all_the_same() -> None:
    metrics = Metrics()
    metrics.counter("fairway_test_things_total", "Things", ("kind",))
    assert "# TYPE fairway_test_things_total counter" in generate_latest(metrics.registry).decode()


def test_operators_names_are_bounded() -> None:
    metrics = Metrics(max_tenants=2)
    assert [metrics.tenants.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_children_are_bounded_and_the_rest_is_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHILDREN", 2)
    metrics = Metrics()
    counter = metrics.counter("fairway_test_things_total", "Things", ("kind",))
    for kind in ("a", "b", "c", "d", "c"):
        counter.add(kind)
    found = scraped(metrics, "fairway_test_things_total")
    assert found == {(("kind", "a"),): 1.0, (("kind", "b"),): 1.0, (("kind", OTHER),): 3.0}


def test_two_processes_in_one_interpreter_do_not_meet() -> None:
    one, two = Metrics(), Metrics()
    one.counter("fairway_test_things_total", "Things").cell().add()
    two.counter("fairway_test_things_total", "Things")
    assert scraped(two, "fairway_test_things_total") == {}


@pytest.mark.parametrize("name", ["test_things_total", "fairway_test_things"])
def test_names_follow_the_scheme(name: str) -> None:
    with pytest.raises(AssertionError):
        Metrics().counter(name, "Things")


def test_exemplars_are_in_openmetrics_alone() -> None:
    metrics = Metrics()
    cell = metrics.histogram("fairway_test_wait_seconds", "Wait", bounds=(0.1, 1.0)).cell()
    cell.observe(0.05)
    cell.observe_as(0.4, {"request_id": "req_1"}, 1_700_000_000.0)
    cell.observe_as(0.5, {"request_id": "req_2", "trace_id": "ab"}, 1_700_000_001.5, times=2)
    plain = generate_latest(metrics.registry).decode()
    assert "req_" not in plain
    assert 'fairway_test_wait_seconds_bucket{le="1.0"} 4.0\n' in plain
    text: bytes = openmetrics.generate_latest(metrics.registry)  # type: ignore[no-untyped-call]
    lines = text.decode().splitlines()
    found = [line for line in lines if " # {" in line]
    assert found == [
        'fairway_test_wait_seconds_bucket{le="1.0"} 4.0 # {request_id="req_2",trace_id="ab"} 0.5 1700000001.5'
    ]
