"""The bounds on what one gateway serves at once, in all and per tenant."""

from __future__ import annotations

from collections import Counter

from services.core.errors import FairwayError, QueueFull, ShareExceeded


class RequestCapacity:
    """Counts the running requests, and the clients that follow a request without running it."""

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._running = 0
        self._per_tenant: Counter[str] = Counter()

    def refusal(self, tenant_id: str) -> FairwayError | None:
        """The reason against one more of the tenant, None when it can be accepted."""
        mine, most = self._per_tenant[tenant_id], self._most_of_tenant
        if mine >= most:
            return ShareExceeded(
                f"this gateway runs {mine} requests of this tenant, and at most {most} of one tenant; "
                "wait until some have ended, or send it to another gateway",
                retry_after_s=1.0,
                limit=most,
            )
        if self._running >= self._most:
            return QueueFull(
                f"this gateway runs {self._running} requests, its most; send it later or elsewhere",
                retry_after_s=1.0,
            )
        return None

    def enter(self, tenant_id: str) -> None:
        """Count one more; ``leave`` must follow."""
        self._running += 1
        self._per_tenant[tenant_id] += 1

    def leave(self, tenant_id: str) -> None:
        self._running -= 1
        subtract(self._per_tenant, tenant_id)


def subtract(counts: Counter[str], name: str) -> None:
    """Decrease a count; delete it at zero."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
