"""A fleet around one scheduler term, without a wire: messages wait in lists until the test delivers them.

Physical bounds that the protocol counts on, and that ``Fleet.advance`` keeps: a gateway reads an outcome
within ``OUTCOME_S`` and starts a grant within its time to live from then, a start travels for less than
``TRAVEL_S``, a report for less than ``REPORT_S``, and a connected worker reports every second.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from random import Random

from services.adapters.links.report_deltas import DeltaKeeper
from services.core.fleet import Granted, PoolSnapshot, ReportSnapshot, SequenceUsage
from services.core.generation import Grant, PlaceSpec
from services.core.records import Priority
from services.ports.clock import Clock
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import Term, TermSettings
from services.scheduler.term_streams import (
    CancelPlacements,
    GatewaySession,
    Report,
    SubmitPlacements,
    WorkerSession,
)

DIGEST = "sha256:" + "a" * 64
OUTCOME_S = 0.5
TRAVEL_S = 0.5
REPORT_S = 1.0
BLOCK = 16
EACH = 4  # blocks of a prefix block
SETTINGS = TermSettings(
    fleet=FleetLimits(grant_ttl_s=1.0, transit_margin_s=3.0, silence_s=2.5, forget_s=10.0),
    queue=QueueLimits(predicted_output_tokens=64, max_per_pool=12),
    order=OrderPolicy(class_head_start_s=2.0, max_bypasses=3, lookahead=4),
)


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the model does not sleep")


def place_spec(
    *,
    prompt_tokens: int = 16,
    max_output_tokens: int = 16,
    priority: Priority = Priority.STANDARD,
    arrival_s: float = 1000.0,
    queue_ttl_s: float = 60.0,
    tenant: str = "acme",
    digest: str = DIGEST,
    excluded_workers: tuple[str, ...] = (),
    weight: float = 1.0,
    deadline_left_s: float | None = None,
    prefix_hashes: tuple[int, ...] = (),
) -> PlaceSpec:
    return PlaceSpec(
        request_id="req_1",
        choice=0,
        tenant_id=tenant,
        priority=priority,
        model="tiny",
        version_digest=digest,
        route_revision=1,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        arrival_unix_us=round(arrival_s * 1e6),
        queue_ttl_s=queue_ttl_s,
        ticket=b"t",
        excluded_workers=excluded_workers,
        tenant_weight=weight,
        deadline_left_s=deadline_left_s,
        prefix_hashes=prefix_hashes,
    )


@dataclass
class InFlight:
    """A report on its way, on one stream."""

    reporter: WorkerSession
    number: int
    snapshot: ReportSnapshot
    sent_s: float


@dataclass
class ModelWorker:
    """Admits every genuine grant without a look at its own room, so that over-commitment shows.

    Its cache holds the prefix blocks of all that ever ran, until ``evict`` takes those without references.
    """

    worker_id: str
    kv_blocks: int
    incarnation: int = 1
    epoch: int = 0
    running: dict[tuple[int, int], Grant] = field(default_factory=dict)
    requests: dict[tuple[int, int], PlaceSpec] = field(default_factory=dict)
    ended: list[SequenceUsage] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    seen: list[int] = field(default_factory=list)
    reporter: WorkerSession | None = None
    deltas: DeltaKeeper = field(default_factory=DeltaKeeper)
    last_report_s: float = 0.0
    ready: bool = True
    runs: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # what each refers to
    cached: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)

    @property
    def references(self) -> Counter[int]:
        return Counter(name for run in self.runs.values() for name in run)

    @property
    def reserved(self) -> int:
        """What each has alone, and every block that any refers to once."""
        own = sum(grant.kv_blocks - EACH * len(self.runs[key]) for key, grant in self.running.items())
        return own + EACH * len(self.references)

    def evict(self) -> None:
        self.cached &= set(self.references)

    def on_leader(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.numbers, self.seen = epoch, set(), []

    def start(self, grant: Grant) -> None:
        if (
            grant.incarnation != self.incarnation
            or grant.epoch < self.epoch
            or grant.sequence in self.numbers
        ):
            return
        self.on_leader(grant.epoch)
        self.numbers.add(grant.sequence)
        self.seen.append(grant.sequence)
        key = grant.epoch, grant.sequence
        self.running[key] = grant
        spec = self.requests[key]
        found = takewhile(self.cached.__contains__, spec.prefix_hashes[: (spec.prompt_tokens - 1) // 64])
        self.runs[key] = tuple(found)
        assert self.reserved <= self.kv_blocks, f"{self.worker_id} is over-committed"

    def prefill(self) -> None:
        """All that runs has its first token: what it computed is cached, once."""
        for key in self.running:
            spec = self.requests[key]
            self.runs[key] = spec.prefix_hashes[: spec.prompt_tokens // 64]
            self.cached.update(self.runs[key])

    def end(self, key: tuple[int, int]) -> None:
        """A sequence leaves; the next report says so."""
        del self.running[key], self.runs[key]
        spec = self.requests[key]
        self.ended.append(
            SequenceUsage(spec.request_id, 0, spec.tenant_id, DIGEST, spec.prompt_tokens, 1, ended=True)
        )

    def snapshot(self) -> ReportSnapshot:
        seen, self.seen = tuple(self.seen), []
        ended, self.ended = tuple(self.ended), []
        shared = set(self.references)
        told, self.told = self.told, shared
        if self.deltas.first:
            told = set()
        pool = PoolSnapshot(
            digest=DIGEST,
            kv_blocks_total=self.kv_blocks,
            kv_blocks_reserved=self.reserved,
            block_size=BLOCK,
            running=len(self.running),
            waiting=0,
            max_sequences=64,
            max_model_len=self.kv_blocks * BLOCK,
            ready=self.ready,
            prefix_shared=tuple(sorted(shared - told)),
            prefix_unshared=tuple(sorted(told - shared)),
        )
        return ReportSnapshot(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address="h:1",
            pools=(pool,),
            epoch=self.epoch,
            grants_seen=seen,
            usage=ended,
        )


@dataclass
class Held:
    """A grant in a gateway's hands."""

    placement_id: int
    grant: Grant
    received_s: float


