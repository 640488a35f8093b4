"""Which node fetches which chunk of a version from where: the policy of the registry's tracker. Pure.

A chunk that no node has goes from the registry to one node, the least served; every other copy comes from a
node. Of the chunks that a node is offered the rarest is next, as in BitTorrent (Cohen, IPTPS 2003), from the
holder in the node's zone that sends least. A node that was reported is avoided by the reporter, and
left out for all once ``QUORUM`` reporters name it, of each of which only few reports count. At most half of
the nodes are left out: a cut between zones looks like lies. While the others bring in nothing new, one that
is left out gets from the registry what they lack, as a copy of its own that nobody waits for.

The cost of an order does not grow with the nodes or the chunks: rarity is counted as reports arrive, of the
holders of a chunk only a random sample is listed, and a node is offered a bounded part of what it lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Final

from services.core.backoff import Backoff
from services.core.errors import OverQuota

MAX_ORDERS: Final = 256  # most chunks that a node fetches or is to fetch
MAX_NODES: Final = 2048
UPLOADS: Final = 64  # most chunks that a node is to send
LEAST_COMING, MOST_COMING = 4, 512  # bounds of the chunks that are on their way from the registry
QUORUM: Final = 2
COUNTED_REPORTS: Final = 4  # reported nodes of one reporter that count at a time
AVOID_S: Final = 60.0  # validity of a report of a node
LEFT_OUT: Final = Backoff(60.0, 600.0)
ORDER_S: Final = 60.0  # time after which an order counts as lost, though its node still reports
SILENT_S: Final = 10.0  # least time without a report after which a node is gone
_LISTED: Final = 16  # holders of a chunk that are listed
_CUT: Final = 16  # nodes that one avoids from which on it is cut off, if no other zone sends it chunks
_OFFERED: Final = 256  # chunks that a node chooses from
_TRIES: Final = 16
_PEERS: Final = 16
_NODES_PER_S: Final = 1000.0  # reports per second of a version, however many nodes fetch it
_LEAST_REPORT_S: Final = 0.2
_COMPLETE_S, _IDLE_S = 10.0, 60.0  # report intervals of a complete node, with and without one that fetches
_LOOK_S: Final = 1.0

_UNSEEN, _OFFER, _ORDERED, _HAS = range(4)  # what a chunk is to a node


@dataclass(frozen=True, slots=True)
class ChunkPeer:
    """A node that serves chunks: its address, the role of its certificate, its failure domain."""

    address: str
    role: str = "worker"
    zone: str = ""


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """An order that failed: the peer sent other bytes or none. ``address`` is empty for the registry."""

    index: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """What a node has of a version since its last report. An index counts the version's distinct chunks."""

    node: ChunkPeer
    have: bytes = b""  # bitmap of all that it has, the lowest bit first; empty: as reported before
    gained: tuple[int, ...] = ()
    fetching: tuple[int, ...] = ()  # orders that are not done
    failed: tuple[FailedChunk, ...] = ()
    wanted: int = 0  # most new orders


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """A chunk to fetch. ``peer`` is None for the registry."""

    index: int
    peer: ChunkPeer | None = None


@dataclass(frozen=True, slots=True)
class ChunkOrders:
    """The answer to a report. ``resend``: the next report has to have the bitmap."""

    orders: tuple[ChunkOrder, ...] = ()
    peers: tuple[ChunkPeer, ...] = ()  # nodes to request chunks from while no tracker answers
    resend: bool = False
    next_report_s: float = _LEAST_REPORT_S


@dataclass(slots=True, eq=False)
class _Node:
    peer: ChunkPeer
    state: bytearray  # what each chunk is to it
    reporter: str = ""  # identity as which its reports count
    far_s: float = 0.0  # time of the last chunk from another zone
    expires_s: float = 0.0
    has: int = 0
    offer: list[int] = field(default_factory=list)
    ordered: dict[int, tuple[_Node | None, float]] = field(default_factory=dict)
    start: int = 0  # position in the released chunks at which its offers began
    ahead: int = 0  # next position from there on
    behind: int = 0  # next position from the beginning on
    sending: int = 0
    given: int = 0  # chunks that it got from the registry
    avoids: dict[str, float] = field(default_factory=dict)  # end of each of its reports, by address
    is_out: bool = False
    is_gone: bool = False


