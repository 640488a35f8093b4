"""Capacity of a replica against its cost model, and the number of replicas of a load."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.core.estimates.capacity import (
    MAX_SEQUENCES,
    Bound,
    RequestMix,
    capacity_of,
    mix_of,
    spare_replicas,
    with_zones,
)
from services.core.estimates.cost_model import PRESETS, CostModel

LINEAR = CostModel("linear", base_s=0.01, prefill_token_s=1e-4, decode_sequence_s=1e-3)
H100 = PRESETS["h100"]


def test_a_mix_of_equal_requests_is_their_lengths() -> None:
    assert mix_of([(100, 20, 50)] * 3) == RequestMix(80.0, 50.0, 125.0, 150.0, 60.0, 1.0)


def test_long_outputs_weigh_what_decodes_read() -> None:
    mix = mix_of([(100, 0, 10), (1000, 0, 90)])
    assert mix.attended_tokens == pytest.approx((10 * 105 + 90 * 1045) / 100)
    assert mix.work_ratio > 1.0


def test_no_request_has_no_mix() -> None:
    with pytest.raises(ValueError, match="produce tokens"):
        mix_of([])


@pytest.mark.parametrize("lengths", [(512, 0, 256), (4096, 0, 64), (128, 0, 1024), (4096, 3584, 128)])
@pytest.mark.parametrize("costs", [LINEAR, H100, PRESETS["a10"], PRESETS["tiny-cpu"]])
def test_at_its_rate_a_replica_does_what_arrives(costs: CostModel, lengths: tuple[int, int, int]) -> None:
    """In one step, as many tokens are decoded and prefilled as requests bring in its time."""
    mix = mix_of([lengths])
    found = capacity_of(costs, mix)
    assert found is not None
    prefilled = found.requests_per_s * mix.prefill_tokens * found.step_s
    computed_s = (
        costs.base_s
        + max(
            costs.weight_read_s, prefilled * costs.prefill_token_s + found.sequences * costs.decode_sequence_s
        )
        + found.sequences * mix.attended_tokens * costs.attended_token_s
        + prefilled * mix.before_tokens * costs.prefill_attended_token_s
    )
    assert found.step_s == pytest.approx(computed_s)
    assert found.requests_per_s * mix.output_tokens * found.step_s == pytest.approx(found.sequences)


def test_what_bounds_a_replica_is_named() -> None:
    chat, documents = mix_of([(512, 0, 256)]), mix_of([(16_384, 0, 16)])
    small = replace(H100, kv_memory_bytes=8 * 768 * H100.kv_bytes_per_token)

    def bound(
        costs: CostModel, mix: RequestMix, itl_target_s: float = math.inf, most: int = MAX_SEQUENCES
    ) -> Bound | None:
        found = capacity_of(costs, mix, itl_target_s=itl_target_s, max_sequences=most)
        return None if found is None else found.bound

    assert bound(H100, documents) is Bound.PREFILL
    assert bound(small, chat) is Bound.KV
    assert bound(H100, chat, 0.012) is Bound.ITL
    assert bound(H100, chat, most=16) is Bound.SEQUENCES
    assert bound(LINEAR, mix_of([(10, 0, 500)])) is Bound.DECODE
    assert bound(H100, chat, 0.001) is None
    assert bound(replace(H100, kv_memory_bytes=1), chat) is None


def test_one_sequence_at_a_time_has_its_steps_to_itself() -> None:
    """Each of its steps also has a share of the next prompt."""
    a100, mix = PRESETS["a100"], mix_of([(1000, 0, 200)])
    found = capacity_of(replace(a100, kv_memory_bytes=1208 * a100.kv_bytes_per_token), mix)
    assert found is not None
    assert found.requests_per_s == pytest.approx(1 / (200 * a100.step_s(5, 1, 1100, 2500)))


def test_a_tighter_gap_between_tokens_costs_rate() -> None:
    mix = mix_of([(512, 0, 256)])
    free, tight = capacity_of(H100, mix), capacity_of(H100, mix, itl_target_s=0.012)
    assert free is not None
    assert tight is not None
    assert tight.step_s <= 0.012
    assert tight.requests_per_s < free.requests_per_s


def late_ratio(spare: float, load: float, work_s: float, absorb_s: float, sequences: int) -> float:
    """Return the share of requests that wait too long, of the exact Erlang formula of M/M/c queues."""
    servers, offered = round((load + spare) * sequences), load * sequences
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    waits = servers * blocked / (servers - offered * (1.0 - blocked))
    return waits * math.exp(-(servers - offered) * absorb_s / (work_s * sequences))


@pytest.mark.parametrize("sequences", [1, 32, 256])
@pytest.mark.parametrize(("load", "absorb_s"), [(8.0, 0.5), (8.0, 2.0), (60.0, 0.1), (60.0, 2.0)])
def test_headroom_meets_the_target_of_an_exact_queue(load: float, absorb_s: float, sequences: int) -> None:
    """Exponential work has twice the variance, which ``work_ratio`` 2 states. Servers come whole."""
    spare = spare_replicas(load, 0.2 * 2.0, absorb_s, sequences=sequences)
    whole = math.ceil((load + spare) * sequences) / sequences - load
    assert late_ratio(whole, load, 0.2, absorb_s, sequences) < 0.02
    assert late_ratio(0.6 * spare, load, 0.2, absorb_s, sequences) > 0.01 or sequences * spare < 3


def test_headroom_without_time_is_that_of_the_square_root_rule() -> None:
    one, hundred = spare_replicas(1.0, 0.1, 0.0), spare_replicas(100.0, 0.1, 0.0)
    assert hundred == pytest.approx(10 * one, rel=1e-3)
    assert hundred == pytest.approx(2.33 * 10, rel=0.05)


def test_headroom_grows_with_bursts_and_work_and_shrinks_with_time() -> None:
    plain = spare_replicas(10.0, 0.1, 2.0)
    assert plain < spare_replicas(10.0, 0.1, 2.0, burst_ratio=4.0)
    assert plain < spare_replicas(10.0, 0.2, 2.0)
    assert plain > spare_replicas(10.0, 0.1, 3.0)
    assert plain > spare_replicas(10.0, 0.1, 2.0, sequences=64)
    assert plain > spare_replicas(10.0, 0.1, 2.0, z=1.0)
    assert spare_replicas(0.0, 0.1, 2.0) == 0.0


def test_a_shared_prefix_is_held_once() -> None:
    a10, requests = PRESETS["a10"], [(4096, 3584, 128)]
    private, shared = (
        capacity_of(a10, mix)
        for mix in (mix_of(requests), mix_of(requests, private_ratio=0.0, shared_tokens=3584.0))
    )
    assert private is not None
    assert shared is not None
    assert shared.kv_sequences > 4 * private.kv_sequences
    assert shared.requests_per_s > private.requests_per_s
    kv_tokens = a10.kv_memory_bytes / a10.kv_bytes_per_token
    assert shared.kv_sequences == pytest.approx((kv_tokens - 3584) / (512 + 128 + 8) - 0.5)


def test_prefill_and_decode_apart_are_each_faster_than_together() -> None:
    found = capacity_of(H100, mix_of([(2000, 0, 200)]))
    assert found is not None
    assert found.requests_per_s < min(found.prefill_per_s, found.decode_per_s)
    assert 1 / found.prefill_per_s == pytest.approx(found.prefill_ratio / found.requests_per_s)


@pytest.mark.parametrize(
    ("need", "zones", "found"), [(4.0, 1, 4), (4.2, 1, 5), (4.0, 3, 6), (5.0, 3, 9), (6.0, 2, 12)]
)
def test_the_zones_that_are_left_carry_the_load(need: float, zones: int, found: int) -> None:
    assert with_zones(need, zones) == found
    if zones > 1:
        assert found / zones * (zones - 1) >= need
