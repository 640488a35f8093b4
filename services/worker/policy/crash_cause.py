"""What ended an engine process, and what each of its sequences has to do with it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Final

from services.core.poison.suspicion import LossCause, StepRole

STEP_FAILED: Final = 4  # exit code of an engine whose step raised an exception
# Signals that a process raises against itself. SIGKILL, SIGTERM and the like come from others.
_OWN_SIGNALS: Final = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)


def cause_of(exit_code: int) -> LossCause:
    """Return the cause of an exit that the agent did not ask for. ``exit_code`` is negative for a signal."""
    is_fault = exit_code == STEP_FAILED or -exit_code in _OWN_SIGNALS
    return LossCause.FAULT if is_fault else LossCause.OUTSIDE


def role_of(handle: int, members: Collection[int], cause: LossCause, *, running: bool) -> StepRole:
    """Return the role of a sequence in the step that ran. ``members`` are as announced, empty without a step.

    After a fault outside a step, everything that ``running`` shared what the engine did: any of it may be
    the cause.
    """
    if members:
        if handle not in members:
            return StepRole.BYSTANDER
        return StepRole.ALONE if len(members) == 1 else StepRole.SHARED
    if cause is LossCause.OUTSIDE:
        return StepRole.NONE
    return StepRole.SHARED if running else StepRole.BYSTANDER
