"""What becomes of a sequence that its worker gave back, refused or lost, and how fast that goes on.

The budget is one of retries (AWS Builders' Library), spent by pacing: what a lost worker leaves behind has
clients that wait for it, so that it is spread out rather than broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.core.generation import NotAdmittedReason

MAX_LOSSES: Final = 3
MAX_REFUSALS: Final = 64
# How long a sequence is kept away from the worker that lost it while no other takes it.
EXCLUDED_S: Final = 2.0
_FIRST_DELAY_S: Final = 0.002
_MAX_DELAY_S: Final = 0.2
_FIRST_UNREACHED_S: Final = 0.05
_MAX_UNREACHED_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """``ratio`` of the requests, and ``floor_per_s`` besides, at most ``burst`` saved up."""

    ratio: float = 0.1
    floor_per_s: float = 10.0
    burst: float = 128.0

    def __post_init__(self) -> None:
        if self.ratio < 0 or self.floor_per_s <= 0 or self.burst < 1:
            raise ValueError("a budget has a floor above zero and holds at least one")


class RetryBudget:
    """Paces what one gateway places again after a loss.

    Over any span in which n requests began and t seconds passed, at most ``burst + ratio * n +
    floor_per_s * t`` go. Single writer; time is an argument, in monotonic seconds.
    """

    def __init__(self, policy: BudgetPolicy | None = None) -> None:
        self._policy = policy if policy is not None else BudgetPolicy()
        self._balance = self._policy.burst
        self._as_of_s: float | None = None

    @property
    def balance(self) -> float:
        """How many may go at once; below zero, how many wait."""
        return self._balance

    def request_began(self, now_s: float) -> None:
        self._fill(now_s, self._policy.ratio)

    def take(self, now_s: float) -> float:
        """Take one and return how long it has to wait for its turn, seconds."""
        self._fill(now_s, 0.0)
        self._balance -= 1.0
        return max(0.0, -self._balance) / self._policy.floor_per_s

    def _fill(self, now_s: float, extra: float) -> None:
        passed_s = 0.0 if self._as_of_s is None else max(0.0, now_s - self._as_of_s)
        self._as_of_s = now_s
        self._balance = min(self._policy.burst, self._balance + passed_s * self._policy.floor_per_s + extra)


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """Ask the scheduler again, after a delay, without the named worker."""

    delay_s: float = 0.0
    exclude_worker: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


def after_refusal(
    reason: NotAdmittedReason, worker_id: str, refusals: int, jitter: float
) -> PlaceAgain | GiveUp:
    """Decide after NOT_ADMITTED number ``refusals`` (from 1). ``jitter`` is uniform in 0..1.

    A refusal is no retry: nothing ran. The delay grows so that a scheduler with a stale view is not
    asked in a tight loop; a worker that is not ready or drains is left alone.
    """
    if refusals >= MAX_REFUSALS:
        return GiveUp(f"{refusals} grants in a row were refused, the last with {reason.value}")
    delay_s = min(_FIRST_DELAY_S * 2 ** min(refusals - 1, 16), _MAX_DELAY_S) * (0.5 + 0.5 * jitter)
    leave_alone = reason in (NotAdmittedReason.NOT_READY, NotAdmittedReason.DRAINING)
    return PlaceAgain(delay_s if refusals > 1 else 0.0, worker_id if leave_alone else "")


def after_loss(worker_id: str, losses: int, jitter: float) -> PlaceAgain | GiveUp:
    """Decide after the engine or the worker died under the sequence for the ``losses``-th time.

    Bounded, since a request that kills whatever runs it must not walk through the fleet.
    """
    if losses >= MAX_LOSSES:
        return GiveUp(f"the worker was lost under this request {losses} times")
    return PlaceAgain(0.05 * 2 ** (losses - 1) * (0.5 + 0.5 * jitter), worker_id)


def after_unreached(
    worker_id: str, attempts: int, waited_s: float, patience_s: float, jitter: float
) -> PlaceAgain | GiveUp:
    """Decide after a worker went away before it accepted the sequence, the ``attempts``-th time in a row.

    Nothing ran, so it is no loss: the network between is to blame, or a worker that just ended. Bounded by
    time, since an attempt takes as long as the network lets it.
    """
    if waited_s > patience_s:
        return GiveUp(f"no worker could be reached for {waited_s:.0f} s")
    delay_s = min(_FIRST_UNREACHED_S * 2 ** min(attempts - 1, 16), _MAX_UNREACHED_S)
    return PlaceAgain(delay_s * (0.5 + 0.5 * jitter), worker_id)
