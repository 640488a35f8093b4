"""Past requests: what is kept of them is bounded, whoever fails and however many there are."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec import structs

from services.core.estimates import finished
from services.core.estimates.finished import (
    FinishedRequest,
    FinishedRequests,
    NotableRequests,
    RequestSample,
)
from services.core.generation import StageClock, Usage
from services.core.records import Priority


def request(number: int, total_us: int, *, tenant: str = "acme", reason: str = "FINISHED") -> FinishedRequest:
    clock = StageClock(number, decode_us=total_us)
    return FinishedRequest(
        f"req_{number}", "grpc", tenant, "chat", "", Priority.STANDARD, reason, clock, Usage(1, 1)
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_slowest_and_failures_of_every_tenant_are_kept_in_bounds(seed: int) -> None:
    rng, notable, times = Random(seed), NotableRequests(), []
    for number in range(3000):
        if rng.random() < 0.3:
            notable.add(request(number, 1, tenant="flood", reason="QUEUE_FULL"))
        else:
            times.append(rng.randrange(10**6))
            notable.add(request(number, times[-1]))
    notable.add(request(3001, 1, tenant="other", reason="INTERNAL"))
    kept = notable.cut()
    slow = sorted((one.total_us for one in kept if not one.failed), reverse=True)
    assert slow == sorted(times, reverse=True)[: finished.MAX_SLOW]
    failed = Counter(one.tenant for one in kept if one.failed)
    assert failed == {"flood": finished.MAX_FAILED_OF_TENANT, "other": 1}
    assert notable.cut() == ()


def test_the_newest_are_kept_once_each() -> None:
    kept = FinishedRequests()
    for number in range(finished.MAX_KEPT + 10):
        kept.add([request(number, number)] * 2)
    assert len(kept) == finished.MAX_KEPT
    found = kept.find(lambda one: True, slow=True, limit=2)
    assert [one.request_id for one in found] == [
        f"req_{finished.MAX_KEPT + 9}",
        f"req_{finished.MAX_KEPT + 8}",
    ]
    assert kept.find(lambda one: one.request_id == "req_3", slow=False, limit=5) == []


def test_a_sample_is_uniform_and_stands_for_all() -> None:
    drawn = Counter[int]()
    for seed in range(300):
        sample = RequestSample(Random(seed))
        for number in range(640):
            sample.add(request(number, 1))
        found = sample.cut()
        assert len(found) == finished.MAX_SAMPLED
        assert {one.weight for one in found} == {10.0}
        drawn.update(one.clock.received_unix_us // 160 for one in found)
        assert sample.cut() == ()
    quarters = [drawn[quarter] / (300 * finished.MAX_SAMPLED) for quarter in range(4)]
    assert quarters == pytest.approx([0.25] * 4, abs=0.02)


def test_a_model_with_little_traffic_is_not_lost_in_the_sample() -> None:
    sample = RequestSample(Random(1))
    for number in range(5000):
        sample.add(structs.replace(request(number, 1), model="large"))
    for number in range(3):
        sample.add(structs.replace(request(number, 1), model="small"))
    found = sample.cut()
    assert len(found) == finished.MAX_SAMPLED
    assert [one.weight for one in found if one.model == "small"] == [1.0] * 3
    assert sum(one.weight for one in found) == pytest.approx(5003)


def test_samples_of_many_models_are_bounded() -> None:
    sample = RequestSample(Random(1))
    for number in range(3000):
        sample.add(structs.replace(request(number, 1), model=f"model-{number % 300}"))
    found = sample.cut()
    assert len(found) <= finished.MAX_SAMPLED
    assert sum(one.weight for one in found) == pytest.approx(3000)
