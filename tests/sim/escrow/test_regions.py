"""A budget in escrow of three regions: never overspent, whatever the network does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.escrow.counter import EscrowRow, RegionalEscrow, share_to_give
from simulator.escrow.regions import EscrowSimulation, EscrowSpec


@pytest.mark.parametrize("seed", range(12))
def test_a_region_that_is_cut_off_overspends_nothing(seed: int) -> None:
    outcome = EscrowSimulation(EscrowSpec(seed, requests=2000, budget=400_000_000)).run()
    assert outcome.overspend <= 0
    assert outcome.spent > 0.8 * 400_000_000, "the budget can be used"


def test_rights_reach_the_region_that_needs_them() -> None:
    uncut = EscrowSpec(1, requests=2000, budget=400_000_000, cut_s=(0.0, 0.0), loss_ratio=0.3)
    outcome = EscrowSimulation(uncut).run()
    assert outcome.spent > 0.95 * 400_000_000
    assert outcome.overspend <= 0


class _GivesTwice(RegionalEscrow):
    """A planted bug: the donor keeps the right to spend what it gave."""

    @property
    def rights(self) -> int:
        received = sum(row.transferred.get(self.region, 0) for row in self.rows.values())
        return self.row.granted + received - self.reserved - self.spent


class _AddsRows(RegionalEscrow):
    """A planted bug: a repeated message counts again."""

    def merge(self, region: str, row: EscrowRow) -> None:
        had = self.rows.get(region, EscrowRow(row.granted))
        names = {*had.transferred, *row.transferred}
        added = {name: had.transferred.get(name, 0) + row.transferred.get(name, 0) for name in names}
        self.rows[region] = EscrowRow(row.granted, added)


@pytest.mark.parametrize("planted", [_GivesTwice, _AddsRows])
def test_a_planted_bug_overspends(planted: type[RegionalEscrow]) -> None:
    spec = EscrowSpec(3, requests=3000, budget=400_000_000)
    assert EscrowSimulation(spec, escrow=planted).run().overspend > 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 50)), max_size=60))
def test_rights_are_neither_made_nor_lost(steps: list[tuple[int, int, int]]) -> None:
    names = ("a", "b", "c")
    regions = {name: RegionalEscrow(name, EscrowRow(100)) for name in names}
    for donor, receiver, amount in steps:
        if donor == receiver:
            if regions[names[donor]].reserve(amount):
                regions[names[donor]].settle(amount, amount // 2)
            continue
        giver = regions[names[donor]]
        giver.transfer(names[receiver], amount)
        regions[names[receiver]].merge(names[donor], giver.row)
    for name in names:
        for other in names:
            if other != name:
                regions[name].merge(other, regions[other].row)
    assert sum(each.rights + each.reserved + each.spent for each in regions.values()) == 300
    assert all(each.rights >= 0 for each in regions.values())


def test_a_donor_gives_half_of_the_difference() -> None:
    assert share_to_give(100, 40) == 30
    assert share_to_give(40, 100) == 0
