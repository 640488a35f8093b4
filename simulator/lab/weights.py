"""A version that a thousand nodes fetch from a thin source and from each other, by the registry's policy.

    python -m simulator weights [--nodes 1000] [--size-gb 500] [--piece-mib 64] [--seed 0]

The bound is size over source rate: no node can be done before the last piece left the source. A link sends
one piece at a time at its full rate, and receives so; the source likewise. Pieces of 64 MiB stand for the
chunks of 4 MiB, to keep the run short: what a node passes on is coarser than in a real fleet, so times are
longer. Nodes that die do so silently, at any time before the bound. Nodes that lie claim every piece from the
beginning, send other bytes, and report nodes that are honest. Ratios are over the honest nodes that live.
Prints ``RESULT {json}`` last; exit status 1 when an aim is missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from services.core.swarm import ChunkOrder, ChunkPeer, ChunkReport, ChunkSwarm, FailedChunk, bitmap_of

AIMS: Final = {"p50_over_bound": 1.1, "p99_over_bound": 1.3}
STALL_S: Final = 5.0  # time after which a transfer from a node that died has failed
_WINDOW_S: Final = 2.0  # orders that a node has at once, in time at the rate of its link
_SLANDERS: Final = 4
_SENT, _RECEIVED, _LOST = range(3)  # what an event is of a transfer


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """Rates in bytes per second."""

    nodes: int = 1000
    zones: int = 3
    size_bytes: float = 500e9
    piece_bytes: float = 64 * 2.0**20
    source_rate: float = 10e9 / 8
    node_rate: float = 25e9 / 8
    dying_ratio: float = 0.05
    lying_ratio: float = 0.02
    seed: int = 0

    @property
    def pieces(self) -> int:
        return math.ceil(self.size_bytes / self.piece_bytes)

    @property
    def bound_s(self) -> float:
        return self.size_bytes / self.source_rate


@dataclass(slots=True, eq=False)
class _SimNode:
    peer: ChunkPeer
    lies: bool
    dies_s: float
    sends_s: float = 0.0  # time at which the link is free to send
    receives_s: float = 0.0
    has: int = 0
    done_s: float = math.inf
    has_joined: bool = False
    gained: list[int] = field(default_factory=list)
    failed: list[FailedChunk] = field(default_factory=list)
    fetching: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class SwarmOutcome:
    """``done_s`` is of the honest nodes that live, sorted, inf for one never done; the rest counts pieces."""

    done_s: tuple[float, ...] = ()
    from_source: int = 0
    from_peers: int = 0
    damaged: int = 0
    across_zones: int = 0

    def over_bound(self, quantile: float, spec: SwarmSpec) -> float:
        return self.done_s[min(len(self.done_s) - 1, int(quantile * len(self.done_s)))] / spec.bound_s


class SwarmWorld:
    """One distribution on a virtual clock."""

    def __init__(self, spec: SwarmSpec, swarm: ChunkSwarm) -> None:
        self._spec = spec
        self._swarm = swarm
        self._rng = Random(f"nodes {spec.seed}")
        self._nodes: dict[str, _SimNode] = {}
        liars, dying = int(spec.nodes * spec.lying_ratio), int(spec.nodes * spec.dying_ratio)
        for number in range(spec.nodes):
            lies, dies = number < liars, liars <= number < liars + dying
            dies_s = self._rng.uniform(0.0, spec.bound_s) if dies else math.inf
            peer = ChunkPeer(f"node-{number}", zone=f"zone-{number % spec.zones}")
            self._nodes[peer.address] = _SimNode(peer, lies, dies_s)
        self._window = max(8, int(_WINDOW_S * spec.node_rate / spec.piece_bytes))
        self._source_free_s = 0.0
        self._events: list[tuple[float, int, _SimNode, ChunkOrder | None, int]] = []
        self._number = 0
        self._found = SwarmOutcome()

    def run(self) -> SwarmOutcome:
        """Return what became of the distribution, at most ten times the bound later."""
        for node in self._nodes.values():
            self._at(self._rng.random(), node, None)
        honest = [node for node in self._nodes.values() if not node.lies and node.dies_s == math.inf]
        left = len(honest)
        while self._events and left:
            now_s, _, node, order, stage = heapq.heappop(self._events)
            if now_s >= node.dies_s:
                continue
            if now_s > 10.0 * self._spec.bound_s:
                break
            if order is None:
                self._report(node, now_s)
            elif stage == _SENT:
                node.receives_s = max(now_s, node.receives_s + self._spec.piece_bytes / self._spec.node_rate)
                self._at(node.receives_s, node, order, _RECEIVED)
            else:
                self._arrive(node, order, now_s, is_lost=stage == _LOST)
                left -= node.done_s == now_s and node.dies_s == math.inf
        self._found.done_s = tuple(sorted(node.done_s for node in honest))
        return self._found

    def _at(self, at_s: float, node: _SimNode, order: ChunkOrder | None, stage: int = _SENT) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, node, order, stage))

    def _report(self, node: _SimNode, now_s: float) -> None:
        spec, have = self._spec, b""
        if not node.has_joined:
            have = bitmap_of(range(spec.pieces) if node.lies else (), spec.pieces)
            node.has_joined = True
        if node.lies:
            others = self._rng.sample(sorted(self._nodes), _SLANDERS)
            node.failed = [FailedChunk(0, address) for address in others]
        gained, fetching = tuple(node.gained), tuple(node.fetching)
        wanted = 0 if node.lies or node.has == spec.pieces else max(0, self._window - len(fetching))
        report = ChunkReport(node.peer, have, gained, fetching, tuple(node.failed), wanted)
        node.gained, node.failed = [], []
        answer = self._swarm.exchange(report, now_s)
        assert not answer.resend, "a node is forgotten"
        for order in answer.orders:
            self._send(node, order, now_s)
        self._at(now_s + answer.next_report_s, node, None)

    def _send(self, node: _SimNode, order: ChunkOrder, now_s: float) -> None:
        """Give the piece its place on the link that sends it."""
        spec = self._spec
        node.fetching[order.index] = None
        if order.peer is None:
            self._found.from_source += 1
            self._source_free_s = max(now_s, self._source_free_s) + spec.piece_bytes / spec.source_rate
            sent_s = self._source_free_s
        else:
            sender = self._nodes[order.peer.address]
            took_s = spec.piece_bytes / spec.node_rate
            sent_s = sender.sends_s = max(now_s, sender.sends_s) + took_s
            if sent_s > sender.dies_s:
                self._at(max(now_s, sender.dies_s) + STALL_S, node, order, _LOST)
                return
        self._at(sent_s, node, order)

    def _arrive(self, node: _SimNode, order: ChunkOrder, now_s: float, *, is_lost: bool) -> None:
        del node.fetching[order.index]
        if order.peer is not None:
            sender = self._nodes[order.peer.address]
            if sender.lies or is_lost:
                self._found.damaged += 1
                node.failed.append(FailedChunk(order.index, order.peer.address))
                return
            self._found.from_peers += 1
            self._found.across_zones += sender.peer.zone != node.peer.zone
        node.gained.append(order.index)
        node.has += 1
        if node.has == self._spec.pieces:
            node.done_s = now_s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulator weights", description=__doc__)
    usual = SwarmSpec()
    parser.add_argument("--nodes", type=int, default=usual.nodes)
    parser.add_argument("--size-gb", type=float, default=usual.size_bytes / 1e9)
    parser.add_argument("--piece-mib", type=float, default=usual.piece_bytes / 2**20)
    parser.add_argument("--seed", type=int, default=usual.seed)
    options = parser.parse_args(arguments)
    size_bytes, piece_bytes = options.size_gb * 1e9, options.piece_mib * 2**20
    spec = SwarmSpec(options.nodes, size_bytes=size_bytes, piece_bytes=piece_bytes, seed=options.seed)
    began_s = time.process_time()
    found = SwarmWorld(spec, ChunkSwarm(spec.pieces, Random(spec.seed))).run()
    result = {
        "bound_s": round(spec.bound_s, 1),
        "p50_over_bound": round(found.over_bound(0.5, spec), 3),
        "p99_over_bound": round(found.over_bound(0.99, spec), 3),
        "source_copies": round(found.from_source / spec.pieces, 3),
        "damaged_ratio": round(found.damaged / max(1, found.from_peers), 5),
        "across_zones_ratio": round(found.across_zones / max(1, found.from_peers), 3),
        "nodes": spec.nodes,
        "pieces": spec.pieces,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    missed = [name for name, most in AIMS.items() if not result[name] <= most]
    print(f"RESULT {json.dumps(result)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
