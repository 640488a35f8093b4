"""How many replicas a deployment needs, from what its users wait for. Never from utilisation.

Work is counted in units of the pool: tokens of prompts and outputs, or rows. A ready replica does ``rate`` of
them per second. Replicas that are ordered now serve in ``start_s`` seconds, so each signal is a prediction
for that time:

1. sustained: work of classes with a target, with headroom for how far its rate moves within ``start_s``
2. reserve: the mean of that work, and a share of it for excursions that end before a replica starts
3. excursion: work that arrives now, where it is far above that and is expected to last
4. deadlines: work without a target, spread over the time that it has, an hour where it has none
5. backlog: work that will still wait then, to be served in the time that a replica takes to start
6. zone: enough replicas for the first class when a zone is lost
7. burn: misses of an objective while work waits, whatever the figures above
8. held: any request of a deployment without replicas

The largest wins; they are not added, since work without a target runs on the headroom. Replicas are added at
once, and removed when no signal of the last ``settle_s`` needed them. An excursion is worth an order if half
of those before it that lasted as long lasted ``start_s`` longer. Pure: time is an argument, in monotonic
seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from services.core.estimates.pool_load import PoolLoad
from services.core.records import Priority
from services.core.scaling import ScalingReason


@dataclass(frozen=True, slots=True)
class Zone:
    """A zone in which nodes can be ordered. ``replicas``: those that it has, starting ones too."""

    name: str
    replicas: int = 0
    price: float = 0.0  # price of a replica, per hour


@dataclass(frozen=True, slots=True)
class Supply:
    """Replicas that serve, and those that were ordered, by the seconds until each is expected."""

    ready: int
    starting: tuple[float, ...] = ()
    start_s: float = 60.0  # expected time from an order until READY
    zones: tuple[Zone, ...] = ()

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
    # Time without a request, waiting or running, before the last replica is removed; needs ``least`` 0.
    idle_s: float = math.inf
    pinned: int | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class _Signal:
    """Replicas that a signal needs, also parts of one."""

    name: str
    need: float
    text: str

    @property
    def reason(self) -> ScalingReason:
        return ScalingReason(self.name, math.ceil(self.need - 1e-9), self.text)


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """Replicas that the deployment gets, in all and by zone; its reasons, the decisive one first."""

    replicas: int
    reasons: tuple[ScalingReason, ...]
    zones: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ScalerTuning:
    fast_window_s: float = 5.0  # time constant of the rate that shows an excursion
    rate_window_s: float = 180.0  # time constant of the sustained rate
    mean_window_s: float = 1800.0  # time constant of the rate that the reserve and deadlines are added to
    settle_s: float = 1800.0  # time that a replica stays after the last signal that needed it
    slack: float = 0.5  # replicas that a removal leaves above that signal, so that noise brings none back
    z: float = 0.5  # standard deviations of the rate's movement that are kept free
    reserve_ratio: float = 0.3  # replicas above the mean rate's, by those: they serve what no start outpaces
    excursion_ratio: float = 2.0  # fast rate over the sustained one from which it is an excursion
    excursion_z: float = 5.0  # standard deviations of independent arrivals that are none
    longest_s: float = 900.0  # time after which an excursion is the sustained rate
    spread_s: float = 3600.0  # time over which work without target and deadline is spread
    burn_ratio: float = 6.0  # speed of the budget's loss from which it is a signal
    burn_step_ratio: float = 0.25  # replicas that it adds, by those that serve
    growth_window: float = 16.0  # start times over which the variance of growth is a mean


@dataclass(slots=True)
class _Excursions:
    """How long arrivals stay far above their sustained rate."""

    longest_s: float
    margin_s: float  # time in which two lengths count as equal
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    began_s: float | None = None

    def note(self, *, above: bool, below: bool, now_s: float) -> None:
        if self.began_s is None:
            self.began_s = now_s if above else None
        elif below or now_s - self.began_s >= self.longest_s:
            self.lengths.append(now_s - self.began_s)
            self.began_s = None

    def lasts(self, start_s: float, now_s: float) -> bool:
        """Whether it is expected to outlast a start: half of those as old as it did, and one of which
        nothing is known."""
        if self.began_s is None:
            return False
        age_s = now_s - self.began_s - self.margin_s
        as_old = [one for one in self.lengths if one > age_s]
        return 2 * (1 + sum(one > age_s + start_s for one in as_old)) >= 1 + len(as_old)


@dataclass(slots=True)
class _Arrivals:
    """Rates of one kind of work, and how far the sustained one moves in a time to start."""

    tuning: ScalerTuning
    counted: float = 0.0
    seen_s: float = -math.inf
    # Time that the rates cover; the first of it, without work, damps the first counts.
    counted_s: float = 10.0
    fast: float = 0.0
    level: float = 0.0
    mean: float = 0.0
    ends_s: float = math.inf  # end of the window whose work is compared with what was expected
    window: float = 0.0
    expected: float = 0.0
    burst_ratio: float = 4.0  # variance of a window's work above that, by that of independent requests

    def note(self, arrived: float, now_s: float, *, anew: bool, most: float) -> None:
        """Count up to ``arrived``. Of an excursion, sustained rates follow what is below ``most``."""
        past_s = now_s - self.seen_s
        if anew or arrived < self.counted or past_s == math.inf:
            self.counted, self.seen_s = arrived, now_s
        elif past_s > 0.0:
            work = arrived - self.counted
            self.fast += (work / past_s - self.fast) * -math.expm1(-past_s / self.tuning.fast_window_s)
            capped = min(work / past_s, most)
            self.counted_s += past_s
            least = past_s / self.counted_s  # so that the first rates are means
            self.level += (capped - self.level) * max(least, -math.expm1(-past_s / self.tuning.rate_window_s))
            self.mean += (capped - self.mean) * max(least, -math.expm1(-past_s / self.tuning.mean_window_s))
            self.window += capped * past_s
            self.counted, self.seen_s = arrived, now_s

    def learn(self, request_work: float, window_s: float, now_s: float) -> None:
        """Compare a window that ended with what the level at its start let expect."""
        if now_s >= self.ends_s and self.expected > 0.0:
            error = max(0.0, self.window - self.expected)
            found = min(2.0 * error * error / (self.expected * request_work), 10.0 * self.burst_ratio)
            self.burst_ratio += (found - self.burst_ratio) / 32.0
        if now_s >= self.ends_s or (self.ends_s == math.inf and self.counted_s >= self.tuning.rate_window_s):
            self.ends_s, self.window, self.expected = now_s + window_s, 0.0, self.level * window_s


@dataclass(slots=True)
class PoolScaler:
    """Decides for one deployment, once a second or so.

    A new one removes nothing for ``settle_s``, unless it observes no request for all of ``idle_s``.
    """

    tuning: Final[ScalerTuning] = field(default_factory=ScalerTuning)
    _urgent: _Arrivals = field(init=False)
    _patient: _Arrivals = field(init=False)
    _first: _Arrivals = field(init=False)
    _excursions: _Excursions = field(init=False)
    _reporter: int | None = None
    _dated: frozenset[Priority] = frozenset()  # classes whose work has deadlines
    _needs: deque[tuple[float, float]] = field(default_factory=deque)  # (time, need), needs descending
    _peak: tuple[float, int] = (-math.inf, 0)  # time until which an excursion's replicas stay, and how many
    _began_s: float | None = None
    _busy_s: float = -math.inf
    _arrived: float = 0.0
    busy: float = 0.0  # replicas of work with a target that arrived at the last decision
    growth_variance: float = 0.0  # variance of the change of ``busy`` within a start time
    _sampled: tuple[float, float] | None = None  # time and ``busy`` at the last sample of growth

    def __post_init__(self) -> None:
        self._urgent, self._patient, self._first = (_Arrivals(self.tuning) for _ in range(3))
        self._excursions = _Excursions(self.tuning.longest_s, 3.0 * self.tuning.fast_window_s)

    def decide(self, load: PoolLoad, supply: Supply, bounds: ReplicaBounds, now_s: float) -> ReplicaDecision:
        """Return the replicas that the deployment gets now."""
        if self._began_s is None:
            self._began_s = self._busy_s = now_s
        arrived = sum(one.arrived for one in load.classes)
        active = load.held or load.running or arrived != self._arrived
        active = active or any(one.waiting for one in load.classes)
        if active:
            self._arrived, self._busy_s = arrived, now_s
        signals, kept = self._signals(load, supply, now_s), 0
        self._sample_growth(supply.start_s, now_s)
        idle = not active and now_s - self._busy_s >= bounds.idle_s
        if idle:
            signals.clear()
            self._needs.clear()
        else:
            kept = self._kept(max((one.need for one in signals), default=0.0), supply, now_s)
            signals += self._excursion(load, supply, now_s)
        reasons = [one.reason for one in signals]
        need = max((one.replicas for one in reasons), default=0)
        if bounds.frozen:
            reasons.insert(0, ScalingReason("frozen", supply.replicas, "an operator froze the deployment"))
            return self._decision(supply.replicas, reasons, supply)
        if bounds.pinned is not None:
            reasons.insert(
                0, ScalingReason("override", bounds.pinned, f"an operator set {bounds.pinned} replicas")
            )
            return self._decision(bounds.pinned, reasons, supply)
        if kept > need:
            text = f"{kept} were needed within the last {self.tuning.settle_s:g} s"
            reasons.append(ScalingReason("settling", kept, text))
        least = max(bounds.least, int(not idle))
        if max(need, kept) < least:
            reasons.append(ScalingReason("minimum", least, "the least that the deployment keeps"))
        wanted = max(need, kept, least)
        if wanted > bounds.most:
            reasons.append(
                ScalingReason("maximum", bounds.most, f"{wanted} are needed, {bounds.most} are allowed")
            )
        found = min(wanted, bounds.most)
        reasons.sort(key=lambda one: (one.replicas != found, -one.replicas))
        return self._decision(found, reasons, supply)

    def _decision(self, replicas: int, reasons: list[ScalingReason], supply: Supply) -> ReplicaDecision:
        return ReplicaDecision(replicas, tuple(reasons), spread(replicas, supply.zones))

    # --- signals ----------------------------------------------------------------------------------------

    def _signals(self, load: PoolLoad, supply: Supply, now_s: float) -> list[_Signal]:
        signals = []
        if load.held and not supply.ready:
            signals.append(_Signal("held", 1, f"{load.held} requests wait for the first replica"))
        rate = load.replica_rate
        self._note(load, rate, supply.start_s, now_s)
        if rate is None:
            if supply.ready and any(one.waiting for one in load.classes):
                text = "requests wait, and no rate of a replica is known yet"
                signals.append(_Signal("unmeasured", supply.replicas, text))
            return signals
        self.busy = busy = self._urgent.level / rate
        mean = self._urgent.mean / rate
        spare = self.tuning.z * _deviation(
            busy, load.request_work / rate, supply.start_s, self._urgent.burst_ratio
        )
        bound = f", bound by {load.bound}" if load.bound else ""
        text = f"{busy:.2f} replicas of work arrive{bound}, {spare:.2f} are kept free for its variation"
        signals.append(_Signal("sustained", busy + spare, text))
        text = (
            f"{mean:.2f} replicas of work are the mean, {self.tuning.reserve_ratio:.0%} more serve excursions"
        )
        signals.append(_Signal("reserve", mean * (1.0 + self.tuning.reserve_ratio), text))
        signals += self._deadlines(load, rate, supply, mean)
        signals += self._backlog(load, rate, supply)
        signals += self._zone_loss(rate, supply)
        signals += self._burn(load, supply)
        return signals

    def _note(self, load: PoolLoad, rate: float | None, start_s: float, now_s: float) -> None:
        anew, self._reporter = load.reporter != self._reporter, load.reporter
        tuning, urgent = self.tuning, self._urgent
        most = math.inf
        if rate is not None and urgent.counted_s >= tuning.rate_window_s:
            noise = _deviation(urgent.level / rate, load.request_work / rate, 2.0 * tuning.fast_window_s, 4.0)
            # A few requests after a pause are none, so that the level can leave zero.
            few = tuning.excursion_z * load.request_work / tuning.fast_window_s
            steady = urgent.level + tuning.excursion_z * noise * rate
            most = max(urgent.level * tuning.excursion_ratio, steady, few)
        with_target = [one for one in load.classes if math.isfinite(one.target_s)]
        urgent.note(sum(one.arrived for one in with_target), now_s, anew=anew, most=most)
        self._excursions.note(above=urgent.fast > most, below=urgent.fast < 0.75 * most, now_s=now_s)
        first = max(with_target, key=lambda one: one.priority.rank, default=None)
        self._first.note(first.arrived if first else 0.0, now_s, anew=anew, most=most)
        rest = (one.arrived for one in load.classes if one not in with_target and one.due is None)
        dated = frozenset(one.priority for one in load.classes if one.due is not None)
        # What arrived while a class had deadlines did not arrive at once when it has none any more.
        self._patient.note(sum(rest), now_s, anew=anew or dated != self._dated, most=math.inf)
        self._dated = dated
        urgent.learn(load.request_work, start_s, now_s)

    def _excursion(self, load: PoolLoad, supply: Supply, now_s: float) -> list[_Signal]:
        rate = load.replica_rate
        if rate is not None and self._excursions.lasts(supply.start_s, now_s):
            need = math.ceil(self._urgent.fast / rate)
            until_s, most = self._peak
            self._peak = now_s + supply.start_s, max(need, most if now_s < until_s else 0)
        until_s, most = self._peak
        if now_s >= until_s:
            return []
        text = (
            f"{self._urgent.fast:.0f} of work arrive per second, where {self._urgent.level:.0f} are sustained"
        )
        return [_Signal("excursion", most, text)]

    def _deadlines(self, load: PoolLoad, rate: float, supply: Supply, busy: float) -> list[_Signal]:
        """Return what work without a target needs beside what has one."""
        due, work = self._patient.level, 0.0
        parts: list[tuple[float, float]] = []
        for one in (one for one in load.classes if one.target_s == math.inf):
            parts += one.due or ()
            undated = one.waiting - sum(amount for _, amount in one.due or ())
            if undated > 0.0:
                parts.append((self.tuning.spread_s, undated))
        for left_s, amount in sorted(parts):
            work += amount
            if left_s > supply.start_s:  # no order helps what is due before
                due = max(due, self._patient.level + work / max(supply.start_s, left_s - supply.start_s))
        if due <= 0.0:
            return []
        text = f"{due / rate:.2f} replicas finish in time what has no target, beside {busy:.2f} of the rest"
        return [_Signal("deadlines", busy + due / rate, text)]

    def _backlog(self, load: PoolLoad, rate: float, supply: Supply) -> list[_Signal]:
        """Return what work with a target needs that will wait when new replicas serve."""
        arriving = self._urgent.level
        targets = [one for one in load.classes if math.isfinite(one.target_s)]
        waiting = sum(one.waiting for one in targets)
        most_s = max((one.target_s for one in targets), default=0.0)
        left = waiting + arriving * supply.start_s - rate * supply.served_s
        left = min(left, max(waiting, arriving * most_s))  # what waits longer is refused
        if left <= 0.0:
            return []
        need = (arriving + left / max(supply.start_s, most_s)) / rate
        text = f"{left:.0f} of work with a target waits in {supply.start_s:g} s"
        return [_Signal("backlog", need, text)]

    def _zone_loss(self, rate: float, supply: Supply) -> list[_Signal]:
        busy = self._first.level / rate
        if len(supply.zones) < 2 or busy <= 0.0:
            return []
        text = f"{busy:.2f} replicas of the first class stay when one of {len(supply.zones)} zones is lost"
        return [_Signal("zone", zones_need(busy, supply.zones), text)]

    def _burn(self, load: PoolLoad, supply: Supply) -> list[_Signal]:
        worst = max((one.burn_ratio for one in load.classes if one.waiting), default=0.0)
        if worst < self.tuning.burn_ratio or not supply.ready:
            return []
        need = max(supply.replicas, supply.ready * (1.0 + self.tuning.burn_step_ratio))
        return [
            _Signal(
                "burn", need, f"requests wait, and an objective's budget is spent {worst:.1f} times too fast"
            )
        ]

    def _sample_growth(self, start_s: float, now_s: float) -> None:
        """Compare the arriving work with that of a start time ago: what grew until then found no replica."""
        if self._sampled is None:
            self._sampled = now_s, self.busy
        elif now_s - self._sampled[0] >= start_s:
            grown = self.busy - self._sampled[1]
            self.growth_variance += (grown * grown - self.growth_variance) / self.tuning.growth_window
            self._sampled = now_s, self.busy

    def _kept(self, need: float, supply: Supply, now_s: float) -> int:
        """Return the replicas that stay for what was needed within ``settle_s``."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now_s, need))
        while self._needs[0][0] < now_s - self.tuning.settle_s:
            self._needs.popleft()
        assert self._began_s is not None
        most = self._needs[0][1]
        if now_s - self._began_s < self.tuning.settle_s:
            return max(supply.replicas, math.ceil(most))
        return min(supply.replicas, math.ceil(most + self.tuning.slack)) if most > 0.0 else 0


