"""Admission of sequences and rows that a gateway placed by itself because no leader answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.core.generation import FallbackGrant, NotAdmittedReason
from services.ports.clock import Clock


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """``after_s``: the least time without a leader. ``credit_ratio``: the share of a pool's blocks that
    fallback sequences may hold together, and of a table's slots that such rows may; a new leader finds the
    rest unchanged."""

    after_s: float = 1.5
    credit_ratio: float = 0.25


class FallbackAdmission:
    """Records the last contact with a leader; before the first one, the start counts."""

    def __init__(
        self,
        clock: Clock,
        rules: FallbackRules | None = None,
        *,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """``started`` is called for each accepted fallback sequence."""
        self.started = started
        self._clock = clock
        self._rules = rules if rules is not None else FallbackRules()
        self._last_message_s = clock.monotonic_s()

    def record_contact(self) -> None:
        """Record a contact with a leader now."""
        self._last_message_s = self._clock.monotonic_s()

    def credit_blocks(self, kv_blocks_total: int) -> int:
        """Return how many blocks of a pool fallback sequences may hold together."""
        return int(kv_blocks_total * self._rules.credit_ratio)

    def takes_row(self, rows_alone: int, row_slots: int) -> bool:
        """Whether one more row may start without a leader's lease when ``rows_alone`` such rows run."""
        return not self._leader_answers() and rows_alone < int(row_slots * self._rules.credit_ratio)

    def _leader_answers(self) -> bool:
        return self._clock.monotonic_s() - self._last_message_s < self._rules.after_s

    def refusal(self, grant: FallbackGrant, *, incarnation: int, epoch: int) -> NotAdmittedReason | None:
        """Return why the placement is rejected for another reason than room or credit; None when it is
        accepted.

        ``epoch`` is the newest leader that this worker has seen. A gateway with an older one placed on an
        outdated snapshot.
        """
        if grant.incarnation != incarnation or incarnation == 0:
            return NotAdmittedReason.STALE_INCARNATION
        if self._leader_answers():
            return NotAdmittedReason.NO_FALLBACK
        return NotAdmittedReason.STALE_EPOCH if grant.last_epoch < epoch else None
