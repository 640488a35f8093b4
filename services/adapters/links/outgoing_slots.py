"""Slot demands and returns that a gateway has not sent to the leader yet."""

from __future__ import annotations

from typing import Final

from services.core.fixed_cost.slots import SlotDemand, SlotReturn

_BATCH: Final = 2048  # of each kind in one message


class OutgoingSlots:
    """Of each version and tenant the newest demand, of each lease the newest return. Bounded by those."""

    def __init__(self) -> None:
        self._demands: dict[tuple[str, str], SlotDemand] = {}  # all with rows
        self._unsent: dict[tuple[str, str], SlotDemand] = {}
        self._returns: dict[tuple[str, str, str], SlotReturn] = {}

    def __bool__(self) -> bool:
        return bool(self._unsent or self._returns)

    def demand(self, wanted: SlotDemand) -> None:
        key = wanted.digest, wanted.tenant
        if wanted.rows:
            self._demands[key] = wanted
        else:
            self._demands.pop(key, None)
        self._unsent[key] = wanted

    def returned(self, found: SlotReturn) -> None:
        self._returns[found.worker_id, found.digest, found.tenant] = found

    def restart(self) -> None:
        """Send every demand again: to another leader, or on another stream. Its leases are new."""
        self._unsent = dict(self._demands)
        self._returns.clear()

    def take(self) -> tuple[list[SlotDemand], list[SlotReturn]]:
        """Return and clear one message's part of both."""
        demands = [self._unsent.pop(key) for key in list(self._unsent)[:_BATCH]]
        returns = [self._returns.pop(name) for name in list(self._returns)[:_BATCH]]
        return demands, returns
