"""When this worker takes what a gateway placed by itself, since nobody leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.core.generation import FallbackGrant, NotAdmittedReason
from services.ports.clock import Clock


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """``after_s``: for how long no leader may have been heard. ``credit_ratio``: the share of a pool's blocks
    that such sequences may hold together; a leader that comes back finds the rest as it left it."""

    after_s: float = 1.5
    credit_ratio: float = 0.25


class FallbackAdmission:
    """Notes when a leader was heard last; the time before the first counts from the start."""

    def __init__(
        self,
        clock: Clock,
        rules: FallbackRules | None = None,
        *,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """``started`` is called for each such sequence that was accepted."""
        self.started = started
        self._clock = clock
        self._rules = rules if rules is not None else FallbackRules()
        self._heard_s = clock.monotonic_s()

    def heard(self) -> None:
        """A leader was heard now."""
        self._heard_s = self._clock.monotonic_s()

    def credit_blocks(self, kv_blocks_total: int) -> int:
        """Return how many blocks of a pool such sequences may hold together."""
        return int(kv_blocks_total * self._rules.credit_ratio)

    def refusal(self, grant: FallbackGrant, *, incarnation: int, epoch: int) -> NotAdmittedReason | None:
        """Return why the placement does not count, room and credit apart; None when it does.

        ``epoch`` is the newest leader that this worker heard of: who has not heard of it placed on a
        snapshot of the past.
        """
        if grant.incarnation != incarnation or incarnation == 0:
            return NotAdmittedReason.STALE_INCARNATION
        if self._clock.monotonic_s() - self._heard_s < self._rules.after_s:
            return NotAdmittedReason.NO_FALLBACK
        return NotAdmittedReason.STALE_EPOCH if grant.last_epoch < epoch else None
