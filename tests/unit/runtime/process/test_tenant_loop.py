"""Tenants take turns in the event loop, in slices between which everything else runs."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import uvloop

from services.runtime.clock import SystemClock
from services.runtime.process.tenant_turns import SLICE_S, TenantLoop, nobody, run_as
from services.runtime.supervisor import Supervisor

STEP_S = 0.001


class RecordingLoop(TenantLoop):
    """Notes the tenant of each callback that takes a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []
        add = self._waiting.add

        def noted(tenant: str, item: asyncio.Handle) -> None:
            self.taken.append(tenant)
            add(tenant, item)

        self._waiting.add = noted  # type: ignore[method-assign]


def run(work: Callable[[], Coroutine[Any, Any, None]], loop: Callable[[], uvloop.Loop] = TenantLoop) -> None:
    uvloop.run(work(), loop_factory=loop)


def hold(seconds: float) -> None:
    """Use the loop's time, as a step of a request does."""
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        pass


async def step(tenant: str, ready: asyncio.Event, done: list[str], *, steps: int = 1) -> None:
    run_as(tenant)
    await ready.wait()
    for _ in range(steps):
        hold(STEP_S)
        done.append(tenant)
        await asyncio.sleep(0)


def test_one_of_a_tenant_waits_for_one_of_another_and_not_for_its_thousand() -> None:
    async def work() -> None:
        ready, done = asyncio.Event(), list[str]()
        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(step("crowd", ready, done))
            group.create_task(step("canary", ready, done))
            await asyncio.sleep(0.05)
            ready.set()
        assert done.index("canary") <= 1

    run(work)


def test_what_belongs_to_nobody_runs_between_slices() -> None:
    """As does input that is read, for which health checks wait."""

    async def work() -> None:
        ready, done = asyncio.Event(), list[str]()
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(step("crowd", ready, done))
            await asyncio.sleep(0.05)
            ready.set()
            between = [await asyncio.sleep(0, len(done)) for _ in range(1000) if len(done) < 100]
        most = max(after - before for before, after in pairwise(between))
        assert most <= SLICE_S / STEP_S + 1

    run(work)


@pytest.mark.parametrize("seed", range(20))
def test_tenants_get_equal_turns_while_they_have_work_and_keep_their_order(seed: int) -> None:
    async def work() -> None:
        rng, loop, ran = Random(seed), asyncio.get_running_loop(), list[tuple[str, int]]()
        counts = {f"t{number}": rng.randint(1, 60) for number in range(rng.randint(1, 6))}
        wanted = [tenant for tenant, count in counts.items() for _ in range(count)]
        rng.shuffle(wanted)
        numbers = dict.fromkeys(counts, 0)
        contexts = {tenant: nobody() for tenant in counts}
        for tenant, context in contexts.items():
            context.run(run_as, tenant)
        for tenant in wanted:
            loop.call_soon(ran.append, (tenant, numbers[tenant]), context=contexts[tenant])
            numbers[tenant] += 1
        while len(ran) < len(wanted):
            await asyncio.sleep(0)
        for tenant, count in counts.items():
            assert [number for name, number in ran if name == tenant] == list(range(count))
        least = min(counts.values())
        rounds = ran[: least * len(counts)]
        assert all(sum(name == tenant for name, _ in rounds) == least for tenant in counts)

    run(work)


def test_a_cancelled_callback_does_not_run_and_one_that_fails_stops_no_other() -> None:
    async def work() -> None:
        loop, ran, failed = asyncio.get_running_loop(), list[int](), list[str]()
        loop.set_exception_handler(lambda _, found: failed.append(str(found["exception"])))
        context = contextvars.copy_context()
        context.run(run_as, "a")
        loop.call_soon(ran.append, 1, context=context).cancel()
        loop.call_soon(int, "x", context=context)
        loop.call_soon(ran.append, 2, context=context)
        await asyncio.sleep(0.01)
        assert ran == [2]
        assert ["invalid literal" in each for each in failed] == [True]

    run(work)


def test_a_task_for_all_tenants_takes_no_turn_of_the_request_that_starts_it() -> None:
    async def work() -> None:
        loop, supervisor = asyncio.get_running_loop(), Supervisor(SystemClock())
        assert isinstance(loop, RecordingLoop)
        woken = asyncio.Event()

        async def serve() -> None:
            await woken.wait()

        async def request(*, shared: bool) -> asyncio.Task[None]:
            run_as("a")
            return supervisor.spawn("link", serve(), shared=shared)

        for shared, turns in ((True, 0), (False, 2)):
            task = await asyncio.create_task(request(shared=shared))
            await asyncio.sleep(0.01)
            loop.taken.clear()
            woken.set()
            await task
            assert loop.taken.count("a") == turns
            woken.clear()

    run(work, RecordingLoop)
