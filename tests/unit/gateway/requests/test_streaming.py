"""The order in which the reader of a stream and the placement of its request continue."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from services.core.errors import FairwayError
from services.gateway.events import Accepted, never
from services.gateway.requests.streaming import BufferedStream


class Controls:
    """A request that nothing controls."""

    def credit(self, choice: int, tokens: int) -> None: ...

    def allow(self, tokens: int) -> None: ...

    def cancel(self, error: FairwayError | None = None) -> None: ...

    def withdraw(self) -> None: ...


async def test_what_waits_for_the_placement_continues_before_the_reader() -> None:
    order: list[str] = []
    stream = BufferedStream(60.0, withdraws=never)
    placed = asyncio.Event()

    async def read() -> None:
        async with aclosing(stream.events(Controls)) as events:
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
