"""The policy of the swarm: who fetches which chunk from where, and whom reports reach."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import OverQuota
from services.core.swarm import (
    AVOID_S,
    COUNTED_REPORTS,
    LEAST_COMING,
    LEFT_OUT,
    MAX_NODES,
    ORDER_S,
    SILENT_S,
    UPLOADS,
    ChunkOrder,
    ChunkOrders,
    ChunkPeer,
    ChunkReport,
    ChunkSwarm,
    FailedChunk,
    bitmap_of,
    indexes_of,
)


class Nodes:
    """Nodes that carry orders out at once, on a clock that ``at`` moves."""

    def __init__(self, chunks: int) -> None:
        self.swarm = ChunkSwarm(chunks, Random(1))
        self.chunks = chunks
        self.now_s = 0.0
        self.has: dict[str, set[int]] = {}
        self.from_registry = Counter[int]()

    def join(self, name: str, *has: int, zone: str = "", wanted: int = 0) -> ChunkOrders:
        self.has[name] = set(has)
        return self.report(name, have=bitmap_of(has, self.chunks), zone=zone, wanted=wanted)

    def report(self, name: str, *, zone: str = "", wanted: int = 0, **fields: object) -> ChunkOrders:
        report = ChunkReport(ChunkPeer(name, zone=zone), wanted=wanted, **fields)  # type: ignore[arg-type]
        answer = self.swarm.exchange(report, self.now_s)
        self.from_registry.update(order.index for order in answer.orders if order.peer is None)
        return answer

    def step(self, name: str, orders: tuple[ChunkOrder, ...], *, wanted: int = 4) -> ChunkOrders:
        """Complete the orders and receive the next."""
        gained = tuple(order.index for order in orders)
        self.has[name] |= set(gained)
        return self.report(name, gained=gained, wanted=wanted)

    def at(self, seconds: float) -> None:
        """Move the clock in steps in which every node reports."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 1.0)
            for name in self.has:
                self.report(name)


def sources(answer: ChunkOrders) -> set[str]:
    return {"" if order.peer is None else order.peer.address for order in answer.orders}


@pytest.mark.parametrize("count", [2, 7])
def test_each_chunk_leaves_the_registry_once(count: int) -> None:
    nodes = Nodes(60)
    names = [f"n{number}" for number in range(count)]
    orders = {name: nodes.join(name, wanted=4).orders for name in names}
    for _ in range(200):
        nodes.now_s += 0.2
        for name in names:
            orders[name] = nodes.step(name, orders[name]).orders
        nodes.swarm.check_integrity()
    assert all(len(has) == 60 for has in nodes.has.values())
    assert nodes.from_registry == Counter(range(60))


def test_new_chunks_go_to_the_least_served() -> None:
    nodes = Nodes(100)
    nodes.report("a", gained=tuple(order.index for order in nodes.join("a", wanted=8).orders))
    nodes.join("b")
    nodes.at(1.0)
    fresh = nodes.report("b", wanted=1).orders
    assert sources(ChunkOrders(fresh)) == {""}, "it was given nothing yet"
    nodes.report("b", gained=(fresh[0].index,))
    first = nodes.report("a", wanted=1).orders[0]
    assert first.peer is not None, "it was given more than the mean, and a peer has what it lacks"


def test_the_rarest_chunk_is_first() -> None:
    nodes = Nodes(4)
    for number in range(3):
        nodes.join(f"n{number}", 0, 1, 2)
    nodes.join("rare", 3)
    assert nodes.join("new", wanted=1).orders == (ChunkOrder(3, ChunkPeer("rare")),)


def test_a_peer_in_the_zone_is_preferred_and_none_sends_more_than_its_bound() -> None:
    chunks = 4 * UPLOADS
    nodes = Nodes(chunks)
    for zone in ("a", "b"):
        nodes.join(f"seed-{zone}", *range(chunks), zone=zone)
    answer = nodes.join("new", zone="b", wanted=chunks)
    by_source = Counter(order.peer.address for order in answer.orders if order.peer)
    assert [order.peer.address for order in answer.orders[:UPLOADS] if order.peer] == ["seed-b"] * UPLOADS
    assert by_source == {"seed-b": UPLOADS, "seed-a": UPLOADS}
    nodes.swarm.check_integrity()


