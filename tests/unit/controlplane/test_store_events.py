"""Stores that are lost and come back are events, written by the leader, also after a loss of etcd."""

from __future__ import annotations

from services.adapters.memory.store import MemoryStore
from services.controlplane.event_log import EventRecorder, event_of
from services.controlplane.store_events import StoreEvents
from services.core.records import EVENTS, leader_key
from services.ports.store import Put
from tests.support.clocks import HandClock
from tests.support.election import StaticElection

LEADER = leader_key("controlplane")


async def ping() -> None:
    return None


async def reasons(store: MemoryStore) -> list[tuple[str, str, bool]]:
    found = [event_of(entry) for entry in (await store.list(EVENTS)).entries]
    records = sorted((event.record for event in found if event is not None), key=lambda one: one.reason)
    return [(one.resource, one.reason, one.warning) for one in records]


async def test_a_loss_and_a_return_are_one_event_each() -> None:
    clock = HandClock()
    store = MemoryStore(clock)
    await store.commit([Put(LEADER, b"a")])
    leader = await store.get(LEADER)
    assert leader is not None
    problems = {"Redis": ""}
    events = StoreEvents(
        {"Redis": lambda: problems["Redis"]},
        StaticElection(1),
        clock,
        events=EventRecorder(store, clock),
        ping=ping,
    )
    events.look()
    problems["Redis"] = "Redis does not answer"
    for _ in range(3):
        events.look()
    await events.write(leader.create_revision)
    assert await reasons(store) == [("Redis", "STORE_LOST", True)]
    problems["Redis"] = ""
    for _ in range(3):
        events.look()
    await events.write(leader.create_revision)
    await events.write(leader.create_revision)
    assert await reasons(store) == [("Redis", "STORE_LOST", True), ("Redis", "STORE_RETURNED", False)]


async def test_what_another_leader_saw_long_ago_is_not_written_again() -> None:
    clock = HandClock()
    store = MemoryStore(clock)
    events = StoreEvents(
        {"etcd": lambda: "etcd does not answer"},
        StaticElection(1),
        clock,
        events=EventRecorder(store, clock),
        ping=ping,
    )
    events.look()
    clock.now_s += 3600
    await events.write(1)
    assert await reasons(store) == []
