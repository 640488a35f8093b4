"""Which timelines are kept: the slowest of each model and failures, in bounded number, bytes and age."""

from random import Random

import pytest

from services.controlplane.timelines.policy import tail
from services.controlplane.timelines.policy.tail import Kept, KeptTimelines
from services.core.estimates.finished import FinishedRequest
from services.core.generation import StageClock, Usage
from services.core.records import Priority


def ended(name: str, total_us: int, *, model: str = "chat", reason: str = "FINISHED") -> FinishedRequest:
    clock = StageClock(1_700_000_000_000_000, decode_us=total_us)
    return FinishedRequest(
        name, "http", "acme", model, "sha256:a", Priority.STANDARD, reason, clock, Usage(1, 0, 1)
    )


def kept(request: FinishedRequest, *, at_s: float = 0.0, size: int = 100) -> Kept[str]:
    return Kept(request, at_s, size, request.request_id)


def test_a_round_takes_the_slowest_and_the_last_failures() -> None:
    store = KeptTimelines[str]()
    fresh = [ended(f"r{number}", 1000 * number) for number in range(10)]
    fresh += [ended(f"f{number}", 1, reason="QUEUE_FULL") for number in range(5)]
    assert [one.request_id for one in store.wanted(fresh)] == ["r9", "r8", "r7", "r6", "f3", "f4"]
    store.add(kept(fresh[9]))
    assert "r9" not in [one.request_id for one in store.wanted(fresh)]


def test_the_slowest_of_each_model_stay() -> None:
    store, rng = KeptTimelines[str](), Random(3)
    requests = [
        ended(f"{model}{number}", rng.randrange(10**6), model=model)
        for model in ("chat", "code")
        for number in range(200)
    ]
    rng.shuffle(requests)
    for one in requests:
        if store.wanted([one]):
            store.add(kept(one))
    for model in ("chat", "code"):
        mine = sorted((one for one in requests if one.model == model), key=lambda one: -one.total_us)
        assert all(store.get(one.request_id) for one in mine[: tail.MAX_SLOW_OF_MODEL])
    assert len(store) == 2 * tail.MAX_SLOW_OF_MODEL
    assert store.evicted


@pytest.mark.parametrize("size", [100, tail.MAX_KEPT_BYTES // 2])
def test_more_models_than_fit_share_alike_and_ordinary_requests_displace_none(size: int) -> None:
    """By the number of timelines, or by their bytes."""
    store, rng = KeptTimelines[str](), Random(5)
    models = {"a": 10**6, "b": 10**5, "c": 10**4, "d": 10**6}
    requests = [
        ended(f"{model}{number}", rng.randrange(below), model=model)
        for model, below in models.items()
        for number in range(200)
    ]
    for one in requests:
        if store.wanted([one]):
            store.add(kept(one, size=size))
    share = min(tail.MAX_SLOW, tail.MAX_SLOW_BYTES // size) // len(models)
    assert len(store) == share * len(models)
    for model in models:
        mine = sorted((one for one in requests if one.model == model), key=lambda one: -one.total_us)
        assert all(store.get(one.request_id) for one in mine[:share])
    held = {one.request_id for one in requests if store.get(one.request_id)}
    for number in range(1000):
        model = rng.choice([*models])
        assert not store.wanted([ended(f"x{number}", rng.randrange(models[model] // 2), model=model)])
    slow = ended("slow", models["c"], model="c")
    assert store.wanted([slow])
    store.add(kept(slow, size=size))
    (gone,) = (name for name in held if store.get(name) is None)
    assert gone.startswith("c")


def test_models_failures_and_bytes_are_bounded() -> None:
    store = KeptTimelines[str]()
    for number in range(300):
        store.add(kept(ended(f"r{number}", number, model=f"m{number}")))
        store.add(kept(ended(f"f{number}", number, reason="INTERNAL")))
    assert len(store) == tail.MAX_SLOW + tail.MAX_FAILED
    assert store.get("f299") is not None
    assert store.get("f0") is None
    assert store.get("r299") is not None
    assert store.get("r0") is None, "of more models than fit, the slowest"
    store.add(kept(ended("big", 10**9), size=tail.MAX_SLOW_BYTES - 50))
    store.add(kept(ended("large", 1, reason="INTERNAL"), size=tail.MAX_FAILED_BYTES - 50))
    assert store.size_bytes <= tail.MAX_SLOW_BYTES + tail.MAX_FAILED_BYTES
    assert store.get("big") is not None
    assert store.get("large") is not None
    store.add(kept(ended("huge", 10**9), size=tail.MAX_SLOW_BYTES + 1))
    assert [store.get("huge"), store.get("f299")] == [None, None]
    assert len(store) == 1


def test_a_timeline_expires() -> None:
    store = KeptTimelines[str]()
    store.add(kept(ended("old", 5), at_s=0.0))
    store.add(kept(ended("new", 5), at_s=100.0))
    store.expire(tail.KEPT_S + 50.0)
    assert store.get("old") is None
    assert store.get("new") is not None
    assert store.size_bytes == 100
