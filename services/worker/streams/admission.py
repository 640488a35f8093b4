"""Which placements a worker accepts: a leader's grants, and a gateway's own while no leader answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.core.generation import FallbackGrant, Grant, NotAdmittedReason
from services.ports.clock import Clock

WINDOW = 4096  # grant numbers that may arrive out of order
MAX_UNREPORTED = 65536


class GrantFence:
    """Rejects grants of another incarnation or an older leader, and replayed ones.

    Bounded: only the newest ``WINDOW`` grants may arrive late.
    """

    def __init__(self) -> None:
        self.incarnation = 0  # 0: not registered, every grant is rejected
        self.epoch = 0
        self._settled = 0  # numbers up to this one are rejected without a look-up
        self._seen: set[int] = set()
        self._unreported: list[int] = []

    def registered(self, incarnation: int) -> None:
        """Adopt a new incarnation: grants of the previous one are rejected, and numbers may restart."""
        self.incarnation = incarnation
        self._reset()

    def on_leader(self, epoch: int) -> None:
        """Reject grants of leaders with a lower epoch from now on."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._reset()

    def check(self, grant: Grant) -> NotAdmittedReason | None:
        """Record the grant as seen and return why it is rejected, or None."""
        if grant.incarnation != self.incarnation or self.incarnation == 0:
            return NotAdmittedReason.STALE_INCARNATION
        if grant.epoch < self.epoch:
            return NotAdmittedReason.STALE_EPOCH
        self.on_leader(grant.epoch)
        if grant.sequence <= self._settled or grant.sequence in self._seen:
            return NotAdmittedReason.GRANT_REPLAYED
        self._seen.add(grant.sequence)
        if len(self._unreported) < MAX_UNREPORTED:
            self._unreported.append(grant.sequence)
        if len(self._seen) >= 2 * WINDOW:
            self._compact()
        return None

    def take_seen(self) -> tuple[int, tuple[int, ...]]:
        """Return the epoch and its grant numbers received since the last call."""
        seen, self._unreported = tuple(self._unreported), []
        return self.epoch, seen

    def _reset(self) -> None:
        self._settled = 0
        self._seen = set()
        self._unreported = []

    def _compact(self) -> None:
        ordered = sorted(self._seen)
        self._settled = ordered[-WINDOW - 1]
        self._seen = set(ordered[-WINDOW:])


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """``after_s``: the least time without a leader. ``credit_ratio``: the share of a pool's blocks that
    fallback sequences may hold together, and of a table's slots that such rows may; a new leader finds the
    rest unchanged."""

    after_s: float = 1.5
    credit_ratio: float = 0.25


class FallbackAdmission:
    """Accepts what a gateway placed by itself while no leader answers.

    Records the last contact with a leader; before the first one, the start counts.
    """

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
