"""The plan brings any state to the desired one, and does nothing in the desired one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.records import AssignedVersion, InPlace, Priority
from services.core.rollouts.routes import Withdrawal
from services.worker.policy.lifecycle import (
    Action,
    CancelRemoval,
    Discard,
    DrainVersion,
    Fetch,
    LoadVersion,
    RetireVersion,
    Slot,
    VersionPhase,
    backoff_s,
    plan,
    wanted,
    withdrawals,
)

DIGESTS = ("d1", "d2", "d3")
NOW_S = 100.0
versions = st.builds(
    AssignedVersion,
    deployment=st.sampled_from(("x", "y")),
    model=st.just("m"),
    version_digest=st.sampled_from(DIGESTS),
    executor=st.sampled_from(("torch", "null")),
    priority=st.sampled_from(list(Priority)),
    served=st.booleans(),
    retiring=st.booleans(),
)
assignments = st.lists(versions, max_size=4)
slots = st.lists(
    st.builds(
        Slot,
        version=versions,
        phase=st.sampled_from(VersionPhase),
        running=st.integers(0, 2),
        has_files=st.booleans(),
        retry_at_s=st.sampled_from((0.0, NOW_S + 10)),
        drain_until_s=st.sampled_from((0.0, NOW_S + 10)),
        unbooked=st.booleans(),
        needed_bytes=st.sampled_from((0, 5)),
        restarting=st.booleans(),
    ).map(
        lambda slot: replace(
            slot, has_files=slot.has_files or slot.phase not in (VersionPhase.FETCHING, VersionPhase.BROKEN)
        )
    ),
    max_size=3,
    unique_by=lambda slot: slot.version.version_digest,
)


def apply(state: dict[str, Slot], action: Action, now_s: float) -> None:
    """The world as it goes when nothing fails."""
    match action:
        case Fetch(version):
            before = state.get(version.version_digest)
            assert before is None or before.phase is VersionPhase.BROKEN
            state[version.version_digest] = Slot(version, VersionPhase.FETCHING)
        case LoadVersion(digest):
            assert state[digest].has_files
            assert state[digest].phase in (VersionPhase.FETCHED, VersionPhase.BROKEN)
            state[digest] = replace(state[digest], phase=VersionPhase.LOADING)
        case DrainVersion(digest):
            assert state[digest].phase in (VersionPhase.READY, VersionPhase.RETIRING)
            state[digest] = replace(state[digest], phase=VersionPhase.DRAINING, drain_until_s=now_s + 5)
        case RetireVersion(digest):
            assert state[digest].phase is VersionPhase.READY
            state[digest] = replace(state[digest], phase=VersionPhase.RETIRING, idle_since_s=now_s)
        case CancelRemoval(digest):
            assert state[digest].phase in (VersionPhase.RETIRING, VersionPhase.DRAINING)
            state[digest] = replace(state[digest], phase=VersionPhase.READY)
        case Discard(digest):
            assert state[digest].phase is not VersionPhase.STOPPING
            state[digest] = replace(state[digest], phase=VersionPhase.STOPPING)


def pass_time(state: dict[str, Slot]) -> None:
    for digest, slot in list(state.items()):
        match slot.phase:
            case VersionPhase.RETIRING if slot.running:
                state[digest] = replace(slot, running=slot.running - 1)
            case VersionPhase.FETCHING:
                state[digest] = replace(slot, phase=VersionPhase.FETCHED, has_files=True)
            case VersionPhase.LOADING:
                state[digest] = replace(slot, phase=VersionPhase.PROBING, unbooked=False)
            case VersionPhase.PROBING:
                state[digest] = replace(slot, phase=VersionPhase.READY)
            case VersionPhase.STOPPING:
                del state[digest]


@settings(deadline=None)
@given(assignments, slots)
def test_every_state_converges_and_then_stays(assigned: list[AssignedVersion], observed: list[Slot]) -> None:
    desired = wanted(assigned)
    state = {slot.version.version_digest: slot for slot in observed}
    now_s = NOW_S
    for _ in range(16):
        actions = plan(desired, list(state.values()), now_s, free_bytes=5, retire_s=8.0)
        assert len(
            {
                action.version.version_digest if isinstance(action, Fetch) else action.version_digest
                for action in actions
            }
        ) == len(actions), "one action per version at a time"
        for action in actions:
            apply(state, action, now_s)
        pass_time(state)
        now_s += 4
    assert {digest: slot.version.executor for digest, slot in state.items()} == {
        digest: version.executor for digest, version in desired.items() if not version.retiring
    }
    assert all(slot.phase is VersionPhase.READY for slot in state.values())
    assert plan(desired, list(state.values()), now_s) == ()


@settings(deadline=None)
@given(assignments, slots)
def test_running_sequences_are_not_cut_short(assigned: list[AssignedVersion], observed: list[Slot]) -> None:
    desired = wanted(assigned)
    phases = {slot.version.version_digest: slot for slot in observed}
    for action in plan(desired, observed, NOW_S):
        if isinstance(action, Discard):
            slot = phases[action.version_digest]
            assert slot.phase is not VersionPhase.READY
            assert slot.phase is not VersionPhase.DRAINING or slot.running == 0 or slot.drain_until_s <= NOW_S


def test_what_retires_leaves_once_nothing_was_placed_for_a_while() -> None:
    version = AssignedVersion("x", "m", "d1", retiring=True)
    slot = Slot(version, VersionPhase.READY, running=1, has_files=True)
    assert plan({"d1": version}, [slot], NOW_S, retire_s=35.0) == (RetireVersion("d1"),)
    slot = replace(slot, phase=VersionPhase.RETIRING, idle_since_s=NOW_S)
    assert plan({"d1": version}, [slot], NOW_S + 3600, retire_s=35.0) == (), "a sequence runs"
    slot = replace(slot, running=0)
    assert plan({"d1": version}, [slot], NOW_S + 34.9, retire_s=35.0) == ()
    assert plan({"d1": version}, [slot], NOW_S + 35.0, retire_s=35.0) == (Discard("d1"),)
    assert plan({"d1": replace(version, retiring=False)}, [slot], NOW_S, retire_s=35.0) == (
        CancelRemoval("d1"),
    )
    assert plan({}, [slot], NOW_S, retire_s=35.0) == (DrainVersion("d1"),), "its deployment was deleted"


def test_an_engine_that_dies_while_it_retires_is_started_again_for_what_it_had() -> None:
    version = AssignedVersion("x", "m", "d1", retiring=True)
    slot = Slot(version, VersionPhase.BROKEN, has_files=True, restarting=True, idle_since_s=NOW_S)
    assert plan({"d1": version}, [slot], NOW_S + 1, retire_s=35.0) == (LoadVersion("d1"),)
    assert plan({"d1": version}, [slot], NOW_S + 40, retire_s=35.0) == (Discard("d1"),)
    assert plan({"d1": version}, [], NOW_S, retire_s=35.0) == (), "nothing loads it anew"


def test_a_version_before_that_lost_its_engine_has_its_memory_again_first() -> None:
    old, new = AssignedVersion("x", "m", "d1", served=True), AssignedVersion("x", "m", "d2")
    crashed = Slot(
        old, VersionPhase.BROKEN, has_files=True, restarting=True, unbooked=True, retry_at_s=NOW_S + 1
    )
    waiting = Slot(new, VersionPhase.BROKEN, has_files=True, unbooked=True, needed_bytes=5)
    both = {"d1": old, "d2": new}
    assert plan(both, [crashed, waiting], NOW_S, free_bytes=9) == ()
    assert plan(both, [crashed, waiting], NOW_S + 1, free_bytes=9) == (LoadVersion("d1"),)
    loading = replace(crashed, phase=VersionPhase.LOADING, unbooked=False)
    assert plan(both, [loading, waiting], NOW_S + 2, free_bytes=9) == (LoadVersion("d2"),)


def test_a_version_that_another_deployment_wants_does_not_retire() -> None:
    both = wanted([AssignedVersion("a", "m", "d1", retiring=True), AssignedVersion("b", "m", "d1")])
    assert not both["d1"].retiring


def test_what_frees_memory_comes_first() -> None:
    old = Slot(AssignedVersion("x", "m", "d9"), VersionPhase.BROKEN)
    actions = plan(wanted([AssignedVersion("x", "m", "d1")]), [old], NOW_S)
    assert [type(action) for action in actions] == [Discard, Fetch]


def test_a_broken_version_waits_for_its_time() -> None:
    version = AssignedVersion("x", "m", "d1")
    slot = Slot(version, VersionPhase.BROKEN, has_files=True, retry_at_s=NOW_S + 1)
    assert plan({"d1": version}, [slot], NOW_S) == ()
    assert plan({"d1": version}, [slot], NOW_S + 1) == (LoadVersion("d1"),)
    assert plan({"d1": version}, [replace(slot, has_files=False)], NOW_S + 1) == (Fetch(version),)


def test_a_final_failure_is_not_tried_again() -> None:
    version = AssignedVersion("x", "m", "d1")
    slot = Slot(version, VersionPhase.BROKEN, has_files=True, final=True)
    assert plan({"d1": version}, [slot], NOW_S) == ()
    assert plan({}, [slot], NOW_S) == (Discard("d1"),)


def test_a_failure_to_replace_weights_lasts_while_the_version_before_is_here() -> None:
    version = AssignedVersion("x", "m", "d1", in_place=InPlace(5.0, 7))
    before = Slot(AssignedVersion("x", "m", "d2", served=True), VersionPhase.READY)
    other = Slot(AssignedVersion("y", "m", "d3"), VersionPhase.READY)
    slot = Slot(version, VersionPhase.BROKEN, has_files=True, final=True, failed_in_place=True)
    desired = {"d1": version, "d2": before.version, "d3": other.version}
    assert plan(desired, [slot, before, other], NOW_S) == ()
    assert plan({"d1": version, "d3": other.version}, [slot, other], NOW_S) == (Discard("d1"),)


def test_what_does_not_fit_waits_for_memory_and_not_for_time() -> None:
    version = AssignedVersion("x", "m", "d1")
    slot = Slot(
        version, VersionPhase.BROKEN, has_files=True, unbooked=True, needed_bytes=10, retry_at_s=NOW_S + 99
    )
    assert plan({"d1": version}, [slot], NOW_S, free_bytes=9) == ()
    assert plan({"d1": version}, [slot], NOW_S + 100, free_bytes=9) == ()
    assert plan({"d1": version}, [slot], NOW_S, free_bytes=10) == (LoadVersion("d1"),)


def test_who_waits_for_memory_waits_until_all_of_it_is_given_back() -> None:
    version = AssignedVersion("x", "m", "d1")
    slot = Slot(version, VersionPhase.BROKEN, has_files=True, unbooked=True, needed_bytes=10)
    assert plan({"d1": version}, [slot], NOW_S, free_bytes=10, releasing=True) == ()
    assert plan({"d1": version}, [replace(slot, phase=VersionPhase.FETCHED)], NOW_S, releasing=True) == (
        LoadVersion("d1"),
    )


LOW = AssignedVersion("low", "m", "low", priority=Priority.BATCH)
HIGH = AssignedVersion("high", "m", "high", priority=Priority.INTERACTIVE)
COMING = Slot(LOW, VersionPhase.FETCHED, has_files=True, unbooked=True)


def loads(*slots: Slot, free_bytes: int = 0) -> list[str]:
    actions = plan(wanted([LOW, HIGH]), slots, NOW_S, free_bytes=free_bytes)
    return [action.version_digest for action in actions if isinstance(action, LoadVersion)]


def test_a_lower_priority_is_not_loaded_into_memory_that_a_higher_one_is_about_to_have() -> None:
    high = Slot(HIGH, VersionPhase.FETCHED, has_files=True, unbooked=True)
    assert loads(COMING, high) == ["high"]
    assert loads(COMING, replace(high, phase=VersionPhase.LOADING)) == []
    assert loads(COMING, replace(high, phase=VersionPhase.LOADING, unbooked=False, granted_bytes=5)) == [
        "low"
    ]
    assert (
        loads(COMING, replace(high, phase=VersionPhase.BROKEN, restarting=True, retry_at_s=NOW_S + 9)) == []
    )
    assert loads(COMING, replace(high, phase=VersionPhase.FETCHING, has_files=False)) == ["low"]


def test_a_higher_priority_that_cannot_be_helped_holds_nobody_up() -> None:
    high = Slot(HIGH, VersionPhase.BROKEN, has_files=True, unbooked=True, needed_bytes=10)
    assert loads(COMING, high, free_bytes=9) == ["low"]
    assert loads(COMING, replace(high, needed_bytes=0, final=True)) == ["low"]
    assert loads(COMING, replace(high, needed_bytes=0, retry_at_s=NOW_S + 9)) == ["low"]
    leaving = Slot(AssignedVersion("old", "m", "old"), VersionPhase.STOPPING, granted_bytes=5)
    assert loads(COMING, leaving, high, free_bytes=9) == [], "what is leaving makes the room"


def test_deployments_of_one_version_have_the_highest_of_their_priorities() -> None:
    other = replace(HIGH, deployment="z", version_digest="low")
    assert wanted([LOW, other])["low"] == replace(LOW, priority=Priority.INTERACTIVE)


def test_backoff_doubles_up_to_a_cap() -> None:
    assert [backoff_s(n, first_s=0.5, most_s=3) for n in (0, 1, 2, 3, 4, 10_000)] == [0.5, 0.5, 1, 2, 3, 3]


def test_the_least_route_revision_of_a_version_is_that_of_its_most_open_deployment() -> None:
    closed = AssignedVersion("a", "m", "sha256:x", least_route_revision=9)
    shared = [replace(closed, version_digest="sha256:y"), AssignedVersion("b", "m", "sha256:y")]
    assert withdrawals([closed, *shared]) == {"sha256:x": Withdrawal("sha256:x", 9)}


def test_a_warm_version_stays_until_its_time_or_until_its_memory_is_needed() -> None:
    warm = AssignedVersion("x", "m", "d1", retiring=True, warm_until_unix_s=60.0)
    desired = {"d1": warm, "d2": AssignedVersion("x", "m", "d2")}
    retired = Slot(warm, VersionPhase.RETIRING, has_files=True, granted_bytes=8)
    beside = Slot(desired["d2"], VersionPhase.READY, has_files=True)
    terms = {"now_s": NOW_S, "retire_s": 5.0, "free_bytes": 4}
    assert plan(desired, [retired, beside], unix_s=59.0, **terms) == ()  # type: ignore[arg-type]
    assert plan(desired, [retired, beside], unix_s=60.0, **terms) == (Discard("d1"),)  # type: ignore[arg-type]
    short = replace(beside, phase=VersionPhase.BROKEN, unbooked=True, needed_bytes=5)
    assert plan(desired, [retired, short], unix_s=59.0, **terms) == (Discard("d1"),)  # type: ignore[arg-type]
    for needed_bytes in (4, 13):  # it fits beside the warm one, or not even without it
        fits = replace(short, needed_bytes=needed_bytes)
        found = plan(desired, [retired, fits], unix_s=59.0, **terms)  # type: ignore[arg-type]
        assert Discard("d1") not in found
    fits = replace(short, needed_bytes=4)
    found = plan(desired, [retired, fits], unix_s=59.0, **terms)  # type: ignore[arg-type]
    assert found == (LoadVersion("d2"),)
    running = replace(retired, running=1)
    assert plan(desired, [running, short], unix_s=99.0, **terms) == (), "a stream ends first"  # type: ignore[arg-type]