def zones_need(busy: float, zones: tuple[Zone, ...]) -> float:
    """Return the least replicas of which ``busy`` are left whichever of several zones is lost.

    More replicas go where fewest are, and those that leave do so where most are. What one replica serves with
    room for the loss gets no second one for it; a minimum of 2 has that effect.
    """
    need = busy * len(zones) / (len(zones) - 1)
    if need <= 1.0:
        return need
    left, counts = math.ceil(busy - 1e-9), [one.replicas for one in zones]
    if sum(counts) - max(counts) < left:
        while sum(counts) - max(counts) < left:
            counts[counts.index(min(counts))] += 1
        return sum(counts)
    while sum(counts) - max(counts) >= left:
        counts[counts.index(max(counts))] -= 1
    return sum(counts) + 1


def spread(replicas: int, zones: tuple[Zone, ...]) -> tuple[tuple[str, int], ...]:
    """Return the replicas of each zone: equal, the rest where most are and then where they cost least."""
    order = sorted(zones, key=lambda one: (one.price, -one.replicas, one.name))
    each, rest = divmod(replicas, len(zones)) if zones else (0, 0)
    return tuple((one.name, each + (number < rest)) for number, one in enumerate(order))


def _deviation(busy: float, work_s: float, window_s: float, burst_ratio: float) -> float:
    """Return the standard deviation of the replicas that a window keeps busy.

    Requests of ``work_s`` replica-seconds arrive with ``burst_ratio`` times the variance of independent ones.
    """
    return math.sqrt(busy * work_s * burst_ratio / window_s)
