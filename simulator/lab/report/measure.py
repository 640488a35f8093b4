"""What clients saw, per tenant and class: latencies, goodput and service, counted in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from services.core.estimates.sketch import Sketch, merged
from services.core.records import Priority
from services.scheduler.policy.queue.fairness import ServiceWeights
from simulator.fleet.clients.client import RequestRecord

MAX_BINS: Final = 600


class Bins:
    """Sums per bin of ``width_s``, which doubles whenever an instant lies beyond the last possible bin."""

    __slots__ = ("sums", "width_s")

    def __init__(self, width_s: float = 1.0) -> None:
        self.width_s = width_s
        self.sums: list[float] = []

    def add(self, at_s: float, amount: float = 1.0) -> None:
        """Count ``amount`` at an instant of 0 or later."""
        while at_s >= self.width_s * MAX_BINS:
            self._double()
        index = int(at_s / self.width_s)
        if index >= len(self.sums):
            self.sums.extend([0.0] * (index + 1 - len(self.sums)))
        self.sums[index] += amount

    def cover(self, from_s: float, to_s: float) -> None:
        """Count every second from ``from_s`` to ``to_s`` in the bin that it lies in."""
        self.add(to_s, 0.0)  # makes room first, so that the width stays below
        at_s = from_s
        while at_s < to_s:
            edge_s = min((int(at_s / self.width_s) + 1) * self.width_s, to_s)
            if edge_s <= at_s:  # a step below the resolution of a float
                return
            self.add(at_s, edge_s - at_s)
            at_s = edge_s

    def widened(self, width_s: float) -> list[float]:
        """Return the sums per bin of ``width_s``, a width of ours doubled any number of times."""
        factor = round(width_s / self.width_s)
        return [sum(self.sums[index : index + factor]) for index in range(0, len(self.sums), factor)]

    def _double(self) -> None:
        self.width_s *= 2
        self.sums = [sum(self.sums[index : index + 2]) for index in range(0, len(self.sums), 2)]


MAX_GROUPS: Final = 256
OTHERS: Final = "(others)"
GroupKey = tuple[str, Priority]


@dataclass(frozen=True, slots=True)
class Slo:
    """A finished request is good with its first token within ``ttft_s`` and a mean gap within ``tpot_s``."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


@dataclass(slots=True)
class Group:
    """The requests of one tenant and class. Sketches are of seconds; ``itl`` weighs a gap by its tokens."""

    sent: int = 0
    finished: int = 0
    good: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft: Sketch = field(default_factory=Sketch)
    itl: Sketch = field(default_factory=Sketch)
    tpot: Sketch = field(default_factory=Sketch)
    queue: Sketch = field(default_factory=Sketch)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    resumes: int = 0
    service: Bins = field(default_factory=Bins)
    waiting: Bins = field(default_factory=Bins)


class RecordCollector:
    """Counts records. Beyond MAX_GROUPS tenants and classes, further ones are counted together per class.

    ``warm_up_s``: requests sent before it are left out of everything but the series over time. Times count
    from ``origin_s``, when the load began.
    """

    def __init__(self, slo: Slo, prices: ServiceWeights | None = None, *, warm_up_s: float = 0.0) -> None:
        self.slo = slo
        self.prices = prices if prices is not None else ServiceWeights()
        self.warm_up_s = warm_up_s
        self.origin_s = 0.0
        self.groups: dict[GroupKey, Group] = {}
        self.tokens = Bins()
        self.arrivals = Bins()
        self.refusals = Bins()
        self.last_s = 0.0
        self.largest_cost = 0.0  # cost of the largest request, in weighted tokens

    def take(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        group = self._group(record.request.tenant, record.request.priority)
        self.last_s = max(self.last_s, record.ended_s - self.origin_s)
        self._over_time(record, group)
        if record.sent_s - self.origin_s < self.warm_up_s:
            return
        group.sent += 1
        group.outcomes[record.outcome] += 1
        group.output_tokens += record.output_tokens
        group.resumes += record.resumes
        group.queue.add(max(0.0, record.queue_s))
        if record.ttft_s is None:
            return
        group.prompt_tokens += record.request.prompt_tokens
        group.cached_tokens += record.cached_tokens
        group.ttft.add(record.ttft_s)
        for gap_s, tokens in zip(record.gap_s, record.gap_tokens, strict=True):
            if tokens:
                group.itl.add(gap_s / tokens, tokens)
        tpot_s = tpot(record)
        if tpot_s is not None:
            group.tpot.add(tpot_s)
        if record.finished:
            group.finished += 1
            group.good += record.ttft_s <= self.slo.ttft_s and (tpot_s or 0.0) <= self.slo.tpot_s

    def ttft_of(self, tenants: Collection[str]) -> Sketch:
        """Return the times to the first token of all requests of these tenants, as one population."""
        return merged(group.ttft for (tenant, _), group in self.groups.items() if tenant in tenants)

    def _over_time(self, record: RequestRecord, group: Group) -> None:
        sent_s = record.sent_s - self.origin_s
        self.arrivals.add(sent_s)
        group.waiting.cover(sent_s, sent_s + max(0.0, record.queue_s))
        if not record.first_token_s:
            self.refusals.add(record.ended_s - self.origin_s)
            return
        first_tokens = max(0, record.output_tokens - sum(record.gap_tokens))
        at_s = record.first_token_s - self.origin_s
        first = self.prices.cost(
            record.request.prompt_tokens, first_tokens, cached_tokens=record.cached_tokens
        )
        group.service.add(at_s, first)
        self.tokens.add(at_s, first_tokens)
        whole = self.prices.cost(record.request.prompt_tokens, record.output_tokens)
        self.largest_cost = max(self.largest_cost, whole)
        for gap_s, tokens in zip(record.gap_s, record.gap_tokens, strict=True):
            at_s += gap_s
            group.service.add(at_s, self.prices.output * tokens)
            self.tokens.add(at_s, tokens)

    def _group(self, tenant: str, priority: Priority) -> Group:
        found = self.groups.get((tenant, priority))
        if found is None:
            key = (tenant if len(self.groups) < MAX_GROUPS else OTHERS, priority)
            found = self.groups.setdefault(key, Group())
        return found


def tpot(record: RequestRecord) -> float | None:
    """Return the mean time per output token after the first, seconds; None below two tokens."""
    if record.output_tokens < 2:
        return None
    return max(0.0, record.last_token_s - record.first_token_s) / (record.output_tokens - 1)
