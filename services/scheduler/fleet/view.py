"""The leader's view of its workers: reported levels, and grants that no report includes yet.

    room = total - reserved (reported) - outstanding

A grant is *outstanding* from its issue until the first of: a report's ``grants_seen`` contains it, its
gateway returns it, it expires, its worker starts another incarnation. ``grants_seen`` and
``kv_blocks_reserved`` of a report are read together, so every grant is counted by exactly one side, and a
late report errs towards less room.

Shared prefixes: ``reserved`` counts a block that several sequences refer to once. A grant is outstanding with
what it adds to that: its prompt and predicted output, less the leading blocks that the same report lists as
shared. When a later report lists fewer or more shared blocks, the outstanding grants are counted again, so
that both terms always refer to the same instant. Sequences may end between two reports, and with them the
last reference to a block. The worker's reserved blocks decreased by those blocks then, and the grant takes
them again. This holds for one grant per prefix at a time; further grants count in full.

Why every grant is counted by one of the two sides:
- A worker accepts grants of the newest epoch that it has received, and gets grants only after a report that
  confirms our epoch: grants of older leaders can no longer start there.
- A worker's stream sends its first report after it received our epoch on that stream, so we open streams in
  the same order as the worker: reports of any but the newest stream are rejected.
- Another incarnation rejects the grants of the previous one, and sequences that started are in its first
  report.
- A grant starts within its time to live after receipt. It is held for ``transit_margin_s`` longer, and a
  worker that was silent for as long receives no grants.

The worker has the final decision: should a margin be exceeded, it answers NOT_ADMITTED.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.generation import Grant
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.scheduler.fleet.roster import EngineGroups, Roster
from services.scheduler.fleet.worker import (
    FleetLimits,
    Outstanding,
    Sums,
    WorkerState,
    candidate_of,
    level_of,
)
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, RoomSummary, blocks_for
from services.scheduler.policy.placement.choose import (
    NO_REJECTIONS,
    Chosen,
    NoWorker,
    PlacementProfile,
    no_worker,
)
from services.scheduler.policy.placement.pool_seats import PoolSeats, SeatLevel
from services.scheduler.policy.placement.prefix_index import PrefixIndex
from services.scheduler.policy.placement.shared_prefix import (
    NOTHING_SHARED,
    SharedPrefixIndex,
    shareable_blocks,
)
from services.scheduler.policy.step_time import StepTimes, WorkerKind

_PRICED_STEP: Final = (1, 512, 32, 0)  # the work by which prices are compared
_EMPTY: Final[Mapping[str, Candidate]] = MappingProxyType({})
_NO_POOL: Final = no_worker(NO_REJECTIONS)
_GATHER_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """Sums over the workers of one version."""

    granted: int = 0
    running: int = 0
    waiting: int = 0
    workers: int = 0
    serving_workers: int = 0
    kv_tokens_total: int = 0
    kv_tokens_free: int = 0  # tokens on serving workers that are neither used nor granted


@dataclass(slots=True)
class PrefixTokens:
    """Prompt tokens of grants with the part that was predicted to be cached, and prompt tokens in worker
    reports with the part that was cached."""

    granted: int = 0
    predicted: int = 0
    reported: int = 0
    cached: int = 0

    def by_kind(self) -> dict[str, int]:
        return {
            "granted": self.granted,
            "predicted_cached": self.predicted,
            "reported": self.reported,
            "reported_cached": self.cached,
        }


class Candidates(Mapping[str, Candidate]):
    """The pools of a version by worker, built on access."""

    def __init__(self, seats: PoolSeats) -> None:
        self._seats = seats

    def __getitem__(self, worker_id: str) -> Candidate:
        return self._seats.candidate(worker_id)

    def __iter__(self) -> Iterator[str]:
        return self._seats.all()

    def __len__(self) -> int:
        return len(self._seats)


def levels_of(digest: str, candidates: Candidates, workers: Mapping[str, WorkerState]) -> PoolLevels:
    """Return the reported levels of a version's workers, with the grants that are not reported yet."""
    states = [workers[worker_id] for worker_id in candidates]
    pools = [worker.pools[digest] for worker in states]
    serving = [candidate for candidate in candidates.values() if candidate.serving]
    return PoolLevels(
        granted=sum(worker.sums[digest].grants for worker in states if digest in worker.sums),
        running=sum(pool.running for pool in pools),
        waiting=sum(pool.waiting for pool in pools),
        workers=len(pools),
        serving_workers=len(serving),
        kv_tokens_total=sum(pool.kv_blocks_total * pool.block_size for pool in pools),
        kv_tokens_free=sum(max(0, candidate.kv_tokens_room) for candidate in serving),
    )


