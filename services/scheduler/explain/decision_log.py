"""Log of recent placement decisions, for operators who query the reason of a placement.

A ring over all requests, bounded by entries and bytes; it outlives a term. Recording a decision keeps
references to the values that the policy returned. They are converted when an operator queries them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from services.core.decisions import (
    PLACED_ALONE,
    QUEUED,
    RUNNING_BEFORE,
    FilterRejections,
    PlacementDecision,
    RankedWorker,
)
from services.core.errors import NoLeader, QueueFull
from services.core.fixed_cost.explained import RowsExplanation
from services.core.fleet import ReportedSequence, SequenceUsage
from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.scheduler.policy.placement.candidate import PlaceQuery
from services.scheduler.policy.placement.choose import (
    NO_REJECTIONS,
    NO_ROOM,
    Chosen,
    NoWorker,
    PlacementProfile,
    Rejections,
)
from services.scheduler.policy.queue.length import FILTER_NAMES as LENGTH_FILTERS
from services.scheduler.queue.waiting import QueuedPlacement
from services.scheduler.term_streams import GatewaySession

MAX_RANKED: Final = 16  # workers in one answer
MAX_FOUND: Final = 4096  # sequences of one report that are recorded as found
MAX_EXPLAINED: Final = 64  # placements in one answer, the newest
_RECORD_BYTES: Final = 1536
_RANKED_BYTES: Final = 512
_NAMED_BYTES: Final = 64

Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Record:
    """One recorded placement.

    Most attempts of an item that waits for KV reach no filter, and are too many to report one by one: the
    item counts them itself, and ``catch_up`` copies its counters.
    """

    request_id: str
    decision: PlacementDecision  # the decision when the placement was queued
    queued_s: float
    ended_s: float | None = None
    outcome: str = QUEUED
    worker_id: str = ""
    item: QueuedPlacement | None = None  # the placement until it ends
    looks: int = 0  # attempts, without the short ones
    looks_without_room: int = 0  # attempts that found no worker with room
    looks_giving_way: int = 0  # attempts that were held back because the tenant has more than its share
    looks_over_budget: int = 0
    short_attempts: int = 0
    bypassed: int = 0
    counter: float = 0.0
    query: PlaceQuery | None = None  # the last query; at the end without the names of the prompt's blocks
    chosen: Chosen | None = None  # result of the last successful attempt for ``query``
    rejections: Rejections = NO_REJECTIONS  # result of the last attempt in which a filter rejected a worker
    size_bytes: int = _RECORD_BYTES

    def catch_up(self) -> None:
        item = self.item
        if item is not None:
            self.short_attempts, self.bypassed, self.counter = (
                item.short_attempts,
                item.bypassed,
                item.counter,
            )

    def close(self, outcome: str, now_s: float) -> None:
        self.catch_up()
        self.item = None
        self.ended_s, self.outcome = now_s, outcome


class DecisionLog:
    """Implements ``scheduler.telemetry.QueueObserver`` and ``scheduler.queue.waiting.DecisionObserver``.
    Single writer: the task of the term; read between two of its turns."""

    def __init__(
        self,
        clock: Clock,
        profile: PlacementProfile,
        *,
        max_entries: int = 16384,
        max_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._clock = clock
        self._profile = profile
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._epoch = 0
        self._ring: deque[_Record] = deque()
        self._by_request: dict[str, list[_Record]] = {}
        self._open: dict[Key, _Record] = {}
        self._bytes = 0
        self.forgotten = 0  # records that newer ones replaced
        self._since_unix_s = clock.unix_s()

    @property
    def entries(self) -> int:
        return len(self._ring)

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory of the records, without values that they share with others."""
        return self._bytes

    @property
    def since_unix_s(self) -> float:
        """Every decision that began after this time is still stored."""
        return self._since_unix_s

    def term_started(self, epoch: int) -> None:
        """End the placements of the previous term: their gateways submit them again."""
        self._epoch = epoch
        now_s = self._clock.monotonic_s()
        for record in self._open.values():
            record.close(NoLeader.reason, now_s)
        self._open.clear()

    # --- calls from the queue ---------------------------------------------------------------------

    def entered(self, spec: PlaceSpec) -> None:
        """Record that the placement is queued."""
        self._add(spec, self._clock.monotonic_s())

    def left(self, spec: PlaceSpec) -> None:
        """The placement has left the queue; ``ended`` records the outcome."""

    def decided(self, item: QueuedPlacement, found: Chosen | NoWorker, *, over_share: bool = False) -> None:
        """Record an attempt to choose a worker for the placement."""
        record = self._open.get((item.spec.request_id, item.spec.choice))
        if record is None:
            return
        record.item, record.query = item, item.query
        if found is NO_ROOM:
            return
        record.looks += 1
        record.looks_over_budget += item.over_budget
        if found.rejections.counts:
            record.rejections = found.rejections
        if isinstance(found, Chosen):
            record.chosen = found
        if isinstance(found, NoWorker) and _lacks_room(found):
            record.looks_without_room += 1
        elif over_share:
            record.looks_giving_way += 1

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None:
        """Record the outcome; a placement that was rejected at once has no open record yet."""
        record = self._open.pop((spec.request_id, spec.choice), None)
        if record is None:
            record = self._add(spec, queued_s)
            del self._open[spec.request_id, spec.choice]
        record.close(outcome, now_s)
        record.worker_id = worker_id
        if (query := record.query) is not None and query.prefix_hashes:
            record.query = PlaceQuery(
                query.demand, query.excluded_workers, (), query.zone, ttft_target_s=query.ttft_target_s
            )
        kept_bytes = _NAMED_BYTES * len(record.rejections.named)
        if record.chosen is not None:
            kept_bytes += _RANKED_BYTES * len(record.chosen.ranked)
        if kept_bytes:
            self._grow(record, kept_bytes)

    def found_running(self, worker_id: str, live: Iterable[ReportedSequence]) -> None:
        """Record the sequences in the first report of a worker's stream: those that this leader did not grant
        were granted by an earlier leader, or placed by their gateways in fallback."""
        for sequence, _ in zip(live, range(MAX_FOUND), strict=False):
            if sequence.placed_alone:
                self._note_alone(worker_id, sequence)
            elif self._known(worker_id, sequence) is None:
                self._note_found(worker_id, sequence, RUNNING_BEFORE)

    def found_ended(self, worker_id: str, usage: Iterable[SequenceUsage]) -> None:
        """Record sequences that gateways placed in fallback and that ended before a leader received a report
        of them."""
        for last, _ in zip(usage, range(MAX_FOUND), strict=False):
            if last.placed_alone:
                self._note_alone(worker_id, last, prompt_tokens=last.prompt_tokens)

    # --- queries of operators ---------------------------------------------------------------------

    def explain(self, request_id: str) -> tuple[PlacementDecision, ...]:
        """Return the stored decisions of the request, oldest first; only the newest ``MAX_EXPLAINED``."""
        now_s = self._clock.monotonic_s()
        found = self._by_request.get(request_id, [])[-MAX_EXPLAINED:]
        return tuple(self._described(record, now_s) for record in found)

    def check_integrity(self) -> None:
        """Raise AssertionError when the index and the ring disagree, or a bound is passed."""
        assert len(self._ring) <= self._max_entries
        assert self._bytes == sum(record.size_bytes for record in self._ring)
        assert sum(len(found) for found in self._by_request.values()) == len(self._ring)
        ring = dict.fromkeys(self._ring)
        assert all(record in ring for found in self._by_request.values() for record in found)
        assert all(record in ring for record in self._open.values()), "a forgotten record is open"
        held = [record for record in self._ring if record.item is not None]
        opened = dict.fromkeys(self._open.values())
        assert all(record in opened for record in held), "a placement is held on to after its end"

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, spec: PlaceSpec, queued_s: float) -> _Record:
        here_s = self._clock.monotonic_s() - queued_s
        decision = PlacementDecision(
            choice=spec.choice,
            tenant=spec.tenant_id,
            model=spec.model,
            version_digest=spec.version_digest,
            priority=spec.priority,
            epoch=self._epoch,
            queued_unix_s=self._clock.unix_s() - here_s,
            wait_s=0.0,
            outcome=QUEUED,
            attempt=spec.attempt,
            prompt_tokens=spec.prompt_tokens,
            excluded_workers=spec.excluded_workers,
            size_reason=spec.size_reason,
            safety=spec.safety,
        )
        record = _Record(spec.request_id, decision, queued_s)
        self._append(record)
        key = spec.request_id, spec.choice
        if (known := self._open.get(key)) is not None:
            known.catch_up()  # submitted twice at once: only the later one is updated from now on
            known.item = None
        self._open[key] = record
        return record

    def _note_alone(
        self, worker_id: str, sequence: ReportedSequence | SequenceUsage, *, prompt_tokens: int = 0
    ) -> None:
        """Record the sequence once per worker, in addition to decisions of a leader on that worker."""
        known = self._known(worker_id, sequence, PLACED_ALONE)
        if known is None:
            known = self._note_found(worker_id, sequence, PLACED_ALONE)
        if prompt_tokens:
            known.decision = replace(known.decision, prompt_tokens=prompt_tokens)

    def _known(
        self, worker_id: str, sequence: ReportedSequence | SequenceUsage, outcome: str | None = None
    ) -> _Record | None:
        wanted = worker_id, sequence.choice
        for one in self._by_request.get(sequence.request_id, ()):
            if (one.worker_id, one.decision.choice) == wanted and outcome in (None, one.outcome):
                return one
        return None

    def _note_found(
        self, worker_id: str, sequence: ReportedSequence | SequenceUsage, outcome: str
    ) -> _Record:
        now_s = self._clock.monotonic_s()
        decision = PlacementDecision(
            choice=sequence.choice,
            tenant=sequence.tenant,
            model="",
            version_digest=sequence.digest,
            priority=sequence.priority,
            epoch=self._epoch,
            queued_unix_s=self._clock.unix_s(),
            wait_s=0.0,
            outcome=outcome,
        )
        record = _Record(sequence.request_id, decision, now_s, ended_s=now_s, outcome=outcome)
        record.worker_id = worker_id
        self._append(record)
        return record

    def _append(self, record: _Record) -> None:
        self._ring.append(record)
        self._by_request.setdefault(record.request_id, []).append(record)
        self._bytes += record.size_bytes
        self._shrink()

    def _grow(self, record: _Record, size_bytes: int) -> None:
        record.size_bytes += size_bytes
        self._bytes += size_bytes
        self._shrink()

    def _shrink(self) -> None:
        while len(self._ring) > self._max_entries or (self._bytes > self._max_bytes and len(self._ring) > 1):
            self._forget(self._ring.popleft())

    def _forget(self, record: _Record) -> None:
        self._bytes -= record.size_bytes
        self.forgotten += 1
        self._since_unix_s = max(self._since_unix_s, record.decision.queued_unix_s)
        mine = self._by_request[record.request_id]
        mine.remove(record)
        if not mine:
            del self._by_request[record.request_id]
        key = record.request_id, record.decision.choice
        if self._open.get(key) is record:
            del self._open[key]

    def _described(self, record: _Record, now_s: float) -> PlacementDecision:
        ended_s = now_s if record.ended_s is None else record.ended_s
        query, chosen = record.query, record.chosen
        record.catch_up()
        return replace(
            record.decision,
            wait_s=max(0.0, ended_s - record.queued_s),
            outcome=record.outcome,
            worker_id=record.worker_id,
            looks=record.looks + record.short_attempts,
            looks_without_room=record.looks_without_room + record.short_attempts,
            looks_giving_way=record.looks_giving_way,
            looks_over_budget=record.looks_over_budget,
            bypassed=record.bypassed,
            counter_tokens=record.counter,
            reserved_tokens=0 if query is None else query.demand.reserved_tokens,
            ranked=() if chosen is None or query is None else _ranked(chosen, query, self._profile),
            rejections=_rejections(record.rejections),
        )


