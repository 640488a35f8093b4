"""How many replicas a deployment needs, from what its users wait for. Never from utilisation.

Work is counted in units of the pool: tokens of prompts and outputs, or rows. A ready replica does ``rate`` of
them per second. Replicas that are ordered now serve in ``start_s`` seconds, so each signal is a prediction
for that time:

1. sustained: work that arrives, with headroom for its variation (``spare_replicas``)
2. backlog: work that will still wait then, to be served within the target of its class
3. held: any request of a deployment without replicas

The largest wins. Replicas are added at once, and removed when no signal of the last ``settle_s`` needed them,
because a replica takes as long to come back as it took to start. Pure: time is an argument, in monotonic
seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from services.core.estimates.capacity import spare_replicas
from services.core.estimates.pool_load import PoolLoad
from services.core.records import Priority
from services.core.scaling import Reason


@dataclass(frozen=True, slots=True)
class Supply:
    """Replicas that serve, and those that were ordered, by the seconds until each is expected."""

    ready: int
    starting: tuple[float, ...] = ()
    start_s: float = 60.0  # expected time from an order until READY

    @property
    def replicas(self) -> int:
        return self.ready + len(self.starting)

    @property
    def served_s(self) -> float:
        """Replica-seconds that it serves until a replica that is ordered now is READY."""
        return self.ready * self.start_s + sum(max(0.0, self.start_s - in_s) for in_s in self.starting)


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """What an operator allows. ``pinned``: an override that holds now; ``frozen``: nothing changes."""

    least: int = 1
    most: int = 1
    idle_s: float = math.inf  # time without a request before the last replica is removed; needs ``least`` 0
    pinned: int | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """Replicas that the deployment gets; its reasons, the decisive one first."""

    replicas: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class ScalerTuning:
    rate_window_s: float = 60.0  # time constant of the arrival rate
    settle_s: float = 300.0  # time that a replica stays after the last signal that needed it
    z: float = 2.33  # standard deviations of the arriving work that are kept free
    absorb_s: float = 2.0  # time within which work must start where no class has a target
    growth_window: float = 16.0  # start times over which the variance of growth is a mean


@dataclass(slots=True)
class _Arrivals:
    """Decayed rate of a class, in work per second."""

    window_s: float
    counted: float = 0.0
    seen_s: float = -math.inf
    rate: float = 0.0

    def note(self, arrived: float, now_s: float, *, anew: bool) -> float:
        """Count up to ``arrived`` and return the rate."""
        if anew or arrived < self.counted or self.seen_s == -math.inf:
            self.counted, self.seen_s = arrived, now_s
            return self.rate
        past_s = now_s - self.seen_s
        if past_s > 0.0:
            keep = math.exp(-past_s / self.window_s)
            self.rate = self.rate * keep + (arrived - self.counted) / past_s * (1.0 - keep)
            self.counted, self.seen_s = arrived, now_s
        return self.rate


@dataclass(slots=True)
class PoolScaler:
    """Decides for one deployment, once a second or so. A new one removes nothing for ``settle_s``."""

    tuning: Final[ScalerTuning] = field(default_factory=ScalerTuning)
    _arrivals: dict[Priority, _Arrivals] = field(default_factory=dict)
    _reporter: int | None = None
    _needs: deque[tuple[float, int]] = field(default_factory=deque)  # (time, need), needs descending
    _began_s: float | None = None
    _busy_s: float = -math.inf
    busy: float = 0.0  # replicas of work that arrived at the last decision
    growth_variance: float = 0.0  # of the change of ``busy`` within a start time
    _sampled: tuple[float, float] | None = None  # time and ``busy`` at the last sample of growth

    def decide(self, load: PoolLoad, supply: Supply, bounds: ReplicaBounds, now_s: float) -> ReplicaDecision:
        """Return the replicas that the deployment gets now."""
        if self._began_s is None:
            self._began_s = self._busy_s = now_s
        reasons = self._signals(load, supply, now_s)
        self._sample_growth(supply.start_s, now_s)
        need = max((one.replicas for one in reasons), default=0)
        if need or any(one.waiting for one in load.classes):
            self._busy_s = now_s
        if bounds.frozen:
            frozen = Reason("frozen", supply.replicas, "an operator froze the deployment")
            return ReplicaDecision(supply.replicas, (frozen, *reasons))
        if bounds.pinned is not None:
            pinned = Reason("override", bounds.pinned, f"an operator set {bounds.pinned} replicas")
            return ReplicaDecision(bounds.pinned, (pinned, *reasons))
        kept = self._kept(need, supply, now_s)
        if kept > need:
            text = f"{kept} were needed within the last {self.tuning.settle_s:g} s"
            reasons.append(Reason("settling", kept, text))
        least = max(bounds.least, int(now_s - self._busy_s < bounds.idle_s))
        if max(need, kept) < least:
            reasons.append(Reason("minimum", least, "the least that the deployment keeps"))
        wanted = max(need, kept, least)
        if wanted > bounds.most:
            reasons.append(Reason("maximum", bounds.most, f"{wanted} are needed, {bounds.most} are allowed"))
        found = min(wanted, bounds.most)
        reasons.sort(key=lambda one: (one.replicas != found, -one.replicas))
        return ReplicaDecision(found, tuple(reasons))

    def _signals(self, load: PoolLoad, supply: Supply, now_s: float) -> list[Reason]:
        anew, self._reporter = load.reporter != self._reporter, load.reporter
        rates = {
            one.priority: self._arrivals.setdefault(one.priority, _Arrivals(self.tuning.rate_window_s)).note(
                one.arrived, now_s, anew=anew
            )
            for one in load.classes
        }
        reasons = []
        if load.held and not supply.ready:
            reasons.append(Reason("held", 1, f"{load.held} requests wait for the first replica"))
        if not load.rate:
            if supply.ready and any(one.waiting for one in load.classes):
                text = "requests wait, and no rate of a replica is known yet"
                reasons.append(Reason("unmeasured", supply.replicas, text))
            return reasons
        reasons.append(self._sustained(load, rates, load.rate))
        reasons += self._backlogs(load, rates, load.rate, supply)
        return reasons

    def _sustained(self, load: PoolLoad, rates: dict[Priority, float], rate: float) -> Reason:
        self.busy = busy = sum(rates.values()) / rate
        targets = [one.target_s for one in load.classes if math.isfinite(one.target_s)]
        absorb_s = min(targets, default=self.tuning.absorb_s)
        spare = spare_replicas(busy, load.request_work / rate, absorb_s, z=self.tuning.z)
        text = f"{busy:.2f} replicas of work arrive, {spare:.2f} are kept free for its variation"
        return Reason("sustained", math.ceil(busy + spare - 1e-9), text)

    def _backlogs(
        self, load: PoolLoad, rates: dict[Priority, float], rate: float, supply: Supply
    ) -> list[Reason]:
        """Return what each class with a target needs for the work that waits when new replicas serve."""
        reasons = []
        for one in load.classes:
            if not math.isfinite(one.target_s):
                continue
            above = [other for other in load.classes if other.priority.rank >= one.priority.rank]
            arriving = sum(rates[other.priority] for other in above)
            waiting = sum(other.waiting for other in above)
            done = (
                sum(max(0.0, supply.start_s - in_s) for in_s in supply.starting)
                + supply.ready * supply.start_s
            )
            left = waiting + arriving * supply.start_s - rate * done
            if left <= 0.0:
                continue
            need = (left / one.target_s + arriving) / rate
            text = f"{left:.0f} of work of class {one.priority.value} and above waits in {supply.start_s:g} s"
            reasons.append(Reason("backlog", math.ceil(need - 1e-9), text))
        return reasons

    def _sample_growth(self, start_s: float, now_s: float) -> None:
        """Compare the arriving work with that of a start time ago: what grew until then found no replica."""
        if self._sampled is None:
            self._sampled = now_s, self.busy
        elif now_s - self._sampled[0] >= start_s:
            grown = self.busy - self._sampled[1]
            self.growth_variance += (grown * grown - self.growth_variance) / self.tuning.growth_window
            self._sampled = now_s, self.busy

    def _kept(self, need: int, supply: Supply, now_s: float) -> int:
        """Return the most replicas that were needed within ``settle_s``."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now_s, need))
        while self._needs[0][0] < now_s - self.tuning.settle_s:
            self._needs.popleft()
        assert self._began_s is not None
        settled = now_s - self._began_s >= self.tuning.settle_s
        return self._needs[0][1] if settled else max(supply.replicas, self._needs[0][1])
