"""Charges requests that only workers reported: their gateway died before it settled them.

It writes their tokens into the reservation as its checkpoint and books the request in the ledger. The
reservation lapses some time later: for a while, the settler settles the lapsed reservations of these
tenants. Repeating any of it has no further effect, so a settler that dies between two of these steps is
continued by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import structlog

from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import Charge
from services.controlplane.usage.policy.joins import Unmatched
from services.core.errors import FairwayError, NoLeader
from services.core.generation import Usage
from services.core.limits import Price
from services.core.rollouts.routes import SHADOW_TENANT
from services.ports.clock import Clock

log = structlog.get_logger()

UNMATCHED_S: Final = 30.0
# Time after the last report in which a lapse may follow; longer than any lease.
LAPSES_WITHIN_S: Final = 600.0
_EACH_S: Final = 5.0
_AT_ONCE: Final = 1000


class LapsedReservations(Protocol):
    """The part of the limiter that charges requests without a gateway. Raises StoreUnavailable."""

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        """Raise the usage with which the reservation is settled if it lapses.

        A lapsed one that was charged already is charged the difference. It has no effect once its
        gateway settled it.
        """

    async def settle_lapsed(self, tenant_id: str) -> int:
        """Settle some of the tenant's lapsed reservations, each with its checkpoint. Returns how many."""


class UsageSettler:
    """Runs in every control plane; acts while its ledger leads."""

    def __init__(
        self,
        ledger: UsageLedger,
        reservations: LapsedReservations,
        clock: Clock,
        *,
        price_of: Callable[[str], Price],
    ) -> None:
        """``price_of`` returns the list price of a deployment."""
        self._ledger = ledger
        self._reservations = reservations
        self._clock = clock
        self._price_of = price_of

    async def run(self) -> None:
        """Settle until cancelled; survives outages of Redis and of the ledger's store."""
        while True:
            await self._clock.sleep(_EACH_S)
            if not self._ledger.leads:
                continue
            try:
                await self.settle()
            except NoLeader:
                continue
            except FairwayError as error:
                log.warning("usage.settling_interrupted", reason=error.reason, error=error.message)

    async def settle(self) -> int:
        """Charge what waits; return the number of requests. Raises StoreUnavailable or NoLeader."""
        found = self._ledger.unmatched(UNMATCHED_S)[:_AT_ONCE]
        for one in found:
            await self._reservations.checkpoint(one.tenant, one.request_id, one.usage)
        if found:
            await self._ledger.charge([self._charge(one) for one in found])
            log.info("usage.charged_from_workers", requests=len(found))
        for tenant in self._ledger.charged_tenants(LAPSES_WITHIN_S):
            while await self._reservations.settle_lapsed(tenant):
                continue
        return len(found)

    def _charge(self, one: Unmatched) -> Charge:
        price = Price() if one.tenant == SHADOW_TENANT else self._price_of(one.model)
        return Charge(one.request_id, one.usage, price.cost_micros(one.usage))
