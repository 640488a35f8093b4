"""Watches of the simulated store: kept while nothing happens, and refused for a history that is gone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.adapters.links.leader_streams import StreamReportLinks
from services.core.errors import NoLeader
from services.ports.store import Compacted, Put
from simulator.kernel.links.streams import SimStreams
from tests.sim.kernel.small_fleet import SmallFleet


@pytest.fixture
def fleet() -> SmallFleet:
    return SmallFleet()


def test_a_quiet_watch_is_kept_by_signs_of_life(fleet: SmallFleet) -> None:
    async def main() -> None:
        batches = 0

        async def follow() -> None:
            nonlocal batches
            async for _ in fleet.store("gateway").watch("nothing/", 0):
                batches += 1

        following = fleet.processes["gateway"].spawn("follow", follow())
        await asyncio.sleep(60)
        assert not following.done()
        assert batches > 0
        following.cancel()

    fleet.run(main())


def test_a_watch_from_before_the_history_is_refused(fleet: SmallFleet) -> None:
    async def main() -> None:
        for number in range(20):
            await fleet.memory.commit([Put(f"many/{number % 7}", b"x")])
        fleet.memory.compact(10)
        fleet.processes["store"].crash()
        fleet.restart("store")
        fleet.serve_store()
        await asyncio.sleep(1)

        async def follow() -> None:
            async for _ in fleet.store("gateway").watch("many/", 1):
                pass

        with pytest.raises(Compacted):
            async with asyncio.timeout(5.0):
                await fleet.processes["gateway"].spawn("follow", follow())

    fleet.run(main())


def test_a_leader_that_stays_is_waited_on_for_the_time_given(fleet: SmallFleet) -> None:
    """Else who lost its link to it would ask without a pause."""

    async def main() -> None:
        gateway = fleet.processes["gateway"]
        streams = SimStreams(gateway, fleet.network)
        links = gateway.run(StreamReportLinks, streams, fleet._directory("gateway"))

        async def ask() -> float:
            async with asyncio.timeout(5.0):
                while True:
                    with contextlib.suppress(NoLeader):
                        await (await links.open()).close()
                        break
            began_s = fleet.loop.now_s
            await links.wait_leader_change(0.7)
            return fleet.loop.now_s - began_s

        assert await gateway.spawn("ask", ask()) >= 0.69

    fleet.run(main())
