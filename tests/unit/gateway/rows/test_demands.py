"""Demands of slots: a rise at once and within 2 ms, a change every 20 ms, a fall after a second."""

from __future__ import annotations

from services.core.fixed_cost.rows import RowsRequest
from services.core.fixed_cost.slots import SlotDemand, SlotReturn
from services.core.records import Priority
from services.gateway.rows.leases import SlotDemands
from tests.support.clocks import HandClock


class Sent:
    """Implements ``SlotClient``: keeps what was sent."""

    def __init__(self) -> None:
        self.demands: list[SlotDemand] = []

    def demand(self, wanted: SlotDemand) -> None:
        self.demands.append(wanted)

    def slots_returned(self, found: SlotReturn) -> None:
        raise AssertionError("no lease")

    @property
    def rows(self) -> list[int]:
        return [wanted.rows for wanted in self.demands]


def request(rows: int, priority: Priority = Priority.STANDARD, tenant: str = "acme") -> RowsRequest:
    return RowsRequest("r", tenant, "m", "d", ((),) * rows, priority, tenant_weight=2.0)


def test_a_rise_is_sent_at_once_and_later_ones_together() -> None:
    sent, clock = Sent(), HandClock()
    demands = SlotDemands(sent, clock)
    demands.enter(request(1))
    demands.enter(request(4))
    demands.enter(request(2, tenant="beta"))
    assert sent.rows == [1, 2]
    assert sent.demands[0] == SlotDemand("d", "acme", 1, 2.0, Priority.STANDARD, repeats=True)
    assert demands.rises
    demands.send_due()
    assert sent.rows == [1, 2], "it was sent just now"
    clock.now_s += 0.003
    demands.send_due()
    assert sent.rows == [1, 2, 5]
    assert not demands.rises


def test_a_change_of_class_waits_for_20_ms() -> None:
    sent, clock = Sent(), HandClock()
    demands = SlotDemands(sent, clock)
    demands.enter(request(2))
    clock.now_s += 0.003
    live = request(1, Priority.INTERACTIVE)
    demands.enter(live)
    demands.leave(live)
    assert not demands.rises
    clock.now_s += 0.003
    demands.send_due()
    assert sent.rows == [2, 3]
    clock.now_s += 0.02
    demands.send_due()
    assert [wanted.priority for wanted in sent.demands[1:]] == [Priority.INTERACTIVE, Priority.STANDARD]


def test_a_demand_falls_a_second_after_its_rows_and_ends() -> None:
    sent, clock = Sent(), HandClock()
    demands = SlotDemands(sent, clock)
    asked = request(3)
    demands.enter(asked)
    for _ in range(3):
        demands.leave(asked)
    for _ in range(9):
        clock.now_s += 0.1
        demands.send_due()
    assert sent.rows == [3]
    clock.now_s += 0.2
    demands.send_due()
    assert sent.rows == [3, 0]
    assert len(demands) == 0
    demands.enter(request(1))
    assert sent.rows == [3, 0, 1]


def test_the_class_is_that_of_the_most_urgent_row() -> None:
    sent, clock = Sent(), HandClock()
    demands = SlotDemands(sent, clock)
    batch, live = request(1, Priority.BATCH), request(1, Priority.INTERACTIVE)
    demands.enter(batch)
    clock.now_s += 0.03
    demands.enter(live)
    assert [wanted.priority for wanted in sent.demands] == [Priority.BATCH, Priority.INTERACTIVE]
    demands.leave(live)
    clock.now_s += 0.03
    demands.send_due()
    assert sent.demands[-1].priority is Priority.BATCH


def test_a_demand_is_repeated_while_it_lasts() -> None:
    sent, clock = Sent(), HandClock()
    demands = SlotDemands(sent, clock)
    demands.enter(request(3))
    for _ in range(35):
        clock.now_s += 0.1
        demands.send_due()
    assert sent.rows == [3, 3, 3, 3], "at first, and after each second"
