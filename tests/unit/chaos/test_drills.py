"""The table of drills covers what it must, and the traffic follows from its seed."""

from __future__ import annotations

import random

from tests.chaos.drills import Drill, matrix
from tests.chaos.faults import Net
from tests.chaos.load import make_specs


def test_names_are_unique_and_fit_a_tenant() -> None:
    names = [drill.name for drill in matrix()]
    assert len(names) == len(set(names))
    assert all(name.replace("-", "").isalnum() and len(name) <= 40 for name in names)


def test_every_role_is_killed_frozen_and_ended() -> None:
    names = {drill.name for drill in matrix()}
    for role in ("gateway", "scheduler", "worker", "engine", "registry", "controlplane"):
        assert {f"{role}-kill", f"{role}-stop", f"{role}-term"} <= names
    assert {"etcd-freeze", "etcd-kill", "redis-freeze", "redis-kill", "redis-empty"} <= names
    assert {"worker-disk-full", "engine-hang"} <= names


def _edges(mode: str) -> set[tuple[str, str]]:
    return {
        (fault.source, fault.target)
        for drill in matrix()
        for fault in drill.faults
        if isinstance(fault, Net) and fault.mode == mode
    }


def test_every_edge_is_cut_and_turned_into_a_hole() -> None:
    expected = {
        ("gateway*", "scheduler*"),
        ("gateway*", "worker-0"),
        ("gateway*", "worker*"),
        ("worker*", "scheduler*"),
        ("worker*", "registry"),
        ("gateway*", "registry"),
        ("gateway*", "redis"),
        ("client", "gateway"),
        *((f"{role}*", "etcd") for role in ("gateway", "scheduler", "worker", "registry", "controlplane")),
    }
    assert _edges("cut") == expected
    assert _edges("hole") == expected


def test_every_drill_says_when_it_must_be_over() -> None:
    def bounded(drill: Drill) -> bool:
        return 0 < drill.silence_s <= 30 and 0 < drill.heal_s <= 90 and 0 < drill.slots_s <= 90

    assert all(bounded(drill) for drill in matrix())


def test_the_specs_are_the_same_every_time_and_mixed() -> None:
    specs = make_specs()
    random.seed(3)
    assert specs == make_specs()
    assert {spec.greedy for spec in specs} == {True, False}
    assert min(spec.tokens for spec in specs) < 41 < 199 < max(spec.tokens for spec in specs)
