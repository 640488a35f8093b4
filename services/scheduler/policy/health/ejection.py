"""Outlier ejection: bars the workers of a pool whose steps are too slow, and probes them later.

Gray failure: a worker responds but is slow. Its ratio is its measured step time over the time that a
step-time model predicts for the same work. Where enough peers of its type have a recent ratio, the reference
is the median of these others, so that a wrong model or a slowdown of all workers ejects none. Otherwise the
reference is the model, or the lowest ratio of the others when all are slower than the model.

    healthy ──outlier in consecutive windows, within the cap──► ejected ──its time is over──► probing
       ▲                                                            ▲                           │
       └──────────────good in consecutive windows───────────────────┼───────────────────────────┘
                                                                    └──outlier again, for twice as long

Names and meaning of the settings follow Envoy's outlier detection and gRFC A50. Pure: time is an argument, in
monotonic seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class EjectionState(StrEnum):
    """State of a worker in a pool."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    PROBING = "probing"


@dataclass(frozen=True, slots=True)
class EjectionPolicy:
    """Thresholds and times of outlier ejection.

    The duration of an ejection doubles with each one until the worker was healthy for ``forgive_s``.
    """

    interval_s: float = 2.0  # minimum duration of a window
    min_steps: int = 5  # minimum number of steps in a window
    min_busy_s: float = 0.02  # minimum predicted time of the steps in a window
    outlier_ratio: float = 2.0  # ratio at which a window begins to count against its worker
    healthy_ratio: float = 1.5  # below this ratio, a window counts for its worker
    consecutive_outliers: int = 4  # windows in a row before ejection
    consecutive_good: int = 3  # good windows in a row before readmission
    consecutive_bad_probes: int = 2  # bad windows in a row before a probing worker is ejected again
    min_peers: int = 3  # others with a fresh window that make a median
    fresh_s: float = 10.0  # a window is fresh until this age
    stale_s: float = 30.0  # time without steps after which the open window starts again
    base_ejection_time_s: float = 30.0
    max_ejection_time_s: float = 300.0
    # Largest part of the serving workers; one may always be ejected, and one always stays.
    max_ejection_ratio: float = 0.3
    probe_interval_s: float = 2.0  # minimum time between two requests to a probing worker
    probe_share_ratio: float = 0.04  # maximum share of the pool's requests for a probing worker
    forgive_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1.0 < self.healthy_ratio <= self.outlier_ratio:
            raise ValueError("the healthy ratio is above 1 and at most the outlier ratio")
        if not 0.0 <= self.max_ejection_ratio < 1.0 or not 0.0 < self.probe_share_ratio <= 1.0:
            raise ValueError("shares are between 0 and 1")


@dataclass(frozen=True, slots=True)
class EjectionChange:
    """A worker changed its state. ``ratio``: over its reference, nan where there was none."""

    worker_id: str
    before: EjectionState
    after: EjectionState
    ratio: float
    why: str


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """State of a worker of one pool. Times are on the caller's monotonic clock; 0: no probe is scheduled.

    ``ratio`` is that of its last window over its reference, nan while it was not judged.
    """

    worker_id: str
    standing: EjectionState
    ratio: float
    since_s: float
    next_probe_s: float = 0.0
    ejections: int = 0


@dataclass(slots=True, eq=False)
class _Member:
    worker_id: str
    kind: str
    since_s: float
    window_s: float  # begin of the open window
    standing: EjectionState = EjectionState.HEALTHY
    trusted: bool = True
    measured_s: float = 0.0
    predicted_s: float = 0.0
    steps: int = 0
    ratio: float = math.nan  # measured over predicted, of the last closed window
    closed_s: float = -math.inf
    relative: float = math.nan  # ratio of ``ratio`` to its reference
    outliers: int = 0
    good: int = 0
    ejections: int = 0
    until_s: float = 0.0
    next_probe_s: float = 0.0
    probes: int = 0
    pool_grants: int = 0  # the pool's grants at the ejection: probes are a share of the grants since then

    def open_window(self, now_s: float) -> None:
        self.window_s, self.measured_s, self.predicted_s, self.steps = now_s, 0.0, 0.0, 0


@dataclass(frozen=True, slots=True)
class _Peers:
    """Fresh ratios of healthy workers, sorted, by type and over all types."""

    members: frozenset[str]
    by_kind: dict[str, list[float]]
    ratios: list[float]

    @staticmethod
    def of(members: Iterable[_Member], since_s: float) -> _Peers:
        fresh = [one for one in members if one.standing is EjectionState.HEALTHY and one.closed_s >= since_s]
        by_kind: dict[str, list[float]] = {}
        for one in fresh:
            by_kind.setdefault(one.kind, []).append(one.ratio)
        for ratios in by_kind.values():
            ratios.sort()
        return _Peers(frozenset(one.worker_id for one in fresh), by_kind, sorted(one.ratio for one in fresh))

    def median_without(self, member: _Member, min_peers: int) -> float | None:
        """Return the median ratio of the others of its type, None when there are fewer than ``min_peers``."""
        ratios = self.by_kind.get(member.kind, [])
        own = bisect_left(ratios, member.ratio) if member.worker_id in self.members else len(ratios)
        others = len(ratios) - (own < len(ratios))
        if others < min_peers:
            return None

        def nth(index: int) -> float:
            return ratios[index if index < own else index + 1]

        middle = others // 2
        return nth(middle) if others % 2 else (nth(middle - 1) + nth(middle)) / 2

    def best_without(self, member: _Member) -> float | None:
        """Return the lowest ratio of the others of any type; None without others."""
        own = member.worker_id in self.members and self.ratios[0] == member.ratio
        others = self.ratios[1:2] if own else self.ratios[:1]
        return others[0] if others else None