def test_a_peer_that_is_reported_is_avoided_by_the_reporter_and_left_out_by_two() -> None:
    nodes = Nodes(10)
    nodes.join("liar", *range(10))
    nodes.join("good", 0, 1, 2)
    assert "liar" in sources(nodes.join("a", wanted=9))
    answer = nodes.report("a", failed=(FailedChunk(5, "liar"),), wanted=9)
    assert sources(answer) == {"good", ""}, "what the liar alone claims comes from the registry"
    assert "liar" in sources(nodes.join("b", wanted=3))
    nodes.report("b", failed=(FailedChunk(5, "liar"),))
    assert "liar" not in sources(nodes.join("c", wanted=9))
    nodes.swarm.check_integrity()
    nodes.at(LEFT_OUT.longest_s(0) + 2.0)
    assert "liar" in sources(nodes.join("d", wanted=9))
    for name in ("a", "b"):
        nodes.report(name, failed=(FailedChunk(5, "liar"),))
    nodes.at(LEFT_OUT.longest_s(0) + 2.0)
    assert "liar" not in sources(nodes.join("e", wanted=9)), "the second time is longer"


def test_one_reporter_removes_no_peer_and_two_remove_few() -> None:
    nodes = Nodes(10)
    names = [f"n{number}" for number in range(30)]
    for name in names:
        nodes.join(name, *range(10))
    slander = tuple(FailedChunk(0, name) for name in names)
    nodes.join("x")
    nodes.report("x", failed=slander)
    out = [name for name in names if nodes.swarm._nodes[name].is_out]
    assert out == []
    nodes.join("y")
    nodes.report("y", failed=slander)
    out = [name for name in names if nodes.swarm._nodes[name].is_out]
    assert len(out) == COUNTED_REPORTS


def test_a_reporter_counts_once_under_however_many_addresses_it_reports() -> None:
    swarm, honest = ChunkSwarm(4, Random(1)), [ChunkPeer(f"n{number}") for number in range(8)]
    for peer in honest:
        swarm.exchange(ChunkReport(peer, have=b"\x0f"), 0.0, peer.address)
    slander = tuple(FailedChunk(0, peer.address) for peer in honest)
    for number in range(8):
        invented = ChunkPeer(f"invented-{number}")
        swarm.exchange(ChunkReport(invented, have=b"\0", failed=slander), 0.0, "stolen")
    assert swarm._out == 0
    for name in ("stolen", "another"):  # two certificates, and again some addresses
        for number in range(8):
            invented = ChunkPeer(f"{name}-{number}")
            swarm.exchange(ChunkReport(invented, have=b"\0", failed=slander[::-1]), 0.0, name)
    assert swarm._out <= COUNTED_REPORTS
    swarm.check_integrity()


def test_at_most_half_of_the_nodes_are_left_out_and_those_get_copies_of_their_own() -> None:
    chunks = 2 * LEAST_COMING
    nodes = Nodes(chunks)
    names = [f"n{number}" for number in range(4)]
    for name in names:
        nodes.join(name, 0)
    for name in names:
        nodes.report(name, failed=tuple(FailedChunk(0, other) for other in names if other != name))
    out = [name for name in names if nodes.swarm._nodes[name].is_out]
    assert len(out) == 2
    assert nodes.report(out[0], wanted=chunks).orders == (), "the others may bring new chunks in"
    nodes.at(SILENT_S + 2.0)
    orders = nodes.report(out[0], wanted=chunks).orders
    nodes.swarm.check_integrity()
    assert any(order.peer is None for order in orders), "it gets nothing"
    kept = [name for name in names if name not in out]
    first = nodes.report(kept[0], wanted=chunks).orders
    assert {order.index for order in first} >= {order.index for order in orders}, (
        "a node that is left out keeps a chunk from others"
    )
    for name in kept:
        del nodes.has[name]
    nodes.at(3.0 * SILENT_S)
    assert sum(node.is_out for node in nodes.swarm._nodes.values()) == 1, "more than half are left out"
    nodes.swarm.check_integrity()


def test_a_majority_that_lies_excludes_nobody_for_good() -> None:
    nodes = Nodes(30)
    honest, liars = [f"h{number}" for number in range(3)], [f"l{number}" for number in range(5)]
    orders = {name: nodes.join(name, 0).orders for name in honest}
    for name in liars:
        nodes.join(name)
    for _ in range(200):
        nodes.now_s += 1.0
        for name in liars:
            nodes.report(name, failed=tuple(FailedChunk(0, other) for other in honest))
        for name in honest:
            orders[name] = nodes.step(name, orders[name]).orders
        nodes.swarm.check_integrity()
    assert [len(nodes.has[name]) for name in honest] == [30] * 3


def test_a_bitmap_sent_again_does_not_clear_a_name() -> None:
    nodes = Nodes(4)
    for name in ("liar", "a", "b"):
        nodes.join(name, *range(4))
    for name in ("a", "b"):
        nodes.report(name, failed=(FailedChunk(0, "liar"),))
    nodes.join("liar", *range(4))
    assert nodes.swarm._nodes["liar"].is_out


