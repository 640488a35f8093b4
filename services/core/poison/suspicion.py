"""Which lost run makes a request a suspect, and when a suspect is condemned. Pure.

A process that computes several requests at a time announces the members of each step before it runs it. After
a crash, the members of the step are *suspects*: from then on each runs in steps of its own. A
request that dies in a step of its own is the cause; after ``FATAL_FAULTS`` such deaths it is condemned. Two
deaths, in two processes, because a device that fails once may fail in any step.

A kill from outside (SIGKILL, a stop, the memory killer) and a hang say little about the step. They make a
suspect only of a request that was lost in ``OUTSIDE_LOSSES`` steps, and condemn it only after ``FATAL_KILLS``
deaths in steps of its own, with no other kill observed meanwhile: kills that come from outside also strike
processes in which the request does not run.

The language-model engine and fixed-cost batches use the same rules: a step is a batch of either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

FATAL_FAULTS: Final = 2  # own crashes in a step of its own
FATAL_KILLS: Final = 3  # kills and hangs in a step of its own
OUTSIDE_LOSSES: Final = 2  # kills and hangs in a shared step that make a suspect
MAX_LOSSES: Final = 3  # kills, hangs and lost workers, of a request that is not condemned
MAX_CRASHES: Final = 12  # crashes that others caused, or that no request caused alone
# How many tokens a suspect produces in steps of its own, by the number of crashes that made it one. Running
# again repeats all computation up to the fatal step, so that the first tokens show whether it kills again.
_TRIAL_TOKENS: Final = (2, 64)
_WHOLE: Final = 1 << 20


class LossCause(StrEnum):
    """What ended the process: a fault that its steps caused, or something that they need not have caused."""

    OUTSIDE = "outside"
    FAULT = "fault"


class StepRole(StrEnum):
    """The part of a request in the step that ran when the process ended."""

    NONE = "none"  # no step ran
    BYSTANDER = "bystander"  # a step of others ran
    SHARED = "shared"  # its step had other members
    ALONE = "alone"  # its step had no other member


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The losses of one request, by cause and role."""

    shared_faults: int = 0
    lone_faults: int = 0
    shared_kills: int = 0
    lone_kills: int = 0
    lost: int = 0  # kills, hangs and lost workers, without the lone kills
    crashes: int = 0  # crashes of shared steps, and of steps of others

    @property
    def trial_tokens(self) -> int:
        """How many tokens its next run produces in steps of its own; 0: it is no suspect."""
        times = self.shared_faults + max(0, self.shared_kills - OUTSIDE_LOSSES + 1)
        if self.lone_faults or self.lone_kills:
            times = max(times, 1)
        if not times:
            return 0
        return _TRIAL_TOKENS[times - 1] if times <= len(_TRIAL_TOKENS) else _WHOLE


@dataclass(frozen=True, slots=True)
class Rerun:
    """Run it again; a suspect runs in steps of its own."""

    suspicion: Suspicion


@dataclass(frozen=True, slots=True)
class Condemned:
    """It is the cause: it never runs again on this version."""

    deaths: int


@dataclass(frozen=True, slots=True)
class LostTooOften:
    """It is not known to be the cause, but it was lost too often to be run again."""

    losses: int


Verdict = Rerun | Condemned | LostTooOften


def judge(suspicion: Suspicion, cause: LossCause, role: StepRole, *, others_killed: bool) -> Verdict:
    """Return what becomes of a request after one more loss.

    ``others_killed``: since it is a suspect, a kill struck a process in which it did not run alone.
    """
    found = _counted(suspicion, cause, role, others_killed=others_killed)
    if found.lone_faults >= FATAL_FAULTS or found.lone_kills >= FATAL_KILLS:
        return Condemned(found.lone_faults + found.lone_kills)
    if found.lost >= MAX_LOSSES or found.crashes >= MAX_CRASHES:
        return LostTooOften(found.lost + found.crashes + found.lone_faults)
    return Rerun(found)


def _counted(before: Suspicion, cause: LossCause, role: StepRole, *, others_killed: bool) -> Suspicion:
    if role is StepRole.BYSTANDER:
        return replace(before, crashes=before.crashes + 1)
    if cause is LossCause.FAULT:
        if role is StepRole.ALONE:
            return replace(before, lone_faults=before.lone_faults + 1)
        return replace(before, shared_faults=before.shared_faults + 1, crashes=before.crashes + 1)
    if role is StepRole.ALONE and before.trial_tokens and not others_killed:
        return replace(before, lone_kills=before.lone_kills + 1)
    shared = before.shared_kills + (role is not StepRole.NONE)
    return replace(before, lost=before.lost + 1, shared_kills=shared, lone_kills=0)
