"""The gateway's side of placements against links that stall, break, lie and cross its own messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from random import Random

import pytest
import structlog

from services.adapters.links.muxed_placement import (
    MuxedPlacement,
    PlacementLink,
    PlacementSettings,
    SlotsMessage,
)
from services.core.errors import FairwayError, NoLeader, QueueFull, QueueTimeout, ShareExceeded
from services.core.fleet import Granted, PlacementFrame, PlacementRefused, PoolMember
from services.core.generation import FallbackGrant, Grant, NotAdmittedReason, PlaceSpec
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.support.place_specs import PLACE_SPEC
from tests.support.waiting import until

GRACE_S = 2.2  # more than the usual one
SPEC = replace(PLACE_SPEC, prompt_tokens=1, max_output_tokens=1, arrival_unix_us=123, queue_ttl_s=100.0)


def with_ttl(seconds: float) -> PlaceSpec:
    return replace(SPEC, queue_ttl_s=seconds)


def grant_of(epoch: int, sequence: int) -> Grant:
    return Grant("w1", "h:1", 1, epoch, sequence, 1, 2.0, "d")


class ScriptedLink:
    """A link whose far side is the test."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.places: list[tuple[int, PlaceSpec, float]] = []
        self.cancelled: list[int] = []
        self.messages = 0
        self.send_error: FairwayError | None = None
        self.closed = False
        self._frames: asyncio.Queue[PlacementFrame | FairwayError] = asyncio.Queue()

    async def send_slots(self, message: SlotsMessage) -> None:
        raise AssertionError("no demand")

    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        if self.send_error is not None:
            raise self.send_error
        self.messages += 1
        self.places += places
        self.cancelled += cancelled

    async def receive(self) -> PlacementFrame:
        found = await self._frames.get()
        if isinstance(found, FairwayError):
            raise found
        return found

    async def close(self) -> None:
        self.closed = True
        self._frames.put_nowait(NoLeader("closed"))

    def answer(self, *outcomes: Granted | PlacementRefused) -> None:
        self._frames.put_nowait(PlacementFrame(self.epoch, outcomes))

    def break_off(self) -> None:
        self._frames.put_nowait(NoLeader("broken"))


class ScriptedLinks:
    def __init__(self) -> None:
        self.next: list[ScriptedLink] = []
        self.opened: list[ScriptedLink] = []
        self.log_context: dict[str, object] = {}

    async def open(self) -> PlacementLink:
        self.log_context = structlog.contextvars.get_contextvars()
        if not self.next:
            raise NoLeader("nobody leads")
        self.opened.append(self.next.pop(0))
        return self.opened[-1]

    async def wait_leader_change(self, timeout_s: float) -> None:
        await asyncio.sleep(0.01)

    async def close(self) -> None:
        pass


class Rig:
    def __init__(self, supervisor: Supervisor) -> None:
        self.links = ScriptedLinks()
        settings = PlacementSettings(max_pending=600, answer_grace_s=GRACE_S)
        self.placement = MuxedPlacement(self.links, SystemClock(), supervisor, Random(1), settings)

    async def link(self, epoch: int) -> ScriptedLink:
        """Return a link that was opened."""
        found = ScriptedLink(epoch)
        self.links.next.append(found)
        self.placement.start()
        await until(lambda: found in self.links.opened)
        return found

    def place(self, spec: PlaceSpec = SPEC) -> asyncio.Task[Grant]:
        async def granted() -> Grant:
            grant = await self.placement.place(spec)
            assert isinstance(grant, Grant)
            return grant

        return asyncio.ensure_future(granted())


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    supervisor = Supervisor(SystemClock())
    found = Rig(supervisor)
    yield found
    await found.placement.close()
    assert supervisor.failures == ()
    assert found.placement.pending == 0
    await supervisor.close()


async def test_many_asked_at_once_travel_in_few_messages(rig: Rig) -> None:
    link = await rig.link(1)
    asking = [rig.place() for _ in range(300)]
    await until(lambda: len(link.places) == 300)
    with pytest.raises(ShareExceeded, match=r"300 placements of this tenant .*wait until some have begun"):
        await rig.placement.place(SPEC)
    other = replace(SPEC, tenant_id="beta")
    asking += [rig.place(other) for _ in range(300)]
    await until(lambda: len(link.places) == 600)
    assert link.messages == 2
    with pytest.raises(QueueFull):
        await rig.placement.place(replace(SPEC, tenant_id="gamma"))
    link.answer(*(Granted(number, grant_of(1, number)) for number, _, _ in link.places))
    assert [grant.sequence for grant in await asyncio.gather(*asking)] == list(range(1, 601))


