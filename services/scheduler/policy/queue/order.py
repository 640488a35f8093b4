"""Order of a pool's waiting placements, and limits on overtaking.

Between classes, the higher goes first. A class whose oldest placement has waited longer than its head start,
``class_head_start_s`` for each step below the highest waiting class, is entitled to a share,
``aged_share_ratio``, of all later grants, and is served first until it has received it. So no class starves,
whatever the load of higher classes, and a backlog of a lower class takes at most that share from a higher
one.

Within a class, the tenant with the least service (``fairness``) goes first; within a tenant, the earliest
deadline, then the first arrival. A placement without a deadline counts as having one ``NO_DEADLINE_S`` after
its arrival, so that it does not wait forever behind placements with deadlines.

Bypass: a placement without room does not block smaller ones behind it, but after ``max_bypasses`` of them it
gets a worker reserved: nothing behind it starts there until it has started. Sequences that end free the room
of that worker, and the placement fits an empty one, so its wait is bounded; other workers continue. Tenants
may pass a placement without room while they are at most ``bypass_window_tokens`` for each worker of the pool
ahead of its tenant (weighted tokens over weight).
"""

from __future__ import annotations

from dataclasses import dataclass

MICROSECONDS = 1_000_000
NO_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """Settings of the order.

    ``lookahead``: how many placements without room a pass skips, ``tenant_lookahead`` how many of one tenant;
    they bound the work of a pass.
    """

    class_head_start_s: float = 30.0
    aged_share_ratio: float = 0.1
    max_bypasses: int = 16
    lookahead: int = 64
    tenant_lookahead: int = 16
    bypass_window_tokens: float = 32768.0

    def window_tokens(self, workers: int) -> float:
        """Return how far ahead a tenant may be that passes one without room, in a pool of that many
        workers."""
        return self.bypass_window_tokens * max(1, workers)
