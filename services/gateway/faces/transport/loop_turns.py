"""Work that would hold the event loop for long, spread over its iterations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TypeVar

from services.runtime.process.tenant_loop import nobody
from services.runtime.process.tenant_turns import TenantRoundRobin

Result = TypeVar("Result")


class LoopTurns:
    """Lets at most ``per_turn`` pieces of work begin in an iteration of the event loop.

    One of each source in turn: a source with few pieces does not wait for one with many. The callers bound
    the waiting pieces.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._begun = 0  # calls that began in this iteration
        self._waiting: TenantRoundRobin[Callable[[], None]] = TenantRoundRobin()  # waiting calls by source

    def add(self, source: str, act: Callable[[], None]) -> None:
        """Call ``act`` in a turn of the source."""
        if not self._waiting and not self._begun:
            asyncio.get_running_loop().call_soon(self._next, context=nobody())
        self._waiting.add(source, act)

    async def turn(self, source: str) -> None:
        """Return once a piece of the source may begin."""
        if self._begun < self._per_turn and not self._waiting:
            if not self._begun:
                asyncio.get_running_loop().call_soon(self._next, context=nobody())
            self._begun += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self.add(source, lambda: None if turn.done() else turn.set_result(None))
        await turn

    async def run(self, source: str, steps: Generator[None, None, Result]) -> Result:
        """Return the result of steps that each take a few milliseconds."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            await self.turn(source)

    def _next(self) -> None:
        self._begun = min(self._per_turn, len(self._waiting))  # what an act adds comes in the next iteration
        try:
            for _ in range(self._begun):
                if (act := self._waiting.take(())) is not None:
                    act()
        finally:  # a piece that fails stops no other
            if self._begun:
                asyncio.get_running_loop().call_soon(self._next, context=nobody())