async def test_tenants_take_turns_in_what_a_leader_has_not_received(rig: Rig) -> None:
    """One placement of a tenant is not behind the hundreds of another that came before."""
    crowd = [rig.place() for _ in range(299)]
    await until(lambda: rig.placement.pending == 299)
    canary = rig.place(replace(SPEC, tenant_id="beta"))
    await until(lambda: rig.placement.pending == 300)
    link = await rig.link(1)
    await until(lambda: len(link.places) == 300)
    assert [spec.tenant_id for _, spec, _ in link.places].index("beta") <= 1
    of_crowd = [number for number, spec, _ in link.places if spec.tenant_id != "beta"]
    assert of_crowd == sorted(of_crowd)
    link.answer(*(Granted(number, grant_of(1, number)) for number, _, _ in link.places))
    await asyncio.gather(*crowd, canary)


async def test_the_link_logs_under_no_request_that_happened_to_start_it(rig: Rig) -> None:
    with structlog.contextvars.bound_contextvars(request_id="req_1"):
        await rig.link(1)
    assert "request_id" not in rig.links.log_context


async def test_a_broken_link_loses_nothing_and_the_next_is_asked_with_the_same_arrival(rig: Rig) -> None:
    link = await rig.link(1)
    asking = [rig.place() for _ in range(3)]
    await until(lambda: len(link.places) == 3)
    link.answer(Granted(2, grant_of(1, 1)))
    await until(lambda: asking[1].done())
    await asyncio.sleep(0.05)
    link.break_off()
    second = await rig.link(2)
    assert link.closed
    await until(lambda: len(second.places) == 2)
    assert [(number, spec.arrival_unix_us) for number, spec, _ in second.places] == [(1, 123), (3, 123)]
    assert all(50 < ttl_s < 99.96 for _, _, ttl_s in second.places), "what is left of the time to wait"
    second.answer(Granted(1, grant_of(2, 1)), Granted(3, grant_of(2, 2)))
    assert [(await task).epoch for task in asking] == [2, 1, 2]


async def test_a_leader_of_the_past_is_not_listened_to(rig: Rig) -> None:
    link = await rig.link(5)
    asking = rig.place()
    await until(lambda: len(link.places) == 1)
    link.break_off()
    old = await rig.link(4)
    await until(lambda: old.closed)
    assert not old.places
    new = await rig.link(6)
    await until(lambda: len(new.places) == 1)
    new.answer(Granted(1, grant_of(6, 1)))
    assert (await asking).epoch == 6


async def test_a_link_that_cannot_be_written_to_is_given_up(rig: Rig) -> None:
    link = await rig.link(1)
    link.send_error = NoLeader("stalled")
    asking = rig.place()
    second = await rig.link(1)
    assert link.closed
    await until(lambda: len(second.places) == 1)
    second.answer(Granted(1, grant_of(1, 1)))
    assert (await asking).sequence == 1


async def test_a_grant_that_finds_its_caller_gone_is_given_back(rig: Rig) -> None:
    link = await rig.link(1)
    asking = rig.place()
    await until(lambda: len(link.places) == 1)
    asking.cancel()
    await until(lambda: link.cancelled == [1])
    link.answer(Granted(1, grant_of(1, 1)))
    await until(lambda: link.cancelled == [1, 1])


async def test_a_grant_that_crosses_the_cancellation_is_given_back(rig: Rig) -> None:
    link = await rig.link(1)
    asking = rig.place()
    await until(lambda: len(link.places) == 1)
    pending = rig.placement._pending[1]
    pending.future.set_result(grant_of(1, 1))
    rig.placement._granted["w1", 1, 1] = (1, 1e18)
    asking.cancel()
    await asyncio.wait((asking,))
    assert asking.cancelled()
    await until(lambda: link.cancelled == [1])


async def test_what_was_never_sent_needs_no_withdrawal(rig: Rig) -> None:
    asking = rig.place()
    await asyncio.sleep(0.02)
    asking.cancel()
    await asyncio.wait((asking,))
    link = await rig.link(1)
    await asyncio.sleep(0.02)
    assert (link.places, link.cancelled) == ([], [])


async def test_a_refusal_reaches_its_caller(rig: Rig) -> None:
    link = await rig.link(1)
    asking = rig.place()
    await until(lambda: len(link.places) == 1)
    link.answer(
        PlacementRefused(1, QueueFull("full", retry_after_s=3.0)), PlacementRefused(1, QueueFull("twice"))
    )
    with pytest.raises(QueueFull) as full:
        await asking
    assert full.value.retry_after_s == 3.0


