"""What one leader knows of its workers: reported levels, and the grants that no report speaks for yet.

    room = total - reserved (reported) - outstanding

A grant is *outstanding* from its issue until the first of: a report's ``grants_seen`` names it, its gateway
gives it back, it lapsed, its worker began another life. ``grants_seen`` and ``kv_blocks_reserved`` of a
report are one atom, so every grant is counted by exactly one side, and a late report errs towards less room.

Why no grant is counted by neither side:
- A worker honours the newest epoch it heard of, and is placed on only after a report that says it honours
  ours: grants of older leaders can no longer start there.
- A worker's stream sends its first report after it heard us on that stream, so the order in which we open
  streams is the order in which the worker did: reports of any but the newest stream are refused.
- Another incarnation refuses the grants of the one before, and those that started are in its first report.
- A grant starts within its time to live from receipt. It is held for ``transit_margin_s`` longer, and a
  worker that was silent for as long is not placed on.
The worker stays the authority: should a margin be exceeded, it answers NOT_ADMITTED.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from services.core.errors import Conflict, OverQuota
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.generation import Grant
from services.scheduler.policy.kv_admission import Demand, blocks_for
from services.scheduler.policy.placement import Candidate

_EMPTY: Final[Mapping[str, Candidate]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``silence_s``: longest gap between two reports of a worker that is placed on."""

    grant_ttl_s: float = 2.0
    transit_margin_s: float = 3.0
    silence_s: float = 2.5
    forget_s: float = 30.0
    max_workers: int = 4096

    def __post_init__(self) -> None:
        if self.silence_s > self.transit_margin_s:
            raise ValueError("a worker may not be silent for longer than the transit margin")
        if self.forget_s <= self.silence_s + self.grant_ttl_s + self.transit_margin_s:
            raise ValueError("a worker is forgotten before its last grant lapsed")


@dataclass(frozen=True, slots=True)
class Outstanding:
    digest: str
    kv_blocks: int
    prompt_tokens: int


@dataclass(slots=True)
class _Sums:
    """Totals of the outstanding grants of one pool."""

    grants: int = 0
    kv_blocks: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    incarnation: int
    stream: int
    address: str = ""
    draining: bool = False
    connected: bool = True
    honours: bool = False
    silent: bool = False
    report_s: float = 0.0
    pools: dict[str, PoolSnapshot] = field(default_factory=dict)
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    sums: dict[str, _Sums] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """The workers of one version together. ``kv_tokens_free``: on those that serve, granted to nobody."""

    granted: int = 0
    running: int = 0
    waiting: int = 0
    workers: int = 0
    serving_workers: int = 0
    kv_tokens_total: int = 0
    kv_tokens_free: int = 0


