"""What an exit code shows, and the part of each sequence in the step that ran."""

from __future__ import annotations

import signal

import pytest

from services.core.poison.suspicion import LossCause, StepRole
from services.worker.engine.process import EngineExitCode
from services.worker.policy.engine_failures import STEP_FAILED, STEP_LACKED_MEMORY, cause_of, role_of

FAULT, OUTSIDE = LossCause.FAULT, LossCause.OUTSIDE


@pytest.mark.parametrize(
    "code",
    [
        EngineExitCode.STEP_FAILED,
        EngineExitCode.OUT_OF_MEMORY,
        *(-s for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)),
    ],
)
def test_an_exception_and_signals_that_a_process_raises_itself_are_its_fault(code: int) -> None:
    assert cause_of(code) is FAULT


@pytest.mark.parametrize(
    "code",
    [
        EngineExitCode.DONE,
        EngineExitCode.ORPHANED,
        EngineExitCode.BAD_INPUT,
        1,
        -signal.SIGKILL,
        -signal.SIGTERM,
    ],
)
def test_a_kill_and_other_exits_are_nobodys(code: int) -> None:
    assert cause_of(code) is OUTSIDE


def test_the_exit_code_is_the_engines() -> None:
    assert int(EngineExitCode.STEP_FAILED) == STEP_FAILED
    assert int(EngineExitCode.OUT_OF_MEMORY) == STEP_LACKED_MEMORY


def test_roles_in_a_step() -> None:
    assert role_of(1, (1, 2), FAULT, running=True) is StepRole.SHARED
    assert role_of(3, (1, 2), FAULT, running=True) is StepRole.BYSTANDER
    assert role_of(1, (1,), OUTSIDE, running=True) is StepRole.ALONE


def test_roles_without_a_step() -> None:
    """A fault while nothing ran may be of any sequence that the engine planned."""
    assert role_of(1, (), OUTSIDE, running=True) is StepRole.NONE
    assert role_of(1, (), FAULT, running=True) is StepRole.SHARED
    assert role_of(1, (), FAULT, running=False) is StepRole.BYSTANDER
