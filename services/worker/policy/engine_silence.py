"""What an engine's silence means. Pure: the caller brings the time.

An engine speaks after each step, and once a second while idle. One that is silent is stuck or stopped, or its
step takes long, which its steps so far tell apart. Its process has more time than its sequences: they go on
elsewhere after a prefill, while loading the model again may take longer than the engine sleeps.
"""

from __future__ import annotations

from typing import Final

STALL_S: Final = 3.0
STALL_STEPS: Final = 2.0
HAND_BACK_S: Final = 6.0
HAND_BACK_STEPS: Final = 8.0


class EngineSilence:
    """``stalled``: it gets no new work. ``lets_go``: what it has is given to others."""

    def __init__(self, now_s: float, longest_step_s: float = 0.0) -> None:
        """``longest_step_s``: what a step may take before one was seen."""
        self.stalled = False
        self._heard_s = now_s
        self._longest_step_s = longest_step_s

    def heard(self, now_s: float, step_s: float = 0.0) -> bool:
        """Note a message; True when it ends a stall."""
        self._heard_s = now_s
        self._longest_step_s = max(self._longest_step_s, step_s)
        was_stalled, self.stalled = self.stalled, False
        return was_stalled

    def begins(self, now_s: float) -> bool:
        """Whether a stall begins now: silent for ``STALL_S`` and ``STALL_STEPS`` times its longest step."""
        if self.stalled or now_s - self._heard_s <= max(STALL_S, STALL_STEPS * self._longest_step_s):
            return False
        self.stalled = True
        return True

    def lets_go(self, now_s: float) -> bool:
        """Whether it was silent for ``HAND_BACK_S``, and for ``HAND_BACK_STEPS`` times its longest step."""
        return now_s - self._heard_s > max(HAND_BACK_S, HAND_BACK_STEPS * self._longest_step_s)