def _lacks_room(found: NoWorker) -> bool:
    """Whether no worker had the KV or the slot; False where a worker had both and its prefill queue was too
    long."""
    counts = found.rejections.counts
    return found.waits_for_room and not (counts and any(name in LENGTH_FILTERS for name, _ in counts))


def _ranked(chosen: Chosen, query: PlaceQuery, profile: PlacementProfile) -> tuple[RankedWorker, ...]:
    parts = dict(chosen.parts(query, profile))
    ranked = sorted(chosen.ranked, key=lambda one: (-one.score, one.offer.candidate.worker_id))
    return tuple(
        RankedWorker(
            worker_id=one.offer.candidate.worker_id,
            score=one.score,
            in_draw=one.score >= chosen.floor,
            cached_tokens=one.offer.cached_tokens,
            predicted_ttft_s=one.offer.ttft_s,
            kv_tokens_room=one.offer.candidate.kv_tokens_room,
            parts=parts.get(one.offer.candidate.worker_id, ()),
        )
        for one in ranked[:MAX_RANKED]
    )


def _rejections(found: Rejections) -> tuple[FilterRejections, ...]:
    return tuple(
        FilterRejections(name, count, tuple(worker for worker, reason in found.named if reason == name))
        for name, count in found.counts
    )


MAX_QUESTIONS: Final = 64  # questions that may wait for answers
ANSWER_S: Final = 0.5  # how long gateways are waited for