def test_nodes_that_lost_their_files_and_report_so_are_not_left_out() -> None:
    """All lose their caches at once: the orders of the first reports go to peers that have nothing left."""
    chunks = 4 * UPLOADS
    nodes = Nodes(chunks)
    names = [f"n{number}" for number in range(4)]
    for name in names:
        nodes.join(name, *range(chunks))
    orders = {name: nodes.join(name, wanted=4).orders for name in names}
    nodes.now_s += 0.2
    for name in names:
        failed = tuple(FailedChunk(order.index, order.peer.address) for order in orders[name] if order.peer)
        nodes.report(name, failed=failed)
    for name in names:
        nodes.join(name, *range(chunks))
    assert sources(nodes.join("new", wanted=chunks)) == set(names)
    nodes.swarm.check_integrity()


def test_a_silent_node_is_forgotten_and_its_chunks_are_sent_again() -> None:
    nodes = Nodes(LEAST_COMING)
    fresh = nodes.join("dies", wanted=8).orders
    nodes.step("dies", fresh[:2])
    del nodes.has["dies"]
    nodes.join("a")
    nodes.at(3.0 * SILENT_S)
    assert nodes.swarm.nodes == 1
    answer = nodes.report("a", wanted=8)
    assert sorted(order.index for order in answer.orders) == list(range(LEAST_COMING))
    assert sources(answer) == {""}
    nodes.swarm.check_integrity()


def test_an_order_that_its_node_does_not_name_any_more_is_given_again() -> None:
    nodes = Nodes(3)
    first = nodes.join("a", wanted=3).orders
    assert nodes.report("a", fetching=(first[0].index,), wanted=3).orders != ()
    nodes.swarm.check_integrity()


def test_a_new_chunk_that_does_not_arrive_in_time_is_given_to_another() -> None:
    nodes = Nodes(1)
    assert nodes.join("slow", wanted=1).orders
    nodes.join("a")
    while nodes.now_s < ORDER_S:
        assert nodes.report("a", wanted=1).orders == ()
        nodes.report("slow", fetching=(0,))
        nodes.now_s += 1.0
    assert nodes.report("a", wanted=1).orders == (ChunkOrder(0),)


@pytest.mark.parametrize("held", [10_000, 19_000, 19_999])
def test_a_node_that_has_most_of_a_version_gets_the_rest_at_once(held: int) -> None:
    nodes = Nodes(20_000)
    has = Random(1).sample(range(20_000), held)
    orders = nodes.join("a", *has, wanted=4).orders
    assert len(orders) == min(4, 20_000 - held)
    assert not {order.index for order in orders} & set(has)


def test_bitmaps_that_are_sent_again_cost_no_memory() -> None:
    nodes = Nodes(100)
    for _ in range(50):
        nodes.join("a", *range(100))
        nodes.join("a")
        nodes.swarm.check_integrity()
    with_none = nodes.report("a", wanted=8).orders
    assert len({order.index for order in with_none}) == len(with_none) == LEAST_COMING


def test_a_node_that_is_not_known_sends_its_bitmap() -> None:
    nodes = Nodes(4)
    nodes.join("a", 0, 1)
    answer = nodes.report("b", gained=(2,), wanted=4)
    assert answer.resend
    assert answer.orders == ()


def test_nodes_are_bounded() -> None:
    nodes = Nodes(1)
    for number in range(MAX_NODES):
        nodes.report(f"n{number}", have=b"\1")
    with pytest.raises(OverQuota):
        nodes.report("more", have=b"\1")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 6))
def test_whatever_nodes_report_the_counts_hold(seed: int, chunks: int, count: int) -> None:
    rng, nodes = Random(seed), Nodes(chunks)
    names = [f"n{number}" for number in range(count)]
    open_: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(60):
        nodes.now_s += rng.choice((0.1, 1.0, 5.0, AVOID_S))
        name = rng.choice(names)
        some = tuple(rng.sample(range(chunks), rng.randint(0, chunks)))
        if rng.random() < 0.2:
            answer = nodes.join(name, *some, wanted=rng.randint(0, 9))
        else:
            failed = tuple(FailedChunk(rng.randrange(chunks), rng.choice((*names, ""))) for _ in range(2))
            fetching = tuple(index for index in open_[name] if rng.random() < 0.7)
            few = some[: rng.randint(0, 3)]
            answer = nodes.report(name, gained=few, failed=failed, fetching=fetching, wanted=4)
        open_[name] = [order.index for order in answer.orders] + open_[name][:8]
        nodes.swarm.check_integrity()


@given(st.sets(st.integers(0, 40)))
def test_a_bitmap_names_its_chunks(indexes: set[int]) -> None:
    assert indexes_of(bitmap_of(indexes, 41)) == sorted(indexes)
