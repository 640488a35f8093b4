"""Joins what a gateway and what workers report of one request, in any order.

A gateway's report books a request's tokens and list price; a worker's adds device time and measured cost to
the same line. A worker's report that comes first waits. If no gateway follows, the request is charged from
its workers' tokens; a gateway's report that comes later replaces that charge. The same request may be
reported by a second gateway that resumed it: larger counts replace smaller ones, as the limiter settles
them.

A request is closed some time after its last report. The join must not take a late report of a closed
request for one of a request without a gateway, because its tokens would be charged twice. Therefore it
remembers the latest end of any closed request: what ended before is booked as device time alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from services.controlplane.usage.policy.lines import HOUR_S, NOTHING, Amounts, Line, Source
from services.core.generation import Usage
from services.core.usage import RequestUsage, SequenceDeviceUse

SETTLED_KEEP_S: Final = 3900.0  # longer than the body of an idempotency key, whose request may be resumed
CHARGED_KEEP_S: Final = 30 * 86_400.0
MAX_SETTLED: Final = 500_000
MAX_WAITING: Final = 200_000
MAX_SEQUENCES: Final = 1024  # most sequences of one request
_SKEW_S: Final = 60.0

Post = Callable[[Line, Amounts], Line]


class Open(Struct, frozen=True):
    """A request that further reports may follow for.

    ``line`` states where ``booked`` is booked; None: nothing is. ``sequences`` are the workers' reports while
    no gateway reported it. ``charged`` is what the request was charged from them.
    """

    reported_s: float
    ended_s: float
    line: Line | None = None
    booked: Amounts = NOTHING
    sequences: tuple[SequenceDeviceUse, ...] = ()
    charged: Usage | None = None


class Unmatched(Struct, frozen=True):
    """A request that only workers reported, and its usage by their reports."""

    request_id: str
    tenant: str
    model: str
    usage: Usage


class OpenRequests:
    """Owns the open requests; books through ``post``, which the caller passes with each report."""

    def __init__(self, *, max_settled: int = MAX_SETTLED, max_waiting: int = MAX_WAITING) -> None:
        self._max_settled = max_settled
        self._max_waiting = max_waiting
        self.settled: OrderedDict[str, Open] = OrderedDict()  # a gateway reported it; oldest report first
        self.waiting: OrderedDict[str, Open] = OrderedDict()  # only workers did
        self.closed_s = 0.0
        self.late = 0

    def copy(self) -> OpenRequests:
        found = OpenRequests()
        found.settled, found.waiting = self.settled.copy(), self.waiting.copy()
        found.closed_s, found.late = self.closed_s, self.late
        return found

    def gateway(self, event: RequestUsage, now_s: float, post: Post) -> None:
        """Book the tokens of a request, once."""
        total = Amounts.of_tokens(event.usage, event.list_micros)
        before = self.settled.pop(event.request_id, None)
        if before is not None:
            assert before.line is not None, "a settled request is booked"
            rise = before.booked.rise_to(total)
            post(before.line, rise)
            ended_s = max(before.ended_s, event.ended_unix_s)
            self.settled[event.request_id] = replace(
                before, reported_s=now_s, ended_s=ended_s, booked=before.booked.plus(rise)
            )
            return
        waiting = self.waiting.pop(event.request_id, None)
        device = NOTHING
        if waiting is not None:
            device = _device_of(waiting.sequences)
            if waiting.line is not None:
                post(waiting.line, waiting.booked.negated())
        line = post(_line_of(event), total.plus(device))
        self.settled[event.request_id] = Open(now_s, event.ended_unix_s, line, total)

    def worker(self, use: SequenceDeviceUse, now_s: float, post: Post) -> None:
        """Book the device time of a sequence, or let it wait for the gateway's report."""
        device = _device_of([use])
        settled = self.settled.get(use.request_id)
        if settled is not None:
            assert settled.line is not None, "a settled request is booked"
            post(settled.line, device)
            return
        waiting = self.waiting.pop(use.request_id, None)
        is_closed = waiting is None and use.ended_unix_s <= self.closed_s + _SKEW_S * bool(self.closed_s)
        if is_closed or (waiting is not None and len(waiting.sequences) >= MAX_SEQUENCES):
            self.late += 1
            post(_worker_line(use), device)
            if waiting is not None:
                self.waiting[use.request_id] = waiting
            return
        if waiting is None:
            waiting = Open(now_s, use.ended_unix_s)
        elif waiting.line is not None:
            post(waiting.line, device)
            waiting = replace(waiting, booked=waiting.booked.plus(device))
        self.waiting[use.request_id] = replace(
            waiting,
            reported_s=now_s,
            ended_s=max(waiting.ended_s, use.ended_unix_s),
            sequences=(*waiting.sequences, use),
        )

    def charge(self, request_id: str, usage: Usage, list_micros: int, post: Post) -> None:
        """Book a request from its workers' reports, in place of an earlier charge. It has no effect once its
        gateway reported it."""
        waiting = self.waiting.get(request_id)
        if waiting is None:
            return
        if waiting.line is not None:
            post(waiting.line, waiting.booked.negated())
        total = Amounts.of_tokens(usage, list_micros).plus(_device_of(waiting.sequences))
        line = post(_worker_line(waiting.sequences[0]), total)
        self.waiting[request_id] = replace(waiting, line=line, booked=total, charged=usage)

    def unmatched(self, now_s: float, older_than_s: float) -> tuple[Unmatched, ...]:
        """Return the requests to charge: without a gateway's report, and the last of a worker that old."""
        found = []
        for request_id, waiting in self.waiting.items():
            usage = tokens_of(waiting.sequences)
            if now_s - waiting.reported_s >= older_than_s and usage != waiting.charged:
                first = waiting.sequences[0]
                found.append(Unmatched(request_id, first.tenant, first.model, usage))
        return tuple(found)

    def charged_tenants(self, now_s: float, within_s: float) -> tuple[str, ...]:
        """Return the tenants of requests without a gateway that workers reported within that time."""
        found = set()
        for waiting in reversed(self.waiting.values()):  # the newest report first
            if now_s - waiting.reported_s > within_s:
                break
            if waiting.charged is not None:
                found.add(waiting.sequences[0].tenant)
        return tuple(sorted(found))

    def close(self, now_s: float, post: Post) -> None:
        """Close the requests whose reports are old, and the oldest ones above the bounds."""
        for found in _oldest(self.settled, self._max_settled, now_s - SETTLED_KEEP_S):
            self.closed_s = max(self.closed_s, found.ended_s)
        for found in _oldest(self.waiting, self._max_waiting, now_s - CHARGED_KEEP_S):
            if found.line is None:
                post(_worker_line(found.sequences[0]), _device_of(found.sequences))


