"""Metrics that every role exports: build, tasks, views of the store, leases, elections."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

from services.runtime.fleet_state.guarded_store import GuardedStore
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.fleet_state.lease import LeaseHolder
from services.runtime.process.product import product_version
from services.runtime.reserve import Reserve
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Labels, Metrics, Reading


class ProcessMetrics:
    """Exports the objects that are registered with it, each from then on."""

    def __init__(self, metrics: Metrics, supervisor: Supervisor, role: str) -> None:
        self._informers: dict[str, Informer[Any]] = {}
        self._leases: dict[str, LeaseHolder] = {}
        self._elections: dict[str, Election] = {}
        self._metrics = metrics
        metrics.process()
        build = (role, product_version(), platform.python_version())
        metrics.gauge(
            "fairway_runtime_build_info",
            "Always 1; the labels name the role, the version and Python",
            lambda: [(build, 1.0)],
            ("role", "version", "python"),
        )
        metrics.level("fairway_runtime_tasks", "Running background tasks", lambda: float(supervisor.running))
        self._export_views(metrics)
        self._export_leases(metrics)

    def informer(self, informer: Informer[Any]) -> None:
        """Export a view of the store, by its prefix."""
        self._informers[informer.prefix] = informer

    def store(self, store: GuardedStore) -> None:
        """Export whether the store is the original one."""
        self._metrics.level(
            "fairway_store_replaced",
            "1 while etcd answers with another store identity than this process belongs to, else 0",
            lambda: float(bool(store.problem())),
        )
        self._metrics.counted(
            "fairway_store_restores_total",
            "Times that etcd answered with a lower revision than before",
            lambda: [((), float(store.restores))],
        )

    def storage(self, reserves: Sequence[Reserve]) -> None:
        """Export what is free in each store; others may be added."""
        self._metrics.gauge(
            "fairway_storage_free_bytes",
            "Free bytes of a store",
            lambda: [((each.store,), each.free_bytes) for each in reserves if each.free_bytes < math.inf],
            ("store",),
        )
        self._metrics.gauge(
            "fairway_storage_reserve_reached",
            "1 while refused to tenants, else 0",
            lambda: [((each.store,), float(each.reached)) for each in reserves],
            ("store",),
        )

    def lease(self, name: str, lease: LeaseHolder) -> None:
        self._leases[name] = lease

    def election(self, role: str, election: Election) -> None:
        """Export the leadership of this process and its lease."""
        self._elections[role] = election
        self.lease(f"{role}-leader", election.lease)

    def _export_views(self, metrics: Metrics) -> None:
        def read(of: Callable[[Informer[Any]], float]) -> Callable[[], Reading]:
            return lambda: [((prefix,), of(informer)) for prefix, informer in self._informers.items()]

        labels: Labels = ("prefix",)
        metrics.gauge(
            "fairway_informer_age_seconds",
            "Time since etcd last confirmed the view of a key prefix",
            read(lambda informer: informer.age_s()),
            labels,
        )
        metrics.gauge(
            "fairway_informer_revision",
            "etcd revision of the view of a key prefix",
            read(lambda informer: float(informer.revision)),
            labels,
        )
        metrics.gauge(
            "fairway_informer_records",
            "Records in the view of a key prefix",
            read(lambda informer: float(len(informer.view))),
            labels,
        )
        metrics.counted(
            "fairway_informer_lists_total",
            "Full reads of a key prefix: at the start and after a compaction",
            read(lambda informer: float(informer.lists)),
            labels,
        )

    def _export_leases(self, metrics: Metrics) -> None:
        metrics.gauge(
            "fairway_lease_remaining_seconds",
            "Time until the lease expires without a renewal; 0 if not held",
            lambda: [((name,), lease.remaining_s()) for name, lease in self._leases.items()],
            ("lease",),
        )
        metrics.counted(
            "fairway_lease_renewals_total",
            "Renewals of a lease, by outcome",
            lambda: [
                ((name, outcome), float(count))
                for name, lease in self._leases.items()
                for outcome, count in (("renewed", lease.renewals), ("failed", lease.failures))
            ],
            ("lease", "outcome"),
        )
        metrics.counted(
            "fairway_lease_losses_total",
            "Leases that expired or were revoked while in use",
            lambda: [((name,), float(lease.losses)) for name, lease in self._leases.items()],
            ("lease",),
        )
        metrics.gauge(
            "fairway_election_leading",
            "1 while this process leads, else 0",
            lambda: [((role,), float(held.epoch is not None)) for role, held in self._elections.items()],
            ("election",),
        )
        metrics.gauge(
            "fairway_election_epoch",
            "Epoch of this process's leadership; 0 while it does not lead",
            lambda: [((role,), float(held.epoch or 0)) for role, held in self._elections.items()],
            ("election",),
        )
