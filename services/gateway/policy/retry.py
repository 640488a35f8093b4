"""Retries of a sequence that its worker returned, rejected or lost, and their pace; which failures of a
request with a key leave it open for another run.

The budget is one of retries (AWS Builders' Library). It delays retries and does not reject them: clients wait
for the sequences of a lost worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    OverQuota,
    PermissionDenied,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
)
from services.core.generation import NotAdmittedReason
from services.core.poison.suspicion import MAX_LOSSES, LossCause, StepRole

MAX_REFUSALS: Final = 64
# How long a sequence avoids the worker that lost it while no other worker takes it.
EXCLUDED_S: Final = 2.0
_FIRST_LOSS_S: Final = 0.05
_MAX_LOSS_S: Final = 0.8
_FIRST_DELAY_S: Final = 0.002
_MAX_DELAY_S: Final = 0.2
_FIRST_UNREACHED_S: Final = 0.05
_MAX_UNREACHED_S: Final = 0.5
# Another run of a request with a key may succeed: it continues from the produced tokens. Another caller may
# have permissions that this one lacks.
_PASSING: Final = (
    Unavailable,
    DeadlineExceeded,
    RequestCancelled,
    OverQuota,
    InternalError,
    PermissionDenied,
    Unauthenticated,
)


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """The budget: ``ratio`` of the requests, plus ``floor_per_s``; at most ``burst`` accumulate."""

    ratio: float = 0.1
    floor_per_s: float = 10.0
    burst: float = 128.0

    def __post_init__(self) -> None:
        if self.ratio < 0 or self.floor_per_s <= 0 or self.burst < 1:
            raise ValueError("a budget has a floor above zero and holds at least one")


class RetryBudget:
    """Paces one gateway's placements after losses.

    Over any span in which n requests began and t seconds passed, it permits at most ``burst + ratio * n +
    floor_per_s * t`` retries. Single writer; time is an argument, in monotonic seconds.
    """

    def __init__(self, policy: BudgetPolicy | None = None) -> None:
        self._policy = policy if policy is not None else BudgetPolicy()
        self._balance = self._policy.burst
        self._as_of_s: float | None = None

    def request_began(self, now_s: float) -> None:
        self._fill(now_s, self._policy.ratio)

    def take(self, now_s: float) -> float:
        """Take one retry and return how long it has to wait, in seconds."""
        self._fill(now_s, 0.0)
        self._balance -= 1.0
        return max(0.0, -self._balance) / self._policy.floor_per_s

    def _fill(self, now_s: float, extra: float) -> None:
        passed_s = 0.0 if self._as_of_s is None else max(0.0, now_s - self._as_of_s)
        self._as_of_s = now_s
        self._balance = min(self._policy.burst, self._balance + passed_s * self._policy.floor_per_s + extra)


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """Request another placement, after a delay, without the named worker."""

    delay_s: float = 0.0
    exclude_worker: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


def after_refusal(
    reason: NotAdmittedReason, worker_id: str, refusals: int, jitter: float
) -> PlaceAgain | GiveUp:
    """Decide after NOT_ADMITTED number ``refusals`` (from 1). ``jitter`` is uniform in 0..1.

    A refusal is no retry: nothing ran. The delay grows, to avoid a tight loop of requests to a scheduler with
    a stale view. A worker that is not ready or drains is excluded.
    """
    if refusals >= MAX_REFUSALS:
        return GiveUp(f"{refusals} grants in a row were refused, the last with {reason.value}")
    delay_s = min(_FIRST_DELAY_S * 2 ** min(refusals - 1, 16), _MAX_DELAY_S) * (0.5 + 0.5 * jitter)
    leave_alone = reason in (NotAdmittedReason.NOT_READY, NotAdmittedReason.DRAINING)
    return PlaceAgain(delay_s if refusals > 1 else 0.0, worker_id if leave_alone else "")


def after_loss(worker_id: str, losses: int, jitter: float, cause: LossCause, role: StepRole) -> PlaceAgain:
    """Return when to place a sequence again after its loss number ``losses``, from 1.

    A worker that the placement excludes is charged with a failure. After a fault in a step it is not: one of
    the members is the likely cause. It is again when a step of one member fails, until that fails elsewhere
    too.
    """
    delay_s = min(_FIRST_LOSS_S * 2 ** min(losses - 1, 16), _MAX_LOSS_S) * (0.5 + 0.5 * jitter)
    blameless = role is StepRole.BYSTANDER or (cause is LossCause.FAULT and role is not StepRole.ALONE)
    return PlaceAgain(delay_s, "" if blameless else worker_id)


def after_not_finite(worker_id: str, tries: int, jitter: float) -> PlaceAgain | GiveUp:
    """Decide after the model gave no finite numbers for the sequence, the ``tries``-th time."""
    if tries >= MAX_LOSSES:
        return GiveUp(f"no finite numbers on {tries} tries")
    return after_loss(worker_id, tries, jitter, LossCause.OUTSIDE, StepRole.NONE)


class OutsideKills:
    """The last time that a kill struck an engine in which no sequence of this gateway ran alone.

    Such a kill shows that engines are killed from outside. Time is monotonic, in seconds.
    """

    def __init__(self) -> None:
        self._last_s = -math.inf

    def note(self, cause: LossCause, role: StepRole, now_s: float) -> None:
        """Record the end of a sequence with ENGINE_LOST."""
        if cause is LossCause.OUTSIDE and role in (StepRole.NONE, StepRole.SHARED):
            self._last_s = now_s

    def any_since(self, since_s: float) -> bool:
        return self._last_s >= since_s


def after_unreached(
    worker_id: str, attempts: int, waited_s: float, patience_s: float, jitter: float
) -> PlaceAgain | GiveUp:
    """Decide after a worker disconnected before it accepted the sequence, the ``attempts``-th time in a row.

    Nothing ran, so it is no loss: the cause is the network, or a worker that just ended. Bounded by time,
    since the network determines the duration of an attempt.
    """
    if waited_s > patience_s:
        return GiveUp(f"no worker could be reached for {waited_s:.0f} s")
    delay_s = min(_FIRST_UNREACHED_S * 2 ** min(attempts - 1, 16), _MAX_UNREACHED_S)
    return PlaceAgain(delay_s * (0.5 + 0.5 * jitter), worker_id)


def ends_record(error: FairwayError) -> bool:
    """Whether every retry of an accepted request would meet this error again."""
    return error.retry_after_s is None and not isinstance(error, _PASSING)
