"""Slot demands and returns on their way to a leader."""

from __future__ import annotations

from services.adapters.links.muxed_placement import MAX_EXPLAINED, OutgoingSlots, SlotsMessage
from services.core.fixed_cost.slots import SlotDemand, SlotReturn


def test_the_newest_of_each_is_sent_once() -> None:
    outgoing = OutgoingSlots()
    assert not outgoing
    for rows in (1, 5):
        outgoing.demand(SlotDemand("d", "acme", rows))
        outgoing.returned(SlotReturn("w1", "d", "acme", rows))
    outgoing.demand(SlotDemand("d", "beta", 2))
    message = outgoing.take()
    assert message.demands == [SlotDemand("d", "acme", 5), SlotDemand("d", "beta", 2)]
    assert message.returned == [SlotReturn("w1", "d", "acme", 5)]
    assert not outgoing


def test_another_leader_gets_every_demand_that_has_rows_and_no_return() -> None:
    outgoing = OutgoingSlots()
    outgoing.demand(SlotDemand("d", "acme", 5))
    outgoing.demand(SlotDemand("d", "beta", 2))
    outgoing.take()
    outgoing.demand(SlotDemand("d", "beta", 0))
    outgoing.returned(SlotReturn("w1", "d", "acme", 1))
    outgoing.restart()
    assert outgoing.take() == SlotsMessage([SlotDemand("d", "acme", 5)], [])


def test_a_message_is_bounded() -> None:
    outgoing = OutgoingSlots()
    for number in range(5000):
        outgoing.demand(SlotDemand("d", f"t{number}", 1))
    sizes = []
    while outgoing:
        sizes.append(len(outgoing.take().demands))
    assert sum(sizes) == 5000
    assert max(sizes) <= 4096


def test_explanations_are_bounded_and_not_repeated() -> None:
    outgoing = OutgoingSlots()
    for number in range(MAX_EXPLAINED + 5):
        outgoing.explained(f"req_{number}", None)
    assert len(outgoing.take().explained) == MAX_EXPLAINED
    assert not outgoing
