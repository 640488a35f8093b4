"""A version that simulated nodes fetch from a thin source: near the bound, with deaths, lies and cuts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from services.core.swarm import ChunkOrder, ChunkOrders, ChunkReport, ChunkSwarm
from simulator.lab.weights import _LOST, STALL_S, SwarmOutcome, SwarmSpec, SwarmWorld, _SimNode

SPEC = SwarmSpec(nodes=60, size_bytes=20e9)


def distributed(kind: type[ChunkSwarm] = ChunkSwarm) -> SwarmOutcome:
    swarm = kind(SPEC.pieces, Random(0))
    found = SwarmWorld(SPEC, swarm).run()
    swarm.check_integrity()
    return found


def test_nodes_have_the_version_soon_after_its_last_piece_left_the_source() -> None:
    found = distributed()
    assert len(found.done_s) == SPEC.nodes - 3 - 1
    assert found.over_bound(0.99, SPEC) <= 1.4, found  # the end is 1 % of a bound of 400 s, and here 25 %
    assert found.from_source <= 1.05 * SPEC.pieces


class Trusting(ChunkSwarm):
    """Takes no reports of peers in."""

    def exchange(self, report: ChunkReport, now_s: float, reporter: str = "") -> ChunkOrders:
        return super().exchange(replace(report, failed=()), now_s, reporter)


def test_a_tracker_that_ignores_reports_is_found() -> None:
    found = distributed(Trusting)
    assert found.over_bound(0.99, SPEC) > 1.4, found


class CutOff(SwarmWorld):
    """The nodes of the first zone reach the source and each other, but none of another zone."""

    def _send(self, node: _SimNode, order: ChunkOrder, now_s: float) -> None:
        if order.peer is None or (order.peer.zone == "zone-0") == (node.peer.zone == "zone-0"):
            super()._send(node, order, now_s)
            return
        node.fetching[order.index] = None
        self._at(now_s + STALL_S, node, order, _LOST)


def small(nodes: int, zones: int, **fields: float) -> SwarmSpec:
    """Return a version of 200 pieces, of which 2 per second leave the source."""
    piece = SPEC.piece_bytes
    spec = SwarmSpec(nodes, zones, size_bytes=200 * piece, source_rate=2 * piece, dying_ratio=0.0)
    return replace(spec, **{"lying_ratio": 0.0, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("nodes", "zones"), [(4, 2), (40, 2), (60, 3)])
def test_a_cut_between_zones_stops_nobody(nodes: int, zones: int) -> None:
    spec = small(nodes, zones)
    swarm = ChunkSwarm(spec.pieces, Random(0))
    found = CutOff(spec, swarm).run()
    swarm.check_integrity()
    assert found.done_s[-1] <= 3.5 * spec.bound_s, found
    assert found.from_source <= 4.0 * spec.pieces, "each side needs a copy, and some pieces come twice"


def test_nodes_of_which_most_lie_still_complete_it() -> None:
    spec = small(10, 2, lying_ratio=0.6)
    swarm = ChunkSwarm(spec.pieces, Random(0))
    found = SwarmWorld(spec, swarm).run()
    swarm.check_integrity()
    assert len(found.done_s) == 4
    assert found.done_s[-1] <= 5.0 * spec.bound_s, "each of the four may need a copy of its own"
