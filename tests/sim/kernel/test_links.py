"""Production services over the simulated links: election, placement and reports through failures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from services.core.errors import NoLeader, QueueTimeout
from services.core.generation import Grant
from tests.sim.kernel.small_fleet import DIGEST, SmallFleet


@pytest.fixture
def fleet() -> SmallFleet:
    return SmallFleet()


async def placed(fleet: SmallFleet, number: int) -> Grant:
    """Ask for a place from within the gateway."""
    ask: Coroutine[Any, Any, Grant] = fleet.place(number)
    return await fleet.processes["gateway"].spawn("place", ask)


def test_a_placement_is_granted(fleet: SmallFleet) -> None:
    async def main() -> None:
        grant = await placed(fleet, 1)
        assert (grant.worker_id, grant.incarnation) == ("w1", 100)
        assert len(fleet.leaders) == 1
        assert fleet.loop.now_s < 2.0

    fleet.run(main())


def test_a_standby_takes_over_from_a_leader_that_is_killed(fleet: SmallFleet) -> None:
    async def main() -> None:
        first = await placed(fleet, 1)
        (leader,) = fleet.leaders
        fleet.processes[leader].crash()
        del fleet.services[leader]
        killed_s = fleet.loop.now_s
        second = await placed(fleet, 2)
        assert second.epoch > first.epoch
        assert 2.0 < fleet.loop.now_s - killed_s < 5.0
        fleet.restart(leader)
        fleet.start_scheduler(leader)
        await asyncio.sleep(10)
        assert len(fleet.leaders) == 1
        assert (await placed(fleet, 3)).epoch == second.epoch

    fleet.run(main())


def test_a_leader_that_freezes_loses_its_term(fleet: SmallFleet) -> None:
    async def main() -> None:
        first = await placed(fleet, 1)
        (leader,) = fleet.leaders
        fleet.processes[leader].pause()
        second = await placed(fleet, 2)
        assert second.epoch > first.epoch
        await asyncio.sleep(5)
        fleet.processes[leader].resume()
        await asyncio.sleep(5)
        assert fleet.leaders != [leader]
        assert len(fleet.leaders) == 1
        assert fleet.heard_epochs == sorted(fleet.heard_epochs)

    fleet.run(main())


def test_a_half_open_link_is_given_up_after_its_silence_limit(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        (leader,) = fleet.leaders
        await asyncio.sleep(1)
        fleet.network.half_open(leader, "gateway")
        fleet.network.half_open("gateway", leader)
        began_s = fleet.loop.now_s
        grant = await placed(fleet, 2)
        assert grant.worker_id == "w1"
        assert 2.0 < fleet.loop.now_s - began_s < 5.0

    fleet.run(main())


def test_a_gateway_that_is_cut_off_says_so_and_recovers(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        fleet.network.partition(("gateway",), ("scheduler-0", "scheduler-1"))
        await asyncio.sleep(10)
        gateway = fleet.processes["gateway"]
        with pytest.raises(NoLeader):
            await gateway.spawn("place", fleet.place(2, queue_ttl_s=5.0))
        waiting = gateway.spawn("place", fleet.place(3))
        await asyncio.sleep(2)
        fleet.network.heal()
        assert (await waiting).worker_id == "w1"

    fleet.run(main())


def test_a_store_that_is_away_ends_the_term_and_its_return_begins_another(fleet: SmallFleet) -> None:
    async def main() -> None:
        first = await placed(fleet, 1)
        fleet.processes["store"].crash()
        await asyncio.sleep(10)
        assert fleet.leaders == []
        fleet.restart("store")
        fleet.serve_store()
        second = await placed(fleet, 2)
        assert second.epoch > first.epoch

    fleet.run(main())


def test_a_worker_that_is_cut_off_gets_nothing(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        (leader,) = fleet.leaders
        fleet.network.cut("worker", leader)
        await asyncio.sleep(6)
        waiting = fleet.processes["gateway"].spawn("place", fleet.place(2))
        await asyncio.sleep(3)
        assert not waiting.done()
        fleet.network.heal()
        assert (await waiting).worker_id == "w1"

    fleet.run(main())


def test_a_leader_that_beats_and_hears_no_report_is_given_up(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        (leader,) = fleet.leaders
        fleet.network.half_open("worker", leader)
        await asyncio.sleep(4)
        waiting = fleet.processes["gateway"].spawn("place", fleet.place(2))
        began_s = fleet.loop.now_s
        assert (await waiting).worker_id == "w1"
        assert fleet.loop.now_s - began_s < 3.0
        assert fleet.leaders == [leader]

    fleet.run(main())


def test_a_worker_that_stood_still_for_a_moment_keeps_its_link(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        for _ in range(5):
            await asyncio.sleep(1)
            fleet.processes["worker"].pause()
            await asyncio.sleep(2.4)
            fleet.processes["worker"].resume()
        await asyncio.sleep(10)
        assert fleet.whole_reports == 1

    fleet.run(main())


def test_a_leader_that_beats_and_hears_no_placement_is_given_up(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        (leader,) = fleet.leaders
        await asyncio.sleep(1)
        fleet.network.half_open("gateway", leader)
        gateway = fleet.processes["gateway"]
        with pytest.raises(QueueTimeout):
            await gateway.spawn("place", fleet.place(2, queue_ttl_s=3.0))
        began_s = fleet.loop.now_s
        assert (await placed(fleet, 3)).worker_id == "w1"
        assert fleet.loop.now_s - began_s < 2.0

    fleet.run(main())


def test_a_leader_that_lets_wait_and_answers_others_is_kept(fleet: SmallFleet) -> None:
    """A timeout is an answer."""

    async def main() -> None:
        await placed(fleet, 1)
        link = fleet.placement._link
        fleet.kv_blocks_reserved = fleet.kv_blocks
        fleet.reporter.changed()
        await asyncio.sleep(1)
        gateway = fleet.processes["gateway"]
        with pytest.raises(QueueTimeout):
            await gateway.spawn("place", fleet.place(2, queue_ttl_s=3.0))
        assert fleet.placement._link is link

    fleet.run(main())


def test_an_idle_link_to_a_leader_without_workers_is_kept_by_its_beats(fleet: SmallFleet) -> None:
    async def main() -> None:
        fleet.processes["worker"].crash()
        fleet.processes["gateway"].run(fleet.placement.start)
        while not fleet.placement.connected:
            await asyncio.sleep(0.1)
        gone = 0
        for _ in range(200):
            await asyncio.sleep(0.1)
            gone += not fleet.placement.connected
        assert gone == 0

    fleet.run(main())


def test_a_placement_that_is_withdrawn_waits_no_more(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        fleet.kv_blocks_reserved = fleet.kv_blocks
        fleet.reporter.changed()
        await asyncio.sleep(1)
        waiting = fleet.processes["gateway"].spawn("place", fleet.place(2))
        await asyncio.sleep(1)
        assert len(fleet.term.queue) == 1
        waiting.cancel()
        await asyncio.sleep(1)
        assert len(fleet.term.queue) == 0

    fleet.run(main())


def test_a_worker_that_ends_is_placed_on_no_more_at_once(fleet: SmallFleet) -> None:
    async def main() -> None:
        await placed(fleet, 1)
        fleet.processes["worker"].crash()
        await asyncio.sleep(0.2)
        assert not fleet.term.fleet.candidates(DIGEST)["w1"].reporting

    fleet.run(main())