class FleetView:
    """Single writer: the task of the scheduler's service. Time is an argument, in monotonic seconds."""

    def __init__(
        self,
        epoch: int,
        limits: FleetLimits,
        step_times: StepTimes,
        *,
        ends_trial: Callable[[str, str, float], bool] = lambda _worker_id, _digest, _now_s: False,
    ) -> None:
        """``ends_trial`` receives the worker and version of each grant, and returns whether the worker gets
        no further grants of the version for now."""
        self.epoch = epoch
        self.limits = limits
        self.step_times = step_times
        self.prefixes = PrefixIndex(max(1, limits.prefix_blocks))
        self.shared = SharedPrefixIndex()
        self.prefix_tokens = PrefixTokens()
        self._engines = EngineGroups()
        self.ends_trial = ends_trial
        self._roster = Roster(limits)
        self._workers: Mapping[str, WorkerState] = self._roster.workers
        self._pools: dict[str, PoolSeats] = {}
        # Ordered: every grant is held for the same time.
        self._lapses: deque[tuple[float, str, int]] = deque()
        self._outstanding = 0
        self._gathered_s: float | None = None  # when the workers have reported to this term

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def outstanding(self) -> int:
        return self._outstanding

    @property
    def workers_by_state(self) -> dict[str, int]:
        """How many workers receive grants, are silent, draining, or away."""
        return self._roster.by_state()

    def view_age_s(self, now_s: float) -> float:
        """Return the age of the oldest last report of a connected worker; 0 without workers."""
        return self._roster.view_age_s(now_s)

    def reports_group(self, digest: str, node_group: str) -> bool:
        """Whether a node of the group reports the version, loaded or on its way."""
        states = (self._workers[worker_id] for worker_id in self.candidates(digest))
        return any(worker.node_group == node_group and worker.reporting for worker in states)

    def lacks_group(self, digest: str, node_group: str, now_s: float) -> bool:
        """Whether no node of a tenant's group reports the version. False in a term's first seconds: its
        workers have yet to report."""
        if self._gathered_s is None:
            self._gathered_s = now_s + _GATHER_S
        gathered = now_s >= self._gathered_s
        return bool(node_group) and gathered and not self.reports_group(digest, node_group)

    def candidates(self, digest: str) -> Mapping[str, Candidate]:
        """Return the pools of a version by worker: immutable values in a read-only mapping."""
        seats = self._pools.get(digest)
        return _EMPTY if seats is None else Candidates(seats)

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions in the workers' reports."""
        return tuple(self._pools)

    @property
    def states(self) -> Collection[WorkerState]:
        """The state of each worker. Read only."""
        return self._workers.values()

    def life_of(self, worker_id: str) -> tuple[str, int]:
        """Return the address and the incarnation of a worker that reported."""
        worker = self._workers[worker_id]
        return worker.address, worker.incarnation

    def pool_of(self, worker_id: str, digest: str) -> PoolSnapshot:
        """Return what a worker last reported of a version that it has."""
        return self._workers[worker_id].pools[digest]

    def in_flight(self, worker_id: str, digest: str) -> int:
        """Return the requests of a version on a worker that reports, with the grants not reported yet."""
        worker = self._workers[worker_id]
        if not worker.reporting:
            return 0
        granted = worker.sums[digest].grants if digest in worker.sums else 0
        return granted + worker.pools[digest].running + worker.pools[digest].waiting

    def levels_by_version(self) -> dict[str, PoolLevels]:
        """Return the levels of each version's workers, with the grants that are not reported yet."""
        return {
            digest: levels_of(digest, Candidates(seats), self._workers)
            for digest, seats in self._pools.items()
        }

    # --- reports ----------------------------------------------------------------------------------

    def apply(self, stream: int, report: ReportSnapshot, now_s: float) -> tuple[str, ...]:
        """Apply a report and return the versions whose room it changed. Later streams have larger numbers.

        Raises Conflict for a report of an older stream or incarnation of its worker, OverQuota when there are
        too many workers. The view is unchanged then.
        """
        worker = self._roster.reporting(stream, report)
        whole = worker.number < 0 or stream != worker.stream or report.incarnation != worker.incarnation
        if report.incarnation > worker.incarnation:
            self._forget_grants(worker)
        self._roster.record_report(worker, stream, report, self.epoch, now_s)
        if worker.honours:
            for sequence in report.grants_seen:
                self._settle(worker, sequence)
        changed = list(worker.pools)
        worker.pools = {pool.digest: pool for pool in report.pools}
        gone = [digest for digest in changed if digest not in worker.pools]
        changed += [digest for digest in worker.pools if digest not in changed]
        self.step_times.forget(worker.worker_id, gone)
        self._learn(worker, report, now_s)
        self._learn_prefixes(worker, report, whole=whole)
        self._learn_shared(worker, report, whole=whole)
        self._refresh(worker, changed)
        self._engines.learn(worker.worker_id, report.pools)
        return tuple(changed)

    def any_shared(self, digest: str) -> bool:
        """Whether sequences share a block of any engine that serves the version."""
        return any(self.shared.any_in(engine) for engine in self.sharing(digest))

    def sharing(self, digest: str) -> tuple[str, ...]:
        """Return the versions that compete with this one for room on some engine, itself included."""
        return self._engines.versions_of(digest)

    def close_stream(self, stream: int) -> tuple[str, ...]:
        """Stop placements on the worker of this stream until it reports again."""
        worker = self._roster.close(stream)
        if worker is None:
            return ()
        self._refresh(worker, worker.pools)
        return tuple(worker.pools)

    def bar(self, worker_id: str, digest: str, *, barred: bool) -> bool:
        """Bar a pool from new requests, or readmit it; return whether that is a change."""
        worker = self._workers.get(worker_id)
        if worker is None or (digest in worker.barred) == barred:
            return False
        (worker.barred.add if barred else worker.barred.discard)(digest)
        self._refresh(worker, (digest,))
        return True

    # --- grants -----------------------------------------------------------------------------------

    def choose(
        self, digest: str, query: PlaceQuery, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        """Return a worker that has room for the query, or why there is none."""
        seats = self._pools.get(digest)
        if seats is None:
            return _NO_POOL
        shared = self.shared.run_of(query.prefix_hashes, query.demand.prompt_tokens)
        if shared is not NOTHING_SHARED:
            query = replace(query, shared=shared)
        chain = query.prefix_hashes if self.limits.prefix_blocks else ()
        match = self.prefixes.match(chain) if chain else None
        if match is None:
            return seats.choose(query, profile, rng)
        held = match.holders(profile.holders, rng, among=seats.open_mask)
        prompt_tokens = query.demand.prompt_tokens

        def cached_tokens(worker_ids: Sequence[str]) -> dict[str, int]:
            return {
                worker_id: min(prompt_tokens, blocks * PREFIX_BLOCK_TOKENS)
                for worker_id in worker_ids
                if (blocks := match.blocks_on(worker_id))
            }

        return seats.choose(
            query,
            profile,
            rng,
            holders=[worker_id for worker_id, _ in held],
            cached_tokens=cached_tokens,
        )

    def shareable_tokens(self, query: PlaceQuery) -> int:
        """Return an upper bound of the prompt tokens that a worker may share."""
        chain, tokens = query.prefix_hashes, query.demand.prompt_tokens
        if self.shared.run_of(chain, tokens) is NOTHING_SHARED:
            return 0
        return shareable_blocks(chain, tokens) * PREFIX_BLOCK_TOKENS

    def any_yields(self, digest: str) -> bool:
        """Whether a worker without a free slot yields one to a tenant below its share."""
        seats = self._pools.get(digest)
        return seats is not None and seats.any_yields

    def choose_yielding(
        self, digest: str, query: PlaceQuery, rank: int, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        """Return a worker with KV room whose slot another tenant yields to this class."""
        seats = self._pools.get(digest)
        return _NO_POOL if seats is None else seats.choose_yielding(query, rank, profile, rng)

    def room(self, digest: str) -> RoomSummary:
        """Return the maximum that any serving worker of the version offers."""
        seats = self._pools.get(digest)
        return RoomSummary(serving=False) if seats is None else seats.room()

    def issue(
        self, chosen: Chosen, query: PlaceQuery, *, digest: str, route_revision: int, now_s: float
    ) -> Grant:
        """Return a new grant, outstanding from now on. The caller chose a candidate that has the room."""
        worker_id, demand, cached_tokens = chosen.worker_id, query.demand, chosen.offer.cached_tokens
        worker = self._workers[worker_id]
        pool = worker.pools[digest]
        kv_blocks = blocks_for(demand.reserved_tokens, pool.block_size)
        sequence = self._roster.next_sequence(worker_id)
        chain = query.prefix_hashes
        if self.shared.free_blocks_on(worker_id, chain, demand.prompt_tokens):
            self.shared.attach(worker_id, chain, sequence)
        else:
            chain = ()
        grant = self._counted(
            worker_id,
            Outstanding(
                digest,
                kv_blocks,
                demand.prompt_tokens - cached_tokens,
                demand.prompt_tokens,
                whole_blocks=kv_blocks,
                each_blocks=PREFIX_BLOCK_TOKENS // pool.block_size,
                chain=chain,
            ),
        )
        worker.outstanding[sequence] = grant
        worker.sums.setdefault(digest, Sums()).add(grant, 1)
        self._outstanding += 1
        if query.prefix_hashes and self.limits.prefix_blocks:
            self.prefixes.expect(worker_id, query.prefix_hashes)
            self.prefix_tokens.granted += demand.prompt_tokens
            self.prefix_tokens.predicted += cached_tokens
        hold_s = self.limits.grant_ttl_s + self.limits.transit_margin_s
        self._lapses.append((now_s + hold_s, worker_id, sequence))
        for other in worker.together(digest):
            self._pools[other].take(worker_id, level_of(worker, worker.pools[other]))
        if self.ends_trial(worker_id, digest, now_s):
            self.bar(worker_id, digest, barred=True)
        return Grant(
            worker_id=worker_id,
            address=worker.address,
            incarnation=worker.incarnation,
            epoch=self.epoch,
            sequence=sequence,
            kv_blocks=kv_blocks,
            ttl_s=self.limits.grant_ttl_s,
            version_digest=digest,
            route_revision=route_revision,
        )

    def give_back(self, grant: Grant) -> bool:
        """End an outstanding grant; return whether it was outstanding. A grant that its worker reported is
        not."""
        worker = self._workers.get(grant.worker_id)
        if worker is None or grant.epoch != self.epoch or grant.incarnation != worker.incarnation:
            return False
        if not self._settle(worker, grant.sequence):
            return False
        self._refresh(worker, (grant.version_digest,))
        return True

    # --- time -------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Remove expired grants and silent workers; return the versions whose room changed."""
        changed: dict[str, None] = {}
        while self._lapses and self._lapses[0][0] <= now_s:
            _, worker_id, sequence = self._lapses.popleft()
            worker = self._workers.get(worker_id)
            if worker is not None and (lapsed := worker.outstanding.get(sequence)) is not None:
                self._settle(worker, sequence)
                self._refresh(worker, (lapsed.digest,))
                changed.update(dict.fromkeys(worker.together(lapsed.digest)))
        while (worker := self._roster.next_silent(now_s)) is not None:
            self._refresh(worker, worker.pools)
            changed.update(dict.fromkeys(worker.pools))
        while (worker := self._roster.next_to_remove(now_s)) is not None:
            assert not worker.outstanding, "a worker is forgotten before its last grant lapsed"
            self._forget(worker)
        self.prefixes.advance(now_s)
        if self.step_times.advance(now_s):  # the models changed: compare prices again
            for digest, seats in self._pools.items():
                workers = [self._workers[worker_id] for worker_id in seats.all()]
                _set_cost_ratios(digest, workers, self.step_times)
                seats.forget_candidates()
        return tuple(changed)

    def next_deadline_s(self) -> float:
        """Return when ``expire`` next has work; infinite when it has none."""
        while self._lapses and not self._is_outstanding(*self._lapses[0][1:]):
            self._lapses.popleft()  # most were settled long ago
        deadline_s = self._lapses[0][0] if self._lapses else math.inf
        return min(deadline_s, self._roster.next_deadline_s())

    def check_integrity(self) -> None:
        """Raise AssertionError when sums, candidates and outstanding grants disagree."""
        assert self._outstanding == sum(len(worker.outstanding) for worker in self._workers.values())
        self._roster.check_integrity()
        for worker in self._workers.values():
            worker.check_integrity(partial(self._counted, worker.worker_id))
            for digest, pool in worker.pools.items():
                exact = self._candidate(worker, digest, level_of(worker, pool))
                assert self._pools[digest].candidate(worker.worker_id) == exact
        self.shared.check_integrity()
        for digest, seats in self._pools.items():
            assert len(seats), "an empty pool is kept"
            assert all(digest in self._workers[worker_id].pools for worker_id in seats.all())
            seats.check_integrity()

    # --- inside -----------------------------------------------------------------------------------

    def _learn(self, worker: WorkerState, report: ReportSnapshot, now_s: float) -> None:
        """Apply the work that the report measures."""
        for pool in report.pools:
            measured = self.step_times.observe(worker.worker_id, worker.device_type, pool, now_s)
            if measured is not None:
                worker.attended[pool.digest] = measured.attended_tokens // measured.steps
        for used in report.tenants:
            self.prefix_tokens.reported += used.prefill
            self.prefix_tokens.cached += used.cached

    def _learn_prefixes(self, worker: WorkerState, report: ReportSnapshot, *, whole: bool) -> None:
        """Apply the changes of the worker's cached blocks. The first report of a stream lists all of them."""
        prefixes, keep = self.prefixes, self.limits.prefix_blocks > 0
        if whole:
            added = [name for pool in report.pools for name in pool.prefix_added] if keep else ()
            worker.number = prefixes.replace(worker.worker_id, added)
            return
        for pool in report.pools if keep else ():
            if pool.prefix_removed:
                prefixes.discard(worker.worker_id, pool.prefix_removed)
            if pool.prefix_added:
                prefixes.add(worker.worker_id, pool.prefix_added)

    def _learn_shared(self, worker: WorkerState, report: ReportSnapshot, *, whole: bool) -> None:
        """Apply the blocks that the worker's sequences share, and count its outstanding grants again."""
        if whole:
            self.shared.drop(worker.worker_id)
        changed = whole
        for pool in report.pools if self.limits.prefix_blocks else ():
            # Otherwise the shared part is not a whole number of blocks.
            divides = PREFIX_BLOCK_TOKENS % pool.block_size == 0
            if divides and (pool.prefix_shared or pool.prefix_unshared):
                changed = True
                engine = pool.engine or pool.digest
                self.shared.change(worker.worker_id, engine, pool.prefix_shared, pool.prefix_unshared)
        for number in self.shared.leaning_on(worker.worker_id) if changed else ():
            grant = worker.outstanding[number]
            counted = self._counted(worker.worker_id, grant)
            if counted is not grant:
                worker.outstanding[number] = counted
                worker.sums[grant.digest].add(grant, -1)
                worker.sums[grant.digest].add(counted, 1)

    def _counted(self, worker_id: str, grant: Outstanding) -> Outstanding:
        """Return the grant with the blocks that it needs in addition to the worker's last report."""
        shared = self.shared.blocks_on(worker_id, grant.chain, grant.prompt_tokens)
        kv_blocks = grant.whole_blocks - shared * grant.each_blocks
        return grant if kv_blocks == grant.kv_blocks else replace(grant, kv_blocks=kv_blocks)

    def _is_outstanding(self, worker_id: str, sequence: int) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and sequence in worker.outstanding

    def _settle(self, worker: WorkerState, sequence: int) -> bool:
        settled = worker.outstanding.pop(sequence, None)
        if settled is None:
            return False
        self._outstanding -= 1
        self.shared.detach(worker.worker_id, settled.chain, sequence)
        sums = worker.sums[settled.digest]
        sums.add(settled, -1)
        if not sums.grants:
            del worker.sums[settled.digest]
        return True

    def _refresh(self, worker: WorkerState, digests: Iterable[str]) -> None:
        """Update the seats of these versions, and of those that share their engines, from the worker's
        state."""
        for digest in dict.fromkeys(other for each in digests for other in worker.together(each)):
            pool, seats = worker.pools.get(digest), self._pools.get(digest)
            if pool is not None:
                if seats is None:
                    seats = self._pools[digest] = PoolSeats(self._builder(digest))
                seats.put(worker.worker_id, level_of(worker, pool))
            elif seats is not None and worker.worker_id in seats:
                seats.drop(worker.worker_id)
                if not len(seats):
                    del self._pools[digest]

    def _builder(self, digest: str) -> Callable[[str, SeatLevel], Candidate]:
        return lambda worker_id, level: self._candidate(self._workers[worker_id], digest, level)

    def _candidate(self, worker: WorkerState, digest: str, level: SeatLevel) -> Candidate:
        return candidate_of(
            worker,
            worker.pools[digest],
            level,
            model=self.step_times.model(WorkerKind(worker.device_type, digest)),
            slowness_ratio=self.step_times.slowness(worker.worker_id, digest),
        )

    def _forget_grants(self, worker: WorkerState) -> None:
        """Drop the outstanding grants: a new incarnation of the worker rejects them."""
        self._outstanding -= len(worker.outstanding)
        worker.outstanding.clear()
        self.shared.detach_all(worker.worker_id)
        worker.sums.clear()

    def _forget(self, worker: WorkerState) -> None:
        digests = tuple(worker.pools)
        worker.pools = {}
        self._engines.learn(worker.worker_id, ())
        self._refresh(worker, digests)
        self.step_times.forget(worker.worker_id, digests)
        self.prefixes.drop(worker.worker_id)
        self.shared.drop(worker.worker_id)
        self._roster.forget(worker)


def _set_cost_ratios(digest: str, workers: Iterable[WorkerState], step_times: StepTimes) -> None:
    """Set each worker's ratio for the version: the cheapest price over its own, 1 while its own is
    unknown."""
    prices = [(worker, _price_of(worker, digest, step_times)) for worker in workers]
    cheapest = min((price for _, price in prices if price), default=0.0)
    for worker, price in prices:
        worker.cost_ratios[digest] = cheapest / price if price else 1.0


def _price_of(worker: WorkerState, digest: str, step_times: StepTimes) -> float:
    """Return the price of a step of mixed work on the worker; 0 when unknown."""
    model = step_times.model(WorkerKind(worker.device_type, digest))
    return worker.cost_per_hour * model.seconds(*_PRICED_STEP)
