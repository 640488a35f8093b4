"""How engines fail: what ended a process and the part of each sequence in it, and stalls. Pure.

An engine sends a message after each step, and one per second while idle. Without messages it is stuck or
stopped, or its step is long; the longest step so far separates these cases. The process gets more time than
its sequences: they resume on another worker after a prefill, while loading the model again may take longer
than the stall lasts.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Final

from services.core.poison.suspicion import LossCause, StepRole

STALL_S: Final = 3.0
STALL_STEPS: Final = 2.0
ABANDON_S: Final = 6.0
ABANDON_STEPS: Final = 8.0
STEP_FAILED: Final = 4  # exit code of an engine whose step raised an exception
STEP_LACKED_MEMORY: Final = 6  # exit code of an engine whose step did not get its memory
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
    is_fault = exit_code in (STEP_FAILED, STEP_LACKED_MEMORY) or -exit_code in _OWN_SIGNALS
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


class StallDetector:
    """``stalled``: the engine gets no new work. ``abandons``: its sequences move to other workers."""

    def __init__(self, now_s: float, longest_step_s: float = 0.0) -> None:
        """``longest_step_s``: the expected duration of a step before the first one was measured."""
        self.stalled = False
        self._last_message_s = now_s
        self._longest_step_s = longest_step_s

    def on_message(self, now_s: float, step_s: float = 0.0) -> bool:
        """Record a message; return True when it ends a stall."""
        self._last_message_s = now_s
        self._longest_step_s = max(self._longest_step_s, step_s)
        was_stalled, self.stalled = self.stalled, False
        return was_stalled

    def begins(self, now_s: float) -> bool:
        """Return True once per stall: silent for ``STALL_S`` and ``STALL_STEPS`` times its longest step."""
        if self.stalled or now_s - self._last_message_s <= max(STALL_S, STALL_STEPS * self._longest_step_s):
            return False
        self.stalled = True
        return True

    def abandons(self, now_s: float) -> bool:
        """Return whether it was silent for ``ABANDON_S`` and ``ABANDON_STEPS`` times its longest step."""
        return now_s - self._last_message_s > max(ABANDON_S, ABANDON_STEPS * self._longest_step_s)