class FleetView:
    """Single writer: the task of the scheduler's service. Time is an argument, in monotonic seconds."""

    def __init__(self, epoch: int, limits: FleetLimits) -> None:
        self.epoch = epoch
        self.limits = limits
        self._workers: dict[str, _Worker] = {}
        self._candidates: dict[str, dict[str, Candidate]] = {}
        self._sequences: dict[str, int] = {}  # outlives the worker's state: a number is never used twice
        self._lapses: deque[tuple[float, str, int]] = deque()  # in order: every grant is held equally long

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def outstanding(self) -> int:
        return sum(len(worker.outstanding) for worker in self._workers.values())

    @property
    def workers_by_state(self) -> dict[str, int]:
        """How many workers are placed on, silent, draining, or away."""
        found = {"placed_on": 0, "silent": 0, "draining": 0, "away": 0}
        for worker in self._workers.values():
            found[_state(worker)] += 1
        return found

    def view_age_s(self, now_s: float) -> float:
        """Return since when the connected worker that was longest not heard was last heard; 0 without any."""
        heard = [worker.report_s for worker in self._workers.values() if worker.connected]
        return now_s - min(heard, default=now_s)

    def candidates(self, digest: str) -> Mapping[str, Candidate]:
        """Return the pools of a version by worker. A snapshot of values in a mapping that is read only."""
        return self._candidates.get(digest, _EMPTY)

    def levels_by_version(self) -> dict[str, PoolLevels]:
        """Return what the workers of each version report, with what is granted and not reported yet."""
        return {digest: self._levels(digest, found) for digest, found in self._candidates.items()}

    def _levels(self, digest: str, candidates: Mapping[str, Candidate]) -> PoolLevels:
        workers = [self._workers[worker_id] for worker_id in candidates]
        pools = [worker.pools[digest] for worker in workers]
        serving = [candidate for candidate in candidates.values() if candidate.serving]
        return PoolLevels(
            granted=sum(worker.sums[digest].grants for worker in workers if digest in worker.sums),
            running=sum(pool.running for pool in pools),
            waiting=sum(pool.waiting for pool in pools),
            workers=len(pools),
            serving_workers=len(serving),
            kv_tokens_total=sum(pool.kv_blocks_total * pool.block_size for pool in pools),
            kv_tokens_free=sum(max(0, candidate.kv_tokens_room) for candidate in serving),
        )

    # --- reports ----------------------------------------------------------------------------------

    def apply(self, stream: int, report: ReportSnapshot, now_s: float) -> tuple[str, ...]:
        """Take a report over and return the versions whose room it changed. ``stream`` grows with opening.

        Raises Conflict for a report of an older stream or an older life of its worker, OverQuota when
        there are too many workers; nothing has changed then.
        """
        worker = self._worker_of(stream, report)
        if report.incarnation > worker.incarnation:
            worker.outstanding.clear()
            worker.sums.clear()
        worker.incarnation, worker.stream = report.incarnation, stream
        worker.address, worker.draining = report.address, report.draining
        worker.connected, worker.silent, worker.report_s = True, False, now_s
        worker.honours = report.epoch == self.epoch
        if worker.honours:
            for sequence in report.grants_seen:
                self._settle(worker, sequence)
        changed = list(worker.pools)
        worker.pools = {pool.digest: pool for pool in report.pools}
        changed += [digest for digest in worker.pools if digest not in changed]
        self._refresh(worker, changed)
        return tuple(changed)

    def close_stream(self, stream: int) -> tuple[str, ...]:
        """Place nothing more on the worker of this stream, until it reports again."""
        for worker in self._workers.values():
            if worker.stream == stream and worker.connected:
                worker.connected = False
                self._refresh(worker, worker.pools)
                return tuple(worker.pools)
        return ()

    # --- grants -----------------------------------------------------------------------------------

    def issue(
        self, worker_id: str, digest: str, demand: Demand, *, route_revision: int, now_s: float
    ) -> Grant:
        """Return a new grant, outstanding from now on. The caller chose a candidate that has the room."""
        worker = self._workers[worker_id]
        pool = worker.pools[digest]
        kv_blocks = blocks_for(demand.reserved_tokens, pool.block_size)
        sequence = self._sequences.get(worker_id, 0) + 1
        self._sequences[worker_id] = sequence
        worker.outstanding[sequence] = Outstanding(digest, kv_blocks, demand.prompt_tokens)
        sums = worker.sums.setdefault(digest, _Sums())
        sums.grants += 1
        sums.kv_blocks += kv_blocks
        sums.prompt_tokens += demand.prompt_tokens
        hold_s = self.limits.grant_ttl_s + self.limits.transit_margin_s
        self._lapses.append((now_s + hold_s, worker_id, sequence))
        self._refresh(worker, (digest,))
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
        """Whether the grant was outstanding; it is no longer. A grant that was seen is the worker's."""
        worker = self._workers.get(grant.worker_id)
        if worker is None or grant.epoch != self.epoch or grant.incarnation != worker.incarnation:
            return False
        if not self._settle(worker, grant.sequence):
            return False
        self._refresh(worker, (grant.version_digest,))
        return True

    # --- time -------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Drop lapsed grants and silent workers; return the versions whose room changed."""
        changed: dict[str, None] = {}
        while self._lapses and self._lapses[0][0] <= now_s:
            _, worker_id, sequence = self._lapses.popleft()
            worker = self._workers.get(worker_id)
            if worker is not None and (lapsed := worker.outstanding.get(sequence)) is not None:
                self._settle(worker, sequence)
                self._refresh(worker, (lapsed.digest,))
                changed[lapsed.digest] = None
        for worker in list(self._workers.values()):
            quiet_s = now_s - worker.report_s
            if not worker.silent and quiet_s >= self.limits.silence_s:
                worker.silent = True
                self._refresh(worker, worker.pools)
                changed.update(dict.fromkeys(worker.pools))
            if quiet_s >= self.limits.forget_s and not worker.outstanding:
                self._forget(worker)
        return tuple(changed)

    def next_deadline_s(self) -> float:
        """Return when ``expire`` may next have something to do; infinite when nothing is due ever."""
        while self._lapses and not self._is_outstanding(*self._lapses[0][1:]):
            self._lapses.popleft()  # settled long ago, as most are
        deadline_s = self._lapses[0][0] if self._lapses else math.inf
        for worker in self._workers.values():
            wait_s = self.limits.forget_s if worker.silent else self.limits.silence_s
            deadline_s = min(deadline_s, worker.report_s + wait_s)
        return deadline_s

    def check_integrity(self) -> None:
        """Raise AssertionError when sums, candidates and outstanding grants disagree."""
        for worker in self._workers.values():
            for digest in {*worker.sums, *worker.pools, *(o.digest for o in worker.outstanding.values())}:
                held = [found for found in worker.outstanding.values() if found.digest == digest]
                sums = worker.sums.get(digest, _Sums())
                assert sums.grants == len(held), "outstanding grants miscounted"
                assert sums.kv_blocks == sum(found.kv_blocks for found in held), "outstanding blocks leaked"
                assert sums.prompt_tokens == sum(found.prompt_tokens for found in held)
            for digest in worker.pools:
                assert self._candidates[digest][worker.worker_id] == _candidate(worker, digest)
            assert all(number <= self._sequences[worker.worker_id] for number in worker.outstanding)
        for digest, found_by_worker in self._candidates.items():
            assert found_by_worker, "an empty pool is kept"
            assert all(digest in self._workers[worker_id].pools for worker_id in found_by_worker)

    # --- inside -----------------------------------------------------------------------------------

    def _worker_of(self, stream: int, report: ReportSnapshot) -> _Worker:
        worker = self._workers.get(report.worker_id)
        if worker is None:
            known = report.worker_id in self._sequences
            if len(self._workers) >= self.limits.max_workers or (
                not known and len(self._sequences) >= 16 * self.limits.max_workers
            ):
                raise OverQuota(f"there are {len(self._workers)} workers; no more are taken")
            self._sequences.setdefault(report.worker_id, 0)
            worker = _Worker(report.worker_id, report.incarnation, stream)
            self._workers[report.worker_id] = worker
        elif report.incarnation < worker.incarnation:
            raise Conflict(f"a newer life of worker {report.worker_id} reports", worker_id=report.worker_id)
        elif stream < worker.stream:
            raise Conflict(f"worker {report.worker_id} opened a newer stream", worker_id=report.worker_id)
        return worker

    def _is_outstanding(self, worker_id: str, sequence: int) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and sequence in worker.outstanding

    def _settle(self, worker: _Worker, sequence: int) -> bool:
        settled = worker.outstanding.pop(sequence, None)
        if settled is None:
            return False
        sums = worker.sums[settled.digest]
        sums.grants -= 1
        sums.kv_blocks -= settled.kv_blocks
        sums.prompt_tokens -= settled.prompt_tokens
        if not sums.grants:
            del worker.sums[settled.digest]
        return True

    def _refresh(self, worker: _Worker, digests: Iterable[str]) -> None:
        """Bring the candidates of these versions in line with the worker's state."""
        for digest in digests:
            if digest in worker.pools:
                self._candidates.setdefault(digest, {})[worker.worker_id] = _candidate(worker, digest)
            elif digest in self._candidates:
                self._candidates[digest].pop(worker.worker_id, None)
                if not self._candidates[digest]:
                    del self._candidates[digest]

    def _forget(self, worker: _Worker) -> None:
        digests: Sequence[str] = tuple(worker.pools)
        worker.pools = {}
        self._refresh(worker, digests)
        del self._workers[worker.worker_id]


def _state(worker: _Worker) -> str:
    if not (worker.connected and worker.honours):
        return "away"
    if worker.silent:
        return "silent"
    return "draining" if worker.draining else "placed_on"


def _candidate(worker: _Worker, digest: str) -> Candidate:
    pool = worker.pools[digest]
    sums = worker.sums.get(digest, _Sums())
    room = pool.kv_blocks_total - pool.kv_blocks_reserved - sums.kv_blocks
    return Candidate(
        worker_id=worker.worker_id,
        kv_tokens_total=pool.kv_blocks_total * pool.block_size,
        kv_tokens_room=room * pool.block_size,
        block_size=pool.block_size,
        slots=pool.max_sequences - pool.running - pool.waiting - sums.grants,
        max_model_len=pool.max_model_len,
        queued_prefill_tokens=pool.queued_prefill_tokens + sums.prompt_tokens,
        ready=pool.ready,
        draining=worker.draining,
        heard=worker.connected and worker.honours and not worker.silent,
    )
