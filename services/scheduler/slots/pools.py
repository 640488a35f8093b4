"""Leases slots of fixed-cost versions to gateways: when each version is planned, and who is sent what.

Single writer: the task of the scheduler's service. Time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotReturn
from services.core.fleet import ReportSnapshot
from services.core.records import Priority
from services.scheduler.fleet.view import FleetView
from services.scheduler.slots.leases import LeaseTerms, RowWorker, VersionLeases
from services.scheduler.slots.pool import TURN_S, Shares, SlotPool

# Between two plans of a version at least ``_GAP_S`` passes, and as much more for each ``_GAP_LEASES`` leases.
_GAP_S: Final = 0.002
_GAP_LEASES: Final = 100
_MAX_POOLS: Final = 4096
_LEASES_PER_FRAME: Final = 4096
_RENEWALS: Final = 4  # looks at what has to be renewed, in one life of a lease


class SlotPools:
    """The slots of all versions of a term."""

    def __init__(
        self, fleet: FleetView, shares: Callable[[str], Shares], terms: LeaseTerms | None = None
    ) -> None:
        """``shares`` returns the service counters of a version's classes."""
        self._fleet = fleet
        self._shares = shares
        self._terms = terms if terms is not None else LeaseTerms()
        self._pools: dict[str, SlotPool] = {}
        self._changed: dict[str, None] = {}
        self._planned_s: dict[str, float] = {}
        self._renew_s = -math.inf
        self._gateways: dict[str, None] = {}  # gateways with leases to send
        self._numbers = itertools.count(1)

    # --- input ------------------------------------------------------------------------------------

    def demand(
        self,
        gateway: str,
        zone: str,
        demands: Sequence[SlotDemand],
        returned: Sequence[SlotReturn],
        now_s: float,
    ) -> None:
        """Apply a gateway's message. A version beyond the limit gets no slots until others end."""
        for wanted in demands:
            pool = self._pools.get(wanted.digest)
            if pool is None and wanted.rows and len(self._pools) < _MAX_POOLS:
                leases = VersionLeases(wanted.digest, self._fleet.epoch, self._terms, self._numbers)
                pool = self._pools[wanted.digest] = SlotPool(wanted.digest, leases, self._shares, now_s)
            if pool is not None and pool.demand(gateway, zone, wanted, now_s):
                self._changed[wanted.digest] = None
        for found in returned:
            pool = self._pools.get(found.digest)
            if pool is not None and pool.returned(gateway, found):
                self._changed[found.digest] = None

    def disconnect(self, gateway: str) -> None:
        """End the demands of a gateway; its leases lapse."""
        for digest, pool in self._pools.items():
            pool.disconnect(gateway)
            self._changed[digest] = None

    def reported(self, snapshot: ReportSnapshot, now_s: float) -> None:
        """Apply a worker's device time."""
        for use in snapshot.tenants:
            if use.rows and (pool := self._pools.get(use.digest)) is not None:
                pool.measure(use, now_s)
        for digest in [found.digest for found in snapshot.pools if found.row_slots]:
            pool = self._pools.get(digest)
            if pool is not None and pool.is_short:
                self._changed[digest] = None

    def changed(self, digests: Collection[str]) -> None:
        """Plan these versions again: the state of their workers changed."""
        self._changed.update(dict.fromkeys(digest for digest in digests if digest in self._pools))

    # --- turns ------------------------------------------------------------------------------------

    def run(self, now_s: float) -> None:
        """Plan the versions that are due, renew what would lapse, and end demands of silent gateways."""
        for digest, pool in self._pools.items():
            if pool.leases.settles_s() <= now_s or self._turn_s(digest, pool) <= now_s:
                self._changed[digest] = None
        renews = now_s >= self._renew_s
        if renews:
            self._renew_s = now_s + self._terms.ttl_s / _RENEWALS
        for digest in [digest for digest in self._changed if self._plan_s(digest) <= now_s]:
            del self._changed[digest]
            self._plan(digest, now_s)
        for digest, pool in list(self._pools.items()):
            if renews:
                pool.leases.renew(now_s)
                if pool.end_old_demands(now_s):
                    self._changed[digest] = None
            self._gateways.update(dict.fromkeys(pool.leases.unsent))
            if pool.idle:
                del self._pools[digest]
                self._planned_s.pop(digest, None)

    def due_s(self) -> float:
        """Return when ``run`` next has work; infinite while no slots are leased."""
        if not self._pools:
            return math.inf
        due_s = min((self._plan_s(digest) for digest in self._changed), default=math.inf)
        for digest, pool in self._pools.items():
            due_s = min(due_s, pool.leases.settles_s(), self._turn_s(digest, pool))
        return min(due_s, self._renew_s)

    def take_gateways(self) -> list[str]:
        """Return and clear the gateways for which there are leases to send."""
        gateways, self._gateways = self._gateways, {}
        return list(gateways)

    def take_leases(self, gateway: str, now_s: float) -> tuple[SlotLease, ...]:
        """Return and clear the leases to send to a gateway now; call again until there are none."""
        found: list[SlotLease] = []
        for pool in self._pools.values():
            found += pool.leases.take(gateway, _LEASES_PER_FRAME - len(found), now_s)
        return tuple(found)

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions with a demand or a lease."""
        return tuple(self._pools)

    def rows_by_class(self, digest: str) -> Mapping[Priority, int]:
        """Return the rows of all demands for a version, waiting and in flight."""
        pool = self._pools.get(digest)
        return {} if pool is None else pool.rows_by_class

    def rows_by_group(self, digest: str) -> Mapping[str, int]:
        """Return the same rows by the group of nodes that may run them."""
        pool = self._pools.get(digest)
        return {} if pool is None else pool.rows_by_group

    def by_kind(self) -> dict[str, int]:
        """Return the slots that are leased, those that are held, and the rows that want one."""
        leases = [lease for pool in self._pools.values() for lease in pool.leases.all()]
        return {
            "leased": sum(lease.slots for lease in leases),
            "held": sum(lease.held for lease in leases),
            "wanted": sum(pool.rows for pool in self._pools.values()),
        }

    def check_integrity(self) -> None:
        """Raise AssertionError when leases and their sums disagree."""
        for pool in self._pools.values():
            pool.leases.check_integrity()

    # --- inside -----------------------------------------------------------------------------------

    def _plan_s(self, digest: str) -> float:
        """Return when a changed version is planned: a fifth of the leader's time goes into it at most."""
        pool = self._pools.get(digest)
        leases = 0 if pool is None else len(pool.leases)
        return self._planned_s.get(digest, -math.inf) + _GAP_S * (1 + leases / _GAP_LEASES)

    def _turn_s(self, digest: str, pool: SlotPool) -> float:
        """Return when a pool with too few slots is planned again, whatever is reported."""
        return self._planned_s.get(digest, -math.inf) + TURN_S if pool.is_short else math.inf

    def _plan(self, digest: str, now_s: float) -> None:
        pool = self._pools.get(digest)
        if pool is None:
            return
        workers, row_s = row_workers(self._fleet, digest)
        pool.plan(workers, row_s, now_s)
        self._planned_s[digest] = now_s


def row_workers(fleet: FleetView, digest: str) -> tuple[list[RowWorker], float]:
    """Return the workers that serve rows of the version, and the mean device time of a row on them."""
    found: list[RowWorker] = []
    measured: list[int] = []
    for candidate in fleet.candidates(digest).values():
        pool = fleet.pool_of(candidate.worker_id, digest)
        if not candidate.serving or not pool.row_slots:
            continue
        address, incarnation = fleet.life_of(candidate.worker_id)
        if pool.row_us:
            measured.append(pool.row_us)
        found.append(
            RowWorker(
                candidate.worker_id,
                address,
                incarnation,
                pool.row_slots,
                rows=pool.running + pool.waiting,
                zone=candidate.zone,
                slowness_ratio=candidate.slowness_ratio,
                node_group=candidate.node_group,
            )
        )
    return found, sum(measured) / len(measured) / 1e6 if measured else 1e-3
