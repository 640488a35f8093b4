"""The workers of a term, the stream on which each reports, and the time of its last report.

Only reports of a worker's newest stream and newest incarnation count (see ``view``). The number of a
worker's last grant is kept longer than its other state, because a number is never reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.core.errors import Conflict, OverQuota
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.scheduler.fleet.worker import FleetLimits, WorkerState


class EngineGroups:
    """Groups of versions, from the reports of all workers. Single writer: the fleet view.

    Versions are in one group if they share an engine anywhere, or each with a third. An engine keeps the name
    of a version that may have left it; that one is in the group too.
    """

    def __init__(self) -> None:
        self._engines: dict[str, frozenset[tuple[str, ...]]] = {}  # versions of each engine, by worker
        self._groups: dict[str, tuple[str, ...]] = {}

    def learn(self, worker_id: str, pools: Iterable[PoolSnapshot]) -> None:
        """Replace what a worker reported last."""
        engines: dict[str, list[str]] = {}
        for pool in pools:
            if pool.engine:
                engines.setdefault(pool.engine, [pool.engine]).append(pool.digest)
        found = frozenset(tuple(sorted({*versions})) for versions in engines.values())
        if found == self._engines.get(worker_id, frozenset()):
            return
        if found:
            self._engines[worker_id] = found
        else:
            del self._engines[worker_id]
        self._groups = _groups_of(one for engines_ in self._engines.values() for one in engines_)

    def versions_of(self, digest: str) -> tuple[str, ...]:
        """Return the versions of the group, itself included, in one order."""
        return self._groups.get(digest, (digest,))


def _groups_of(engines: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, set[str]] = {}
    for versions in sorted(set(engines)):
        joined = set(versions).union(*(groups[version] for version in versions if version in groups))
        groups.update(dict.fromkeys(sorted(joined), joined))
    return {version: tuple(sorted(group)) for version, group in groups.items()}


class Roster:
    """Single writer: the owner of the fleet view. Time is an argument, in monotonic seconds."""

    def __init__(self, limits: FleetLimits) -> None:
        """Only this class writes ``workers``."""
        self.workers: dict[str, WorkerState] = {}
        self._limits = limits
        self._streams: dict[int, str] = {}
        self._sequences: dict[str, int] = {}
        self._talking: dict[str, None] = {}  # workers in the order of their last reports, like ``_silent``
        self._silent: dict[str, None] = {}

    def by_state(self) -> dict[str, int]:
        """Return how many workers receive grants, are silent, draining, or away."""
        found = {"placed_on": 0, "silent": 0, "draining": 0, "away": 0}
        for worker in self.workers.values():
            found[worker.state] += 1
        return found

    def view_age_s(self, now_s: float) -> float:
        """Return the age of the oldest last report of a connected worker; 0 without workers."""
        reported_s = [worker.report_s for worker in self.workers.values() if worker.connected]
        return now_s - min(reported_s, default=now_s)

    def next_sequence(self, worker_id: str) -> int:
        """Return a number that no earlier grant of this worker had."""
        sequence = self._sequences.get(worker_id, 0) + 1
        self._sequences[worker_id] = sequence
        return sequence

    def reporting(self, stream: int, report: ReportSnapshot) -> WorkerState:
        """Return the worker that sent the report. Raises like ``FleetView.apply``."""
        worker = self.workers.get(report.worker_id)
        if worker is None:
            known = report.worker_id in self._sequences
            if len(self.workers) >= self._limits.max_workers or (
                not known and len(self._sequences) >= 16 * self._limits.max_workers
            ):
                raise OverQuota(f"there are {len(self.workers)} workers, which is the limit")
            self._sequences.setdefault(report.worker_id, 0)
            worker = WorkerState(report.worker_id, report.incarnation, stream)
            self.workers[report.worker_id] = worker
        elif report.incarnation < worker.incarnation:
            raise Conflict(
                f"a newer incarnation of worker {report.worker_id} reports", worker_id=report.worker_id
            )
        elif stream < worker.stream:
            raise Conflict(f"worker {report.worker_id} opened a newer stream", worker_id=report.worker_id)
        return worker

    def record_report(
        self, worker: WorkerState, stream: int, report: ReportSnapshot, epoch: int, now_s: float
    ) -> None:
        """Record a report on this stream to the leader of ``epoch``."""
        self._streams.pop(worker.stream, None)
        self._streams[stream] = worker.worker_id
        worker.record_report(stream, report, epoch, now_s)
        self._silent.pop(worker.worker_id, None)
        self._talking.pop(worker.worker_id, None)
        self._talking[worker.worker_id] = None

    def close(self, stream: int) -> WorkerState | None:
        """Return the worker that the end of this stream disconnects, or None."""
        worker = self.workers.get(self._streams.pop(stream, ""))
        if worker is None or worker.stream != stream or not worker.connected:
            return None
        worker.connected = False
        return worker

    def next_silent(self, now_s: float) -> WorkerState | None:
        """Return a worker that missed its report deadline and mark it silent; None when there is none."""
        worker = self._oldest(self._talking)
        if worker is None or now_s - worker.report_s < self._limits.silence_s:
            return None
        worker.silent = True
        del self._talking[worker.worker_id]
        self._silent[worker.worker_id] = None
        return worker

    def next_to_remove(self, now_s: float) -> WorkerState | None:
        """Return a worker that has been silent long enough to be removed; None when there is none."""
        worker = self._oldest(self._silent)
        return worker if worker is not None and now_s - worker.report_s >= self._limits.forget_s else None

    def forget(self, worker: WorkerState) -> None:
        """Remove a silent worker."""
        self._streams.pop(worker.stream, None)
        del self._silent[worker.worker_id]
        del self.workers[worker.worker_id]

    def next_deadline_s(self) -> float:
        """Return when the next worker may become silent or be removed; infinite when none can."""
        deadline_s = math.inf
        if (worker := self._oldest(self._talking)) is not None:
            deadline_s = worker.report_s + self._limits.silence_s
        if (worker := self._oldest(self._silent)) is not None:
            deadline_s = min(deadline_s, worker.report_s + self._limits.forget_s)
        return deadline_s

    def check_integrity(self) -> None:
        """Raise AssertionError when orders, streams and workers disagree."""
        assert self._talking.keys() | self._silent.keys() == self.workers.keys()
        for order in (self._talking, self._silent):
            times = [self.workers[worker_id].report_s for worker_id in order]
            assert times == sorted(times), "workers are out of order"
        for worker in self.workers.values():
            assert worker.silent == (worker.worker_id in self._silent)
            assert not worker.connected or self._streams[worker.stream] == worker.worker_id
            assert all(number <= self._sequences[worker.worker_id] for number in worker.outstanding)

    def _oldest(self, order: Mapping[str, None]) -> WorkerState | None:
        """Return the worker in ``order`` whose last report is the oldest."""
        worker_id = next(iter(order), None)
        return None if worker_id is None else self.workers[worker_id]


class AppliedReports:
    """By worker, for the last ``most`` workers. Single writer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deltas: dict[str, tuple[int, int]] = {}  # incarnation, number of the last deltas applied
        self._prefixes: dict[str, int] = {}

    @property
    def prefixes_by_worker(self) -> Mapping[str, int]:
        """Number of prefix blocks that each worker reported."""
        return self._prefixes

    def without_applied(self, snapshot: ReportSnapshot) -> ReportSnapshot:
        """Return the report without deltas that were applied before: the answer to that report was lost."""
        incarnation, number = self._deltas.get(snapshot.worker_id, (0, 0))
        if incarnation == snapshot.incarnation and 0 < snapshot.deltas_number <= number:
            return replace(snapshot, tenants=(), usage=())
        return snapshot

    def note(self, snapshot: ReportSnapshot, *, first: bool) -> None:
        """Record an applied report. ``first``: it begins its stream, so it contains all prefix blocks."""
        worker_id = snapshot.worker_id
        incarnation, number = self._deltas.pop(worker_id, (0, 0))
        number = number if incarnation == snapshot.incarnation else 0
        self._deltas[worker_id] = snapshot.incarnation, max(number, snapshot.deltas_number)
        known = 0 if first else self._prefixes.get(worker_id, 0)
        known += sum(len(pool.prefix_added) - len(pool.prefix_removed) for pool in snapshot.pools)
        self._prefixes[worker_id] = max(0, known)
        for by_worker in (self._deltas, self._prefixes):
            while len(by_worker) > self._most:
                del by_worker[next(iter(by_worker))]
