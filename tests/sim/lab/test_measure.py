"""What clients saw is counted per tenant and class, and over time."""

from __future__ import annotations

import pytest

from services.core.records import Priority
from services.scheduler.policy.queue.fairness import ServiceWeights
from simulator.lab.report import measure
from simulator.lab.report.measure import MAX_BINS, OTHERS, Bins, RecordCollector, Slo
from simulator.lab.report.report import MAX_SAMPLES, Sample, Timeline, WorkerSample, fairness, jain
from tests.sim.lab.records import finished, refused


def near(value: float) -> object:
    return pytest.approx(value, rel=0.011)


def test_latencies_are_counted_where_they_belong() -> None:
    collector = RecordCollector(Slo())
    collector.take(finished(ttft_s=0.4, queue_s=0.1, gaps=((0.02, 1), (0.06, 3))))
    collector.take(finished(ttft_s=0.8, tenant="globex", priority=Priority.BATCH))
    acme = collector.groups["acme", Priority.STANDARD]
    assert (acme.sent, acme.finished, acme.output_tokens) == (1, 1, 5)
    assert acme.ttft.quantile(0.5) == near(0.4)
    assert acme.queue.quantile(0.5) == near(0.1)
    assert acme.tpot.quantile(0.5) == near(0.08 / 4)
    assert collector.groups["globex", Priority.BATCH].ttft.quantile(1.0) == near(0.8)


def test_itl_weighs_a_gap_by_its_tokens() -> None:
    collector = RecordCollector(Slo())
    collector.take(finished(gaps=((0.9, 1), (0.9, 9))))
    itl = collector.groups["acme", Priority.STANDARD].itl
    assert itl.count == 10
    assert (itl.quantile(0.5), itl.quantile(0.9), itl.quantile(0.95)) == (near(0.1), near(0.1), near(0.9))


def test_goodput_counts_finished_requests_within_both_targets() -> None:
    collector = RecordCollector(Slo(ttft_s=1.0, tpot_s=0.1))
    collector.take(finished(ttft_s=1.0, gaps=((0.05, 1),)))
    collector.take(finished(ttft_s=1.1, gaps=((0.05, 1),)))
    collector.take(finished(ttft_s=0.1, gaps=((0.2, 1),)))
    broken = finished(ttft_s=0.1)
    broken.outcome = "UNAVAILABLE"
    collector.take(broken)
    group = collector.groups["acme", Priority.STANDARD]
    assert (group.sent, group.finished, group.good) == (4, 3, 1)


def test_tenants_together_are_one_population() -> None:
    collector = RecordCollector(Slo())
    for ttft_s in (0.1, 0.2, 0.3):
        collector.take(finished(tenant="acme", ttft_s=ttft_s))
    collector.take(finished(tenant="globex", priority=Priority.BATCH, ttft_s=4.0))
    collector.take(finished(tenant="whale", ttft_s=90.0))
    found = collector.ttft_of(("acme", "globex"))
    assert (found.count, found.quantile(0.75), found.most) == (4, near(0.3), 4.0)
    assert collector.ttft_of(("nobody",)).quantile(0.95) is None


def test_refusals_are_counted_by_reason_and_have_no_ttft() -> None:
    collector = RecordCollector(Slo())
    collector.take(refused("QUEUE_FULL"))
    collector.take(refused("QUEUE_TIMEOUT", queue_s=30.0))
    group = collector.groups["acme", Priority.STANDARD]
    assert dict(group.outcomes) == {"QUEUE_FULL": 1, "QUEUE_TIMEOUT": 1}
    assert group.ttft.count == 0
    assert group.queue.quantile(1.0) == near(30.0)


def test_requests_of_the_warm_up_count_over_time_only() -> None:
    collector = RecordCollector(Slo(), warm_up_s=10.0)
    collector.take(finished(sent_s=9.9))
    collector.take(finished(sent_s=10.0))
    assert collector.groups["acme", Priority.STANDARD].sent == 1
    assert sum(collector.arrivals.sums) == 2


def test_service_is_counted_when_it_is_given() -> None:
    collector = RecordCollector(Slo(), ServiceWeights(prompt=1.0, cached=0.1, output=2.0))
    collector.take(
        finished(sent_s=0.0, ttft_s=1.5, gaps=((1.0, 3), (1.0, 4)), prompt_tokens=100, cached_tokens=40)
    )
    service = collector.groups["acme", Priority.STANDARD].service
    assert service.sums == [0.0, pytest.approx(60 + 4 + 2), 6.0, 8.0]
    assert collector.tokens.sums == [0.0, 1.0, 3.0, 4.0]


