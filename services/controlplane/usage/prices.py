"""Bounds of what a reported request may cost.

Decision: a request costs at most its tokens at the highest price in its deployment's history, which outlives
the deployment, and without a history at the highest price of the fleet. So what an earlier price makes right
is never refused; the history is read again before anything is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.controlplane.fleet import readable
from services.controlplane.resources.deployment_history import revisions_of
from services.core.errors import InvalidInput
from services.core.generation import Usage
from services.core.limits import Price
from services.core.records import DEPLOYMENTS, Deployment
from services.core.usage import RequestUsage, UsageEvent
from services.ports.store import Store

_MOST_NAMES: Final = 10_000


class ListPrices:
    """The highest prices of deployments, as they were read last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._highest: dict[str, Price] = {}

    async def check(self, events: Iterable[UsageEvent]) -> None:
        """Return if each request costs at most its bound. Raises InvalidInput or StoreUnavailable."""
        for event in events:
            if not isinstance(event, RequestUsage) or event.list_micros <= self._most_micros(event):
                continue
            await self._read(event.model)
            if event.list_micros > (most := self._most_micros(event)):
                field = "events.request.list_micros"
                raise InvalidInput(
                    f"{field} is {event.list_micros}; its tokens cost at most {most} at the highest price "
                    f"that {event.model} had",
                    field=field,
                )

    def _most_micros(self, event: RequestUsage) -> int:
        usage = Usage(event.usage.prompt_tokens, event.usage.output_tokens)  # cached ones never cost more
        return self._highest.get(event.model, Price()).cost_micros(usage)

    async def _read(self, model: str) -> None:
        prices = [one.deployment.price for _, one in await revisions_of(self._store, model)]
        if not prices:
            entries = (await self._store.list(DEPLOYMENTS)).entries
            prices = [one.price for entry in entries if (one := readable(entry, Deployment)) is not None]
        if len(self._highest) >= _MOST_NAMES:
            self._highest.clear()
        self._highest[model] = Price(
            max((price.input_micros for price in prices), default=0),
            output_micros=max((price.output_micros for price in prices), default=0),
        )
