"""Slot demands, returns and explanations that a gateway has not sent to the leader yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.fixed_cost.explained import RowsExplanation
from services.core.fixed_cost.slots import SlotDemand, SlotReturn

_BATCH: Final = 2048  # most entries of each kind in one message
MAX_EXPLAINED: Final = 256  # the same of explanations


@dataclass(frozen=True, slots=True)
class SlotsMessage:
    """What one message to the leader says of slots and rows."""

    demands: Sequence[SlotDemand] = ()
    returned: Sequence[SlotReturn] = ()
    # Explanations by request; None: nothing is stored.
    explained: Mapping[str, RowsExplanation | None] = field(default_factory=dict)


class OutgoingSlots:
    """Of each version and tenant the newest demand, of each lease the newest return. Bounded by those, and by
    ``MAX_EXPLAINED`` explanations."""

    def __init__(self) -> None:
        self._demands: dict[tuple[str, str], SlotDemand] = {}  # all with rows
        self._unsent: dict[tuple[str, str], SlotDemand] = {}
        self._returns: dict[tuple[str, str, str], SlotReturn] = {}
        self._explained: dict[str, RowsExplanation | None] = {}  # explanations by request

    def __bool__(self) -> bool:
        return bool(self._unsent or self._returns or self._explained)

    def demand(self, wanted: SlotDemand) -> None:
        key = wanted.digest, wanted.tenant
        if wanted.rows:
            self._demands[key] = wanted
        else:
            self._demands.pop(key, None)
        self._unsent[key] = wanted

    def returned(self, found: SlotReturn) -> None:
        self._returns[found.worker_id, found.digest, found.tenant] = found

    def explained(self, request_id: str, found: RowsExplanation | None) -> None:
        if len(self._explained) < MAX_EXPLAINED:  # the leader does without the others
            self._explained[request_id] = found

    def restart(self) -> None:
        """Send every demand again: to another leader, or on another stream. Its leases are new."""
        self._unsent = dict(self._demands)
        self._returns.clear()
        self._explained.clear()

    def take(self) -> SlotsMessage:
        """Return and clear one message's part of all."""
        demands = [self._unsent.pop(key) for key in list(self._unsent)[:_BATCH]]
        returns = [self._returns.pop(name) for name in list(self._returns)[:_BATCH]]
        explained, self._explained = self._explained, {}
        return SlotsMessage(demands, returns, explained)
