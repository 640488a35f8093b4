"""Egress on a virtual clock: rates hold within a bucket, and streams of a tenant share theirs evenly."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from services.core.records import Meta, Tenant
from services.gateway.policy.egress import EgressBucket, EgressRates, EgressWait, TenantEgress, egress_rates

TICK_S = 0.1
WINDOW = 256


class Streams:
    """Streams whose readers take everything at once, so that each always waits for a whole window."""

    def __init__(self, count: int, *, choices: int = 1) -> None:
        self.egress, self.now_s = TenantEgress(), 100.0
        self.taken: Counter[int] = Counter()
        self.waits: list[EgressWait] = []
        for _ in range(count):
            bucket = EgressBucket()
            self.waits += [EgressWait(bucket, lambda _: None, since_s=100.0) for _ in range(choices)]

    def run(self, seconds: float, rates: EgressRates) -> None:
        for _ in range(round(seconds / TICK_S)):
            for wait in self.waits:
                wait.wanted = WINDOW
                self.egress.waits.setdefault(wait)
            for wait, tokens in self.egress.due(rates, self.now_s).items():
                self.taken[self.waits.index(wait)] += tokens
            self.now_s += TICK_S


@pytest.mark.parametrize("rate", [1, 7, 20, 1000])
def test_a_stream_receives_its_rate_and_at_most_a_bucket_more(rate: int) -> None:
    streams = Streams(3)
    streams.run(30.0, EgressRates(stream=rate))
    for taken in streams.taken.values():
        assert rate * 29 <= taken <= rate * 31


@pytest.mark.parametrize(("rate", "count"), [(1, 1), (3, 40), (100, 7), (5000, 100)])
def test_a_tenant_receives_its_rate_and_its_streams_equal_parts(rate: int, count: int) -> None:
    streams = Streams(count)
    streams.run(60.0, EgressRates(tenant=rate))
    total = streams.taken.total()
    assert rate * 59 <= total <= rate * 61
    assert (
        max(streams.taken.values()) - min(streams.taken[at] for at in range(count))
        <= total / count * 0.05 + 1
    )


def test_what_a_slow_stream_leaves_is_shared_by_the_others() -> None:
    streams = Streams(4)
    slow = streams.waits[0]
    for _ in range(600):
        for wait in streams.waits:
            wait.wanted = 1 if wait is slow else WINDOW
            streams.egress.waits.setdefault(wait)
        for wait, tokens in streams.egress.due(EgressRates(tenant=310), streams.now_s).items():
            streams.taken[streams.waits.index(wait)] += tokens
        streams.now_s += TICK_S
    assert streams.taken[0] == pytest.approx(10 * 60, rel=0.02)
    assert [streams.taken[at] for at in (1, 2, 3)] == pytest.approx([100 * 60] * 3, rel=0.03)


def test_choices_of_one_stream_share_its_rate() -> None:
    streams = Streams(1, choices=5)
    streams.run(30.0, EgressRates(stream=20))
    assert 20 * 29 <= streams.taken.total() <= 20 * 31


def test_an_answer_leaves_whole_and_delays_what_follows() -> None:
    egress = TenantEgress()
    rates = EgressRates(tenant=10)
    big, small = (EgressWait(EgressBucket(), lambda _: None, whole=True, wanted=n) for n in (100, 1))
    egress.waits |= {big: None, small: None}
    assert egress.due(rates, 0.0) == {big: 100}
    assert egress.due(rates, 8.9) == {}  # 90 tokens of debt, and one to leave
    assert egress.due(rates, 9.2) == {small: 1}


def test_a_change_of_the_rate_applies_to_what_waits() -> None:
    streams = Streams(2)
    streams.run(10.0, EgressRates(tenant=10))
    before = streams.taken.total()
    streams.run(10.0, EgressRates(tenant=1000))
    assert streams.taken.total() - before == pytest.approx(10_000, rel=0.1)
    before = streams.taken.total()
    streams.run(TICK_S, EgressRates())
    assert streams.taken.total() - before == 2 * WINDOW, "without a limit everything leaves"
    before = streams.taken.total()
    streams.run(10.0, EgressRates(tenant=10))
    assert streams.taken.total() - before <= 110


def test_the_time_that_output_waited_is_counted() -> None:
    streams = Streams(1)
    streams.run(20.0, EgressRates(tenant=10))
    assert streams.egress.held_s == pytest.approx(20.0, abs=0.3)
    assert not streams.egress.rests(EgressRates(tenant=10))
    streams.egress.waits.clear()
    streams.egress.due(EgressRates(tenant=10), streams.now_s + 5)
    assert streams.egress.rests(EgressRates(tenant=10))


def test_rates_hold_for_any_arrivals() -> None:
    rng = Random(5)
    for _ in range(50):
        rates = EgressRates(tenant=rng.choice([0, 1, 9, 400]), stream=rng.choice([0, 1, 9, 50]))
        egress, now_s, taken = TenantEgress(), 0.0, Counter[EgressWait]()
        waits = [EgressWait(EgressBucket(), lambda _: None) for _ in range(rng.randint(1, 30))]
        for _ in range(300):
            for wait in rng.sample(waits, rng.randint(0, len(waits))):
                if wait not in egress.waits:
                    wait.wanted = rng.randint(1, WINDOW)
                    egress.waits[wait] = None
            found = egress.due(rates, now_s)
            assert all(tokens > 0 for tokens in found.values())
            taken.update(found)
            assert not rates.tenant or taken.total() <= rates.tenant * (now_s + 1) + 1
            assert not rates.stream or max(taken.values(), default=0) <= rates.stream * (now_s + 1) + 1
            now_s += rng.uniform(0, 0.3)


def test_gateways_share_the_rate_of_a_tenant_and_not_that_of_a_stream() -> None:
    tenant = Tenant(Meta("acme"), egress_tokens_per_second=100, stream_tokens_per_second=20)
    assert egress_rates(tenant, 4) == EgressRates(25, 20)
    assert egress_rates(tenant, 0) == EgressRates(100, 20), "before the gateway observes itself"
    assert egress_rates(Tenant(Meta("acme")), 4) is None
