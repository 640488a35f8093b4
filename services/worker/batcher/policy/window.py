"""The two kinds of window: derived, in production, and fixed, to compare it with; and the group that starts
first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from services.worker.batcher.policy.batch_key import BatchKey
from services.worker.batcher.policy.cost_curve import CostCurve
from services.worker.batcher.policy.linger import Expected, LingerBound
from services.worker.batcher.policy.start import Device, Linger, Start, StartCause, WaitingGroup, decide


class Window(Protocol):
    """Decides when an idle device starts a batch."""

    def decide(
        self, group: WaitingGroup, device: Device, expected: Expected, now_s: float
    ) -> Start | Linger: ...


class DerivedWindow:
    """The production policy."""

    def decide(self, group: WaitingGroup, device: Device, expected: Expected, now_s: float) -> Start | Linger:
        return decide(group, device, expected, now_s)


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """Starts a batch when it is full or its oldest row has waited ``window_s``."""

    window_s: float

    def decide(self, group: WaitingGroup, device: Device, expected: Expected, now_s: float) -> Start | Linger:
        most, limit = device.rows_of(group)
        until_s = group.oldest_s + self.window_s
        bound = LingerBound(until_s - now_s, 0.0, 0.0, 0.0, group.rows)
        if group.rows >= most:
            return Start(most, limit, bound)
        return Start(group.rows, StartCause.LINGER, bound) if until_s <= now_s else Linger(until_s, bound)


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided for one group, and what it was decided by."""

    key: BatchKey
    group: WaitingGroup
    found: Start | Linger
    expected: Expected


def first_to_start(decided: Iterable[Decided], curve: CostCurve, now_s: float) -> Decided | None:
    """Return the first of the groups that starts, or else the one that lingers for the shortest time.

    A group before it that lingers goes first where the other batch would outlast its wait. ``decided`` is
    read no further than needed. None without groups.
    """
    waits: Decided | None = None
    until_s = math.inf
    for each in decided:
        if isinstance(each.found, Linger):
            if each.found.until_s < until_s:
                waits, until_s = each, each.found.until_s
            continue
        if waits is not None and until_s < now_s + curve.mean_s(each.group.width, each.found.rows):
            start = Start(waits.group.rows, StartCause.LINGER, waits.found.bound)
            return replace(waits, found=start)
        return each
    return waits
