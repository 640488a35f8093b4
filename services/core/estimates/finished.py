"""Requests that have ended, as operators look for them: times, counts and names, never a text."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from services.core import faults
from services.core.generation import NO_RUN, RunFacts, StageClock, Usage
from services.core.records import Priority

MAX_SLOW: Final = 32  # most slow requests of one gateway between two reports
MAX_FAILED: Final = 32
MAX_FAILED_OF_TENANT: Final = 8
MAX_SAMPLED: Final = 64  # most samples of one gateway between two reports
MAX_STRATA: Final = 16  # models with a reservoir of their own, and one for the others
_OTHER_MODELS: Final = ""
MAX_KEPT: Final = 4096  # most requests in the leading control plane, the newest ones


class FinishedRequest(Struct, frozen=True, gc=False):
    """``reason`` is its error's, FINISHED for none. ``version_digest`` is empty before one was chosen."""

    request_id: str
    face: str
    tenant: str
    model: str
    version_digest: str
    priority: Priority
    reason: str
    clock: StageClock
    usage: Usage
    zone: str = ""  # zone of its gateway
    gateway: str = ""  # name of its gateway
    weight: float = 0.0  # how many requests it stands for as a sample; 0: it was not drawn
    run: RunFacts = NO_RUN

    @property
    def failed(self) -> bool:
        return self.reason != faults.FINISHED

    @property
    def total_us(self) -> int:
        clock = self.clock
        waited_us = clock.validate_us + clock.admit_us + clock.queue_us + clock.dispatch_us
        return waited_us + clock.engine_wait_us + clock.prefill_us + clock.decode_us + clock.send_us

    @property
    def ended_unix_us(self) -> int:
        return self.clock.received_unix_us + self.total_us


class NotableRequests:
    """The slowest requests and the first failures since the last cut, in bounded memory."""

    def __init__(self) -> None:
        self._number = 0
        self._slow: list[tuple[int, int, FinishedRequest]] = []
        self._failed: list[FinishedRequest] = []
        self._of_tenant: Counter[str] = Counter()

    def add(self, request: FinishedRequest) -> None:
        if not request.failed:
            self._number += 1
            entry = request.total_us, self._number, request
            if len(self._slow) < MAX_SLOW:
                heapq.heappush(self._slow, entry)
            else:
                heapq.heappushpop(self._slow, entry)
        elif len(self._failed) < MAX_FAILED and self._of_tenant[request.tenant] < MAX_FAILED_OF_TENANT:
            self._failed.append(request)
            self._of_tenant[request.tenant] += 1

    def cut(self) -> tuple[FinishedRequest, ...]:
        """Return and forget them."""
        found = (*(request for _, _, request in self._slow), *self._failed)
        self._slow, self._failed, self._of_tenant = [], [], Counter()
        return found


class RequestSample:
    """A uniform sample of each model's requests since the last cut, in bounded memory.

    Each model has a reservoir (Vitter, Random Sampling with a Reservoir, 1985: algorithm R); a cut shares its
    places over the models, so that a model with little traffic is not lost. Models beyond ``MAX_STRATA``
    share one reservoir.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._ended: Counter[str] = Counter()
        self._drawn: dict[str, list[FinishedRequest]] = {}

    def add(self, request: FinishedRequest) -> None:
        model = request.model
        if model not in self._drawn and len(self._drawn) >= MAX_STRATA - 1:
            model = _OTHER_MODELS
        drawn = self._drawn.setdefault(model, [])
        self._ended[model] += 1
        if len(drawn) < MAX_SAMPLED:
            drawn.append(request)
        elif (place := self._rng.randrange(self._ended[model])) < MAX_SAMPLED:
            drawn[place] = request

    def cut(self) -> tuple[FinishedRequest, ...]:
        """Return and forget at most ``MAX_SAMPLED``, with their weights."""
        found: list[FinishedRequest] = []
        left = MAX_SAMPLED
        strata = sorted(self._drawn.items(), key=lambda each: len(each[1]))
        for at, (model, drawn) in enumerate(strata):
            places = min(len(drawn), left // (len(strata) - at))
            left -= places
            weight = self._ended[model] / max(1, places)
            found += (replace(one, weight=weight) for one in self._rng.sample(drawn, places))
        self._ended, self._drawn = Counter(), {}
        return tuple(found)


class FinishedRequests:
    """The newest ``MAX_KEPT`` of all gateways. A report that comes again replaces its own."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, FinishedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, requests: Iterable[FinishedRequest]) -> None:
        for request in requests:
            self._kept[request.request_id] = request
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def find(
        self, takes: Callable[[FinishedRequest], bool], *, slow: bool, limit: int
    ) -> Sequence[FinishedRequest]:
        """Return at most ``limit`` of those taken: the slowest first, else the last to end."""
        found = filter(takes, self._kept.values())
        return heapq.nlargest(limit, found, key=lambda one: one.total_us if slow else one.ended_unix_us)
