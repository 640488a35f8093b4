"""The baselines decide as their names say."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery
from services.scheduler.policy.placement.choose import Chosen, choose
from services.scheduler.policy.placement.kv_admission import demand_of
from services.scheduler.term import TermSettings
from simulator.lab import baselines

NAMES = ("a", "b", "c", "d")


def worker(name: str, *, room: int = 100_000, ahead: int = 0) -> Candidate:
    return Candidate(
        name,
        kv_tokens_total=100_000,
        kv_tokens_room=room,
        block_size=16,
        slots=8,
        max_model_len=16_384,
        queued_prefill_tokens=ahead,
    )


def place(settings: TermSettings, fleet: list[Candidate], *, cached: Mapping[str, int] | None = None) -> str:
    query = PlaceQuery(demand_of(1000, 100, 100))
    found = choose(query, fleet, settings.profile, Random(1), cached_tokens=cached or {})
    assert isinstance(found, Chosen)
    return found.worker_id


def test_round_robin_takes_turns() -> None:
    settings = baselines.round_robin()
    fleet = [worker(name) for name in NAMES]
    assert "".join(place(settings, fleet) for _ in range(10)) == "abcdabcdab"


def test_round_robin_passes_over_one_without_room_and_goes_on_behind_the_one_it_took() -> None:
    settings = baselines.round_robin()
    fleet = [worker(name) for name in NAMES]
    full = [worker(name, room=0 if name == "c" else 100_000) for name in NAMES]
    assert "".join(place(settings, fleet) for _ in range(2)) == "ab"
    assert place(settings, full) == "d"
    assert "".join(place(settings, fleet) for _ in range(4)) == "abcd"


def test_round_robin_does_not_look_at_load_or_cache() -> None:
    settings = baselines.round_robin()
    fleet = [worker("a", room=5000, ahead=1500), worker("b")]
    assert "".join(place(settings, fleet, cached={"a": 900}) for _ in range(4)) == "abab"


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        ([worker("a", room=40_000), worker("b", room=60_000)], "b"),
        ([worker("a", ahead=1500), worker("b", ahead=100)], "b"),
    ],
)
def test_least_loaded_goes_where_the_room_is(fleet: list[Candidate], expected: str) -> None:
    assert place(baselines.least_loaded(), fleet, cached={"a": 900}) == expected


def test_prefix_only_follows_the_cache_whatever_the_load() -> None:
    fleet = [worker("a", room=5000, ahead=1500), worker("b"), worker("c", room=50_000)]
    assert place(baselines.prefix_only(), fleet, cached={"a": 640, "b": 576}) == "a"
    assert place(baselines.prefix_only(), fleet) == "b"


def test_first_come_changes_the_order_alone() -> None:
    ours, settings = baselines.ours(), baselines.first_come()
    assert settings.order.kind == "arrival"
    assert settings.profile == ours.profile


def test_every_run_takes_turns_from_its_own_start() -> None:
    fleet = [worker(name) for name in NAMES]
    assert place(baselines.round_robin(), fleet) == place(baselines.round_robin(), fleet) == "a"
    assert len({policy.name for policy in baselines.POLICIES}) == 5
