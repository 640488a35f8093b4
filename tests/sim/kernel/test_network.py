"""The simulated network: order within a connection, none across, and everything that breaks one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from simulator.kernel.connection import WINDOW
from simulator.kernel.loop import VirtualTimeLoop
from simulator.kernel.network import Broken, Latency, Network, Silent, SimConnection, Unreachable
from simulator.kernel.process import Process, Skew

JITTERY = Latency(base_s=0.001, jitter_s=0.005, tail_ratio=0.1, tail_s=0.1)


class Pair:
    """A client and a server process; the server keeps its ends of all connections."""

    def __init__(self, latency: Latency = JITTERY, seed: int = 1) -> None:
        self.loop = VirtualTimeLoop()
        rng = Random(seed)
        self.network = Network(self.loop, rng, latency)
        self.client = Process("client", self.loop, rng)
        self.server = Process("server", self.loop, rng)
        self.ends: list[SimConnection] = []
        self.listen()

    def listen(self) -> None:
        self.network.listen(self.server, "server:1", self.ends.append)

    async def connect(self) -> tuple[SimConnection, SimConnection]:
        near = await self.client.spawn("connect", self.network.connect(self.client, "server:1", within_s=5.0))
        return near, self.ends[-1]

    def run(self, main: Coroutine[Any, Any, Any]) -> None:
        try:
            self.loop.run_until_complete(main)
        finally:
            self.loop.close()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_order_holds_within_a_connection_and_not_across(pair: Pair) -> None:
    async def main() -> None:
        heard: list[tuple[int, int]] = []
        for stream in range(20):
            near, far = await pair.connect()
            far.on_message = lambda number, stream=stream: heard.append((stream, number))
            for number in range(20):
                near.post(number)
        await asyncio.sleep(10)
        assert len(heard) == 400
        for stream in range(20):
            assert [number for at, number in heard if at == stream] == list(range(20))
        assert heard != sorted(heard), "nothing overtook anything"

    pair.run(main())


def test_messages_take_their_time(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        pair.network.set_latency("client", "server", Latency(2.0, 0.0, 0.0))
        sent_s = pair.loop.now_s
        near.post("slow")
        assert await far.receive() == "slow"
        assert pair.loop.now_s - sent_s == pytest.approx(2.0)
        pair.network.set_latency("client", "server", None)
        near.post("fast")
        await far.receive(1.0)

    pair.run(main())


def test_the_peer_of_a_closed_connection_hears_all_and_then_why(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        for number in range(3):
            near.post(number)
        near.close(ValueError("enough"))
        near.close()
        assert [await far.receive() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(Broken) as ended:
            await far.receive()
        assert isinstance(ended.value.error, ValueError)
        with pytest.raises(Broken):
            far.post("late")
        with pytest.raises(Broken):
            await near.receive()
        assert pair.network.connections("client") == pair.network.connections("server") == 0

    pair.run(main())


def test_connecting_fails_where_nobody_listens_or_nothing_answers(pair: Pair) -> None:
    async def main() -> None:
        began_s = pair.loop.now_s
        with pytest.raises(Unreachable, match="nobody listens"):
            await pair.network.connect(pair.client, "nowhere:1", within_s=5.0)
        assert pair.loop.now_s - began_s < 1.0
        pair.server.pause()
        with pytest.raises(Unreachable, match="did not answer within 5 s"):
            await pair.connect()
        pair.server.resume()
        await asyncio.sleep(1.0)  # what was accepted late is closed by who waited no longer
        assert pair.network.connections("server") == 0
        pair.network.cut("client", "server")
        with pytest.raises(Unreachable, match="did not answer"):
            await pair.connect()
        pair.network.heal()
        pair.server.crash()
        with pytest.raises(Unreachable, match="nobody listens"):
            await pair.connect()

    pair.run(main())


def test_a_cut_delays_what_is_sent_and_keeps_its_order(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        near.post(0)
        await asyncio.sleep(5)
        pair.network.cut("client", "server", both=False)
        near.post(1)
        near.post(2)
        far.post("still through")
        assert await near.receive(1.0) == "still through"
        assert await far.receive(1.0) == 0
        with pytest.raises(Silent):
            await far.receive(10.0)
        pair.network.heal("server", "client")
        near.post(3)
        assert [await far.receive(1.0) for _ in range(3)] == [1, 2, 3]

    pair.run(main())


def test_partitions_cut_sides_from_each_other_only(pair: Pair) -> None:
    async def main() -> None:
        third = Process("third", pair.loop, Random(3))
        pair.network.partition(("client", "third"), ("server",))
        for process in (pair.client, third):
            with pytest.raises(Unreachable):
                await pair.network.connect(process, "server:1", within_s=1.0)
        pair.network.heal("third")
        await pair.network.connect(third, "server:1", within_s=1.0)
        with pytest.raises(Unreachable):
            await pair.connect()
        pair.network.heal()
        await pair.connect()

    pair.run(main())


def test_a_half_open_connection_is_noticed_by_silence_alone(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        pair.network.half_open("client", "server")
        pair.network.half_open("server", "client")
        near.post("lost")
        far.close()  # not even its end is heard
        began_s = pair.loop.now_s
        with pytest.raises(Silent):
            await near.receive(3.5)
        assert pair.loop.now_s - began_s == pytest.approx(3.5)
        whole, other = await pair.connect()
        whole.post("new connections are whole")
        assert await other.receive(1.0)

    pair.run(main())


def test_a_reset_is_heard_by_both(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        broken: list[str] = []
        far.on_broken = lambda error: broken.append(error.message)
        pair.network.disconnect("client", "server")
        with pytest.raises(Broken, match="reset"):
            await near.receive()
        await asyncio.sleep(1.0)
        assert broken == ["the connection was reset"]

    pair.run(main())


def test_a_crash_is_heard_after_what_was_sent_and_a_lost_machine_is_not(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        far.post("last word")
        pair.server.crash()
        assert await near.receive(1.0) == "last word"
        with pytest.raises(Broken, match="server ended"):
            await near.receive(1.0)
        pair.server = pair.server.restart()
        pair.listen()
        near, far = await pair.connect()
        pair.server.crash(silent=True)
        near.post("into the void")
        with pytest.raises(Silent):
            await near.receive(10.0)
        with pytest.raises(Unreachable, match="did not answer"):
            await pair.connect()

    pair.run(main())


def test_a_paused_process_reads_what_came_when_it_is_resumed(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        heard: list[tuple[float, Any]] = []
        far.on_message = lambda message: heard.append((pair.loop.now_s, message))
        pair.server.pause()
        for number in range(5):
            near.post(number)
            await asyncio.sleep(1.0)
        assert heard == []
        pair.server.resume()
        await asyncio.sleep(0)
        assert heard == [(pair.loop.now_s, number) for number in range(5)]

    pair.run(main())


def test_silence_is_judged_by_the_clock_of_who_waits(pair: Pair) -> None:
    async def main() -> None:
        slow = Process("slow", pair.loop, Random(3), skew=Skew(rate=0.5))
        end = await pair.network.connect(slow, "server:1", within_s=1.0)
        began_s = pair.loop.now_s
        with pytest.raises(Silent):
            await slow.spawn("read", end.receive(3.0))
        assert pair.loop.now_s - began_s == pytest.approx(6.0)

    pair.run(main())


def test_a_sender_waits_for_a_reader_that_lags(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()
        sent: list[int] = []

        async def send() -> None:
            for number in range(3 * WINDOW):
                await near.send(number)
                sent.append(number)

        task = pair.client.spawn("send", send())
        await asyncio.sleep(60)
        assert len(sent) == WINDOW
        first = [await far.receive() for _ in range(WINDOW // 2)]
        await asyncio.sleep(60)
        assert len(sent) == WINDOW + WINDOW // 2
        rest = [await far.receive() for _ in range(3 * WINDOW - len(first))]
        assert first + rest == list(range(3 * WINDOW))
        await task

    pair.run(main())


def test_a_sender_that_waits_hears_of_the_end(pair: Pair) -> None:
    async def main() -> None:
        near, far = await pair.connect()

        async def send() -> None:
            with pytest.raises(Broken):
                while True:
                    await near.send("more")

        task = pair.client.spawn("send", send())
        await asyncio.sleep(1)
        far.close()
        await task

    pair.run(main())


def test_questions_are_answered_lost_or_answered_in_vain(pair: Pair) -> None:
    async def main() -> None:
        asked: list[str] = []

        async def ask(store: list[str]) -> int:
            store.append("asked")
            return len(store)

        async def fail(store: list[str]) -> int:
            raise ValueError("no")

        network, client = pair.network, pair.client
        network.listen(pair.server, "store", pair.ends.append, answers=asked)
        assert await network.ask(client, "store", ask, within_s=1.0) == 1
        with pytest.raises(ValueError, match="no"):
            await network.ask(client, "store", fail, within_s=1.0)
        network.cut("server", "client", both=False)
        network.set_latency("client", "server", Latency(0.5, 0.0, 0.0))
        with pytest.raises(Unreachable):
            await network.ask(client, "store", ask, within_s=1.0)
        assert len(asked) == 2, "the question went through, and its answer did not"
        network.heal()
        network.cut("client", "server", both=False)
        with pytest.raises(Unreachable):
            await network.ask(client, "store", ask, within_s=1.0)
        assert len(asked) == 2
        network.heal()
        waiting = client.spawn("ask", network.ask(client, "store", ask, within_s=2.0))
        await asyncio.sleep(0.1)
        network.cut("server", "client", both=False)
        with pytest.raises(Unreachable, match="within 2 s"):
            await waiting
        assert len(asked) == 3, "the answer was lost, not the question"
        network.heal()
        pair.server.crash()
        with pytest.raises(Unreachable, match="nobody listens"):
            await network.ask(client, "store", ask, within_s=2.0)

    pair.run(main())


def test_latencies_are_those_of_the_distribution() -> None:
    rng = Random(1)
    latency = Latency(0.010, 0.002, 0.01, 0.5)
    drawn = [latency.draw_s(rng) for _ in range(50_000)]
    assert min(drawn) >= 0.010
    assert sum(drawn) / len(drawn) == pytest.approx(0.010 + 0.002 + 0.005, rel=0.05)
    assert sum(delay_s > 0.1 for delay_s in drawn) / len(drawn) == pytest.approx(0.01 * 0.835, rel=0.2)
