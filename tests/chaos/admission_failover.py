"""A budget on a Redis with Sentinels, whose master dies with settlements that its replica had not received.

Clients reserve and settle requests of one tenant through three limiters until the budget rejects them. In
mid-run the replica is frozen, the master is killed a moment later, and the replica, started again, becomes
the master: what the dead one had acknowledged meanwhile is lost. The clients count the spending themselves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, TypeVar

from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import BudgetExceeded, StoreUnavailable
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from tests.support.redis_topologies import HOST, Servers, sentinel_group, servers

Answer = TypeVar("Answer")

LIMITERS: Final = 3
CLIENTS: Final = 60
BUDGET_MICROS: Final = 3_000_000
PRICE: Final = Price(1_000_000, 1_000_000, 1_000_000)  # a token costs one micro-dollar
WORST: Final = 800
HELD_S: Final = (0.01, 0.08)
RENEWED_S: Final = 0.5
# How long a master accepts writes after its replica has stopped, with `min-replicas-max-lag 1`. The lag is
# the whole seconds since the last acknowledgement, which comes once a second and is checked once a second.
LAG_S: Final = 3.0
FROZEN_S: Final = 4.0  # longer
DOWN_S: Final = 3.0
AT_MOST_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that a client paid for. ``settled_s``: monotonic time of the store's acknowledgement."""

    reserved_s: float
    settled_s: float
    micros: int


@dataclass(frozen=True, slots=True)
class FailoverVerdict:
    """Micro-dollars. ``lost``: what the new master never received of what clients spent."""

    spent: int
    overspend: int
    bound: int
    lost: int

    @property
    def problems(self) -> tuple[str, ...]:
        problems = []
        if self.overspend > self.bound:
            problems.append(f"the failover overspent {self.overspend}; the bound is {self.bound}")
        if self.lost <= 0:
            problems.append("the failover lost nothing, so it shows nothing")
        return tuple(problems)


def judge_failover(charges: list[Charge], counted: int, cut_s: float) -> FailoverVerdict:
    """Return the verdict on one failover.

    ``counted`` is what the store has settled at the end, ``cut_s`` when the replica received its last write.
    The bound: each request that reserved or settled within ``LAG_S`` after that, at its worst cost.
    """
    spent = sum(each.micros for each in charges)
    at_risk = [each for each in charges if each.reserved_s <= cut_s + LAG_S and each.settled_s >= cut_s]
    return FailoverVerdict(spent, max(0, spent - BUDGET_MICROS), len(at_risk) * WORST, spent - counted)


class FailoverDrill:
    """The clients of one run."""

    def __init__(self, url: str, seed: int) -> None:
        clock = SystemClock()
        self._limiters = [RedisLimiter(url, clock, timeout_s=1.0) for _ in range(LIMITERS)]
        self._limit = Limit(LimitKind.MONTH_MICROS, BUDGET_MICROS)
        self._rng = Random(seed)
        self._running: dict[str, tuple[RedisLimiter, Reservation]] = {}
        self._rejected = 0
        self.charges: list[Charge] = []

    async def run(self, group: Servers, master: int, replica: int) -> FailoverVerdict:
        async with asyncio.timeout(AT_MOST_S), asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(self._renew_forever())
            clients = [tasks.create_task(self._send_forever(number)) for number in range(CLIENTS)]
            while sum(each.micros for each in self.charges) < BUDGET_MICROS // 2:
                await asyncio.sleep(0.01)
            cut_s = await self._fail_over(group, master, replica)
            await asyncio.gather(*clients)
            renewing.cancel()
        (spent,) = await self._until_served(lambda: self._limiters[0].spent("t", [self._limit]))
        for each in self._limiters:
            await each.close()
        return judge_failover(self.charges, spent.settled_micros, cut_s)

    async def _fail_over(self, group: Servers, master: int, replica: int) -> float:
        """Return when the replica received its last write."""
        cut_s = time.monotonic()
        os.kill(group.processes[replica].pid, signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        await asyncio.to_thread(group.kill, master)
        # With the process goes what the system had received for it: as if the network had lost it.
        await asyncio.to_thread(group.kill, replica)
        await asyncio.to_thread(group.start, *GROUP_OPTIONS, "--replicaof", HOST, str(master), port=replica)
        await asyncio.sleep(DOWN_S)
        # A master without a replica refuses writes: the dead one comes back, and becomes its replica.
        await asyncio.to_thread(group.start, *GROUP_OPTIONS, port=master)
        return cut_s

    async def _send_forever(self, number: int) -> None:
        limiter, sent = self._limiters[number % LIMITERS], 0
        while self._rejected < CLIENTS:
            sent += 1
            try:
                await self._request(limiter, f"{number}-{sent}")
            except BudgetExceeded:
                self._rejected += 1
            except StoreUnavailable:
                await asyncio.sleep(0.05)

    async def _request(self, limiter: RedisLimiter, name: str) -> None:
        slot = await limiter.admit("t", name, [Limit(LimitKind.CONCURRENCY, 10 * CLIENTS)])
        cost = self._rng.randint(1, WORST)
        try:
            held = await limiter.reserve(slot, [Claim(self._limit, WORST)], PRICE)
        except (BudgetExceeded, StoreUnavailable):
            await self._until_served(lambda: limiter.settle(slot, Usage(0, 0)))
            raise
        reserved_s = time.monotonic()
        self._running[name] = (limiter, held)
        await asyncio.sleep(self._rng.uniform(*HELD_S))
        await self._until_served(lambda: limiter.settle(held, Usage(cost, 0)))
        del self._running[name]
        self.charges.append(Charge(reserved_s, time.monotonic(), cost))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_S)
            for limiter in self._limiters:
                mine = [(held, Usage(0, 0)) for owner, held in self._running.values() if owner is limiter]
                try:
                    await limiter.renew(mine)
                except StoreUnavailable:
                    continue

    async def _until_served(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


GROUP_OPTIONS: Final = (
    *("--appendonly", "yes", "--appendfsync", "always"),
    *("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"),
)


async def run_failover(folder: Path, seed: int) -> FailoverVerdict:
    """Return the verdict of one failover."""
    folder.mkdir(parents=True, exist_ok=True)
    with servers(folder) as group:
        url, master, replica = await asyncio.to_thread(sentinel_group, group, *GROUP_OPTIONS)
        return await FailoverDrill(url, seed).run(group, master, replica)
