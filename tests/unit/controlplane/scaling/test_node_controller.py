"""The leader's rounds with a provider that fails, postpones or forgets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.adapters.memory.store import MemoryStore
from services.controlplane.fleet import decode
from services.controlplane.scaling.nodes import NodeController
from services.controlplane.scaling.policy.nodes import NodeLimits
from services.controlplane.telemetry import NodeTelemetry
from services.core.records import (
    DEPLOYMENTS,
    NODE_ORDERS,
    NODES,
    ROOT,
    WORKERS,
    Deployment,
    Meta,
    Node,
    Worker,
    dump,
    leader_key,
    load,
)
from services.core.scaling import NodeOrder, OrderState
from services.ports.store import Delete, Put
from services.runtime.fleet_state.informer import Informer
from tests.support.clocks import HandClock
from tests.support.election import StaticElection
from tests.support.nodes import MemoryNodes

KEY = leader_key("controlplane")


@dataclass
class Rig:
    store: MemoryStore
    clock: HandClock
    informer: Informer[object]
    nodes: MemoryNodes
    controller: NodeController
    epoch: int

    async def put(self, *operations: Put | Delete) -> None:
        await self.store.commit(list(operations))

    async def order(self, name: str, state: OrderState, *, node: str = "", node_type: str = "") -> None:
        order = NodeOrder(name, 0.0, node_type, state=state, node=node)
        await self.put(Put(NODE_ORDERS + name, dump(order)))

    async def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now_s += 10.0
            listing = await self.store.list(ROOT)
            while self.informer.revision < listing.revision:
                await asyncio.sleep(0)
            await self.controller.round(self.epoch)

    async def orders(self) -> dict[str, OrderState]:
        found = [load(one.value, NodeOrder) for one in (await self.store.list(NODE_ORDERS)).entries]
        return {one.order_id: one.state for one in found}


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    clock, names = HandClock(), itertools.count(1)
    store = MemoryStore(clock)
    await store.commit([Put(KEY, b"a")])
    entry = await store.get(KEY)
    assert entry is not None
    informer = Informer(store, ROOT, decode, clock)
    nodes = MemoryNodes()
    controller = NodeController(
        store,
        informer,
        StaticElection(entry.create_revision),
        KEY,
        clock,
        provider=nodes,
        limits=NodeLimits(most=4, order_s=100.0, idle_s=50.0),
        new_id=lambda: f"o{next(names)}",
        telemetry=NodeTelemetry(),
    )
    running = asyncio.create_task(informer.run())
    try:
        await informer.wait_synced(5.0)
        yield Rig(store, clock, informer, nodes, controller, entry.create_revision)  # type: ignore[arg-type]
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_node_that_is_released_later_stays_drained_until_then() -> None:
    async with rig() as found:
        await found.nodes.order("a", "", "")
        await found.put(Put(WORKERS + "node-0", dump(Worker("node-0", "w:1"))))
        await found.order("a", OrderState.RUNNING, node="node-0")
        found.nodes.kept = {"node-0"}
        await found.rounds(20)
        assert await found.orders() == {"a": OrderState.LEAVING}
        entry = await found.store.get(NODES + "node-0")
        assert entry is not None
        assert load(entry.value, Node).draining
        found.nodes.kept.clear()
        await found.rounds()
        assert (await found.orders(), found.nodes.nodes) == ({"a": OrderState.RELEASED}, {})


async def test_an_order_that_fails_does_not_keep_the_nodes_that_leave() -> None:
    async with rig() as found:
        await found.nodes.order("a", "", "")
        found.nodes.untyped = True
        await found.order("a", OrderState.LEAVING, node="node-0")
        await found.order("b", OrderState.ORDERED, node_type="gpu")
        await found.rounds()
        assert found.nodes.nodes == {}
        assert (await found.orders())["a"] is OrderState.RELEASED


async def test_the_node_of_a_failed_order_is_taken_back_by_the_next_leader_too() -> None:
    async with rig() as found:
        await found.nodes.order("a", "", "")
        await found.order("a", OrderState.FAILED, node="node-0")
        found.nodes.failing = True
        await found.rounds(3)
        assert found.nodes.nodes
        found.nodes.failing = False
        await found.rounds(30)
        assert found.nodes.nodes == {}
        before = len(found.nodes.calls)
        await found.rounds(10)
        assert len(found.nodes.calls) == before, "a provider without anything to do is not called"


async def test_a_need_is_ordered_with_the_labels_of_its_selector() -> None:
    async with rig() as found:
        selector = {"node-type": "gpu", "zone": "a"}
        deployment = Deployment(Meta("chat"), "m", "latest", "sha256:" + "a" * 64, 1, node_selector=selector)
        await found.put(Put(DEPLOYMENTS + "chat", dump(deployment)))
        await found.rounds(2)
        assert await found.orders() == {"o1": OrderState.ORDERED}
        assert list(found.nodes.nodes) == ["o1"]