async def test_a_leader_that_never_answers_is_waited_for_in_bounded_time(rig: Rig) -> None:
    link = await rig.link(1)
    asking, began_s = rig.place(with_ttl(0.1)), asyncio.get_running_loop().time()
    with pytest.raises(QueueTimeout):
        async with asyncio.timeout(30):
            await asking
    # The clocks that time the queue and the grace are read one after the other.
    assert asyncio.get_running_loop().time() - began_s > 0.1 + GRACE_S - 0.05
    assert link.closed, "it beats and does not hear"
    again = await rig.link(1)
    late = rig.place(with_ttl(1.0))
    other = rig.place(with_ttl(5.0))
    await until(lambda: len(again.places) == 2)
    again.answer(Granted(3, grant_of(1, 1)))
    await other
    with pytest.raises(QueueTimeout):
        async with asyncio.timeout(30):
            await late
    assert not again.closed, "it is late, and hears"
    await until(lambda: again.cancelled == [2])


async def test_without_a_link_the_error_says_why(rig: Rig) -> None:
    with pytest.raises(NoLeader, match="nobody leads"):
        await rig.placement.place(with_ttl(0.1))


async def test_giving_back_is_told_once_and_only_to_the_leader_that_gave_it(rig: Rig) -> None:
    link = await rig.link(1)
    asking = rig.place()
    await until(lambda: len(link.places) == 1)
    link.answer(Granted(1, grant_of(1, 1)))
    grant = await asking
    rig.placement.give_back(grant)
    rig.placement.give_back(grant)
    await until(lambda: link.cancelled == [1])
    second = rig.place()
    await until(lambda: len(link.places) == 2)
    link.answer(Granted(2, grant_of(1, 2)))
    late = await second
    link.break_off()
    newer = await rig.link(2)
    rig.placement.give_back(late)
    await asyncio.sleep(0.02)
    assert newer.cancelled == []


# --- without a leader ------------------------------------------------------------------------------


class Alone:
    """A placer that takes everything once it is told to, and counts what is over."""

    def __init__(self) -> None:
        self.open = False
        self.answers = 0
        self.snapshots: list[tuple[int, int]] = []
        self.ends: list[NotAdmittedReason | None] = []

    def leader_answered(self, now_s: float) -> None:
        self.answers += 1

    def replace_snapshot(self, epoch: int, members: Sequence[PoolMember], now_s: float) -> None:
        self.snapshots.append((epoch, len(members)))

    def wait_s(self, now_s: float) -> float:
        return 0.0 if self.open else 60.0

    def place(self, spec: PlaceSpec, now_s: float) -> FallbackGrant | None:
        return FallbackGrant("w9", "h:9", 1, 4, 1, "d") if self.open else None

    def ended(self, grant: FallbackGrant, refusal: NotAdmittedReason | None, now_s: float) -> None:
        self.ends.append(refusal)


@pytest.fixture
async def alone() -> AsyncIterator[tuple[Rig, Alone]]:
    supervisor, placer = Supervisor(SystemClock()), Alone()
    found = Rig(supervisor)
    settings = PlacementSettings(max_pending=600, answer_grace_s=GRACE_S)
    found.placement = MuxedPlacement(
        found.links, SystemClock(), supervisor, Random(1), settings, fallback=placer
    )
    yield found, placer
    await found.placement.close()
    assert supervisor.failures == ()
    await supervisor.close()


async def test_a_leader_is_heard_with_each_frame_and_members_are_learned(alone: tuple[Rig, Alone]) -> None:
    rig, placer = alone
    link = await rig.link(4)
    await until(lambda: placer.answers == 1)
    link.answer()
    await until(lambda: placer.answers == 2)
    member = PoolMember("w1", "h:1", 1, "d", 16, 16, 16, 1, 0)
    link._frames.put_nowait(PlacementFrame(4, members=(member,)))
    await until(lambda: placer.snapshots == [(4, 1)])


async def test_a_grant_that_crosses_a_placement_alone_is_given_back(alone: tuple[Rig, Alone]) -> None:
    rig, placer = alone
    link = await rig.link(4)
    asking = asyncio.ensure_future(rig.placement.place(SPEC))
    await until(lambda: len(link.places) == 1)
    placer.open = True
    rig.placement._place_waiting(0.0)
    assert isinstance(await asking, FallbackGrant)
    number = link.places[0][0]
    await until(lambda: link.cancelled == [number])
    link.answer(Granted(number, grant_of(4, 1)))
    await until(lambda: link.cancelled == [number, number])


async def test_what_was_not_sent_is_never_sent_once_placed_alone(alone: tuple[Rig, Alone]) -> None:
    rig, placer = alone
    asking = asyncio.ensure_future(rig.placement.place(SPEC))
    await asyncio.sleep(0.05)
    placer.open = True
    rig.placement._place_waiting(0.0)
    grant = await asking
    link = await rig.link(5)
    await asyncio.sleep(0.05)
    assert (link.places, link.cancelled) == ([], [])
    rig.placement.give_back(grant)
    assert placer.ends == []
    rig.placement.over(grant, NotAdmittedReason.NO_FALLBACK)
    rig.placement.over(grant_of(5, 1))
    assert placer.ends == [NotAdmittedReason.NO_FALLBACK]
