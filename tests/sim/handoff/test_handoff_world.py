"""Hand-offs on a virtual clock: what a request waits for, who computes what, and what a fleet can serve."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from services.core.estimates.cost_model import CostModel
from services.worker.engine.plan.block_manager import OutOfBlocks
from simulator.engine.sim_engine import SimKvPool
from simulator.handoff import map as handoff_map
from simulator.handoff.world import HandoffOutcome, HandoffSpec, HandoffWorld, Link
from simulator.lab.load.lengths import Fixed, LogNormal
from simulator.lab.report.measure import Slo

# 10 ms a step, and 0.1 ms for each token of a prompt; 1 kB of KV a token.
COST = CostModel("flat", 0.01, 1e-4, 0.0, kv_bytes_per_token=1000)
LOOSE = Slo(ttft_s=5.0, tpot_s=0.5)
LINK = Link(1e6, delay_s=0.05)  # 64 ms a block


def run(spec: HandoffSpec, **changed: object) -> HandoffOutcome:
    return HandoffWorld(replace(spec, **changed)).run()  # type: ignore[arg-type]


def spec(rate_per_s: float = 0.01, *, requests: int = 2, prompt: int = 640, output: int = 3) -> HandoffSpec:
    return HandoffSpec(
        COST, rate_per_s, Fixed(prompt), Fixed(output), LOOSE, replicas=2, link=LINK, requests=requests
    )


@pytest.mark.parametrize("prompt", [640, 700])
def test_a_request_alone_waits_for_its_prefill_and_then_for_its_kv(prompt: int) -> None:
    apart = run(spec(prompt=prompt), prefill_replicas=1)
    assert (apart.handed_over, apart.lost_tokens) == (2, 0)
    assert apart.ttft.most == pytest.approx(0.01 + prompt * 1e-4, abs=1e-3)
    whole = prompt // 64
    rest = prompt + 1 - 64 * whole
    assert apart.itl.most == pytest.approx(0.05 + whole * 0.064 + 0.01 + rest * 1e-4, abs=1e-3)
    both = run(spec(prompt=prompt))
    assert both.handed_over == 0
    assert both.ttft.most == pytest.approx(apart.ttft.most)
    assert both.itl.most == pytest.approx(0.01, abs=1e-4)


def test_transfers_of_one_replica_share_its_link() -> None:
    """At a rate above what the link carries, the gap grows from request to request; prefill is no bound."""
    patient = replace(spec(3.0, requests=40, output=2), slo=Slo(5.0, 100.0))
    slow = run(patient, prefill_replicas=1)
    assert slow.handed_over == 40
    assert slow.itl.most > 5.0, "0.64 s a request, three requests a second"
    fast = run(patient, prefill_replicas=1, link=Link(1e9))
    assert fast.itl.most < 0.1
    assert fast.ttft.most == pytest.approx(slow.ttft.most)


def test_equal_specs_have_equal_outcomes_and_every_token_is_counted_once() -> None:
    drawn = replace(
        spec(20.0, requests=100), prompt=LogNormal(300, 0.8), output=LogNormal(20, 0.5, 2), replicas=4
    )
    for count in range(4):
        first, again = (run(drawn, prefill_replicas=count, link=Link(1e9)) for _ in range(2))
        assert (first.good, first.itl.total, first.ttft.total) == (
            again.good,
            again.itl.total,
            again.ttft.total,
        )
        assert (first.counted, first.good, first.lost_tokens) == (80, 80, 0)
        assert first.handed_over == (100 if count else 0)
    tokens = [run(drawn, prefill_replicas=count, link=Link(1e9)).itl.count for count in range(4)]
    assert len(set(tokens)) == 1, "the load does not depend on the fleet"


def test_a_replica_takes_kv_when_it_has_room_so_that_nothing_is_computed_twice() -> None:
    small = replace(COST, kv_memory_bytes=1000 * 16 * 700)  # 700 blocks, of which 256 stay for growth
    crowded = replace(spec(20.0, requests=60, output=200), cost=small, slo=Slo(100.0, 100.0))
    full = run(crowded, prefill_replicas=1, link=Link(1e9))
    assert (full.handed_over, full.lost_tokens) == (60, 0)
    assert full.itl.most > 1.0, "some waited for room"


def test_a_pool_receives_what_fits_and_never_in_place_of_what_is_held() -> None:
    rng = Random(5)
    pool = SimKvPool(64, 16)
    for _ in range(300):
        held = pool.allocate(rng.randrange(pool.blocks_free + 1))
        names = [rng.randrange(1, 10_000) for _ in range(rng.randrange(20))]
        pool.receive(names)
        pool.check_integrity([held])
        assert pool.prefix_blocks * 4 + len(held) <= 64
        fitting = names[: (64 - len(held)) // 4]
        added, _ = pool.take_changes()
        assert set(added) <= set(fitting)
        pool.release(held)
    with pytest.raises(OutOfBlocks):
        pool.allocate(65)


def test_goodput_is_what_the_replicas_that_prefill_can_compute() -> None:
    """Prefill takes 0.21 s of 2,000 tokens, decoding nothing: with two of four it is half of both on each."""
    search = handoff_map.Search(2000, 2, 400)
    base = HandoffSpec(COST, 1.0, Fixed(2000), Fixed(2), Slo(2.0, 0.5), replicas=4, link=Link(1e12))
    both, half = search.goodput(base), search.goodput(replace(base, prefill_replicas=2))
    assert 0.6 < both * COST.prefill_s(2000) / 4 < 1.1
    assert half / both == pytest.approx(0.5, abs=0.12)
    best, split = search.best_split(base)
    assert split == 3
    assert best / both == pytest.approx(0.75, abs=0.12)


def test_the_map_states_where_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "60", "--profiles", "2048:16", "512:16", "--step-ratios", "5"]
    assert handoff_map.main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last.removeprefix("RESULT "))
    assert list(found["ratios"]) == ["2048:16 within 38 ms", "512:16 within 38 ms"]
    best = {name: max(by_link.values()) for name, by_link in found["ratios"].items()}
    assert found["pays"] == [name for name, ratio in best.items() if ratio >= 1.2]
    assert handoff_map.main(["--preset", "flat"]) == 2
    assert "neither a preset" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["2048", "2048:1", "0:64", "a:b", "1:2:3"])
def test_a_profile_that_is_none_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        handoff_map.main(["--profiles", wrong])
    assert ended.value.code == 2
    assert f"invalid profile value: '{wrong}'" in capsys.readouterr().err
