"""What happened to the split of a run: every write of a control plane or an operator, and every resolution.

Listeners only look. A write is reported where the store applies it, with the leader of that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.adapters.memory.store import MemoryStore
from services.core.records import Leader, leader_key, load
from services.core.rollouts.routes import SplitCaller
from services.gateway.catalog import ModelCatalog, Route
from services.ports.store import Committed, Condition, ConditionFailed, Operation
from simulator.kernel.links.store_link import SimStore
from simulator.kernel.network import Network
from simulator.kernel.process import Process

LEADER_KEY: Final = leader_key("controlplane")


@dataclass(frozen=True, slots=True)
class AppliedWrite:
    """A transaction that the store applied. ``leader``: who led the control plane at that moment, if any."""

    writer: str
    life: int
    leader: Leader | None
    operations: tuple[Operation, ...]
    revision: int


class RolloutListener:
    """Called where it happens; must not block, raise or change anything."""

    def written(self, written: AppliedWrite) -> None:
        """A control plane or an operator has just written."""

    def resolved(self, gateway: str, caller: SplitCaller, route: Route) -> None:
        """A gateway has just chosen the version of a request."""


class RolloutWatch(RolloutListener):
    """Passes on what it receives to its listeners."""

    def __init__(self) -> None:
        self.listeners: list[RolloutListener] = []

    def written(self, written: AppliedWrite) -> None:
        for listener in self.listeners:
            listener.written(written)

    def resolved(self, gateway: str, caller: SplitCaller, route: Route) -> None:
        for listener in self.listeners:
            listener.resolved(gateway, caller, route)


class SignedStore(SimStore):
    """A process's link to the store, whose writes are reported with their writer."""

    def __init__(self, process: Process, network: Network, watch: RolloutListener) -> None:
        super().__init__(process, network)
        self._writer = process
        self._watch = watch

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        return await self._ask(lambda store: self._signed(store, operations, conditions))

    async def _signed(
        self, store: MemoryStore, operations: Sequence[Operation], conditions: Sequence[Condition]
    ) -> Committed | ConditionFailed:
        entry = await store.get(LEADER_KEY)
        done = await store.commit(operations, conditions)
        if isinstance(done, Committed):
            leader = None if entry is None else load(entry.value, Leader)
            writer = self._writer
            self._watch.written(
                AppliedWrite(writer.name, writer.life, leader, tuple(operations), done.revision)
            )
        return done


class WatchedCatalog(ModelCatalog):
    """The production catalog of one gateway; it also reports to ``watch``, if there is one."""

    gateway = ""
    watch: RolloutListener | None = None

    def resolve(self, model: str, caller: SplitCaller | None = None) -> Route:
        route = super().resolve(model, caller)
        if caller is not None and self.watch is not None:
            self.watch.resolved(self.gateway, caller, route)
        return route
