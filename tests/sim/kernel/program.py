"""One program with tasks, groups, waits, a network, failures and production services; prints what happened.

Run as ``python -m tests.sim.kernel.program SEED WASTE``: ``WASTE`` bytes are allocated first, so that
everything after lies elsewhere in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from random import Random

import structlog

from services.core.errors import FairwayError
from tests.sim.kernel.small_fleet import SmallFleet


class Program:
    def __init__(self, seed: int) -> None:
        self.fleet = SmallFleet(seed)
        self.rng = Random(seed)
        self.trace: list[str] = []

    def note(self, what: str) -> None:
        self.trace.append(f"{self.fleet.loop.now_s!r} {what}")

    async def main(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.place_all())
            group.create_task(self.break_things())
            group.create_task(self.groups())
            group.create_task(self.waits())

    async def place_all(self) -> None:
        gateway = self.fleet.processes["gateway"]
        tasks = set()
        for number in range(200):
            await asyncio.sleep(self.rng.expovariate(20.0))
            task = gateway.spawn(f"place-{number}", self.placed(number))
            task.add_done_callback(lambda done: self.note(done.get_name()))
            tasks.add(task)
        done, _ = await asyncio.wait(tasks)
        for task in done:  # in the order of a set
            self.note(f"{task.get_name()} {task.result()}")

    async def placed(self, number: int) -> str:
        try:
            return repr(await self.fleet.place(number, queue_ttl_s=10.0))
        except FairwayError as error:
            return error.reason

    async def break_things(self) -> None:
        fleet, network = self.fleet, self.fleet.network
        for turn in range(8):
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            name = self.rng.choice(("scheduler-0", "scheduler-1"))
            self.note(f"turn {turn} {name} leaders {fleet.leaders}")
            fault = self.rng.randrange(4)
            if fault == 0:
                fleet.processes[name].crash()
                fleet.services.pop(name, None)
                await asyncio.sleep(1.0)
                fleet.restart(name)
                fleet.start_scheduler(name)
            elif fault == 1:
                fleet.processes[name].pause()
                await asyncio.sleep(self.rng.uniform(0.1, 5.0))
                fleet.processes[name].resume()
            elif fault == 2:
                network.cut(name, self.rng.choice(("gateway", "worker", "store")))
                await asyncio.sleep(self.rng.uniform(0.1, 5.0))
                network.heal()
            else:
                network.half_open(name, "gateway")

    async def groups(self) -> None:
        """Groups whose first failure cancels the rest, in the order of a set."""

        async def child(number: int) -> None:
            try:
                await asyncio.sleep(10.0)
            finally:
                self.note(f"child {number}")

        async def failing() -> None:
            await asyncio.sleep(0.5)
            raise KeyError("fails")

        for _ in range(5):
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(50):
                        group.create_task(child(number))
                    group.create_task(failing())
            except* KeyError:
                self.note("group")

    async def waits(self) -> None:
        loop = self.fleet.loop
        for _ in range(5):
            futures = {loop.create_future() for _ in range(50)}
            for future in sorted(futures, key=lambda _: self.rng.random())[:25]:
                loop.call_later(self.rng.choice((0.1, 0.2)), future.set_result, None)
            done, pending = await asyncio.wait(futures, timeout=0.5)
            self.note(f"wait {[hash(future) for future in done]} {[hash(future) for future in pending]}")


def trace_of(seed: int) -> list[str]:
    """Return what happened, line by line."""
    program = Program(seed)
    program.fleet.run(program.main())
    return program.trace


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    waste = [bytearray(1 + number % 997) for number in range(int(sys.argv[2]) // 500)]
    found = trace_of(int(sys.argv[1]))
    print(len(found), hashlib.sha256("\n".join(found).encode()).hexdigest())
