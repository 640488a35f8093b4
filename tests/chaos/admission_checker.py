"""What the recorded history of admissions allows to conclude. Pure: judges intervals, amounts and the meters.

A client knows only when it sent a request and when it received the answer, so each conclusion holds for every
order that these intervals allow. A rejection counts as false only if the limit had room in all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate


class AdmissionEnd(StrEnum):
    """How a request ended for its client."""

    FINISHED = "finished"
    NO_SLOT = "no_slot"  # rejected by the concurrency limit
    NO_BUDGET = "no_budget"  # rejected by the budget
    REFUSED = "refused"  # rejected with another error of the server, such as an outage's
    CUT = "cut"  # its gateway was killed


@dataclass(frozen=True, slots=True)
class AdmissionRecord:
    """One request. Times in monotonic seconds of the client, amounts in micro-dollars."""

    began_s: float
    ended_s: float
    end: AdmissionEnd
    worst_micros: int  # what it reserves
    # What its tokens cost that the client received: all of them if it finished.
    received_micros: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What was enforced, and when it may not have been. A killed gateway's slots are held for ``held_s``."""

    budget_micros: int
    max_concurrency: int
    held_s: float
    outages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinalMeters:
    """What the store counts when nothing runs any more."""

    settled_micros: int
    reserved_micros: int
    slots: int
    # List cost in the usage ledger: of requests that gateways settled; of those that only workers reported.
    by_gateways_micros: int = 0
    by_workers_micros: int = 0

    @property
    def charged_micros(self) -> int:
        """What was charged of the requests that no gateway settled."""
        return self.settled_micros - self.by_gateways_micros


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The figures of a run; ``problems`` says in words what is wrong."""

    budget_overspend: int
    false_rejections: int
    leaked: int
    # What was charged of the requests that no gateway settled, over what workers computed for them.
    killed_charged_ratio: float
    problems: tuple[str, ...]


def judge_admissions(
    history: Sequence[AdmissionRecord], limits: AdmissionLimits, meters: FinalMeters
) -> AdmissionVerdict:
    """Return the verdict on one run."""
    finished = sum(each.received_micros for each in history if each.end is AdmissionEnd.FINISHED)
    cut = [each for each in history if each.end is AdmissionEnd.CUT]
    received, worst = sum(each.received_micros for each in cut), sum(each.worst_micros for each in cut)
    charged = meters.charged_micros
    overspend = max(
        0, meters.settled_micros - limits.budget_micros, finished + received - limits.budget_micros
    )
    sums = _Sums(history, limits)
    rejected = [each for each in history if each.end in (AdmissionEnd.NO_SLOT, AdmissionEnd.NO_BUDGET)]
    false = [each for each in rejected if not _in_outage(each, limits) and sums.had_room(each)]
    leaked = meters.slots + (1 if meters.reserved_micros else 0)
    problems = [f"{each.end} at {each.began_s:.3f} s although there was room" for each in false[:10]]
    if overspend:
        problems.append(f"{meters.settled_micros} settled, {finished + received} received: over the budget")
    if leaked:
        problems.append(f"{meters.slots} slots and {meters.reserved_micros} micro-dollars are held at rest")
    ended = meters.settled_micros - finished
    if not received <= ended <= worst:
        problems.append(f"{ended} charged for killed gateways: {received} received, {worst} reserved")
    if charged != meters.by_workers_micros:
        problems.append(f"{charged} charged for what no gateway settled: {meters.by_workers_micros} computed")
    computed = meters.by_workers_micros
    ratio = charged / computed if computed else float(charged == 0)
    return AdmissionVerdict(overspend, len(false), leaked, round(ratio, 4), tuple(problems))


def _in_outage(record: AdmissionRecord, limits: AdmissionLimits) -> bool:
    return any(began_s <= record.ended_s and record.began_s <= ended_s for began_s, ended_s in limits.outages)


class _Sums:
    """The most that a history may have counted at a time, by bisection.

    A rejected request counts nothing, but one that the budget rejected held a slot before.
    """

    def __init__(self, history: Sequence[AdmissionRecord], limits: AdmissionLimits) -> None:
        self._limits = limits
        holders = [each for each in history if each.end is not AdmissionEnd.NO_SLOT]
        self._slot_begins = sorted(each.began_s for each in holders)
        self._slot_ends = sorted(self._held_until_s(each) for each in holders)
        payers = [each for each in holders if each.end is not AdmissionEnd.NO_BUDGET]
        payers.sort(key=lambda each: each.began_s)
        self._begins = [each.began_s for each in payers]
        self._worst = [0, *accumulate(each.worst_micros for each in payers)]
        by_end = sorted((self._held_until_s(each), each.worst_micros - _left(each)) for each in payers)
        self._ends = [end_s for end_s, _ in by_end]
        self._freed = [0, *accumulate(freed for _, freed in by_end)]

    def had_room(self, rejected: AdmissionRecord) -> bool:
        """Whether the limit had room for the request whatever the others did meanwhile."""
        if rejected.end is AdmissionEnd.NO_SLOT:
            begun = bisect_right(self._slot_begins, rejected.ended_s)
            ended = bisect_left(self._slot_ends, rejected.began_s)
            return begun - ended < self._limits.max_concurrency
        most = self._worst[bisect_right(self._begins, rejected.ended_s)]
        most -= self._freed[bisect_left(self._ends, rejected.began_s)]
        return most + rejected.worst_micros <= self._limits.budget_micros

    def _held_until_s(self, record: AdmissionRecord) -> float:
        return record.ended_s + (self._limits.held_s if record.end is AdmissionEnd.CUT else 0.0)


def _left(record: AdmissionRecord) -> int:
    """Return the most that a request counts in the budget after its end."""
    return record.worst_micros if record.end is AdmissionEnd.CUT else record.received_micros