@dataclass
class ModelGateway:
    """Numbers placements, knows what became of each, and never uses a grant beyond its time to live."""

    gateway_id: str
    session: GatewaySession
    numbers: int = 0
    pending: dict[int, PlaceSpec] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    unread_s: float | None = None  # since when its stream holds something
    used: set[int] = field(default_factory=set)


class Fleet:
    """One scheduler, its workers and gateways."""

    new_term: Callable[[int, TermSettings, Clock, Random], Term] = Term

    def __init__(self, seed: int, blocks: tuple[int, ...], gateways: int = 2) -> None:
        self.clock = ManualClock()
        self.rng = Random(seed)
        self.term = self.new_term(1, SETTINGS, self.clock, self.rng)
        self.workers = [ModelWorker(f"w{index}", total) for index, total in enumerate(blocks)]
        self.gateways = [self._gateway(f"g{index}") for index in range(gateways)]
        # Of each worker, the streams with reports on their way, by number: only a stream keeps an order.
        self.reports: list[dict[int, deque[InFlight]]] = [{} for _ in self.workers]
        self.starts: list[tuple[float, Grant]] = []  # (latest arrival, grant)
        for worker in self.workers:
            self.open_stream(worker)

    def _gateway(self, gateway_id: str) -> ModelGateway:
        return ModelGateway(gateway_id, self.term.streams.open_session(gateway_id, lambda: None))

    # --- gateways ---------------------------------------------------------------------------------

    def submit(self, gateway: ModelGateway, spec: PlaceSpec) -> int:
        gateway.numbers += 1
        spec = replace(spec, request_id=f"req_{gateway.gateway_id}_{gateway.numbers}")
        gateway.pending[gateway.numbers] = spec
        arrival_us = spec.arrival_unix_us
        self.term.streams.send(SubmitPlacements(gateway.session, [(gateway.numbers, spec, arrival_us)]))
        return gateway.numbers

    def cancel(self, gateway: ModelGateway, placement_id: int) -> None:
        """Withdraw a pending placement, or give a grant back that is in hand and was not used."""
        if placement_id in gateway.used:
            return
        if gateway.pending.pop(placement_id, None) is not None:
            gateway.withdrawn.add(placement_id)
            gateway.ended[placement_id] = "withdrawn"
        gateway.held = [held for held in gateway.held if held.placement_id != placement_id]
        self.term.streams.send(CancelPlacements(gateway.session, [placement_id]))

    def receive(self, gateway: ModelGateway) -> None:
        """The gateway reads what its stream holds."""
        outcomes, gateway.session.outbox = gateway.session.outbox, []
        gateway.unread_s = None
        for outcome in outcomes:
            number = outcome.placement_id
            if number in gateway.withdrawn:
                gateway.withdrawn.discard(number)  # crossed: at most one outcome may
                continue
            assert number in gateway.pending, f"placement {number} ended twice: {gateway.ended.get(number)}"
            spec = gateway.pending.pop(number)
            if isinstance(outcome, Granted):
                grant = outcome.grant
                worker = next(found for found in self.workers if found.worker_id == grant.worker_id)
                worker.requests[grant.epoch, grant.sequence] = spec
                gateway.ended[number] = "granted"
                gateway.held.append(Held(number, outcome.grant, self.clock.now_s))
            else:
                gateway.ended[number] = outcome.error.reason

    def use(self, gateway: ModelGateway, index: int) -> None:
        """Start one of the grants in hand, if it has not lapsed."""
        held = gateway.held.pop(index)
        gateway.used.add(held.placement_id)
        if self.clock.now_s <= held.received_s + held.grant.ttl_s:
            self.starts.append((self.clock.now_s + TRAVEL_S, held.grant))

    def reconnect(self, gateway: ModelGateway, *, cleanly: bool) -> None:
        """The gateway's stream breaks, noticed before or after its new one opens; it asks again."""
        old = gateway.session
        if cleanly:
            self.term.streams.close_session(old)
        gateway.session = self.term.streams.open_session(gateway.gateway_id, lambda: None)
        if not cleanly:
            self.term.streams.close_session(old)
        gateway.withdrawn.clear()
        for number, spec in gateway.pending.items():
            self.term.streams.send(SubmitPlacements(gateway.session, [(number, spec, spec.arrival_unix_us)]))

    # --- workers ----------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        """A start reaches its worker."""
        _, grant = self.starts.pop(index)
        next(worker for worker in self.workers if worker.worker_id == grant.worker_id).start(grant)

    def finish(self, worker: ModelWorker, index: int) -> None:
        worker.end(list(worker.running)[index])

    def open_stream(self, worker: ModelWorker, *, break_first: bool = True) -> None:
        """A new stream; the old one's reports may still be on their way."""
        if worker.reporter is not None and break_first:
            self.term.streams.close_reporter(worker.reporter)
        worker.reporter = self.term.streams.open_reporter(lambda: None)
        worker.deltas.stream_opened()
        worker.on_leader(self.term.epoch)
        self.report(worker)

    def break_stream(self, worker: ModelWorker) -> None:
        if worker.reporter is not None:
            self.term.streams.close_reporter(worker.reporter)
            worker.reporter = None

    def report(self, worker: ModelWorker) -> None:
        """Take a snapshot and send it."""
        if worker.reporter is None:
            return
        number, snapshot = worker.deltas.next_report(worker.snapshot())
        streams = self.reports[self.workers.index(worker)]
        streams.setdefault(worker.reporter.number, deque()).append(
            InFlight(worker.reporter, number, snapshot, self.clock.now_s)
        )
        worker.last_report_s = self.clock.now_s

    def deliver(self, index: int, which: int = 0, *, answered: bool = True) -> None:
        """The oldest report of one of a worker's streams arrives, and perhaps its answer comes back."""
        streams = self.reports[index]
        if not streams:
            return
        number = list(streams)[which % len(streams)]
        found = streams[number].popleft()
        if not streams[number]:
            del streams[number]
        self.term.streams.send(Report(found.reporter, found.number, found.snapshot))
        worker = self.workers[index]
        if answered and found.reporter is worker.reporter:
            self.term.step()
            worker.deltas.confirm(found.reporter.applied)

    def restart(self, worker: ModelWorker) -> None:
        """Another life on the same machine: nothing runs, grants for the last life are refused."""
        self.break_stream(worker)
        worker.incarnation += 1
        worker.running.clear()
        worker.runs.clear()
        worker.cached.clear()
        worker.ended.clear()
        worker.seen = []
        worker.epoch = 0
        worker.numbers = set()
        worker.deltas = DeltaKeeper()
        self.open_stream(worker)

    # --- time and leaders -------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass in small steps; nothing stays on its way for longer than physics has it."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.clock.now_s = min(end_s, self.clock.now_s + 0.25)
            now_s = self.clock.now_s
            for index in reversed(range(len(self.starts))):
                if self.starts[index][0] <= now_s + 0.25:
                    self.arrive(index)
            for index, worker in enumerate(self.workers):
                if worker.reporter is not None and now_s - worker.last_report_s >= 1.0:
                    self.report(worker)
                for which in reversed(range(len(self.reports[index]))):
                    while self._is_late(index, which):
                        self.deliver(index, which)
            self.term.step()
            for gateway in self.gateways:
                if not gateway.session.outbox:
                    gateway.unread_s = None
                elif gateway.unread_s is None:
                    gateway.unread_s = now_s
                elif now_s - gateway.unread_s >= OUTCOME_S - 0.25:
                    self.receive(gateway)

    def _is_late(self, index: int, which: int) -> bool:
        streams = list(self.reports[index].values())
        return which < len(streams) and self.clock.now_s - streams[which][0].sent_s >= REPORT_S - 0.25

    def new_leader(self) -> None:
        """Another scheduler leads; everybody comes to it, grants of the old one are still about."""
        self.term = self.new_term(self.term.epoch + 1, SETTINGS, self.clock, self.rng)
        for gateway in self.gateways:
            gateway.session = self.term.streams.open_session(gateway.gateway_id, lambda: None)
            gateway.withdrawn.clear()
            for number, spec in gateway.pending.items():
                self.term.streams.send(
                    SubmitPlacements(gateway.session, [(number, spec, spec.arrival_unix_us)])
                )
        for streams in self.reports:
            streams.clear()
        for worker in self.workers:
            worker.reporter = None
            self.open_stream(worker)

    def settle(self) -> None:
        """Everything ends: sequences finish, reports arrive, time passes. Nothing may be left."""
        for worker in self.workers:
            worker.ready = True
            if worker.reporter is None:
                self.open_stream(worker)
        for _ in range(400):
            for worker in self.workers:
                for key in list(worker.running):
                    worker.end(key)
            for gateway in self.gateways:
                self.receive(gateway)
                gateway.held.clear()
            self.advance(0.5)
            waiting = any(gateway.pending for gateway in self.gateways)
            running = any(worker.running for worker in self.workers)  # a start that was still on its way
            if not (waiting or running or self.starts or self.term.fleet.outstanding):
                break
        for gateway in self.gateways:
            self.receive(gateway)
        self.advance(6.0)