@dataclass(slots=True)
class _Standing:
    """Reports about an address. It outlives the node, so that a new bitmap does not clear them."""

    reporters: dict[str, float] = field(default_factory=dict)
    out_until_s: float = 0.0
    times: int = 0


class ChunkSwarm:
    """The nodes that have or fetch one version. ``exchange`` is the only writer."""

    def __init__(self, chunks: int, rng: Random) -> None:
        """``chunks`` is the number of distinct chunks."""
        self.chunks = chunks
        self._rng = rng
        self._nodes: dict[str, _Node] = {}
        self._listed: tuple[_Node, ...] = ()
        self._standings: dict[str, _Standing] = {}
        self._counted: dict[str, dict[str, float]] = {}  # end of each report that counts, by reporter
        self._out = 0
        self._count = [0] * chunks  # holders that are not left out
        self._holders: list[list[_Node]] = [[] for _ in range(chunks)]
        self._released: list[int] = []  # chunks in the order in which they got a first holder
        self._released_s = float("-inf")
        # Chunks without a holder that come to no node, the next one first.
        self._unsent = OrderedDict[int, None].fromkeys(range(chunks))
        self._coming: dict[int, int] = {}  # orders from the registry, by chunk
        # The registry as the source of copies for one node alone: such an order keeps no chunk from others.
        self._aside = _Node(ChunkPeer(""), bytearray())
        self._most_coming = LEAST_COMING
        self._came = 0  # chunks that came from the registry since the last look
        self._mean_given = 0.0
        self._looked_s = float("-inf")
        self._fetching = 0

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    @property
    def reported_s(self) -> float:
        """Time of the last report, to ``_LOOK_S``; minus infinity before the first."""
        return self._looked_s

    def exchange(self, report: ChunkReport, now_s: float, reporter: str = "") -> ChunkOrders:
        """Take a report in and return what its node is to fetch next. Indexes are below ``chunks``.

        ``reporter`` is the proven identity of the caller, by default its address.
        Raises OverQuota for a node more than ``MAX_NODES``.
        """
        self._look(now_s)
        node = self._nodes.get(report.node.address)
        if node is None and len(self._nodes) >= MAX_NODES:
            raise OverQuota(f"{MAX_NODES} nodes share the version, the most", retry_after_s=SILENT_S)
        if report.have:
            node = self._join(report, node)
        if node is None:
            return ChunkOrders(peers=self._some_peers(), resend=True)
        node.reporter = reporter or report.node.address
        for index in report.gained:
            self._gain(node, index)
        for failed in report.failed:
            self._drop(node, failed.index)
            accused = self._nodes.get(failed.address, node)
            # One that has reported since that it lacks the chunk lost its files, as all may at once.
            if accused is not node and accused.state[failed.index] == _HAS:
                self._accuse(node, accused, now_s)
        for index in sorted(node.ordered.keys() - set(report.fetching)):
            self._drop(node, index)
        orders = self._orders(node, min(report.wanted, MAX_ORDERS - len(node.ordered)), now_s)
        interval_s = self._interval_s(node)
        node.expires_s = now_s + max(SILENT_S, 3.0 * interval_s)
        return ChunkOrders(orders, self._some_peers(), next_report_s=interval_s)

    def _look(self, now_s: float) -> None:
        """Once a second: remove silent nodes and lost orders, and take back who was left out long enough."""
        if now_s < self._looked_s + _LOOK_S:
            return
        # What comes until its nodes report, and as much again: the registry is never idle between reports.
        rate_per_s = self._came / (now_s - self._looked_s)
        wanted = int(2.0 * rate_per_s * (0.5 + self._report_s))
        self._most_coming = min(MOST_COMING, max(LEAST_COMING, wanted))
        self._looked_s, self._came = now_s, 0
        for node in list(self._nodes.values()):
            if node.expires_s <= now_s:
                self._leave(node)
                continue
            standing = self._standings.get(node.peer.address)
            is_over = standing is not None and standing.out_until_s <= now_s
            if node.is_out and (is_over or 2 * self._out > len(self._nodes)):
                self._let_in(node)
            for index in [each for each, (_, at_s) in node.ordered.items() if at_s + ORDER_S <= now_s]:
                self._drop(node, index)
        # A standing is kept for as long again as it held, so that the next time is longer.
        self._standings = {
            address: one
            for address, one in self._standings.items()
            if one.out_until_s + LEFT_OUT.longest_s(one.times) > now_s or max(one.reporters.values()) > now_s
        }
        self._counted = {who: ends for who, ends in self._counted.items() if max(ends.values()) > now_s}
        if len(self._released) > 2 * self.chunks + _OFFERED:  # holders came and went
            self._released = [index for index in range(self.chunks) if self._count[index]]
            for node in self._nodes.values():
                node.start = node.ahead = node.behind = 0
        self._listed = tuple(node for node in self._nodes.values() if not node.is_out)
        given = [node.given for node in self._listed if node.has < self.chunks]
        self._mean_given = sum(given) / max(1, len(given))

    def check_integrity(self) -> None:
        for index in range(self.chunks):
            holders = sum(n.state[index] == _HAS and not n.is_out for n in self._nodes.values())
            assert holders == self._count[index], f"chunk {index} has {holders} holders"
        sending = [source for n in self._nodes.values() for source, _ in n.ordered.values() if source]
        assert all(node.sending == sending.count(node) <= UPLOADS for node in self._nodes.values())
        assert self._aside.sending == sending.count(self._aside) <= MOST_COMING
        assert self._out == sum(node.is_out for node in self._nodes.values())
        assert sum(self._coming.values()) <= MOST_COMING
        assert self._fetching == sum(node.has < self.chunks for node in self._nodes.values())
        lost = {i for i in range(self.chunks) if not self._count[i]} - self._coming.keys()
        assert lost == self._unsent.keys(), "what is to be sent is what has no holder and does not come"

    # --- nodes ------------------------------------------------------------------------------------

    def _join(self, report: ChunkReport, before: _Node | None) -> _Node:
        """Replace what is known of the node by its bitmap."""
        node = _Node(report.node, bytearray(self.chunks))
        if before is not None:
            self._leave(before)
            node.given, node.avoids = before.given, before.avoids
        standing = self._standings.get(report.node.address)
        self._nodes[report.node.address] = node
        until_s = 0.0 if standing is None else standing.out_until_s
        node.is_out = until_s > self._looked_s and self._may_leave_out
        self._out += node.is_out
        self._fetching += 1
        for index in indexes_of(report.have):
            self._gain(node, index)
        node.start = node.ahead = int(self._rng.random() * len(self._released))
        return node

    def _leave(self, node: _Node) -> None:
        del self._nodes[node.peer.address]
        self._fetching -= node.has < self.chunks
        for index in list(node.ordered):
            self._drop(node, index)
        if not node.is_out:
            self._uncount(node)
        self._out -= node.is_out
        node.is_gone = True

    def _gain(self, node: _Node, index: int) -> None:
        if index in node.ordered:
            source = node.ordered[index][0]
            if source is None or source is self._aside:
                self._came += 1
            elif source.peer.zone != node.peer.zone:
                node.far_s = self._looked_s
            self._end(node, index)
        if node.state[index] == _HAS:
            return
        node.state[index] = _HAS
        node.has += 1
        self._fetching -= node.has == self.chunks
        holders = self._holders[index]
        if len(holders) < _LISTED:
            holders.append(node)
        else:
            holders[int(self._rng.random() * _LISTED)] = node
        if not node.is_out:
            self._add_holder(index)

    def _add_holder(self, index: int) -> None:
        self._count[index] += 1
        if self._count[index] == 1:
            self._released.append(index)
            self._released_s = self._looked_s
            self._unsent.pop(index, None)

    def _drop(self, node: _Node, index: int) -> None:
        """End an order that is not done; its chunk is offered again."""
        if index in node.ordered:
            self._end(node, index)
            node.state[index] = _OFFER
            node.offer.append(index)

    def _end(self, node: _Node, index: int) -> None:
        source, _ = node.ordered.pop(index)
        if source is not None:
            source.sending -= 1
            return
        self._coming[index] -= 1
        if not self._coming[index]:
            del self._coming[index]
            if not self._count[index]:
                self._unsent[index] = None
                self._unsent.move_to_end(index, last=False)

    def _uncount(self, node: _Node) -> None:
        for index, state in enumerate(node.state):
            if state == _HAS:
                self._count[index] -= 1
                if not self._count[index] and index not in self._coming:
                    self._unsent[index] = None

    def _accuse(self, node: _Node, accused: _Node, now_s: float) -> None:
        """Avoid the accused for this node; leave it out for all if enough reporters name it."""
        address, until_s = accused.peer.address, now_s + AVOID_S
        node.avoids = {other: end_s for other, end_s in node.avoids.items() if end_s > now_s}
        node.avoids[address] = until_s
        before = self._counted.get(node.reporter, {})
        counted = {other: end_s for other, end_s in before.items() if end_s > now_s}
        if len(counted) >= COUNTED_REPORTS and address not in counted:
            return
        counted[address] = until_s
        self._counted[node.reporter] = counted
        one = self._standings.setdefault(address, _Standing())
        one.reporters = {other: end_s for other, end_s in one.reporters.items() if end_s > now_s}
        one.reporters[node.reporter] = until_s
        if len(one.reporters) >= QUORUM and not accused.is_out and self._may_leave_out:
            one.out_until_s = now_s + LEFT_OUT.longest_s(one.times)
            one.times += 1
            one.reporters = {node.reporter: now_s}  # the next time needs a new quorum
            accused.is_out = True
            self._out += 1
            self._uncount(accused)

    @property
    def _may_leave_out(self) -> bool:
        return 2 * (self._out + 1) <= len(self._nodes)

    def _let_in(self, node: _Node) -> None:
        node.is_out = False
        self._out -= 1
        for index, state in enumerate(node.state):
            if state == _HAS:
                self._add_holder(index)

    # --- orders -----------------------------------------------------------------------------------

    def _orders(self, node: _Node, wanted: int, now_s: float) -> tuple[ChunkOrder, ...]:
        orders: list[ChunkOrder] = []
        fresh = max(1, self._most_coming // max(1, self._fetching))
        while min(fresh, wanted) > len(orders) and not node.is_out and node.given <= self._mean_given + 1:
            if (order := self._fresh(node, now_s)) is None:
                break
            orders.append(order)
        fresh -= len(orders)
        orders += self._from_peers(node, wanted - len(orders), now_s)
        while fresh > 0 and len(orders) < wanted:  # it has had more than others, who would fetch nothing more
            if (order := self._fresh(node, now_s)) is None:
                break
            fresh -= 1
            orders.append(order)
        return tuple(orders)

    def _fresh(self, node: _Node, now_s: float) -> ChunkOrder | None:
        """Return a chunk that no node has, and that comes to none yet."""
        coming = self._aside.sending if node.is_out else len(self._coming)
        if coming >= self._most_coming or (node.is_out and now_s < self._released_s + SILENT_S):
            return None
        for index in list(islice(self._unsent, _TRIES)):
            if node.state[index] in (_UNSEEN, _OFFER):
                return self._order(node, index, self._aside if node.is_out else None, now_s)
            self._unsent.move_to_end(index)
        return None

    def _from_peers(self, node: _Node, wanted: int, now_s: float) -> list[ChunkOrder]:
        """Return orders of what the node lacks and peers can send, the rarest first."""
        self._fill(node)
        offer, count, orders = node.offer, self._count, list[ChunkOrder]()
        # Nodes begin with different ones of equally rare chunks.
        begin = int(self._rng.random() * len(offer))
        offer = sorted(offer[begin:] + offer[:begin], key=count.__getitem__)
        left: list[int] = []
        tries = 2 * wanted + _TRIES
        avoided = sum(end_s > now_s for end_s in node.avoids.values())
        is_cut = avoided >= _CUT and node.far_s + SILENT_S < now_s  # the many that lie or die are not a cut
        for index in offer:
            if node.state[index] != _OFFER:
                continue  # it came another way
            if not count[index]:
                node.state[index] = _UNSEEN
                continue
            if tries and len(orders) < wanted:
                tries -= 1
                if (source := self._source(node, index, now_s, is_cut=is_cut)) is not None:
                    orders.append(self._order(node, index, source, now_s))
                    continue
            left.append(index)
        node.offer = left
        return orders

    def _source(self, node: _Node, index: int, now_s: float, *, is_cut: bool) -> _Node | None:
        """Return the best holder that can send; the registry where the node avoids all of them, or is cut
        off and has none in its zone."""
        holders = self._holders[index]
        if not any(not (peer.is_out or peer.is_gone) for peer in holders):  # the sample has none that count
            found = (p for p in self._listed if p.state[index] == _HAS and not (p.is_out or p.is_gone))
            holders[:] = islice(found, _LISTED)
        best, zone, least, avoided = None, node.peer.zone, (True, True, UPLOADS), 0
        for peer in holders:
            # Nodes that are left out send each other chunks: in a cut they are the rest of a zone.
            if peer.is_gone or peer is node or (peer.is_out and not node.is_out):
                continue
            if node.avoids and node.avoids.get(peer.peer.address, 0.0) > now_s:
                avoided += not peer.is_out
            elif peer.sending < UPLOADS:
                cost = (peer.peer.zone != zone, peer.is_out, peer.sending)
                if cost < least:
                    best, least = peer, cost
        is_lost = best is None and avoided >= self._count[index]
        needs_registry = is_lost or (is_cut and least[0])
        return self._aside if needs_registry and self._aside.sending < self._most_coming else best

    def _fill(self, node: _Node) -> None:
        """Offer the node chunks that have a holder, from a random position on, so that nodes differ."""
        released = self._released
        while len(node.offer) < _OFFERED:
            if node.ahead < len(released):
                index = released[node.ahead]
                node.ahead += 1
            elif node.behind < node.start:
                index = released[node.behind]
                node.behind += 1
            else:
                return
            if node.state[index] == _UNSEEN and self._count[index]:
                node.state[index] = _OFFER
                node.offer.append(index)

    def _order(self, node: _Node, index: int, source: _Node | None, now_s: float) -> ChunkOrder:
        node.state[index] = _ORDERED
        node.ordered[index] = (source, now_s)
        if source is not None:
            source.sending += 1
            if source is not self._aside:
                return ChunkOrder(index, source.peer)
        else:
            self._coming[index] = self._coming.get(index, 0) + 1
            self._unsent.pop(index, None)
        node.given += 1
        return ChunkOrder(index)

    @property
    def _report_s(self) -> float:
        return max(_LEAST_REPORT_S, len(self._nodes) / _NODES_PER_S)

    def _interval_s(self, node: _Node) -> float:
        if node.has < self.chunks:
            return self._report_s
        return _COMPLETE_S if self._fetching else _IDLE_S

    def _some_peers(self) -> tuple[ChunkPeer, ...]:
        begin = int(self._rng.random() * max(1, len(self._listed) - _PEERS + 1))
        return tuple(node.peer for node in self._listed[begin : begin + _PEERS])


def indexes_of(bitmap: bytes) -> list[int]:
    """Return the chunks of a bitmap, in order."""
    return [8 * at + bit for at, byte in enumerate(bitmap) if byte for bit in range(8) if byte >> bit & 1]


def bitmap_of(indexes: Iterable[int], chunks: int) -> bytes:
    """Return the bitmap of these chunks, the lowest bit first."""
    bits = bytearray(-(-chunks // 8))
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)
