"""What becomes of a sequence that its worker gave back, refused or lost."""

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
