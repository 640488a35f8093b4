"""Fencing of grants: own incarnation, newest leader, each grant number once."""

from __future__ import annotations

from services.core.generation import Grant, NotAdmittedReason

WINDOW = 4096  # grant numbers that may arrive out of order
MAX_UNREPORTED = 65536


class GrantFence:
    """Rejects stale and replayed grants. Bounded: only the newest ``WINDOW`` grants may arrive late."""

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
