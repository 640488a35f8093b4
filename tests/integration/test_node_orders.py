"""Orders of nodes by a leader: stored before the call, placed again, drained and given back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.adapters.memory.store import MemoryStore
from services.controlplane.fleet import decode
from services.controlplane.scaling.nodes import NodeController
from services.controlplane.scaling.policy.nodes import NodeLimits
from services.controlplane.telemetry import NodeTelemetry
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    NODE_ORDERS,
    NODES,
    ROOT,
    WORKERS,
    AssignedVersion,
    Assignment,
    Deployment,
    Leader,
    Meta,
    Node,
    Worker,
    dump,
    leader_key,
    load,
)
from services.core.scaling import NodeOrder, OrderState
from services.ports.store import Delete, Put
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.supervisor import Supervisor
from tests.support.clocks import HandClock
from tests.support.election import StaticElection
from tests.support.nodes import MemoryNodes
from tests.support.waiting import until

KEY = leader_key("controlplane")
DIGEST = "sha256:" + "a" * 64


@dataclass
class Rig:
    store: MemoryStore
    provider: MemoryNodes
    clock: HandClock = field(default_factory=HandClock)
    election: StaticElection = field(default_factory=StaticElection)
    made: int = 0
    settle_s: float = 0.0
    informer: Any = None
    controller: Any = None

    async def start(self, supervisor: Supervisor) -> None:
        await self.put(KEY, Leader("a", ""))
        entry = await self.store.get(KEY)
        assert entry is not None
        self.election.turn(entry.create_revision)
        self.informer = Informer(self.store, ROOT, decode, SystemClock())
        supervisor.spawn("informer", self.informer.run())
        self.controller = NodeController(
            self.store,
            self.informer,
            self.election,
            self.clock,
            provider=self.provider,
            limits=NodeLimits(most=4, order_s=100.0, idle_s=50.0, settle_s=self.settle_s),
            new_id=self.new_id,
            telemetry=NodeTelemetry(),
            growth_variance=lambda: 0.0,
        )
        await self.put(DEPLOYMENTS + "chat", Deployment(Meta("chat"), "m", "latest", DIGEST, 1))

    def new_id(self) -> str:
        self.made += 1
        return f"o{self.made}"

    async def put(self, key: str, record: object) -> None:
        await self.store.commit([Put(key, dump(record))])

    async def elect(self) -> None:
        """Begin another term of the same process."""
        await self.store.commit([Delete(KEY)])
        await self.put(KEY, Leader("a", ""))
        entry = await self.store.get(KEY)
        assert entry is not None
        self.election.turn(entry.create_revision)

    async def round(self, seconds: float = 2.0) -> None:
        """Make a round after the informer has followed the store."""
        latest = (await self.store.list(ROOT)).revision
        await until(lambda: self.informer.revision >= latest)
        self.clock.now_s += seconds
        await self.controller.round(self.election.epoch)

    async def orders(self) -> list[NodeOrder]:
        return [load(entry.value, NodeOrder) for entry in (await self.store.list(NODE_ORDERS)).entries]


@asynccontextmanager
async def started(settle_s: float = 0.0) -> AsyncIterator[Rig]:
    """Yield a leader; most tests are of one that has led for a while."""
    supervisor = Supervisor(SystemClock())
    rig = Rig(MemoryStore(SystemClock()), MemoryNodes(), settle_s=settle_s)
    try:
        await rig.start(supervisor)
        yield rig
    finally:
        await supervisor.close()


@pytest.mark.asyncio
async def test_a_replica_without_a_node_gets_one_that_is_given_back_when_it_is_empty() -> None:
    async with started() as rig:
        await rig.round()
        await rig.round()
        (order,) = await rig.orders()
        assert (order.state, order.reason) == (OrderState.ORDERED, "chat")
        assert [name for call, name in rig.provider.calls if call == "order"] == [order.order_id]
        node = rig.provider.nodes[order.order_id]
        await rig.put(WORKERS + node, Worker(node, "h:1"))
        version = AssignedVersion("chat", "m", DIGEST)
        await rig.put(ASSIGNMENTS + node, Assignment(node, (version,)))
        await rig.round(500.0)
        assert (await rig.orders())[0].state is OrderState.RUNNING
        await rig.store.commit([Delete(DEPLOYMENTS + "chat"), Delete(ASSIGNMENTS + node)])
        await rig.round()
        await rig.round(60.0)
        entry = await rig.store.get(NODES + node)
        assert entry is None or load(entry.value, Node).draining
        await rig.round()
        (order,) = await rig.orders()
        assert order.state is OrderState.RELEASED
        assert rig.provider.nodes == {}
        calls = len(rig.provider.calls)
        await rig.round()
        assert len(rig.provider.calls) == calls, "a provider without an order is not called"


@pytest.mark.asyncio
async def test_a_provider_that_fails_gets_the_same_order_later_and_later() -> None:
    async with started() as rig:
        rig.provider.forgets = True
        await rig.round()
        await rig.round()
        assert {name for call, name in rig.provider.calls if call == "order"} == {"o1"}
        rig.provider.failing = True
        before = len(rig.provider.calls)
        for _ in range(30):
            await rig.round()
        assert len(rig.provider.calls) - before <= 6, "60 s: after 2, 4, 8, 16 and 32 s"
        assert len(await rig.orders()) == 1
        rig.provider.failing = False
        await rig.round(400.0)
        (order,) = await rig.orders()
        assert order.state is OrderState.FAILED
        assert "the provider lists no node" in order.reason


@pytest.mark.asyncio
async def test_a_deposed_leader_orders_nothing() -> None:
    async with started() as rig:
        await rig.store.commit([Delete(KEY)])
        await rig.round()
        assert await rig.orders() == []
        assert [call for call, _ in rig.provider.calls] == ["list"], "no order without its record"


@pytest.mark.asyncio
async def test_a_node_that_is_released_later_stays_drained_until_then() -> None:
    async with started() as rig:
        await rig.store.commit([Delete(DEPLOYMENTS + "chat")])
        await rig.provider.order("a", "", "")
        await rig.put(WORKERS + "node-0", Worker("node-0", "w:1"))
        await rig.put(NODE_ORDERS + "a", NodeOrder("a", 0.0, state=OrderState.RUNNING, node="node-0"))
        rig.provider.kept = {"node-0"}
        for _ in range(10):
            await rig.round(20.0)
        assert [one.state for one in await rig.orders()] == [OrderState.LEAVING]
        entry = await rig.store.get(NODES + "node-0")
        assert entry is not None
        assert load(entry.value, Node).draining
        rig.provider.kept.clear()
        await rig.round()
        assert [one.state for one in await rig.orders()] == [OrderState.RELEASED]
        assert rig.provider.nodes == {}


@pytest.mark.asyncio
async def test_an_order_that_fails_does_not_keep_the_nodes_that_leave() -> None:
    async with started() as rig:
        await rig.store.commit([Delete(DEPLOYMENTS + "chat")])
        await rig.provider.order("a", "", "")
        rig.provider.untyped = True
        await rig.put(NODE_ORDERS + "a", NodeOrder("a", 0.0, state=OrderState.LEAVING, node="node-0"))
        await rig.put(NODE_ORDERS + "b", NodeOrder("b", 1000.0, "gpu"))
        await rig.round()
        assert rig.provider.nodes == {}
        assert [one.state for one in await rig.orders()] == [OrderState.RELEASED, OrderState.ORDERED]


@pytest.mark.asyncio
async def test_the_node_of_a_failed_order_is_taken_back_whatever_failed_meanwhile() -> None:
    async with started() as rig:
        await rig.store.commit([Delete(DEPLOYMENTS + "chat")])
        await rig.provider.order("a", "", "")
        await rig.put(NODE_ORDERS + "a", NodeOrder("a", 0.0, state=OrderState.FAILED, node="node-0"))
        rig.provider.failing = True
        for _ in range(3):
            await rig.round(10.0)
        assert rig.provider.nodes
        rig.provider.failing = False
        await rig.round(400.0)
        assert rig.provider.nodes == {}
        calls = len(rig.provider.calls)
        await rig.round()
        assert len(rig.provider.calls) == calls


@pytest.mark.asyncio
async def test_a_new_leader_changes_no_node_before_workers_had_time_to_register() -> None:
    """An outage of the store ends their leases and the leader's: neither is a lost node, nor an empty one."""
    async with started(settle_s=10.0) as rig:
        await rig.provider.order("a", "", "")
        await rig.put(NODE_ORDERS + "a", NodeOrder("a", 0.0, state=OrderState.LEAVING, node="node-0"))
        version = AssignedVersion("chat", "m", DIGEST)
        await rig.put(ASSIGNMENTS + "node-0", Assignment("node-0", (version,)))
        for _ in range(4):
            await rig.round()
        assert rig.provider.nodes, "a node that is busy was given back"
        await rig.put(WORKERS + "node-0", Worker("node-0", "w:1"))
        for _ in range(4):
            await rig.round()
        assert [(one.order_id, one.state) for one in await rig.orders()] == [("a", OrderState.LEAVING)]
        assert rig.provider.nodes
        await rig.store.commit([Delete(WORKERS + "node-0")])
        await rig.elect()
        await rig.round()
        await rig.round(9.0)
        assert list(rig.provider.nodes) == ["a"], "another term of the same process is a new leader"
        await rig.round()
        assert list(rig.provider.nodes) != ["a"], "the lost one is given back, and another is ordered"


@pytest.mark.asyncio
async def test_a_node_is_not_idle_since_an_earlier_term() -> None:
    async with started() as rig:
        await rig.store.commit([Delete(DEPLOYMENTS + "chat")])
        await rig.provider.order("a", "", "")
        await rig.put(WORKERS + "node-0", Worker("node-0", "w:1"))
        await rig.put(NODE_ORDERS + "a", NodeOrder("a", 0.0, state=OrderState.RUNNING, node="node-0"))
        await rig.round()
        rig.clock.now_s += 500.0  # another leads, and it serves
        await rig.elect()
        await rig.round()
        assert [one.state for one in await rig.orders()] == [OrderState.RUNNING]
        await rig.round(51.0)
        assert [one.state for one in await rig.orders()] == [OrderState.RELEASED]
