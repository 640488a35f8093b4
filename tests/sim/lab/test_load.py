"""Streams of requests are merged in order, and traces are dealt out to tenants."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from simulator.fleet.clients.session import prompt_ids
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import Fixed
from simulator.lab.load.load import Share, SharedPrefixes, Stream, merged, of_trace
from simulator.lab.load.replay import azure_like, mooncake_like
from simulator.lab.load.traces import TraceRow


def stream(tenant: str, rate: float = 10.0, prefixes: SharedPrefixes | None = None) -> Stream:
    return Stream(tenant, Poisson(rate), Fixed(100), Fixed(10), prefixes=prefixes)


def test_streams_are_merged_in_order_and_do_not_disturb_one_another() -> None:
    both = list(merged([stream("acme"), stream("globex", 20.0)], seed=1, duration_s=50.0))
    alone = list(merged([stream("acme")], seed=1, duration_s=50.0))
    assert [each.arrival_s for each in both] == sorted(each.arrival_s for each in both)
    assert [each for each in both if each.tenant == "acme"] == alone
    counts = Counter(each.tenant for each in both)
    assert counts["globex"] / counts["acme"] == pytest.approx(2.0, rel=0.2)


def test_a_stream_keeps_to_its_time() -> None:
    late = Stream("acme", Poisson(50.0), Fixed(1), Fixed(1), from_s=5.0, until_s=7.0)
    times = [each.arrival_s for each in merged([late], seed=1, duration_s=100.0)]
    assert 5.0 < min(times) < 5.2
    assert 6.8 < max(times) < 7.0


def test_prefixes_are_shared_by_the_stated_share() -> None:
    prefixes = SharedPrefixes(count=10, tokens=512, share_ratio=0.9)
    requests = list(islice(stream("acme", prefixes=prefixes).requests(3), 5000))
    ids = Counter(each.prefix_id for each in requests)
    assert ids[0] / 5000 == pytest.approx(0.1, abs=0.02)
    assert (ids[1] + ids[2]) / (5000 - ids[0]) == pytest.approx(0.8, abs=0.02)
    assert set(ids) == set(range(11))
    assert {each.prompt_tokens for each in requests} == {100, 612}


def rows() -> list[TraceRow]:
    conversations = [
        TraceRow(float(turn), 1500, 5, (0, 10 + talk, 100 + 10 * talk + turn), 512)
        for turn in range(5)
        for talk in range(40)
    ]
    return [*conversations, TraceRow(9.0, 100_000, 3000, (), 512)]


def test_conversations_stay_with_one_tenant_and_rows_are_dealt_by_shares() -> None:
    shares = [Share("acme", 3.0), Share("globex", 1.0)]
    requests = list(of_trace(rows(), shares, seed=1, context_tokens=4096))
    assert len(requests) == 201
    owners: dict[int, set[str]] = {}
    for each in requests[:200]:
        owners.setdefault(each.blocks[1], set()).add(each.tenant)
    assert all(len(tenants) == 1 for tenants in owners.values())
    drawn = Counter(
        each.tenant for each in islice(of_trace(azure_like(1), shares, seed=1, context_tokens=8192), 2000)
    )
    assert drawn["acme"] / drawn["globex"] == pytest.approx(3.0, rel=0.2)


def test_rows_are_cut_to_the_context() -> None:
    requests = list(of_trace(rows(), [Share("acme", 1.0)], seed=1, context_tokens=4096))
    last = requests[-1]
    assert (last.output_tokens, last.prompt_tokens) == (2048, 2048)


def test_equal_blocks_are_equal_tokens() -> None:
    first, second = list(of_trace(rows()[:80:40], [Share("acme", 1.0)], seed=1, context_tokens=4096))
    one, two = prompt_ids(first, 1), prompt_ids(second, 2)
    assert len(one) == len(two) == 1500
    assert one[:1024] == two[:1024]
    assert one[1024:1030] != two[1024:1030]


def test_synthetic_traces_have_the_shape_of_the_recorded_ones() -> None:
    chats = list(islice(azure_like(1), 4000))
    assert 4000 / chats[-1].arrival_s == pytest.approx(5.5, rel=0.1)
    assert sum(row.prompt_tokens for row in chats) / 4000 == pytest.approx(1155, rel=0.2)
    assert sum(row.output_tokens for row in chats) / 4000 == pytest.approx(211, rel=0.2)
    talks = list(islice(mooncake_like(1), 4000))
    assert sum(row.prompt_tokens for row in talks) / 4000 == pytest.approx(12_035, rel=0.25)
    seen: set[int] = set()
    shared = whole = 0
    for row in talks:
        assert len(row.blocks) == -(-row.prompt_tokens // 512)
        whole += len(row.blocks)
        shared += sum(block in seen for block in row.blocks)
        seen.update(row.blocks)
    assert shared / whole == pytest.approx(0.37, abs=0.1)