class Ejection:
    """The workers of one pool. Single writer; the owner bounds the number of workers."""

    def __init__(self, policy: EjectionPolicy | None = None) -> None:
        self.policy: Final = policy if policy is not None else EjectionPolicy()
        self._members: dict[str, _Member] = {}
        self._grants = 0
        self._ticked_s = -math.inf

    # --- observations -----------------------------------------------------------------------------

    def observe(
        self,
        worker_id: str,
        *,
        kind: str,
        steps: int,
        measured_s: float,
        predicted_s: float,
        now_s: float,
        trusted: bool = True,
    ) -> None:
        """Count steps that took ``measured_s`` and were predicted to take ``predicted_s``. ``kind``: the
        worker's type.

        ``trusted``: the prediction may serve as a reference by itself, not only to compare workers.
        """
        member = self._member(worker_id, kind, now_s)
        member.trusted = trusted
        if steps <= 0 or predicted_s <= 0.0:
            return
        if now_s - member.window_s > self.policy.stale_s:  # it was idle: the old steps are no evidence
            member.open_window(now_s)
            member.outliers = 0
        member.steps += steps
        member.measured_s += measured_s
        member.predicted_s += predicted_s

    def restarted(self, worker_id: str, now_s: float) -> None:
        """Discard the measurements of a restarted worker; an ejected one is probed at once."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.open_window(now_s)
        member.ratio = member.relative = math.nan
        member.closed_s = -math.inf
        member.outliers = member.good = 0
        if member.standing is EjectionState.EJECTED:
            member.until_s = now_s

    def granted(self, worker_id: str, now_s: float) -> None:
        """Count a request to the worker. A probing worker gets no other for ``probe_interval_s``."""
        self._grants += 1
        member = self._members.get(worker_id)
        if member is not None and member.standing is EjectionState.PROBING:
            member.probes += 1
            member.next_probe_s = now_s + self.policy.probe_interval_s

    def forget(self, worker_id: str) -> None:
        self._members.pop(worker_id, None)

    # --- queries ----------------------------------------------------------------------------------

    def barred(self, worker_id: str, now_s: float) -> bool:
        """Whether the worker gets no request now."""
        member = self._members.get(worker_id)
        if member is None or member.standing is EjectionState.HEALTHY:
            return False
        return member.standing is EjectionState.EJECTED or not self._may_probe(member, now_s)

    def health(self) -> tuple[WorkerHealth, ...]:
        """Return the state of each worker."""
        return tuple(_health(member) for member in self._members.values())

    @property
    def all_healthy(self) -> bool:
        return all(member.standing is EjectionState.HEALTHY for member in self._members.values())

    def due_s(self) -> float:
        """Return when ``tick`` is next needed; infinite without workers."""
        return self._ticked_s + self.policy.interval_s if self._members else math.inf

    # --- decisions --------------------------------------------------------------------------------

    def tick(self, serving: Collection[str], now_s: float) -> tuple[EjectionChange, ...]:
        """Close windows, judge, eject and readmit. ``serving``: workers that get requests unless ejected."""
        self._ticked_s = now_s
        closed = [member for member in self._members.values() if self._closes(member, now_s)]
        for member in closed:
            member.ratio = member.measured_s / member.predicted_s
            member.closed_s = now_s
            member.open_window(now_s)
        peers = _Peers.of(self._members.values(), now_s - self.policy.fresh_s)
        changes = [found for member in closed if (found := self._judge(member, peers, now_s)) is not None]
        changes += self._let_probe(now_s)
        changes += self._eject(closed, serving, now_s)
        changes += self._keep_one(serving, now_s)
        self._forgive(now_s)
        return tuple(changes)

    def _member(self, worker_id: str, kind: str, now_s: float) -> _Member:
        member = self._members.get(worker_id)
        if member is None:
            member = self._members[worker_id] = _Member(worker_id, kind, now_s, now_s)
        member.kind = kind
        return member

    def _closes(self, member: _Member, now_s: float) -> bool:
        policy = self.policy
        if now_s - member.window_s < policy.interval_s:
            return False
        # A few long steps are as much evidence as many short ones.
        enough = member.steps >= policy.min_steps and member.predicted_s >= policy.min_busy_s
        return enough or (member.steps > 0 and member.measured_s >= policy.interval_s)

    def _judge(self, member: _Member, peers: _Peers, now_s: float) -> EjectionChange | None:
        """Count a closed window for or against its worker."""
        policy = self.policy
        measure = self._measure(member, peers)
        if measure is None:
            member.relative, member.outliers = math.nan, 0
            return None
        member.relative = member.ratio / measure
        if member.standing is EjectionState.PROBING:
            return self._judge_probe(member, now_s)
        if member.relative >= policy.outlier_ratio:
            member.outliers += 1
        elif member.relative < policy.healthy_ratio:
            member.outliers = 0
        else:
            member.outliers = max(0, member.outliers - 1)
        return None

    def _judge_probe(self, member: _Member, now_s: float) -> EjectionChange | None:
        policy = self.policy
        if member.relative >= policy.outlier_ratio:
            member.good, member.outliers = 0, member.outliers + 1
            if member.outliers >= policy.consecutive_bad_probes:
                return self._move(member, EjectionState.EJECTED, now_s, "still slow when probed")
            return None
        member.good, member.outliers = member.good + 1, 0
        if member.good >= policy.consecutive_good:
            return self._move(member, EjectionState.HEALTHY, now_s, "good when probed")
        return None

    def _measure(self, member: _Member, peers: _Peers) -> float | None:
        """Return the reference ratio, None where there is none."""
        found = peers.median_without(member, self.policy.min_peers)
        if found is not None:
            return found
        if not member.trusted:
            return None
        best = peers.best_without(member)
        if best is not None:  # a worker that is no slower than the best of the others is no outlier
            return max(1.0, best)
        return 1.0 if member.standing is EjectionState.PROBING else None

    def _let_probe(self, now_s: float) -> Iterable[EjectionChange]:
        for member in self._members.values():
            if member.standing is EjectionState.EJECTED and member.until_s <= now_s:
                yield self._move(member, EjectionState.PROBING, now_s, "its ejection time is over")

    def _eject(
        self, closed: Iterable[_Member], serving: Collection[str], now_s: float
    ) -> Iterable[EjectionChange]:
        """Eject the slowest first, as many as the limit allows."""
        outliers = [
            member
            for member in closed
            if member.standing is EjectionState.HEALTHY
            and member.outliers >= self.policy.consecutive_outliers
        ]
        outliers.sort(key=lambda member: (-member.relative, member.worker_id))
        for member in outliers:
            if self._may_eject(member, serving):
                yield self._move(member, EjectionState.EJECTED, now_s, "slower than its peers or its model")

    def _may_eject(self, member: _Member, serving: Collection[str]) -> bool:
        out = {
            found.worker_id for found in self._members.values() if found.standing is not EjectionState.HEALTHY
        }
        pool = len(serving)
        allowed = max(1, math.floor(pool * self.policy.max_ejection_ratio))
        gone = sum(worker_id in out for worker_id in serving)
        left = pool - gone - (member.worker_id in serving)
        return gone < allowed and left >= 1

    def _keep_one(self, serving: Collection[str], now_s: float) -> Iterable[EjectionChange]:
        """Readmit the fastest worker when no other worker serves: a slow worker is better than none."""
        found = [self._members[worker_id] for worker_id in serving if worker_id in self._members]
        if (
            len(found) < len(serving)
            or any(one.standing is EjectionState.HEALTHY for one in found)
            or not found
        ):
            return
        best = min(found, key=lambda one: (one.relative if one.relative > 0 else math.inf, one.worker_id))
        yield self._move(best, EjectionState.HEALTHY, now_s, "no other worker serves")

    def _move(self, member: _Member, after: EjectionState, now_s: float, why: str) -> EjectionChange:
        policy = self.policy
        change = EjectionChange(member.worker_id, member.standing, after, member.relative, why)
        member.standing, member.since_s = after, now_s
        member.outliers = member.good = member.probes = 0
        member.open_window(now_s)
        if after is EjectionState.EJECTED:
            time_s = policy.base_ejection_time_s * 2.0 ** min(member.ejections, 32)
            member.until_s = now_s + min(policy.max_ejection_time_s, time_s)
            member.ejections += 1
        elif after is EjectionState.PROBING:
            member.next_probe_s, member.pool_grants = now_s, self._grants
        return change

    def _may_probe(self, member: _Member, now_s: float) -> bool:
        earned = 1 + (self._grants - member.pool_grants) * self.policy.probe_share_ratio
        return now_s >= member.next_probe_s and member.probes < earned

    def _forgive(self, now_s: float) -> None:
        for member in self._members.values():
            if member.standing is EjectionState.HEALTHY and now_s - member.since_s >= self.policy.forgive_s:
                member.ejections = 0


def _health(member: _Member) -> WorkerHealth:
    next_probe_s = 0.0
    if member.standing is EjectionState.EJECTED:
        next_probe_s = member.until_s
    elif member.standing is EjectionState.PROBING:
        next_probe_s = member.next_probe_s
    return WorkerHealth(
        member.worker_id, member.standing, member.relative, member.since_s, next_probe_s, member.ejections
    )