@dataclass(slots=True, eq=False)
class _Question:
    request_id: str
    missing: set[int]  # the streams of gateways that have not answered, by number
    found: list[RowsExplanation] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RowQuestions:
    """Asks the connected gateways how they ran a request of a fixed-cost model: its rows pass no scheduler.

    Every gateway answers on its stream, whether or not it remembers the request. Single event loop.
    """

    def __init__(self) -> None:
        self._open: dict[_Question, None] = {}

    async def ask(self, request_id: str, gateways: Iterable[GatewaySession]) -> tuple[RowsExplanation, ...]:
        """Return what these gateways remember of the request. Raises QueueFull.

        One that does not answer within ``ANSWER_S`` is left out.
        """
        if len(self._open) >= MAX_QUESTIONS:
            raise QueueFull("too many explanations are asked for at once", retry_after_s=1.0)
        sessions = list(gateways)
        if not sessions:
            return ()
        question = _Question(request_id, {session.number for session in sessions})
        self._open[question] = None
        try:
            for session in sessions:
                session.questions.append(request_id)
                session.wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await question.done.wait()
        finally:
            del self._open[question]
        return tuple(question.found)

    def answered(self, session: GatewaySession, request_id: str, found: RowsExplanation | None) -> None:
        """Take a gateway's answer."""
        for question in self._open:
            if question.request_id != request_id or session.number not in question.missing:
                continue
            question.missing.remove(session.number)
            if found is not None:
                question.found.append(structs.replace(found, gateway_id=session.gateway_id))
            if not question.missing:
                question.done.set()
