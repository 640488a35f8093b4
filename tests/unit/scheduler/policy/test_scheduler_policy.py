"""Admission, placement and order as functions of values."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.scheduler.policy.overload.rates import MAX_WAIT_S, MIN_WAIT_S, DrainRate
from services.scheduler.policy.placement.candidate import (
    Candidate,
    PlaceQuery,
    blocks_for,
    can_ever_fit,
    demand_of,
)
from services.scheduler.policy.placement.choose import Chosen, NoWorker, PlacementProfile, Rejections, choose
from tests.unit.scheduler.policy.room_oracle import room_of

WORKER = Candidate("w1", 1024, 1024, block_size=16, slots=8, max_model_len=1024)
QUERY = PlaceQuery(demand_of(100, 50, 256))


def test_a_prompt_without_output_may_fill_the_context() -> None:
    demand = demand_of(1024, 0, 256)
    assert (demand.reserved_tokens, demand.worst_case_tokens) == (1024, 1024)
    assert can_ever_fit(demand, kv_tokens_total=2048, max_model_len=1024)


@given(prompt=st.integers(0, 5000), output=st.integers(0, 5000), predicted=st.integers(1, 5000))
def test_a_reservation_holds_the_prompt_and_never_exceeds_the_worst_case(
    prompt: int, output: int, predicted: int
) -> None:
    demand = demand_of(prompt, output, predicted)
    assert prompt <= demand.reserved_tokens <= demand.worst_case_tokens == prompt + output
    assert demand.reserved_tokens == prompt + min(output, predicted)
    assert blocks_for(demand.reserved_tokens, 16) * 16 - demand.reserved_tokens in range(16)


def test_what_can_ever_fit_follows_pool_and_model_length() -> None:
    demand = demand_of(100, 900, 100)
    assert can_ever_fit(demand, kv_tokens_total=200, max_model_len=1000)
    assert not can_ever_fit(demand, kv_tokens_total=199, max_model_len=1000)
    assert not can_ever_fit(demand, kv_tokens_total=200, max_model_len=999)
    assert can_ever_fit(demand, kv_tokens_total=200, max_model_len=0)


@pytest.mark.parametrize(
    ("worker", "reason", "waits", "never"),
    [
        (replace(WORKER, ready=False), "ready", False, False),
        (replace(WORKER, reporting=False), "heard", False, False),
        (replace(WORKER, draining=True), "not_draining", False, False),
        (replace(WORKER, ejected=True), "not_ejected", False, False),
        (replace(WORKER, worker_id="bad"), "not_excluded", False, False),
        (replace(WORKER, kv_tokens_room=149), "has_kv_room", True, False),
        (replace(WORKER, slots=0), "has_sequence_slot", True, False),
        (replace(WORKER, max_model_len=149), "fits_when_empty", False, True),
    ],
)
def test_each_filter_gives_its_reason(worker: Candidate, reason: str, waits: bool, never: bool) -> None:
    query = replace(QUERY, excluded_workers=("bad",))
    assert choose(query, [worker], PlacementProfile(), Random(1)) == NoWorker(
        Rejections(((reason, 1),), ((worker.worker_id, reason),)), never_fits=never, waits_for_room=waits
    )


def test_no_worker_at_all_neither_waits_for_room_nor_never_fits() -> None:
    assert choose(QUERY, [], PlacementProfile(), Random(1)) == NoWorker(
        Rejections(), never_fits=False, waits_for_room=False
    )


def test_one_that_is_too_small_and_one_that_is_full_means_waiting() -> None:
    small, full = replace(WORKER, max_model_len=10), replace(WORKER, worker_id="w2", kv_tokens_room=0)
    found = choose(QUERY, [small, full], PlacementProfile(), Random(1))
    assert isinstance(found, NoWorker)
    assert (found.waits_for_room, found.never_fits) == (True, False)


def test_the_least_loaded_is_chosen_by_kv_and_by_queued_prefill() -> None:
    fuller = replace(WORKER, worker_id="w2", kv_tokens_room=512)
    busier = replace(WORKER, worker_id="w3", queued_prefill_tokens=2000)
    found = choose(QUERY, [fuller, busier, WORKER], PlacementProfile(), Random(1))
    assert isinstance(found, Chosen)
    assert found.worker_id == "w1"
    assert [name for name, _ in found.scores] == ["w1"]


def test_equals_share_the_draw_and_the_same_seed_draws_the_same() -> None:
    workers = [replace(WORKER, worker_id=f"w{n}") for n in range(4)]

    def draw(seed: int) -> list[str]:
        rng = Random(seed)
        return [
            found.worker_id
            for _ in range(200)
            if isinstance(found := choose(QUERY, workers, PlacementProfile(), rng), Chosen)
        ]

    assert draw(1) == draw(1) != draw(2)
    assert all(count > 20 for count in Counter(draw(1)).values())
    assert len(set(draw(1))) == 4


@given(
    rooms=st.lists(st.tuples(st.integers(-64, 640), st.integers(0, 2), st.booleans()), max_size=5),
    prompt=st.integers(1, 700),
)
def test_the_summary_agrees_with_a_look_at_each(rooms: list[tuple[int, int, bool]], prompt: int) -> None:
    workers = [
        Candidate(f"w{n}", 640, room, 16, slots, 640, ready=ready)
        for n, (room, slots, ready) in enumerate(rooms)
    ]
    demand = demand_of(prompt, 10, 5)
    summary = room_of(workers)
    found = choose(PlaceQuery(demand), workers, PlacementProfile(), Random(1))
    if summary.serving and summary.is_short_for(demand):
        assert isinstance(found, NoWorker)
        assert (found.waits_for_room, found.never_fits) == (True, False)
    if not summary.serving:
        assert isinstance(found, NoWorker)
        assert not found.never_fits


def test_the_wait_follows_the_rate_of_grants() -> None:
    rate = DrainRate(window_s=5.0)
    assert rate.wait_s(0, 0.0) == MIN_WAIT_S
    assert rate.wait_s(10, 0.0) == MAX_WAIT_S
    for n in range(1000):
        rate.note(n * 0.1)
    assert rate.wait_s(100, 100.0) == pytest.approx(10.0, rel=0.1)
    assert rate.wait_s(1, 100.0) == MIN_WAIT_S
    assert rate.wait_s(100, 200.0) == MAX_WAIT_S


@pytest.mark.parametrize(("is_batch", "chosen"), [(True, "spot"), (False, "steady")])
def test_batch_work_goes_to_preemptible_nodes_first(is_batch: bool, chosen: str) -> None:
    workers = [replace(WORKER, worker_id="steady"), replace(WORKER, worker_id="spot", preemptible=True)]
    query = replace(QUERY, is_batch=is_batch)
    found = {_chosen(query, workers, seed) for seed in range(20)}
    assert found == {chosen}
    full = [replace(one, slots=0) if one.worker_id == chosen else one for one in workers]
    assert {_chosen(query, full, seed) for seed in range(20)} == {"steady", "spot"} - {chosen}


def _chosen(query: PlaceQuery, workers: list[Candidate], seed: int) -> str:
    found = choose(query, workers, PlacementProfile(), Random(seed))
    assert isinstance(found, Chosen)
    return found.worker_id
