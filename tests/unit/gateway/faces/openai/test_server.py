"""How many requests begin in a turn of the loop, and in which order those that wait do."""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.faces.openai.server import BEGUN_PER_TURN, PacedApp


class App:
    """Notes in which turn each request began, and whose it was."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[int, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append((self.turn, scope["client"][0]))

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def _nothing(*_: object) -> Any:
    return None


def _request(app: PacedApp, host: str) -> asyncio.Task[None]:
    return asyncio.create_task(app({"client": (host, 1)}, _nothing, _nothing))


async def _run(hosts: list[str]) -> list[tuple[int, str]]:
    app = App()
    turns = PacedApp(app)
    counting = asyncio.create_task(app.count_turns())
    await asyncio.gather(*(_request(turns, host) for host in hosts))
    counting.cancel()
    await asyncio.sleep(0)
    assert not turns.turns._waiting
    return app.begun


async def test_few_requests_begin_at_once() -> None:
    begun = await _run(["10.0.0.1"] * BEGUN_PER_TURN)
    assert {turn for turn, _ in begun} == {begun[0][0]}


async def test_a_turn_begins_no_more_than_its_bound() -> None:
    begun = await _run(["10.0.0.1"] * 1000)
    numbers = [turn for turn, _ in begun]
    assert len(begun) == 1000
    assert max(numbers.count(turn) for turn in set(numbers)) == BEGUN_PER_TURN


async def test_a_source_with_one_request_does_not_wait_for_those_of_others() -> None:
    begun = await _run([*(f"10.0.0.{number % 4}" for number in range(1000)), "10.0.9.9"])
    assert [host for _, host in begun].index("10.0.9.9") < 2 * BEGUN_PER_TURN


async def test_a_request_that_is_cancelled_takes_no_turn() -> None:
    app = App()
    turns = PacedApp(app)
    tasks = [_request(turns, "10.0.0.1") for _ in range(100)]
    await asyncio.sleep(0)
    for task in tasks[BEGUN_PER_TURN:90]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(app.begun) == BEGUN_PER_TURN + 10
    assert not turns.turns._waiting
