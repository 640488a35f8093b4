"""Metrics of the control plane's reconciliation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.ports.clock import Clock
from services.runtime.telemetry.metrics import LATENCY_S, Metrics

STALLED_S: Final = 30.0

WRITTEN: Final = "written"
INCOMPLETE: Final = "incomplete"
STORE_LOST: Final = "store_lost"


class ReconcilerTelemetry:
    """Counts the reconciler's rounds; detects a round that does not end."""

    def __init__(
        self, clock: Clock, metrics: Metrics | None = None, *, leads: Callable[[], bool] = lambda: True
    ) -> None:
        """Without ``metrics`` nothing is exported. ``leads`` returns whether this process leads."""
        metrics = metrics if metrics is not None else Metrics()
        self._clock = clock
        self._began_s: float | None = None
        self._unplaced = 0
        self._round_s = metrics.histogram(
            "fairway_controlplane_round_seconds",
            "One reconciliation round of the leader: plan and writes",
            bounds=LATENCY_S,
        ).cell()
        self._rounds = metrics.counter(
            "fairway_controlplane_rounds_total",
            "Reconciliation rounds, by outcome",
            ("outcome",),
        )
        self._actions = metrics.counter(
            "fairway_controlplane_actions_total",
            "Actions of reconciliation rounds, by kind",
            ("kind", "outcome"),
        )
        metrics.level(
            "fairway_controlplane_unplaced_deployments",
            "Deployments with too few replicas after the leader's last round; 0 while not leading",
            lambda: float(self._unplaced) if leads() else 0.0,
        )

    def round_began(self) -> None:
        self._began_s = self._clock.monotonic_s()

    def round_ended(self, outcome: str) -> None:
        began_s, self._began_s = self._began_s, None
        if began_s is not None:
            self._round_s.observe(self._clock.monotonic_s() - began_s)
        self._rounds.add(outcome)

    def acted(self, kind: str, outcome: str) -> None:
        self._actions.add(kind, outcome)

    def unplaced(self, count: int) -> None:
        self._unplaced = count

    def problem(self) -> str:
        """Return the problem of a round that does not end, else empty. A store outage ends rounds."""
        stuck_s = 0.0 if self._began_s is None else self._clock.monotonic_s() - self._began_s
        return f"a round has run for {stuck_s:.0f} s" if stuck_s > STALLED_S else ""
