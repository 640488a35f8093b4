"""Reports of gateways and workers about the same request are booked once, in any order."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from services.controlplane.usage.policy.joins import SETTLED_KEEP_S, OpenRequests, tokens_of
from services.controlplane.usage.policy.lines import Amounts, LineSums, Source
from services.core.generation import Usage
from services.core.usage import RequestUsage, SequenceDeviceUse

NOW_S = 1_800_000_000.0
REQUEST = RequestUsage(
    request_id="r1",
    tenant="acme",
    key_id="k1",
    user="ann",
    model="chat",
    version_digest="sha256:1",
    ended_unix_s=NOW_S,
    usage=Usage(100, 20, 40),
    list_micros=500,
    labels={"cost-centre": "lab"},
)
SEQUENCE = SequenceDeviceUse(
    request_id="r1",
    choice=0,
    tenant="acme",
    model="chat",
    version_digest="sha256:1",
    worker_id="w1",
    device_type="cpu",
    cost_per_hour=3.6,
    ended_unix_s=NOW_S - 1,
    usage=Usage(100, 20, 40),
    device_s=2.0,
)
MOVED = structs.replace(SEQUENCE, worker_id="w2", usage=Usage(100, 10, 90), device_s=1.0)


class Ledger:
    """Joins and sums, as the book uses them."""

    def __init__(self) -> None:
        self.sums = LineSums()
        self.requests = OpenRequests()

    def report(self, event: RequestUsage | SequenceDeviceUse, now_s: float = NOW_S) -> None:
        if isinstance(event, RequestUsage):
            self.requests.gateway(event, now_s, self.sums.add)
        else:
            self.requests.worker(event, now_s, self.sums.add)

    def charge(self, now_s: float = NOW_S + 40) -> int:
        found = self.requests.unmatched(now_s, 30)
        for one in found:
            self.requests.charge(one.request_id, one.usage, 7, self.sums.add)
        return len(found)

    def close(self, now_s: float) -> None:
        self.requests.close(now_s, self.sums.add)

    @property
    def booked(self) -> list[tuple[str, Source, Amounts]]:
        return [
            (line.key_id, line.source, amounts)
            for lines in self.sums.hours.values()
            for line, amounts in lines.items()
        ]


WHOLE = Amounts(1, 100, 40, 20, device_us=3_000_000, list_micros=500, measured_nanos=3_000_000)


@pytest.mark.parametrize("order", list(itertools.permutations([REQUEST, SEQUENCE, MOVED])))
def test_tokens_come_from_the_gateway_and_device_time_from_the_workers(
    order: tuple[RequestUsage | SequenceDeviceUse, ...],
) -> None:
    ledger = Ledger()
    for event in order:
        ledger.report(event)
    assert ledger.booked == [("k1", Source.GATEWAY, WHOLE)]
    assert ledger.charge() == 0


@pytest.mark.parametrize("charged_after", [1, 2])
def test_a_later_report_of_the_gateway_replaces_a_charge(charged_after: int) -> None:
    ledger = Ledger()
    events = [SEQUENCE, MOVED]
    for event in events[:charged_after]:
        ledger.report(event)
    assert ledger.charge() == 1
    for event in events[charged_after:]:
        ledger.report(event)
    ledger.charge(NOW_S + 80)
    assert ledger.booked == [
        ("", Source.WORKER, Amounts(1, 100, 40, 30, 3_000_000, 7, 3_000_000)),
    ]
    assert ledger.charge(NOW_S + 200) == 0
    ledger.report(REQUEST)
    assert ledger.booked == [("k1", Source.GATEWAY, WHOLE)]


def test_a_request_is_unmatched_only_after_a_while() -> None:
    ledger = Ledger()
    ledger.report(SEQUENCE)
    assert ledger.requests.unmatched(NOW_S + 29, 30) == ()
    (found,) = ledger.requests.unmatched(NOW_S + 30, 30)
    assert (found.request_id, found.tenant, found.usage) == ("r1", "acme", Usage(100, 20, 40))


def test_a_resumed_request_is_booked_once_with_its_larger_counts() -> None:
    ledger = Ledger()
    ledger.report(structs.replace(REQUEST, usage=Usage(100, 8, 40), list_micros=300))
    ledger.report(SEQUENCE)
    ledger.report(REQUEST)
    ledger.report(structs.replace(REQUEST, usage=Usage(100, 8, 40), list_micros=300))
    ((_, _, amounts),) = ledger.booked
    assert amounts == Amounts(1, 100, 40, 20, 2_000_000, 500, 2_000_000)


def test_a_late_report_of_a_worker_does_not_charge_a_closed_request_again() -> None:
    ledger = Ledger()
    ledger.report(REQUEST)
    ledger.close(NOW_S + SETTLED_KEEP_S + 1)
    assert not ledger.requests.settled
    late_s = NOW_S + SETTLED_KEEP_S + 2
    ledger.report(SEQUENCE, late_s)
    assert ledger.charge(late_s + 100) == 0
    assert ledger.requests.late == 1
    assert [(source, amounts.requests, amounts.device_us) for _, source, amounts in ledger.booked] == [
        (Source.GATEWAY, 1, 0),
        (Source.WORKER, 0, 2_000_000),
    ]


def test_reports_that_waited_for_the_ledger_are_joined_as_if_they_came_at_once() -> None:
    """After an outage that is longer than requests are kept: nothing that ended in it was closed."""
    ledger = Ledger()
    ledger.report(REQUEST)
    back_s = NOW_S + 2 * SETTLED_KEEP_S
    ledger.close(back_s)
    in_outage_s = NOW_S + 600
    ledger.report(structs.replace(SEQUENCE, request_id="r2", ended_unix_s=in_outage_s), back_s)
    assert ledger.charge(back_s + 31) == 1


def test_the_device_time_of_a_waiting_request_above_the_bound_is_kept() -> None:
    ledger = Ledger()
    ledger.requests = OpenRequests(max_waiting=1)
    ledger.report(SEQUENCE)
    ledger.report(structs.replace(SEQUENCE, request_id="r2"))
    ledger.close(NOW_S)
    assert [(source, amounts.device_us) for _, source, amounts in ledger.booked] == [
        (Source.WORKER, 2_000_000)
    ]


def test_the_prompt_of_a_moved_sequence_counts_once() -> None:
    assert tokens_of([MOVED, SEQUENCE]) == Usage(100, 30, 40)
    second = structs.replace(SEQUENCE, choice=1, usage=Usage(100, 5, 100))
    assert tokens_of([SEQUENCE, second]) == Usage(100, 25, 40)
    cut = structs.replace(SEQUENCE, usage=Usage(30, 0, 0))  # cancelled within its prompt
    assert tokens_of([cut, SEQUENCE]) == Usage(100, 20, 40)
    assert tokens_of([cut]) == Usage(30, 0, 0)