def test_tenants_beyond_the_limit_are_counted_together() -> None:
    collector = RecordCollector(Slo())
    for number in range(measure.MAX_GROUPS + 50):
        collector.take(finished(tenant=f"tenant-{number}"))
    assert len(collector.groups) == measure.MAX_GROUPS + 1
    assert collector.groups[OTHERS, Priority.STANDARD].sent == 50


def test_bins_stay_bounded_and_keep_their_sum() -> None:
    bins = Bins(1.0)
    for at_s in range(0, 100_000, 7):
        bins.add(float(at_s))
    assert len(bins.sums) <= MAX_BINS
    assert sum(bins.sums) == len(range(0, 100_000, 7))
    assert bins.width_s == 256.0
    assert sum(bins.widened(1024.0)) == sum(bins.sums)


def test_covering_counts_each_second_in_its_bin() -> None:
    bins = Bins(1.0)
    bins.cover(0.25, 3.5)
    assert bins.sums == [0.75, 1.0, 1.0, 0.5]
    bins.cover(599.5, 1200.5)
    assert sum(bins.sums) == pytest.approx(3.25 + 601.0)


def test_jain_is_one_for_equals_and_one_in_n_for_one_who_has_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0
    with pytest.raises(ValueError, match="no values"):
        jain([])


def waits(collector: RecordCollector, tenant: str, served_per_s: int, *, until_s: int = 40) -> None:
    """A tenant that always has two requests in the queue and is served evenly."""
    for second in range(until_s):
        collector.take(
            finished(
                sent_s=max(0.0, second - 2.0),
                queue_s=min(second, 2.0),
                ttft_s=min(second, 2.0) + 0.5,
                tenant=tenant,
                prompt_tokens=served_per_s,
            )
        )


def test_fairness_compares_tenants_that_wait_at_the_same_time() -> None:
    collector = RecordCollector(Slo(), ServiceWeights(output=0.0))
    waits(collector, "acme", 300)
    waits(collector, "globex", 100)
    collector.take(finished(tenant="idle", prompt_tokens=50_000))
    found = fairness(collector, {})
    assert found.windows >= 2
    assert found.jain_mean == pytest.approx(16 / 20, abs=0.01)
    assert found.pair == ("acme", "globex")
    assert found.difference_tokens == pytest.approx(200 * 38, rel=0.05)


def test_weights_divide_the_service() -> None:
    collector = RecordCollector(Slo(), ServiceWeights(output=0.0))
    waits(collector, "acme", 300)
    waits(collector, "globex", 100)
    found = fairness(collector, {"acme": 3.0})
    assert found.jain_least == pytest.approx(1.0)
    assert found.difference_tokens < 200


def test_a_tenant_that_does_not_wait_is_not_compared() -> None:
    collector = RecordCollector(Slo())
    for second in range(40):
        collector.take(finished(sent_s=float(second), tenant="acme"))
        collector.take(finished(sent_s=float(second), tenant="globex", prompt_tokens=9000))
    found = fairness(collector, {})
    assert (found.windows, found.jain_mean, found.pair) == (0, None, None)


def worker(tokens: int, busy_s: float, name: str = "w") -> WorkerSample:
    return WorkerSample(name, tokens, 0, busy_s, running=0, waiting=0, kv_ratio=0.0)


def test_utilisation_and_shares_survive_an_engine_that_starts_anew() -> None:
    timeline = Timeline()
    for at_s, tokens, busy_s in ((0, 0, 0.0), (10, 100, 5.0), (20, 30, 2.0), (30, 80, 4.0)):
        timeline.add(Sample(float(at_s), 0, 0.0, (worker(tokens, busy_s), worker(at_s * 6, 0.0, "other"))))
    assert timeline.utilisation("w") == pytest.approx(9.0 / 30)
    assert timeline.shares() == {"w": pytest.approx(0.5), "other": pytest.approx(0.5)}


def test_a_timeline_is_bounded_and_reaches_to_the_end() -> None:
    timeline = Timeline()
    for number in range(10_000):
        timeline.add(Sample(float(number), number, 0.5, (worker(number, number * 0.5),)))
    assert len(timeline.points) <= MAX_SAMPLES
    assert timeline.points[0][0] == 0.0
    assert timeline.points[-1][0] > 9_900
    assert all(ratio == pytest.approx(0.5, abs=0.01) for _, ratio in timeline.busy["w"])
