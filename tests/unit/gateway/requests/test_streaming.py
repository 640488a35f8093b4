"""The buffer between a request and its reader: what it merges, and who continues first."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, Tokens
from services.gateway.requests.streaming import MAX_MERGED_LOGPROBS, BufferedStream

ENTRY = TokenLogprobs(-1.0, (), (), (), "x", "x", 1)


class Handle:
    """A request that takes credit and nothing else."""

    def __init__(self) -> None:
        self.taken = 0

    def credit(self, choice: int, tokens: int) -> None:
        self.taken += tokens

    def cancel(self) -> None: ...

    def withdraw(self) -> None: ...


async def test_events_that_accumulate_stay_small_and_leave_the_loop_to_others() -> None:
    stream, handle, found, turns = BufferedStream(60.0, withdraws=lambda: False), Handle(), [], 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def start() -> Any:
        for first in range(0, 10_000, 100):
            for choice in range(2):
                stream.on_tokens(choice, first, list(range(first, first + 100)), "x" * 100, (ENTRY,) * 100)
        stream.on_finished(
            Finished((ChoiceResult(0, FinishReason.STOP, "", 0),), Usage(1, 0, 0), StageClock(0))
        )
        return handle

    counting = asyncio.create_task(count())
    async with aclosing(stream.events(start)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                found.append(event)
    counting.cancel()
    assert max(len(event.ids) for event in found) <= MAX_MERGED_LOGPROBS + 100
    assert len(found) < 100, "nothing was merged"
    assert turns >= len(found)
    for choice in range(2):
        assert [token for event in found if event.choice == choice for token in event.ids] == [*range(10_000)]
    assert handle.taken == 20_000


async def test_what_waits_for_the_placement_continues_before_the_reader() -> None:
    order: list[str] = []
    stream = BufferedStream(60.0, withdraws=lambda: False)
    placed = asyncio.Event()

    def start() -> Any:
        return Handle()

    async def read() -> None:
        async with aclosing(stream.events(start)) as events:
            async for _ in events:
                order.append("reader")
                return

    async def place() -> None:
        await placed.wait()
        order.append("placement")

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(read())
        group.create_task(place())
        await asyncio.sleep(0)
        stream.on_accepted(Accepted("r", "m", "d", 1, 7, 3))
        placed.set()
    assert order == ["placement", "reader"]
