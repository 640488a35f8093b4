"""The load of a simulated fleet: streams of requests, merged in order of arrival.

Every stream draws from a random source that the seed and its own name determine, so that one stream's
requests do not depend on the other streams.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from services.core.records import Priority
from simulator.fleet.clients.client import SimRequest
from simulator.lab.load.arrivals import Arrivals
from simulator.lab.load.lengths import Lengths
from simulator.lab.load.traces import TraceRow


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """``share_ratio`` of the requests begin with one of ``count`` prefixes of ``tokens`` tokens.

    ``hot_ratio`` of the prefixes get ``share_of_hot`` of those requests: a fifth of them four fifths.
    """

    count: int
    tokens: int
    share_ratio: float = 1.0
    hot_ratio: float = 0.2
    share_of_hot: float = 0.8
    first_id: int = 1

    def draw(self, rng: Random) -> int:
        """Return the identity of a prefix; 0: none."""
        if rng.random() >= self.share_ratio:
            return 0
        hot = max(1, round(self.count * self.hot_ratio))
        if hot == self.count or rng.random() < self.share_of_hot:
            return self.first_id + rng.randrange(hot)
        return self.first_id + hot + rng.randrange(self.count - hot)


@dataclass(frozen=True, slots=True)
class Stream:
    """The requests of one tenant and class, from ``from_s`` until ``until_s`` (None: without end)."""

    tenant: str
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    name: str = ""
    priority: Priority = Priority.STANDARD
    prefixes: SharedPrefixes | None = None
    deadline_s: float | None = None
    from_s: float = 0.0
    until_s: float | None = None

    def requests(self, seed: int) -> Iterator[SimRequest]:
        """Yield the requests in order of arrival. The prefix comes on top of the drawn prompt."""
        rng = Random(f"{seed}/{self.tenant}/{self.name}")
        times = self.arrivals.times(Random(f"{seed}/{self.tenant}/{self.name}/arrivals"))
        for at_s in times:
            arrival_s = self.from_s + at_s
            if self.until_s is not None and arrival_s >= self.until_s:
                return
            prefix_id = self.prefixes.draw(rng) if self.prefixes is not None else 0
            prefix_tokens = self.prefixes.tokens if self.prefixes is not None and prefix_id else 0
            yield SimRequest(
                tenant=self.tenant,
                prompt_tokens=prefix_tokens + self.prompt.draw(rng),
                output_tokens=self.output.draw(rng),
                arrival_s=arrival_s,
                priority=self.priority,
                prefix_id=prefix_id,
                prefix_tokens=prefix_tokens,
                deadline_s=self.deadline_s,
            )


def merged(streams: Sequence[Stream], *, seed: int, duration_s: float) -> Iterator[SimRequest]:
    """Yield the requests of all streams that arrive within ``duration_s``, in order of arrival."""
    for request in heapq.merge(*(each.requests(seed) for each in streams), key=lambda each: each.arrival_s):
        if request.arrival_s >= duration_s:
            return
        yield request


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's part of a trace, relative to the other parts."""

    tenant: str
    weight: float
    priority: Priority = Priority.STANDARD


def of_trace(
    rows: Iterable[TraceRow], shares: Sequence[Share], *, seed: int, context_tokens: int
) -> Iterator[SimRequest]:
    """Yield a trace's rows as requests of several tenants, drawn by their shares.

    Rows with blocks go to tenants by conversation: the first block that not every row begins with, so that
    what shares a prefix shares a tenant. A row that exceeds ``context_tokens`` is cut to fit.
    """
    upto = list(accumulate(share.weight for share in shares))
    rng = Random(f"{seed}/tenants")
    for row in rows:
        source = Random(f"{seed}/{row.blocks[1]}") if len(row.blocks) > 1 else rng
        point = source.random() * upto[-1]
        share = next(share for share, limit in zip(shares, upto, strict=True) if point < limit)
        output_tokens = min(row.output_tokens, context_tokens // 2)
        prompt_tokens = min(row.prompt_tokens, context_tokens - output_tokens)
        yield SimRequest(
            tenant=share.tenant,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            arrival_s=row.arrival_s,
            priority=share.priority,
            blocks=row.blocks[: -(-prompt_tokens // row.block_tokens)],
            block_tokens=row.block_tokens if row.blocks else 0,
        )
