"""Where a gateway places while nobody leads: within the last that it was told, and spread."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.fleet import PoolMember
from services.core.generation import NotAdmittedReason
from services.gateway.fallback import (
    CLOSED_S,
    GUESS_S,
    MAX_DENIED,
    FallbackSettings,
    GatewayFallback,
    Need,
    Placed,
    choose_by_snapshot,
    may_take,
    takes,
)
from tests.support.place_specs import PLACE_SPEC

SETTINGS = FallbackSettings(after_s=1.5, max_age_s=60.0, predicted_output_tokens=32)
SPEC = PLACE_SPEC


def member(
    name: str = "w1", *, room: int = 160, total: int = 160, slots: int = 4, max_len: int = 0
) -> PoolMember:
    return PoolMember(name, f"{name}:1", 7, "d", room, max(room, total), 16, slots, max_len)


@pytest.mark.parametrize(
    ("need", "found", "placed", "fits"),
    [
        (Need(80, 140), member(), Placed(), True),
        (Need(161, 170), member(), Placed(), False),
        (Need(145, 150), member(), Placed(), True),
        (Need(145, 150), member(room=159), Placed(), False),
        (Need(80, 140), member(), Placed(5, 1), True),
        (Need(80, 140), member(), Placed(6, 1), False),
        (Need(80, 140), member(slots=1), Placed(0, 1), False),
        (Need(80, 140), member(max_len=139), Placed(), False),
        (Need(80, 140), member(max_len=140), Placed(), True),
        (Need(80, 140, ("w1",)), member(), Placed(), False),
    ],
)
def test_a_worker_takes_what_it_has_room_for(
    need: Need, found: PoolMember, placed: Placed, fits: bool
) -> None:
    assert takes(need, found, placed) is fits


@pytest.mark.parametrize(
    ("need", "placed", "fits"),
    [
        (Need(160, 200), Placed(), True),
        (Need(161, 200), Placed(), False),
        (Need(80, 201), Placed(), False),
        (Need(80, 140), Placed(5, 9), True),
        (Need(80, 140), Placed(6, 1), False),
        (Need(80, 140, ("w1",)), Placed(), False),
    ],
)
def test_a_full_worker_may_have_room_by_now_but_for_what_was_placed_since(
    need: Need, placed: Placed, fits: bool
) -> None:
    full = member(room=0, slots=0, max_len=200)
    assert may_take(need, full, placed) is fits
    assert not takes(need, full, placed)


def test_of_two_drawn_the_one_with_more_room_is_taken() -> None:
    pair = [member("w1", room=800), member("w2", room=400)]
    need = Need(16, 16)
    assert {choose_by_snapshot(need, pair, {}, Random(seed)) for seed in range(20)} == {pair[0]}
    placed = {"w1": Placed(40, 1)}
    assert {choose_by_snapshot(need, pair, placed, Random(seed)) for seed in range(20)} == {pair[1]}


def test_the_worker_with_most_room_does_not_take_all() -> None:
    many = [member(f"w{index}", room=160 + 16 * index) for index in range(8)]
    rng = Random(1)
    taken = [choose_by_snapshot(Need(16, 16), many, {}, rng) for _ in range(200)]
    assert len(set(taken)) == 7, "each but the smallest wins some draw"


class Rig:
    def __init__(self) -> None:
        self.found = GatewayFallback(Random(3), SETTINGS)

    def told(self, *members: PoolMember, at_s: float = 100.0) -> None:
        self.found.leader_answered(at_s)
        self.found.replace_snapshot(9, members, at_s)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_nothing_is_placed_before_a_leader_told_of_the_fleet(rig: Rig) -> None:
    assert rig.found.wait_s(100.0) == math.inf
    rig.found.leader_answered(100.0)
    assert rig.found.wait_s(200.0) == math.inf
    assert rig.found.place(SPEC, 200.0) is None


def test_it_waits_until_the_leader_was_silent_for_a_while(rig: Rig) -> None:
    rig.told(member())
    assert rig.found.wait_s(100.5) == pytest.approx(1.0)
    assert rig.found.place(SPEC, 101.49) is None
    rig.found.leader_answered(101.0)
    assert rig.found.place(SPEC, 102.0) is None
    grant = rig.found.place(SPEC, 102.5)
    assert grant is not None
    assert (grant.worker_id, grant.address, grant.incarnation, grant.last_epoch) == ("w1", "w1:1", 7, 9)
    assert (grant.kv_blocks, grant.version_digest) == (5, "d")


def test_an_old_snapshot_is_not_placed_on(rig: Rig) -> None:
    rig.told(member())
    rig.found.leader_answered(140.0)
    assert rig.found.place(SPEC, 160.0) is not None
    assert rig.found.place(SPEC, 160.1) is None
    assert rig.found.wait_s(160.1) == math.inf
    assert rig.found.wait_s(150.0) == 0.0
    rig.found.leader_answered(159.0)
    assert rig.found.wait_s(159.5) == math.inf, "it will be too old when it is wanted"


def test_another_version_has_no_place(rig: Rig) -> None:
    rig.told(member())
    assert rig.found.place(replace(SPEC, version_digest="other"), 110.0) is None


def test_what_was_placed_takes_room_until_it_is_over(rig: Rig) -> None:
    rig.told(member(room=160))
    grants = [rig.found.place(SPEC, 110.0) for _ in range(3)]
    assert grants[2] is None
    assert grants[0] is not None
    rig.found.ended(grants[0], None, 111.0)
    assert rig.found.place(SPEC, 111.0) is not None
    assert rig.found.place(SPEC, 111.0) is None


def test_a_worker_that_refused_is_left_alone_for_a_moment(rig: Rig) -> None:
    rig.told(member("w1"), member("w2"))
    first = rig.found.place(SPEC, 110.0)
    assert first is not None
    rig.found.ended(first, NotAdmittedReason.NO_FALLBACK, 110.0)
    second = rig.found.place(SPEC, 110.0)
    assert second is not None
    assert second.worker_id != first.worker_id
    rig.found.ended(second, NotAdmittedReason.NO_FALLBACK, 110.0)
    assert rig.found.place(SPEC, 110.0 + CLOSED_S - 0.01) is None
    assert rig.found.place(SPEC, 110.0 + CLOSED_S) is not None


@pytest.mark.parametrize("reason", [NotAdmittedReason.NO_FALLBACK, NotAdmittedReason.STALE_EPOCH])
def test_workers_that_all_refuse_are_asked_less_and_less(rig: Rig, reason: NotAdmittedReason) -> None:
    """They hear a leader, or heard one that this gateway missed."""
    rig.told(*(member(f"w{number}") for number in range(50)))
    asked: list[float] = []
    now_s = 110.0
    while now_s < 140.0:
        grant = rig.found.place(SPEC, now_s)
        if grant is None:
            now_s += 0.05
            continue
        asked.append(now_s)
        rig.found.ended(grant, reason, now_s)
        now_s += 0.1
    assert MAX_DENIED < len(asked) < 32, "a request may be refused 64 times"
    rig.told(member("w1"), at_s=141.0)
    assert rig.found.wait_s(142.5) == 0.0, "what a new leader tells begins anew"


def test_what_ends_sets_credit_free_and_ends_the_pause(rig: Rig) -> None:
    rig.told(*(member(f"w{number}") for number in range(9)))
    running = rig.found.place(SPEC, 110.0)
    assert running is not None
    for number in range(MAX_DENIED):
        now_s = 110.0 + number * CLOSED_S
        together = [rig.found.place(SPEC, now_s) for _ in range(3)]
        for denied in together:
            assert denied is not None
            rig.found.ended(denied, NotAdmittedReason.NO_FALLBACK, now_s)
    assert rig.found.place(SPEC, 112.0) is None
    rig.found.ended(running, None, 112.0)
    assert rig.found.place(SPEC, 112.0) is not None


def test_a_new_snapshot_counts_what_ran_before_it(rig: Rig) -> None:
    rig.told(member(room=160))
    small = replace(SPEC, prompt_tokens=20)
    old = rig.found.place(small, 110.0)
    assert old is not None
    rig.told(member(room=80, total=80), at_s=112.0)
    assert rig.found.place(SPEC, 114.0) is not None
    rig.found.ended(old, None, 114.0)  # the snapshot has it, for as long as it is the newest
    assert rig.found.place(small, 114.0) is None


def test_a_full_fleet_is_known_and_asked_for_what_it_may_have_by_now(rig: Rig) -> None:
    rig.told(member("w1", room=0), member("w2", room=0, slots=0))
    assert rig.found.wait_s(110.0) == 0.0
    grants = [rig.found.place(SPEC, 110.0) for _ in range(3)]
    assert {grant.worker_id for grant in grants if grant is not None} == {"w1", "w2"}
    assert grants[2] is None, "one guess at a time for each worker"
    assert rig.found.place(SPEC, 110.0 + GUESS_S) is not None


def test_a_guess_that_ran_shows_room_for_what_comes(rig: Rig) -> None:
    rig.told(member(room=0))
    guessed = rig.found.place(SPEC, 110.0)
    assert guessed is not None
    rig.found.ended(guessed, None, 110.01)
    assert rig.found.place(SPEC, 110.01) is not None, "known by now, and no guess"
    assert rig.found.place(SPEC, 110.01) is None


def test_a_fleet_that_is_full_is_asked_less_and_less(rig: Rig) -> None:
    rig.told(*(member(f"w{number}", room=0) for number in range(64)))
    asked: list[float] = []
    now_s = 110.0
    while now_s < 140.0:
        grant = rig.found.place(SPEC, now_s)
        if grant is None:
            now_s += 0.05
            continue
        asked.append(now_s)
        rig.found.ended(grant, NotAdmittedReason.NO_ROOM, now_s)
    assert 4 <= len(asked) <= 10, "a request may be refused 64 times"
    assert asked[0] == 110.0
    rig.told(member("w1", room=0), at_s=141.0)
    assert rig.found.place(SPEC, 142.5) is not None, "what a new leader tells begins anew"


def test_who_has_less_room_than_was_told_is_known_to_be_full_for_that_much(rig: Rig) -> None:
    rig.told(member(room=160))
    refused = rig.found.place(SPEC, 110.0)
    assert refused is not None
    rig.found.ended(refused, NotAdmittedReason.NO_ROOM, 110.0)
    now_s = 110.0 + CLOSED_S
    assert rig.found.place(replace(SPEC, prompt_tokens=20), now_s) is not None, "four blocks are not five"
    rig.told(member("w1", room=160), at_s=120.0)
    refused = rig.found.place(SPEC, 122.0)
    assert refused is not None
    rig.found.ended(refused, NotAdmittedReason.NO_ROOM, 122.0)
    assert rig.found.place(SPEC, 122.0 + CLOSED_S) is not None, "a guess"
    assert rig.found.place(SPEC, 122.0 + CLOSED_S) is None


@given(st.lists(st.tuples(st.sampled_from(("place", "over", "refused")), st.integers(1, 120)), max_size=40))
def test_room_is_never_overdrawn_and_never_lost(turns: list[tuple[str, int]]) -> None:
    rig = Rig()
    rooms = {"w1": 160, "w2": 320}
    rig.told(*(member(name, room=room, total=room) for name, room in rooms.items()))
    held, now_s = [], 110.0
    for turn, prompt in turns:
        if turn == "place":
            grant = rig.found.place(replace(SPEC, prompt_tokens=prompt), now_s)
            if grant is not None:
                held.append(grant)
        elif held:
            refusal = NotAdmittedReason.NO_FALLBACK if turn == "refused" else None
            rig.found.ended(held.pop(prompt % len(held)), refusal, now_s)
            now_s += CLOSED_S if refusal is None else 10.0
        for name, room in rooms.items():
            used = [grant.kv_blocks for grant in held if grant.worker_id == name]
            assert 16 * sum(used) <= room, "nor by a guess"
    for grant in held:
        rig.found.ended(grant, None, now_s)
    now_s += 10.0
    whole = replace(SPEC, prompt_tokens=320 - 32)
    assert now_s > 160.0 or rig.found.place(whole, now_s) is not None
