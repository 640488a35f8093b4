"""Which idle deployments leave a full pool first: those whose stay is expected to save the least loading.

A stay saves, per second and byte, the hazard of the next visit times the time of a load over the size: the
order of Greedy-Dual-Size-Frequency (Cherkasova, 1998) with a hazard rate for the frequency, as in Panigrahy
et al. (2020), where no policy without foresight has more hits. The hazard is the mean of a Poisson rate after
decayed visits in decayed time, with a gamma prior, so that it falls while no visit comes; the decay is that
of LRFU (Lee et al., 2001).

An owner that would hold an equal part of the memory without one of its deployments loses that one first.
Pure: times are arguments, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from services.core.estimates.pool_load import PoolLoad

_DECAY_S: Final = 7200.0  # time constant of what is remembered of visits
_PRIOR_VISITS: Final = 0.5
_PRIOR_S: Final = 1800.0
_STAY_LOADS: Final = 2.0  # loading times that a deployment stays after its last request
_LEAST_STAY_S: Final = 5.0
_MOST_STAY_S: Final = 120.0


def stay_s(load_s: float) -> float:
    """Return how long a deployment stays after a request whatever waits, so that it serves longer than it
    loads."""
    return min(_MOST_STAY_S, max(_LEAST_STAY_S, _STAY_LOADS * load_s))


@dataclass(slots=True)
class Visits:
    """Times at which a deployment had requests. Those within ``stay_s`` of a visit belong to it, because they
    find the deployment loaded whatever leaves."""

    active_s: float = -math.inf  # when a request last arrived, waited or ran
    _began_s: float | None = None
    _visits: float = 0.0
    _exposed_s: float = 0.0
    _noted_s: float = 0.0
    _visited_s: float = -math.inf
    _reporter: int | None = None
    _arrived: float = 0.0

    def note(self, load: PoolLoad, now_s: float, *, apart_s: float) -> None:
        """Observe a report. Visits count once within ``apart_s``."""
        if self._began_s is None:
            self._began_s = self._noted_s = self.active_s = now_s
        keep = math.exp(-(now_s - self._noted_s) / _DECAY_S)
        self._visits *= keep
        self._exposed_s = self._exposed_s * keep + (1.0 - keep) * _DECAY_S
        self._noted_s = now_s
        arrived = sum(one.arrived for one in load.classes)
        came = load.reporter == self._reporter and arrived > self._arrived
        self._reporter, self._arrived = load.reporter, arrived
        if came or load.held or load.running or any(one.waiting for one in load.classes):
            self.active_s = now_s
            if now_s - self._visited_s >= apart_s:
                self._visits, self._visited_s = self._visits + 1.0, now_s

    @property
    def hazard(self) -> float:
        """Expected visits per second."""
        return (self._visits + _PRIOR_VISITS) / (self._exposed_s + _PRIOR_S)


@dataclass(frozen=True, slots=True)
class Resident:
    """A deployment that may be at zero and has or wants memory."""

    deployment: str
    owner: str
    size_bytes: int  # granted to its engines; 0: it waits for memory
    load_s: float  # expected time from an assignment until READY
    hazard: float  # expected visits per second
    idle_s: float
    yields: bool  # it has no request, and has stayed long enough after the last

    @property
    def saved(self) -> float:
        """Loading seconds that its stay saves, per second and GiB."""
        return self.hazard * self.load_s * 2**30 / max(1, self.size_bytes)


@dataclass(frozen=True, slots=True)
class Residency:
    """``leaving``: why each idle deployment would leave, by name, the first to leave first. ``needs``: the
    memory that each version took when it was last loaded, by digest."""

    leaving: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)


def leaving(residents: Iterable[Resident]) -> dict[str, str]:
    """Return the reasons of those that yield, by deployment, the first to leave first."""
    found = list(residents)
    held: dict[str, int] = {}
    for one in found:
        held[one.owner] = held.get(one.owner, 0) + one.size_bytes
    share = sum(held.values()) / max(1, len(held))
    ranked = sorted(
        (not (len(held) > 1 and held[one.owner] - one.size_bytes >= share), one.saved, one.deployment, one)
        for one in found
        if one.yields
    )
    return {name: _reason(one, 0.0 if within else held[one.owner] / share) for within, _, name, one in ranked}


def _reason(one: Resident, parts: float) -> str:
    text = (
        f"its memory was needed: no request for {one.idle_s:.0f} s, one comes in about "
        f"{1.0 / one.hazard:.0f} s, a load takes {one.load_s:.1f} s"
    )
    if not parts:
        return text
    return f"{text}; {one.owner or 'deployments without an owner'} had {parts:.1f} equal parts of the memory"
