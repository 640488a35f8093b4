"""The replicas of one pool, a request at a time: a day takes seconds.

A replica prefills up to ``CHUNK_TOKENS`` of waiting prompts at a time, while what it decodes goes on at the
pace of the shared step; a step takes what its cost model states. A request starts where its whole KV has
room. Classes go first in order of rank, batch fills what is left, and what would wait longer than its target
is refused: rates, predicted waits and their limits are the scheduler's own. Nodes cost from their order until
they are released.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final, Protocol

from services.core.estimates.cost_model import CostModel, span_tokens
from services.core.records import Priority
from services.scheduler.policy.overload.pressure import ArrivalRate, TokenRate, wait_s
from services.scheduler.policy.overload.shedding import SheddingPolicy
from simulator.elastic.traffic import DayRequest, Workload

CHUNK_TOKENS: Final = 2048
START_S: Final = (60.0, 180.0)  # bounds of the time from an order until READY
TICK_S: Final = 2.0  # time between two observations of the rate
OVERDUE_RATIO: Final = SheddingPolicy().overdue_ratio
_ORDER: Final = (Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH)


@dataclass(slots=True, eq=False)
class SimReplica:
    """One node with one replica. ``v``: tokens that a sequence which decodes since its start has produced."""

    zone: int
    ordered_s: float
    ready_s: float
    kv_free: float
    most: int  # sequences
    is_ready: bool = False
    draining: bool = False
    running: list[tuple[float, int, DayRequest]] = field(default_factory=list)  # heap by the v of their end
    prefilling: list[DayRequest] = field(default_factory=list)
    prefill_end_s: float = math.inf
    attended: float = 0.0
    v: float = 0.0
    v_rate: float = 0.0
    prompt_rate: float = 0.0  # prompt tokens per second
    at_s: float = 0.0
    turn: int = 0  # number of its next event; older ones are void

    def __len__(self) -> int:
        return len(self.running) + len(self.prefilling)

    def takes(self, request: DayRequest) -> bool:
        return (
            self.is_ready and not self.draining and request.tokens <= self.kv_free and len(self) < self.most
        )


@dataclass(slots=True)
class ClassCount:
    """What became of the requests of a class. ``met``: first token, or batch line, in time."""

    arrived: int = 0
    met: int = 0
    refused: int = 0
    waiting_tokens: float = 0.0
    arrived_tokens: float = 0.0  # refused ones too
    queue: deque[DayRequest] = field(default_factory=deque)

    @property
    def attainment(self) -> float:
        return self.met / self.arrived if self.arrived else 1.0


class Scaler(Protocol):
    """Decides how many replicas the pool has, once in ``every_s``."""

    every_s: float

    def replicas(self, pool: ElasticPool, now_s: float) -> int: ...


class ElasticPool:
    """Runs a workload with a scaler. ``zone_loss_s``: zone 0 and its nodes are lost for good at that time."""

    def __init__(
        self, load: Workload, scaler: Scaler, *, replicas: int, zones: int = 3, zone_loss_s: float = math.inf
    ) -> None:
        self.load: Final = load
        self.costs: Final[CostModel] = load.costs
        self.classes: Final = {one: ClassCount() for one in _ORDER}
        self.replicas: list[SimReplica] = []
        self.changes: list[tuple[float, int]] = []  # (time, nodes ordered or released)
        self.done: list[tuple[int, int, int]] = []  # (prompt, 0, output) of each that ended
        self.misses: list[float] = []  # arrival of each interactive request that missed
        self.due: dict[float, float] = {}  # tokens of batch lines that have not started, by their due time
        self.zones: Final = list(range(zones))
        self.node_s = 0.0
        self.now_s = 0.0
        self._scaler = scaler
        self._zone_loss_s = zone_loss_s
        self._rng = Random(f"{load.seed}/starts")
        self._numbers = count()
        self._events: list[tuple[float, int, SimReplica, int]] = []
        self._rate = TokenRate()
        self._tokens = 0.0  # computed since the rate was noted
        self.used_s = 0.0  # replica-seconds: computed tokens by the rate of a full replica
        self._above = ArrivalRate()
        self._kv_tokens = self.costs.kv_memory_bytes / self.costs.kv_bytes_per_token
        for _ in range(replicas):
            self._order(0.0, ready=True)

    # --- what scalers observe ---------------------------------------------------------------------------

    @property
    def ready(self) -> list[SimReplica]:
        return [one for one in self.replicas if one.is_ready and not one.draining]

    @property
    def starting(self) -> list[SimReplica]:
        return [one for one in self.replicas if not one.is_ready]

    @property
    def rate(self) -> float | None:
        """Tokens per second of one replica, as the scheduler measures it."""
        return self._rate.tokens_per_s(1)

    @property
    def request_tokens(self) -> float:
        """Tokens of the mean request so far."""
        arrived = sum(one.arrived for one in self.classes.values())
        return sum(one.arrived_tokens for one in self.classes.values()) / arrived if arrived else 1.0

    @property
    def in_flight(self) -> int:
        """Requests that wait or run, batch lines aside."""
        running = sum(
            one.priority is not Priority.BATCH
            for replica in self.replicas
            for one in (*replica.prefilling, *(entry[2] for entry in replica.running))
        )
        return running + self.waiting

    @property
    def waiting(self) -> int:
        """Requests that wait, batch lines aside."""
        return sum(len(self.classes[one].queue) for one in _ORDER[:2])

    # --- the run ----------------------------------------------------------------------------------------

    def run(self, requests: Iterator[DayRequest] | None = None) -> None:
        """Serve all arrivals; what waits at the end is left."""
        tick_s, decide_s, lost_s = 0.0, 0.0, self._zone_loss_s
        for request in requests or self.load.requests():
            while (next_s := min(tick_s, lost_s)) <= request.arrival_s:
                self._until(next_s)
                if next_s == lost_s:
                    self._lose_zone(lost_s)
                    lost_s = math.inf
                    continue
                self._measure(tick_s)
                if tick_s >= decide_s:
                    self._decide(tick_s)
                    decide_s += self._scaler.every_s
                tick_s += TICK_S
            self._until(request.arrival_s)
            self._arrive(request)
        self._until(self.load.duration_s)
        for replica in self.replicas:
            self.node_s += self.load.duration_s - replica.ordered_s

    def _until(self, to_s: float) -> None:
        events = self._events
        while events and events[0][0] <= to_s:
            now_s, _, replica, turn = heapq.heappop(events)
            if turn == replica.turn:
                self.now_s = now_s
                self._step(replica, now_s)
        self.now_s = to_s

    def _arrive(self, request: DayRequest) -> None:
        counted = self.classes[request.priority]
        counted.arrived += 1
        counted.arrived_tokens += request.tokens
        if request.priority is Priority.INTERACTIVE:
            self._above.note(request.tokens, self.now_s)
        if request.priority is not Priority.BATCH and self._hopeless(request):
            self._refuse(request)
            return
        if request.priority is Priority.BATCH:
            self.due[request.due_s] = self.due.get(request.due_s, 0.0) + request.tokens
        first = not any(one.queue for rank, one in self.classes.items() if rank.rank >= request.priority.rank)
        counted.waiting_tokens += request.tokens
        counted.queue.append(request)
        if first:
            idle = [one for one in self.replicas if one.prefill_end_s == math.inf and one.takes(request)]
            if idle:
                self._start(min(idle, key=len), self.now_s)

    def _hopeless(self, request: DayRequest) -> bool:
        """Whether it would wait longer than its target behind its class and higher ones."""
        ahead = sum(
            one.waiting_tokens for rank, one in self.classes.items() if rank.rank >= request.priority.rank
        )
        if ahead <= 0.0:
            return False
        ready = sum(one.is_ready and not one.draining for one in self.replicas)
        above = self._above.tokens_per_s(self.now_s) if request.priority is Priority.STANDARD else 0.0
        found_s = wait_s(ahead, self._rate.tokens_per_s(ready), arriving_tokens_per_s=above)
        return found_s is not None and found_s > self.load.targets[request.priority] * self.load.shed_ratio

    def _refuse(self, request: DayRequest) -> None:
        self.classes[request.priority].refused += 1
        if request.priority is Priority.INTERACTIVE:
            self.misses.append(request.arrival_s)

    # --- a replica --------------------------------------------------------------------------------------

    def _step(self, replica: SimReplica, now_s: float) -> None:
        """Bring a replica to the present: what ended leaves, and what waits starts."""
        if not replica.is_ready:
            replica.is_ready, replica.at_s = True, now_s
        self._advance(replica, now_s)
        if replica.prefill_end_s <= now_s:
            for request in replica.prefilling:
                self._first_token(request, now_s)
                end_v = replica.v + request.output - request.produced - 1
                replica.attended += request.prompt + request.output / 2
                heapq.heappush(replica.running, (end_v, next(self._numbers), request))
            replica.prefilling, replica.prefill_end_s, replica.prompt_rate = [], math.inf, 0.0
        running = replica.running
        while running and running[0][0] <= replica.v + 1e-6:
            request = heapq.heappop(running)[2]
            replica.kv_free += request.tokens
            replica.attended -= request.prompt + request.output / 2
            self.done.append((request.prompt, 0, request.output))
            if request.priority is Priority.BATCH and now_s <= request.due_s:
                self.classes[Priority.BATCH].met += 1
        if replica.draining and not len(replica):
            self._release(replica, now_s)
        else:
            self._start(replica, now_s)

    def _advance(self, replica: SimReplica, now_s: float) -> None:
        past_s = now_s - replica.at_s
        if past_s > 0.0:
            replica.v += past_s * replica.v_rate
            self._tokens += past_s * (replica.v_rate * len(replica.running) + replica.prompt_rate)
            replica.at_s = now_s

    def _first_token(self, request: DayRequest, now_s: float) -> None:
        if request.begun or request.priority is Priority.BATCH:
            return
        request.begun = True
        if now_s - request.arrival_s <= self.load.targets[request.priority]:
            self.classes[request.priority].met += 1
        elif request.priority is Priority.INTERACTIVE:
            self.misses.append(request.arrival_s)

    def _start(self, replica: SimReplica, now_s: float) -> None:
        """Prefill what waits and has room, unless a prefill runs; set the pace and the next event."""
        if replica.prefill_end_s == math.inf:
            self._advance(replica, now_s)
            tokens = 0
            while (request := self._next(now_s)) is not None:
                size = request.prompt + request.produced
                if not replica.takes(request) or (tokens and tokens + size > CHUNK_TOKENS):
                    break
                self.classes[request.priority].queue.popleft()
                self.classes[request.priority].waiting_tokens -= request.tokens
                if request.priority is Priority.BATCH:
                    self.due[request.due_s] -= request.tokens
                replica.prefilling.append(request)
                tokens += size
                replica.kv_free -= request.tokens
            if tokens:
                self._prefill(replica, tokens, now_s)
            else:
                decodes = len(replica.running)
                step_s = self.costs.step_s(0, decodes, 0) + replica.attended * self.costs.attended_token_s
                replica.v_rate = 1.0 / step_s if decodes else 0.0
        next_s = replica.prefill_end_s
        if replica.running and replica.v_rate:
            next_s = min(next_s, now_s + max(0.0, replica.running[0][0] - replica.v) / replica.v_rate)
        self._at(replica, next_s)

    def _at(self, replica: SimReplica, next_s: float) -> None:
        replica.turn += 1
        if next_s < math.inf:
            heapq.heappush(self._events, (next_s, next(self._numbers), replica, replica.turn))

    def _next(self, now_s: float) -> DayRequest | None:
        """Return the first that waits, without what has waited too long."""
        for priority, counted in self.classes.items():
            queue = counted.queue
            while queue:
                request = queue[0]
                limit_s = self.load.targets.get(priority, math.inf) * OVERDUE_RATIO
                if request.begun or now_s <= min(request.arrival_s + limit_s, request.due_s):
                    return request
                queue.popleft()
                counted.waiting_tokens -= request.tokens
                if priority is Priority.BATCH:
                    self.due[request.due_s] -= request.tokens
                self._refuse(request)
        return None

    def _prefill(self, replica: SimReplica, tokens: int, now_s: float) -> None:
        costs, decodes = self.costs, len(replica.running)
        chunks = math.ceil(tokens / CHUNK_TOKENS)
        linear_s = tokens * costs.prefill_token_s + chunks * decodes * costs.decode_sequence_s
        spans = sum(span_tokens(0, one.prompt + one.produced) for one in replica.prefilling)
        lasts_s = (
            chunks * (costs.base_s + replica.attended * costs.attended_token_s)
            + max(chunks * costs.weight_read_s, linear_s)
            + spans * costs.prefill_attended_token_s
        )
        replica.prefill_end_s = now_s + lasts_s
        replica.v_rate, replica.prompt_rate = chunks / lasts_s, tokens / lasts_s

    # --- nodes ------------------------------------------------------------------------------------------

    def _measure(self, now_s: float) -> None:
        for replica in self.replicas:
            self._advance(replica, now_s)
        waits = any(one.queue for one in self.classes.values())
        self._rate.note(self._tokens, now_s, workers=len(self.ready), waits=waits)
        self.used_s += self._tokens / self.rate if self.rate else 0.0
        self._tokens = 0.0

    def _decide(self, now_s: float) -> None:
        wanted = self._scaler.replicas(self, now_s)
        live = [one for one in self.replicas if not one.draining]
        if wanted != len(live):
            self.changes.append((now_s, wanted - len(live)))
        for _ in range(wanted - len(live)):
            self._order(now_s)
        for _ in range(len(live) - wanted):
            self._remove(now_s)

    def _order(self, now_s: float, *, ready: bool = False) -> None:
        zone = min(
            self.zones, key=lambda each: sum(one.zone == each and not one.draining for one in self.replicas)
        )
        ready_s = now_s if ready else now_s + self._rng.uniform(*START_S)
        replica = SimReplica(zone, now_s, ready_s, self._kv_tokens, self.load.max_sequences, is_ready=ready)
        self.replicas.append(replica)
        if not ready:
            self._at(replica, ready_s)

    def _remove(self, now_s: float) -> None:
        """Cancel what starts last, else drain the emptiest replica of the largest zone."""
        live = [one for one in self.replicas if not one.draining]
        sizes = {zone: sum(one.zone == zone for one in live) for zone in range(len(self.zones) + 1)}
        found = min(
            live,
            key=lambda one: (
                one.is_ready,
                -one.ready_s if not one.is_ready else 0.0,
                -sizes[one.zone],
                len(one),
            ),
        )
        found.draining = True
        if not len(found):
            self._release(found, now_s)

    def _release(self, replica: SimReplica, now_s: float) -> None:
        self.node_s += now_s - replica.ordered_s
        self.replicas.remove(replica)
        replica.turn += 1

    def _lose_zone(self, now_s: float) -> None:
        self.zones.remove(0)
        for replica in [one for one in self.replicas if one.zone == 0]:
            self._advance(replica, now_s)
            for end_v, _, request in replica.running:
                request.produced = max(
                    0, min(request.output - 1, round(request.output - 1 - (end_v - replica.v)))
                )
            for request in (*(entry[2] for entry in replica.running), *replica.prefilling):
                counted = self.classes[request.priority]
                counted.queue.appendleft(request)
                if request.priority is Priority.BATCH:
                    self.due[request.due_s] += request.tokens
                counted.waiting_tokens += request.tokens
            self._release(replica, now_s)
        for replica in self.ready:
            self._start(replica, now_s)