def _oldest(requests: OrderedDict[str, Open], most: int, before_s: float) -> Iterator[Open]:
    """Remove and yield the requests above the bound, and those whose last report is older."""
    while requests and (len(requests) > most or next(iter(requests.values())).reported_s < before_s):
        yield requests.popitem(last=False)[1]


def tokens_of(sequences: Iterable[SequenceDeviceUse]) -> Usage:
    """Return a request's usage by its workers' reports.

    All its sequences have one prompt. Later runs find it in a cache more often than the first, which pays.
    """
    found = [use.usage for use in sequences]
    prompt = max(usage.prompt_tokens for usage in found)
    cached = min(usage.cached_tokens for usage in found if usage.prompt_tokens == prompt)
    return Usage(prompt, sum(usage.output_tokens for usage in found), cached)


def _device_of(sequences: Iterable[SequenceDeviceUse]) -> Amounts:
    total = NOTHING
    for use in sequences:
        total = total.plus(Amounts.of_device(use.device_s, use.cost_per_hour))
    return total


def _line_of(event: RequestUsage) -> Line:
    return Line(
        int(event.ended_unix_s // HOUR_S),
        event.tenant,
        event.key_id,
        event.user,
        event.model,
        event.version_digest,
        tuple(sorted(event.labels.items())),
    )


def _worker_line(use: SequenceDeviceUse) -> Line:
    hour = int(use.ended_unix_s // HOUR_S)
    return Line(hour, use.tenant, model=use.model, version_digest=use.version_digest, source=Source.WORKER)
