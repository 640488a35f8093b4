"""Regions that spend one budget over a network that loses, repeats and delays messages and cuts regions off.

    python -m simulator escrow [--seeds 200]

Prints ``RESULT {json}`` last: the overspend must be 0 in every seed.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Final

from simulator.escrow.counter import EscrowRow, RegionalEscrow, share_to_give

REGIONS: Final = ("east", "north", "west")
_GOSSIP_S: Final = 1.0
# A region requests rights once it holds less than this share of an equal split.
_LOW_RATIO: Final = 0.25


@dataclass(frozen=True, slots=True)
class EscrowSpec:
    """One run. ``budget`` in micro-dollars, times in virtual seconds."""

    seed: int
    budget: int = 1_000_000_000
    requests: int = 5000
    most_cost: int = 1_000_000  # worst case of the largest request
    duration_s: float = 600.0
    loss_ratio: float = 0.1  # share of the messages that are lost; as many are repeated
    # Begin and end of the time in which ``cut_region`` is cut off.
    cut_s: tuple[float, float] = (150.0, 450.0)
    cut_region: str = "west"


@dataclass(slots=True)
class EscrowOutcome:
    """What a run ended with, in micro-dollars and requests."""

    overspend: int = 0  # most by which reserved and spent exceeded the budget at any time
    spent: int = 0
    rejected: int = 0
    # Rejected although the regions that could reach each other held enough rights together.
    rejected_falsely: int = 0
    stranded: int = 0  # rights that the cut-off region held, unused, when it was healed
    requests: int = 0


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class EscrowSimulation:
    """A discrete-event run: requests, settlements, gossip and faults, all drawn from the seed."""

    def __init__(self, spec: EscrowSpec, *, escrow: type[RegionalEscrow] = RegionalEscrow) -> None:
        self._spec = spec
        self._rng = Random(spec.seed)
        self._events: list[_Event] = []
        self._numbers = count()
        self._now_s = 0.0
        self.outcome = EscrowOutcome()
        share, rest = divmod(spec.budget, len(REGIONS))
        self.regions = {
            name: escrow(name, EscrowRow(share + (rest if name == REGIONS[0] else 0))) for name in REGIONS
        }

    def run(self) -> EscrowOutcome:
        """Return the outcome once every request was settled and no message is under way."""
        spec, rng = self._spec, self._rng
        for _ in range(spec.requests):  # two thirds of them where the rights run out first
            region = rng.choice((REGIONS[0], REGIONS[0], rng.choice(REGIONS)))
            self._at(rng.uniform(0, spec.duration_s), partial(self._request, region))
        for name in REGIONS:
            for step in range(int(spec.duration_s / _GOSSIP_S)):
                self._at(step * _GOSSIP_S + rng.random(), partial(self._gossip, name))
        self._at(spec.cut_s[1], self._healed)
        while self._events:
            event = heapq.heappop(self._events)
            self._now_s = event.at_s
            event.act()
            used = sum(region.reserved + region.spent for region in self.regions.values())
            self.outcome.overspend = max(self.outcome.overspend, used - spec.budget)
        self.outcome.spent = sum(region.spent for region in self.regions.values())
        return self.outcome

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, _Event(at_s, next(self._numbers), act))

    def _request(self, name: str) -> None:
        spec, rng, region = self._spec, self._rng, self.regions[name]
        worst = rng.randint(1, spec.most_cost)
        self.outcome.requests += 1
        if not region.reserve(worst):
            self._rejected(name, worst)
            return
        cost = rng.randint(worst // 4, worst)
        self._at(self._now_s + rng.expovariate(1 / 5.0), partial(region.settle, worst, cost))

    def _rejected(self, name: str, worst: int) -> None:
        self.outcome.rejected += 1
        reachable = [self.regions[other] for other in REGIONS if self._connected(name, other)]
        if sum(region.rights for region in reachable) >= worst:
            self.outcome.rejected_falsely += 1

    def _gossip(self, name: str) -> None:
        """Send the row to the others, and request rights of them while short of rights."""
        region = self.regions[name]
        low = region.rights < self._spec.budget // len(REGIONS) * _LOW_RATIO
        for other in REGIONS:
            if other != name:
                self._send(name, other, partial(self.regions[other].merge, name, region.row))
                if low:
                    self._send(name, other, partial(self._give, other, name, region.rights))

    def _give(self, donor: str, receiver: str, receiver_rights: int) -> None:
        region = self.regions[donor]
        if region.transfer(receiver, share_to_give(region.rights, receiver_rights)):
            self._send(donor, receiver, partial(self.regions[receiver].merge, donor, region.row))

    def _send(self, sender: str, receiver: str, act: Callable[[], None]) -> None:
        """Deliver a message never, once or twice, each time after a delay of its own."""
        spec, rng = self._spec, self._rng
        drawn = rng.random()
        times = 0 if drawn < spec.loss_ratio else 2 if drawn < 2 * spec.loss_ratio else 1
        for _ in range(times):
            arrives_s = self._now_s + rng.expovariate(1 / 0.2)

            def arrive() -> None:
                if self._connected(sender, receiver):
                    act()

            self._at(arrives_s, arrive)

    def _is_cut(self, name: str) -> bool:
        began_s, ended_s = self._spec.cut_s
        return name == self._spec.cut_region and began_s <= self._now_s < ended_s

    def _connected(self, one: str, other: str) -> bool:
        return one == other or not (self._is_cut(one) or self._is_cut(other))

    def _healed(self) -> None:
        self.outcome.stranded = max(0, self.regions[self._spec.cut_region].rights)


def main(arguments: Sequence[str]) -> int:
    """Run the seeds; exit with 1 if one of them overspends."""
    parser = argparse.ArgumentParser(prog="python -m simulator escrow", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parsed = parser.parse_args(arguments)
    outcomes = [EscrowSimulation(EscrowSpec(seed)).run() for seed in range(parsed.seeds)]
    budget = EscrowSpec(0).budget
    result = {
        "seeds": parsed.seeds,
        "overspend": max(outcome.overspend for outcome in outcomes),
        "spent_ratio": round(min(outcome.spent for outcome in outcomes) / budget, 4),
        "rejected_falsely_ratio": round(
            sum(outcome.rejected_falsely for outcome in outcomes)
            / sum(outcome.requests for outcome in outcomes),
            5,
        ),
        "stranded_ratio": round(max(outcome.stranded for outcome in outcomes) / budget, 4),
    }
    print(f"RESULT {json.dumps(result)}")
    return 1 if result["overspend"] > 0 else 0
