"""A budget that several regions spend without waiting for each other: a bounded counter held in escrow.

Each region owns rights to a part of the budget and may spend these alone. A region with rights to spare
transfers some to one that runs short. Only the donor writes a transfer, into its own row, and rows merge by
maximum, so a message may be lost, repeated, delayed or reordered. A region that is cut off spends what it
holds and no more.

Sources: O'Neil, The Escrow Transactional Method (TODS 1986); Balegas et al., Extending Eventually Consistent
Cloud Databases for Enforcing Numeric Invariants (SRDS 2015), from which the transfer rows are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EscrowRow:
    """What one region has written; every number only grows. Amounts in micro-dollars."""

    granted: int  # part of the budget that it received at its creation
    transferred: Mapping[str, int] = field(default_factory=dict)  # total that went to each other region


@dataclass(slots=True)
class RegionalEscrow:
    """The part of a budget that one region may spend. Single writer: the region.

    The caller makes ``row``, ``reserved`` and ``spent`` durable before it acts on a change of them.
    """

    region: str
    row: EscrowRow
    rows: dict[str, EscrowRow] = field(default_factory=dict)  # rows of the other regions as last received
    reserved: int = 0  # worst case of the running requests
    spent: int = 0  # cost of settled requests

    @property
    def rights(self) -> int:
        """Return what may be reserved now."""
        received = sum(row.transferred.get(self.region, 0) for row in self.rows.values())
        return self.row.granted + received - sum(self.row.transferred.values()) - self.reserved - self.spent

    def reserve(self, amount: int) -> bool:
        """Reserve a request's worst case. False, with nothing changed, where the rights do not suffice."""
        if amount > self.rights:
            return False
        self.reserved += amount
        return True

    def settle(self, reserved: int, spent: int) -> None:
        """Replace a reservation by what the request cost, at most what it reserved."""
        assert 0 <= spent <= reserved <= self.reserved, "a request costs more than its worst case"
        self.reserved -= reserved
        self.spent += spent

    def transfer(self, to: str, amount: int) -> int:
        """Give up to ``amount`` of the rights to another region; return what was given."""
        given = max(0, min(amount, self.rights))
        if given:
            before = self.row.transferred
            self.row = EscrowRow(self.row.granted, {**before, to: before.get(to, 0) + given})
        return given

    def merge(self, region: str, row: EscrowRow) -> None:
        """Take over what another region wrote, whether the message is new, old or a repetition."""
        had = self.rows.get(region, EscrowRow(row.granted))
        most = {
            name: max(had.transferred.get(name, 0), row.transferred.get(name, 0))
            for name in sorted({*had.transferred, *row.transferred})
        }
        self.rows[region] = EscrowRow(row.granted, most)


def share_to_give(donor_rights: int, receiver_rights: int) -> int:
    """Return what a donor gives: half of the difference, so that both hold the same afterwards."""
    return max(0, (donor_rights - receiver_rights) // 2)
