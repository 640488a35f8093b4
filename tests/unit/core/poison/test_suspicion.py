"""Who is a suspect after a crash, who is condemned, and that no neighbour ever is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.poison.suspicion import (
    FATAL_FAULTS,
    FATAL_KILLS,
    MAX_CRASHES,
    MAX_LOSSES,
    Condemned,
    LossCause,
    LostTooOften,
    Rerun,
    StepRole,
    Suspicion,
    judge,
)

FAULT, OUTSIDE = LossCause.FAULT, LossCause.OUTSIDE
Loss = tuple[LossCause, StepRole]


def after(*losses: Loss, others_killed: bool = False) -> Suspicion:
    """Return the suspicion after losses that all lead to another run."""
    found = Suspicion()
    for cause, role in losses:
        verdict = judge(found, cause, role, others_killed=others_killed)
        assert isinstance(verdict, Rerun), verdict
        found = verdict.suspicion
    return found


def test_members_of_the_step_that_faulted_are_suspects_and_others_are_not() -> None:
    assert after((FAULT, StepRole.SHARED)).trial_tokens == 2
    assert after((FAULT, StepRole.ALONE)).trial_tokens == 2
    assert after((FAULT, StepRole.BYSTANDER)).trial_tokens == 0


def test_who_faults_alone_twice_is_condemned() -> None:
    lone = FAULT, StepRole.ALONE
    assert judge(after((FAULT, StepRole.SHARED), lone), *lone, others_killed=True) == Condemned(FATAL_FAULTS)


def test_each_crash_in_a_shared_step_makes_the_next_trial_longer() -> None:
    shared = FAULT, StepRole.SHARED
    trials = [after(*[shared] * times).trial_tokens for times in (1, 2, 3)]
    assert trials == [2, 64, 1 << 20]


@pytest.mark.parametrize("role", [StepRole.NONE, StepRole.SHARED, StepRole.ALONE])
def test_one_kill_makes_no_suspect(role: StepRole) -> None:
    assert after((OUTSIDE, role)).trial_tokens == 0


def test_kills_outside_of_steps_make_no_suspect() -> None:
    assert after((OUTSIDE, StepRole.NONE), (OUTSIDE, StepRole.NONE)).trial_tokens == 0


def test_who_is_killed_alone_as_a_suspect_three_times_is_condemned() -> None:
    suspect = after((OUTSIDE, StepRole.SHARED), (OUTSIDE, StepRole.SHARED))
    assert suspect.trial_tokens == 2
    for _ in range(FATAL_KILLS - 1):
        verdict = judge(suspect, OUTSIDE, StepRole.ALONE, others_killed=False)
        assert isinstance(verdict, Rerun)
        suspect = verdict.suspicion
    assert isinstance(judge(suspect, OUTSIDE, StepRole.ALONE, others_killed=False), Condemned)


def test_kills_of_others_make_the_evidence_of_kills_void() -> None:
    suspect = Suspicion(shared_faults=1, lone_kills=FATAL_KILLS - 1)
    verdict = judge(suspect, OUTSIDE, StepRole.ALONE, others_killed=True)
    assert verdict == Rerun(Suspicion(shared_faults=1, lost=1, shared_kills=1))


def test_losses_of_a_kind_that_condemns_nobody_are_bounded() -> None:
    assert isinstance(
        judge(replace(Suspicion(), lost=MAX_LOSSES - 1), OUTSIDE, StepRole.NONE, others_killed=False),
        LostTooOften,
    )
    assert isinstance(
        judge(replace(Suspicion(), crashes=MAX_CRASHES - 1), FAULT, StepRole.BYSTANDER, others_killed=False),
        LostTooOften,
    )


_NEIGHBOUR_LOSSES = st.one_of(
    st.tuples(st.just(FAULT), st.sampled_from([StepRole.SHARED, StepRole.BYSTANDER]), st.booleans()),
    st.tuples(
        st.just(OUTSIDE), st.sampled_from([StepRole.NONE, StepRole.SHARED, StepRole.BYSTANDER]), st.booleans()
    ),
    # Alone, an engine that is killed while others are killed as well.
    st.tuples(st.just(OUTSIDE), st.just(StepRole.ALONE), st.just(True)),
)


@given(st.lists(_NEIGHBOUR_LOSSES, max_size=40))
def test_a_neighbour_is_never_condemned_and_its_runs_are_bounded(
    losses: list[tuple[LossCause, StepRole, bool]],
) -> None:
    found, runs = Suspicion(), 0
    for cause, role, others_killed in losses:
        verdict = judge(found, cause, role, others_killed=others_killed)
        assert not isinstance(verdict, Condemned)
        if isinstance(verdict, LostTooOften):
            break
        found, runs = verdict.suspicion, runs + 1
    assert runs <= MAX_LOSSES + MAX_CRASHES


_ANY_LOSS = st.tuples(st.sampled_from(list(LossCause)), st.sampled_from(list(StepRole)), st.booleans())


@given(st.lists(_ANY_LOSS, min_size=30, max_size=30))
def test_every_history_ends(losses: list[tuple[LossCause, StepRole, bool]]) -> None:
    found = Suspicion()
    for cause, role, others_killed in losses:
        verdict = judge(found, cause, role, others_killed=others_killed)
        if not isinstance(verdict, Rerun):
            return
        found = verdict.suspicion
    pytest.fail("it would be run for ever")
