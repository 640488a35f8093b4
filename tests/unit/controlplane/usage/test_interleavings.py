"""Every event is booked once in any interleaving of duplicated, reordered and retried batches, failing
writes, killed control planes, and changes of the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.log import KEEP_S, Superseded, UsageLog
from services.controlplane.usage.policy.book import Segment, SourceEvents
from services.controlplane.usage.policy.lines import summed
from services.core.errors import FairwayError, NoLeader, StoreUnavailable
from services.core.usage import UsageEvent
from tests.support.clocks import HandClock
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.usage_ledgers import (
    HOUR,
    UNIX_S,
    Sender,
    booked,
    ledger_of,
    request_usage,
    sequence_use,
)

REQUESTS: Final = 40
DEVICE_US: Final = 2_000_000

WEIGHTS: Final = {"send": 10, "again": 4, "elect": 5, "fail": 4, "checkpoint": 2, "pass": 2, "kill": 2}
STEPS: Final = 120


class Faults:
    """Fails some of the next writes, before or after their effect."""

    def __init__(self, store: MemoryLedger) -> None:
        self.left = 0
        self.after = False
        store.before = lambda operation, name: self._maybe(False)
        store.after = lambda operation, name: self._maybe(True)

    def _maybe(self, after: bool) -> None:
        if self.left and self.after is after:
            self.left -= 1
            raise StoreUnavailable("the store does not answer")


class Plane:
    """A control plane that can be killed: what it has in memory is lost."""

    def __init__(self, store: MemoryLedger, clock: HandClock, name: str) -> None:
        self._store, self._clock, self._name = store, clock, name
        self._lives = 0
        self.start()

    def start(self) -> None:
        self._lives += 1
        self.election = StaticElection()
        self.ledger: UsageLedger = ledger_of(
            self._store, self._clock, self.election, writer=f"{self._name}{self._lives}"
        )
        self.task = asyncio.ensure_future(self.ledger.run())

    async def kill(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class World:
    def __init__(self) -> None:
        self.clock = HandClock(UNIX_S)
        self.store = MemoryLedger()
        self.faults = Faults(self.store)
        self.planes = [Plane(self.store, self.clock, name) for name in "ab"]
        names = [f"r{number}" for number in range(REQUESTS)]
        gateway: list[UsageEvent] = [request_usage(name) for name in names]
        worker: list[UsageEvent] = [sequence_use(name) for name in names]
        self.senders = [Sender("gateway", gateway), Sender("worker", worker)]
        self.calls: list[asyncio.Future[None]] = []
        self.sending: dict[Sender, asyncio.Future[None]] = {}
        self.epoch = 0

    async def step(self, rng: Random) -> None:
        plane, sender = rng.choice(self.planes), rng.choice(self.senders)
        match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
            case "send":
                self.send(sender, plane.ledger)
            case "again":
                first = max(1, sender.acknowledged - rng.randrange(4))
                self.calls.append(asyncio.ensure_future(_quietly(plane.ledger.report(sender.report(first)))))
            case "elect":
                self.epoch += 1
                plane.election.turn(self.epoch if rng.random() < 0.8 else None)
            case "fail":
                self.faults.after, self.faults.left = rng.random() < 0.5, rng.randrange(1, 20)
            case "checkpoint":
                self.calls.append(asyncio.ensure_future(_quietly(plane.ledger.checkpoint())))
            case "pass":
                self.clock.now_s += rng.choice([1, 30, 700])
            case _:
                await plane.kill()
                plane.start()
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)

    def send(self, sender: Sender, ledger: UsageLedger) -> None:
        """A source has one batch under way."""
        before = self.sending.get(sender)
        if not sender.done and (before is None or before.done()):
            self.sending[sender] = asyncio.ensure_future(_quietly(sender.send(ledger)))

    async def finish(self) -> dict[str, tuple[int, int, int]]:
        """One leads, nothing fails: what is left is delivered."""
        self.faults.left = 0
        for plane in self.planes:
            plane.election.turn(None)
        self.planes[0].election.turn(self.epoch + 1)
        ledger = self.planes[0].ledger
        async with asyncio.timeout(120):
            await asyncio.gather(*self.calls, *self.sending.values())
            while not all(sender.done for sender in self.senders):
                for sender in self.senders:
                    self.send(sender, ledger)
                await asyncio.gather(*self.sending.values())
                await asyncio.sleep(0)
            found = None
            while found is None:
                # The other one may have taken a segment number last, or a checkpoint rewrites the hour.
                with suppress(NoLeader, StoreUnavailable):
                    found = await booked(ledger)
                await asyncio.sleep(0)
        for plane in self.planes:
            await plane.kill()
        return found


async def _quietly(call: Awaitable[object]) -> None:
    with suppress(FairwayError, Superseded):
        await call


@settings(max_examples=150)
@given(st.integers(0, 2**32))
@example(1267962)  # a checkpoint that outlasts its term, and a load between
def test_every_event_is_booked_once(seed: int) -> None:
    rng = Random(seed)

    async def computed(function: Callable[..., Any], *arguments: Any) -> Any:
        """In place of a thread, which would take as long as the machine likes."""
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        return function(*arguments)

    async def run() -> dict[str, tuple[int, int, int]]:
        world = World()
        for _ in range(STEPS):
            await world.step(rng)
        return await world.finish()

    with patch("services.controlplane.usage.log.in_thread", computed):
        found = asyncio.run(run())
    late = found.pop("", (0, 0, 0))  # workers' reports of requests that the test's fast clock closed before
    assert late[:2] == (0, 0)
    assert {key: amounts[:2] for key, amounts in found.items()} == {
        f"r{number}": (1, 20) for number in range(REQUESTS)
    }
    assert sum(amounts[2] for amounts in [late, *found.values()]) == REQUESTS * DEVICE_US


async def test_a_checkpoint_that_outlasts_a_foreign_one_takes_no_hour_for_empty() -> None:
    """One freezes as it begins a checkpoint, until another replaced and deleted the hours that it names."""
    store, clock = MemoryLedger(), HandClock(UNIX_S)
    frozen, other = UsageLog(store, clock), UsageLog(store, clock)
    book = await frozen.load()
    for name in ("r1", "r2"):
        await frozen.append(segment := booking(book.number + 1, name))
        book.apply(segment)
        if name == "r1":
            book.hours = await frozen.write_checkpoint(book.seal(), 0)
    foreign = await other.load()
    foreign.hours = await other.write_checkpoint(foreign.seal(), 0)
    await frozen.append(segment := booking(book.number + 1, "r3"))
    book.apply(segment)
    clock.now_s += 2 * KEEP_S
    await other.delete_covered(foreign)
    with pytest.raises(Superseded):
        await frozen.write_checkpoint(book.seal(), 0)
    found = await frozen.load()
    assert (found.number, found.hours) == (3, {HOUR: 2})
    (lines,) = found.sums.hours.values()
    both = summed((await frozen.hour(HOUR, 2), lines))
    assert {line.key_id: amounts.requests for line, amounts in both.items()} == {"r1": 1, "r2": 1, "r3": 1}


def booking(number: int, name: str) -> Segment:
    return Segment(number, "w", UNIX_S, (SourceEvents("gateway", number, (request_usage(name),)),))
