"""The PlacementClient port while nobody leads: requests go on, and a leader that comes counts each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest

from services.core.errors import NoLeader
from services.core.generation import AnyGrant, FallbackGrant, Grant, NotAdmittedReason, PlaceSpec
from services.core.records import Priority
from services.gateway.fallback import FallbackSettings, GatewayFallback
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import TermSettings
from tests.contract.placement_rig import PlacementRig, placing, placing_simulated
from tests.integration.scheduler_fleet import DIGEST, place_spec
from tests.support.simulated import Check, World, checks_of, simulate
from tests.support.waiting import until

SETTINGS = TermSettings(queue=QueueLimits(predicted_output_tokens=32), beat_s=0.05)
ALONE = FallbackSettings(after_s=1.0, max_age_s=600.0, predicted_output_tokens=32)
PATIENT = replace(ALONE, after_s=3.0)


@dataclass
class Rig(PlacementRig):
    fallback: GatewayFallback

    async def told(self) -> None:
        """The leader told this gateway of a worker with room."""
        self.placement.start()
        await until(lambda: self.fallback.wait_s(self.clock.monotonic_s()) < 600.0)

    def ask(self, spec: PlaceSpec) -> asyncio.Task[AnyGrant]:
        return asyncio.ensure_future(self.placement.place(spec))

    async def alone(self, spec: PlaceSpec) -> FallbackGrant:
        grant = await self.placement.place(spec)
        assert isinstance(grant, FallbackGrant)
        return grant


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    fallback = GatewayFallback(Random(5), getattr(request, "param", ALONE))
    async with placing(SETTINGS, fallback) as parts:
        yield Rig(**vars(parts), fallback=fallback)


@asynccontextmanager
async def simulated(world: World, settings: FallbackSettings = ALONE) -> AsyncIterator[Rig]:
    fallback = GatewayFallback(Random(5), settings)
    async with placing_simulated(world, SETTINGS, fallback) as parts:
        yield Rig(**vars(parts), fallback=fallback)


async def test_without_ever_a_leader_nothing_is_placed(rig: Rig) -> None:
    with pytest.raises(NoLeader):
        await rig.placement.place(place_spec(queue_ttl_s=0.5))
    assert rig.placement.placed_alone == 0


@pytest.mark.parametrize("rig", [PATIENT], indirect=True, ids=["patient"])
async def test_while_a_leader_is_heard_it_alone_places(rig: Rig) -> None:
    rig.lead(1)
    await rig.told()
    await asyncio.sleep(PATIENT.after_s + 0.5)  # its heartbeats come meanwhile
    grant = await rig.placement.place(place_spec(prompt_tokens=200))
    assert isinstance(grant, Grant)
    waiting = rig.ask(place_spec("req_2", prompt_tokens=200, queue_ttl_s=0.7))
    await asyncio.wait((waiting,))
    assert not isinstance(waiting.exception(), NoLeader | None)
    assert rig.placement.placed_alone == 0


async def test_a_silent_leader_is_not_waited_for(rig: Rig) -> None:
    rig.lead(4)
    await rig.told()
    rig.lead(None)
    grant = await rig.alone(place_spec(prompt_tokens=40))
    assert (grant.worker_id, grant.address, grant.incarnation) == ("w1", "127.0.0.1:1", 100)
    assert (grant.last_epoch, grant.kv_blocks, grant.version_digest) == (4, 5, DIGEST)
    rig.lead(5)
    await until(lambda: rig.placement.connected)
    assert isinstance(await rig.placement.place(place_spec("req_2", prompt_tokens=40)), Grant)


async def test_workers_of_a_full_fleet_stay_known_and_are_asked_for_what_ended_meanwhile(rig: Rig) -> None:
    rig.lead(4)
    await rig.told()
    whole = await rig.placement.place(place_spec(prompt_tokens=224))
    assert isinstance(whole, Grant)
    assert rig.worker.start(whole)
    await until(lambda: [one.kv_tokens_room for one in rig.fallback._members[DIGEST].values()] == [0])
    rig.lead(None)
    rig.worker.finish(whole)
    grant = await rig.alone(place_spec("req_2", prompt_tokens=40))
    assert (grant.worker_id, grant.kv_blocks) == ("w1", 5)


async def test_what_waits_is_placed_by_class_and_arrival_as_far_as_there_is_room(rig: Rig) -> None:
    rig.lead(1)
    await rig.told()
    members = tuple(rig.fallback._members[DIGEST].values())
    blocking = await rig.placement.place(place_spec("req_0", prompt_tokens=200))
    waiting = {
        name: rig.ask(place_spec(name, prompt_tokens=90, priority=priority, arrival_unix_us=arrival))
        for name, priority, arrival in (
            ("batch", Priority.BATCH, 1),
            ("late", Priority.STANDARD, 9),
            ("early", Priority.STANDARD, 2),
            ("urgent", Priority.INTERACTIVE, 5),
        )
    }
    await until(lambda: len(rig.term.queue) == 4)
    # By the snapshot of before the grant, the pool is empty: what counts is the worker's word.
    rig.fallback.replace_snapshot(1, members, rig.clock.monotonic_s())
    rig.lead(None)
    await until(lambda: sum(task.done() for task in waiting.values()) == 2)
    done = {name for name, task in waiting.items() if task.done()}
    assert done == {"urgent", "early"}
    rig.placement.over(waiting["urgent"].result())
    await asyncio.wait((waiting["late"],))
    rig.placement.over(waiting["early"].result())
    await asyncio.wait((waiting["batch"],))
    assert all(isinstance(task.result(), FallbackGrant) for task in waiting.values())
    rig.placement.give_back(blocking)


async def test_a_refusal_sends_it_back_to_wait(rig: Rig) -> None:
    rig.lead(1)
    await rig.told()
    rig.lead(None)
    first = await rig.alone(place_spec(prompt_tokens=40))
    rig.placement.over(first, NotAdmittedReason.NO_FALLBACK)
    again = rig.ask(place_spec(prompt_tokens=40))
    await asyncio.sleep(0.1)
    assert not again.done()
    rig.lead(2)
    assert isinstance(await again, Grant)


async def test_a_leader_that_comes_gets_only_what_still_waits(rig: Rig) -> None:
    rig.lead(1)
    await rig.told()
    rig.lead(None)
    await until(lambda: rig.fallback.wait_s(rig.clock.monotonic_s()) == 0.0)
    asked = [rig.ask(place_spec(f"req_{n}", prompt_tokens=90)) for n in range(4)]
    await until(lambda: sum(task.done() for task in asked) == 2)
    rig.lead(2)
    grants = await asyncio.gather(*asked)
    assert [type(grant) for grant in grants] == [FallbackGrant] * 2 + [Grant] * 2
    assert sorted(grant.sequence for grant in grants if isinstance(grant, Grant)) == [1, 2]


async def test_a_caller_that_leaves_as_it_is_placed_takes_no_room_with_it(rig: Rig) -> None:
    rig.lead(1)
    await rig.told()
    rig.lead(None)
    blocking = await rig.alone(place_spec("req_0", prompt_tokens=200))
    leaving = rig.ask(place_spec("req_1", prompt_tokens=200))
    await until(lambda: rig.placement.pending == 1)
    rig.placement.over(blocking)
    rig.placement._place_waiting(rig.clock.monotonic_s())
    leaving.cancel()
    await asyncio.wait((leaving,))
    assert leaving.cancelled()
    assert isinstance(await rig.placement.place(place_spec("req_2", prompt_tokens=200)), FallbackGrant)


@pytest.mark.parametrize("check", checks_of(globals()))
def test_over_the_simulated_network(check: Check) -> None:
    simulate(check, simulated)


def test_a_fleet_that_is_full_for_longer_than_a_snapshot_may_be_old_stays_known() -> None:
    settings = FallbackSettings(after_s=0.3, max_age_s=120.0, predicted_output_tokens=32)

    async def check(rig: Rig) -> None:
        rig.lead(4)
        whole = await rig.placement.place(place_spec(prompt_tokens=224))
        assert isinstance(whole, Grant)
        assert rig.worker.start(whole)
        await asyncio.sleep(settings.max_age_s + 10.0)
        rig.lead(None)
        assert (await rig.alone(place_spec("req_2", prompt_tokens=40))).worker_id == "w1"

    simulate(check, partial(simulated, settings=settings))
