"""Metrics that every role exports: build, tasks, views of the store, leases, elections, its event loop.

The loop is watched from inside by a timer and from outside by a thread.

A stuck loop runs no timer, answers no health check and renews no lease. The thread still detects it. It logs
where the loop is stuck. If the loop does not recover, it ends the process, so that a supervisor restarts it.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from services.ports.clock import Clock
from services.runtime.fleet_state.guarded_store import GuardedStore
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.fleet_state.lease import LeaseHolder
from services.runtime.process.product import product_version
from services.runtime.reserve import Reserve
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import LATENCY_S, Labels, Metrics, Reading

log = structlog.get_logger()

TICK_S: Final = 0.5  # each tick wakes a process at rest, twice
STALL_S: Final = 2.0  # logged with a stack
FATAL_S: Final = 60.0
EXIT_STUCK: Final = 70
LATE_S: Final = 1.0  # repeated lag of this much makes the loop unhealthy
_LATE_TICKS: Final = 2  # a single one is a process that was paused and goes on
_MOST_TICK_S: Final = 1.5 * TICK_S  # more than this means that the whole process was paused


def quiet_for(quiet_s: float, passed_s: float, *, beaten: bool) -> float:
    """Return for how long the loop has run nothing: ``passed_s`` longer than before, or 0 if it has run."""
    return 0.0 if beaten else quiet_s + min(passed_s, _MOST_TICK_S)


class LoopWatch:
    """``run`` is a task of the loop; ``start`` starts the thread."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        stall_s: float = STALL_S,
        fatal_s: float = FATAL_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._fatal_s = fatal_s
        self._end = end
        self._beat_s = time.monotonic()
        self._lag_s = 0.0
        self._late_ticks = 0
        self._lag = metrics.histogram(
            "fairway_runtime_loop_lag_seconds",
            "From when an event loop timer is due until it runs, sampled twice a second",
            bounds=LATENCY_S,
        ).cell()
        self._stalls = metrics.counter(
            "fairway_runtime_loop_stalls_total", "Times that the event loop ran nothing for 2 s"
        ).cell()
        self._loop_thread = 0
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Measure the lag until cancelled."""
        self._loop_thread = threading.get_ident()
        while True:
            began_s = self._clock.monotonic_s()
            await self._clock.sleep(TICK_S)
            self._beat_s = now_s = self._clock.monotonic_s()
            self._lag_s = max(0.0, now_s - began_s - TICK_S)
            self._late_ticks = self._late_ticks + 1 if self._lag_s >= LATE_S else 0
            self._lag.observe(self._lag_s)
            if self._lag_s >= self._stall_s:
                self._stalls.add()

    def problem(self) -> str:
        """Return the problem for a health check; empty unless timers are late repeatedly."""
        is_late = self._late_ticks >= _LATE_TICKS
        return f"the event loop is {self._lag_s:.1f} s behind" if is_late else ""

    def start(self) -> None:
        """Watch from a thread until ``stop``, which is called before ``run`` is cancelled.

        Only time in which the thread itself ran counts: a stopped process or a sleeping machine is no stuck
        loop.
        """
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        is_logged = False
        quiet_s, beat_s, ticked_s = 0.0, self._beat_s, time.monotonic()
        while not self._stopped.wait(TICK_S):
            now_s = time.monotonic()
            passed_s, ticked_s = now_s - ticked_s, now_s
            beaten, beat_s = beat_s != self._beat_s, self._beat_s
            quiet_s = quiet_for(quiet_s, passed_s, beaten=beaten)
            if quiet_s < self._stall_s:
                is_logged = False
                continue
            if not is_logged:
                is_logged = True
                log.error("loop.stalled", quiet_s=round(quiet_s, 1), at=self._stack())
            if quiet_s >= self._fatal_s:
                log.critical("loop.stuck", quiet_s=round(quiet_s, 1), exit_code=EXIT_STUCK)
                self._end(EXIT_STUCK)
                return

    def _stack(self) -> list[str]:
        """Return the stack of the loop's thread: files, lines and functions, without values."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return []
        return [
            f"{entry.filename}:{entry.lineno} {entry.name}" for entry in traceback.extract_stack(frame)[-12:]
        ]


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
        metrics.gauge(
            "fairway_informer_unreadable_records",
            "Records that cannot be decoded",
            read(lambda informer: float(len(informer.unreadable))),
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
