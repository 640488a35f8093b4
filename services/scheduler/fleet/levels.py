"""Sums over the fleet view for operators and metrics, and its pools as a mapping. No decision uses the
sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.scheduler.fleet.worker import WorkerState
from services.scheduler.policy.placement.candidate import Candidate
from services.scheduler.policy.placement.pool_seats import PoolSeats


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
