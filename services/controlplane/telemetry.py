"""Metrics of the control plane's reconciliation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from services.controlplane.policy.paging import AlertBook, PagedAlert, burn_alert, spend_alert
from services.core.records import BurnAlert, Objective, SliStatus
from services.core.scaling import NodeOrder, OrderState
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import LATENCY_S, OTHER, LabelCap, Labels, Metrics, Reading

STALLED_S: Final = 30.0

WRITTEN: Final = "written"
INCOMPLETE: Final = "incomplete"
STORE_LOST: Final = "store_lost"
MAX_NAMES: Final = 500  # objectives, and budgets; of further ones the highest level shares "other"
_LEVELS: Final = {BurnAlert.NONE: 0, BurnAlert.SLOW: 1, BurnAlert.FAST: 2, BurnAlert.ACUTE: 3}


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


class ScalingTelemetry:
    """Exports the replicas that the leader decided, and counts the changes by their decisive signal."""

    def __init__(self, metrics: Metrics | None = None, *, leads: Callable[[], bool] = lambda: True) -> None:
        metrics = metrics if metrics is not None else Metrics()
        self._replicas: dict[Labels, float] = {}
        self._decisions = metrics.counter(
            "fairway_scaling_decisions_total",
            "Written decisions about the replicas of deployments, by the signal or bound that decided",
            ("signal",),
        )
        metrics.gauge(
            "fairway_scaling_replicas",
            "Replicas that were decided for a deployment with scaling bounds; only from the leader",
            lambda: tuple(self._replicas.items()) if leads() else (),
            ("deployment",),
        )

    def decided(self, signal: str) -> None:
        self._decisions.add(signal)

    def replicas(self, found: Iterable[tuple[str, int]]) -> None:
        """Replace the replicas of all deployments."""
        levels: dict[Labels, float] = {}
        names = LabelCap(MAX_NAMES)
        for name, replicas in found:
            _raise_to(levels, (names.of(name),), replicas)
        self._replicas = levels


class NodeTelemetry:
    """Exports the orders of nodes by state, and how often the provider failed in a row."""

    def __init__(self, metrics: Metrics | None = None, *, leads: Callable[[], bool] = lambda: True) -> None:
        metrics = metrics if metrics is not None else Metrics()
        self._orders: Counter[str] = Counter()
        self._failures = 0
        metrics.gauge(
            "fairway_node_orders",
            "Kept orders of nodes, by state; only from the leader",
            lambda: tuple(((state,), float(self._orders[state])) for state in OrderState) if leads() else (),
            ("state",),
        )
        metrics.level(
            "fairway_node_provider_failures",
            "Failures in a row of the node provider; 0 while not leading",
            lambda: float(self._failures) if leads() else 0.0,
        )

    def orders(self, found: Iterable[NodeOrder]) -> None:
        self._orders = Counter(one.state.value for one in found)

    def provider_failing(self, failures: int) -> None:
        self._failures = failures


class AlertTelemetry:
    """Exports what the leader checked last, as metrics and as the alerts that are sent.

    Nothing is exported while this process does not lead.
    """

    def __init__(self, metrics: Metrics | None = None, *, leads: Callable[[], bool] = lambda: True) -> None:
        metrics = metrics if metrics is not None else Metrics()
        self.alerts = AlertBook()
        self._leads = leads
        self._burns: dict[Labels, float] = {}
        self._spent: dict[Labels, float] = {}
        self._known: dict[tuple[str, str], float] = {}  # last known ratios by budget and period
        metrics.gauge(
            "fairway_objective_burn_level",
            "Burn alert of an objective's indicator: 0 none, 1 slow, 2 fast, 3 acute; only from the leader",
            lambda: self._read(self._burns),
            ("objective", "sli", "model"),
        )
        metrics.gauge(
            "fairway_budget_spent_ratio",
            "Spent of a budget's limit, of the month and of the day; only from the leader",
            lambda: self._read(self._spent),
            ("budget", "period"),
        )

    def burns(self, found: Iterable[tuple[Objective, Iterable[SliStatus]]]) -> None:
        """Replace the levels of all objectives."""
        levels: dict[Labels, float] = {}
        alerts = list[PagedAlert | None]()
        names = LabelCap(MAX_NAMES)
        for objective, slis in found:
            name = names.of(objective.meta.name)
            model = OTHER if name == OTHER else objective.model
            for one in slis:
                _raise_to(levels, (name, one.sli.value, model), _LEVELS[one.alert])
                alerts.append(burn_alert(objective, one))
        self._burns = levels
        self.alerts.replace("objectives", filter(None, alerts))

    def spent(self, found: Iterable[tuple[str, str, int | None, int]]) -> None:
        """Replace the levels of all budgets: name, period, spent (None: unknown) and limit (0: none).

        Unknown is as it was, or an alert would end and page again while the store is away.
        """
        ratios, known = dict[Labels, float](), dict[tuple[str, str], float]()
        alerts = list[PagedAlert | None]()
        names = LabelCap(MAX_NAMES)
        for name, period, spent_micros, limit_micros in found:
            if not limit_micros:
                continue
            ratio = self._known.get((name, period)) if spent_micros is None else spent_micros / limit_micros
            if ratio is not None:
                known[name, period] = ratio
                _raise_to(ratios, (names.of(name), period), ratio)
                alerts.append(spend_alert(name, period, ratio))
        self._spent, self._known = ratios, known
        self.alerts.replace("budgets", filter(None, alerts))

    def _read(self, levels: dict[Labels, float]) -> Reading:
        return tuple(levels.items()) if self._leads() else ()


def _raise_to(levels: dict[Labels, float], labels: Labels, level: float) -> None:
    levels[labels] = max(level, levels.get(labels, 0.0))
