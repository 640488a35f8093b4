"""Faults, carried out on a fleet: the target of each, and how it heals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeVar

from fairway.task_group import TaskGroup
from services.core.generation import PlaceSpec, StartSpec
from services.scheduler.term import Term
from simulator.fleet.assembly import STORE, SimFleet
from simulator.fleet.chaos import FaultKind, InjectedFault, Moment
from simulator.fleet.grant_watch import GrantListener
from simulator.fleet.nodes.node_provider import PROVIDER
from simulator.fleet.nodes.shared_stores import LEDGER, REDIS
from simulator.kernel.network import Latency

T = TypeVar("T")
_FLAP_S: Final = 0.8
_PREFILL_S: Final = 0.02
_DRAIN_S: Final = 5.0
_POOL_TURN_S: Final = 1.6
_OUTAGES: Final = {
    FaultKind.STORE_OUTAGE: STORE,
    FaultKind.REDIS_OUTAGE: REDIS,
    FaultKind.LEDGER_OUTAGE: LEDGER,
    FaultKind.PROVIDER_OUTAGE: PROVIDER,
}


class FaultSchedule(GrantListener):
    """A plan of a run: each fault of a schedule strikes and heals in its turn; all have healed at the end.

    ``struck`` counts what was carried out, by kind.
    """

    def __init__(self, faults: Sequence[InjectedFault], *, patience_s: float = 1.0) -> None:
        self._faults = faults
        self._patience_s = patience_s
        self._waiting: list[tuple[Moment, asyncio.Future[str]]] = []
        self.struck: Counter[FaultKind] = Counter()

    async def run(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        self._rng = Random(f"strikes {fleet.spec.seed}")
        fleet.grants.listeners.append(self)
        async with TaskGroup() as group:
            for fault in self._faults:
                group.create_task(self._carry_out(fault))

    async def _carry_out(self, fault: InjectedFault) -> None:
        fleet = self._fleet
        await fleet.wait(fault.at_s)
        worker = None
        if fault.moment is not Moment.AT_ONCE:
            worker = await self._reach(fault.moment)
        heal = self._strike(fault, worker)
        if heal is None:
            return
        self.struck[fault.kind] += 1
        try:
            await fleet.wait(fault.for_s)
        finally:
            heal()

    async def _reach(self, moment: Moment) -> str | None:
        """Return the worker at which the moment comes next, None when it does not come in time."""
        reached: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((moment, reached))
        await asyncio.wait((reached,), timeout=self._patience_s)
        if not reached.done():
            self._waiting.remove((moment, reached))
            return None
        if moment is Moment.IN_PREFILL:
            await self._fleet.wait(self._rng.uniform(0.0, _PREFILL_S))
        return reached.result()

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        self._come(Moment.AFTER_GRANT, worker_id)

    def started(self, worker_id: str, spec: StartSpec) -> None:
        self._come(Moment.IN_PREFILL, worker_id)

    def _come(self, moment: Moment, worker_id: str) -> None:
        for index, (wanted, reached) in enumerate(self._waiting):
            if wanted is moment:
                del self._waiting[index]
                reached.set_result(worker_id)
                return

    # --- the faults --------------------------------------------------------------------------------

    def _strike(self, fault: InjectedFault, worker: str | None) -> Callable[[], None] | None:
        """Let it happen now; return what heals it, None when there is nothing left that it may strike."""
        match fault.kind:
            case FaultKind.ZONE_LOSS:
                return self._lose_zone(fault.pick)
            case FaultKind.NODE_LOSS | FaultKind.NODE_PREEMPTED:
                return self._lose_node(fault)
            case FaultKind.POOL_LOSS:
                return self._lose_pool()
        name = self._target(fault, worker)
        if name is None:
            return None
        match fault.kind:
            case (
                FaultKind.WORKER_CRASH
                | FaultKind.GATEWAY_CRASH
                | FaultKind.LEADER_CRASH
                | FaultKind.PLANE_CRASH
            ):
                return self._crash(name, silent=fault.other < 0.3)
            case (
                FaultKind.WORKER_PAUSE
                | FaultKind.GATEWAY_PAUSE
                | FaultKind.LEADER_PAUSE
                | FaultKind.PLANE_PAUSE
                | FaultKind.STORE_OUTAGE
                | FaultKind.REDIS_OUTAGE
                | FaultKind.LEDGER_OUTAGE
                | FaultKind.PROVIDER_OUTAGE
            ):
                return self._pause(name)
            case FaultKind.STALE_GATEWAY:
                return self._cut_off(name)
            case FaultKind.WORKER_FLAP:
                return self._flap(name)
            case FaultKind.WORKER_SLOW:
                return self._slow(name, fault.amount)
            case FaultKind.WORKER_DRAIN | FaultKind.GATEWAY_DRAIN:
                return self._drain(name)
            case FaultKind.ENGINE_CRASH:
                return self._crash_engine(name)
            case FaultKind.ENGINE_HANG:
                return self._hang_engine(name)
            case FaultKind.NETWORK_CUT | FaultKind.HALF_OPEN | FaultKind.LATENCY_STORM:
                return self._disturb(fault, name)
            case FaultKind.CLOCK_JUMP:
                return self._jump(name, fault.amount)

    def _target(self, fault: InjectedFault, worker: str | None) -> str | None:
        """Return a process that runs and that the kind may strike."""
        fleet = self._fleet
        if fault.kind in _OUTAGES:
            return self._running(_OUTAGES[fault.kind])
        if worker is not None and fault.kind is not FaultKind.WORKER_FLAP:
            return self._running(worker)
        kind = fault.kind.value
        if kind.startswith("leader"):
            leader = fleet.leader
            return None if leader is None else self._running(leader.name)
        if kind.startswith("plane"):
            plane = fleet.plane
            return None if plane is None else self._running(plane.name)
        if kind.startswith(("gateway", "stale")):
            return _pick(self._all_running(fleet.gateways), fault.pick)
        if kind.startswith(("worker", "engine")):
            return _pick(self._all_running(fleet.workers), fault.pick)
        return _pick(self._all_running(fleet.processes), fault.pick)

    def _running(self, name: str) -> str | None:
        return name if self._fleet.processes[name].running else None

    def _all_running(self, names: dict[str, T] | list[str]) -> list[str]:
        return [name for name in names if self._fleet.processes[name].running]

    def _crash(self, name: str, *, silent: bool) -> Callable[[], None]:
        self._fleet.crash(name, silent=silent)
        return lambda: self._restart(name)

    def _restart(self, name: str) -> None:
        if not self._fleet.processes[name].alive:
            self._fleet.restart(name)

    def _pause(self, name: str) -> Callable[[], None]:
        self._fleet.trace.note(name, "paused")
        self._fleet.processes[name].pause()

        def resume() -> None:
            process = self._fleet.processes[name]
            if process.paused:
                self._fleet.trace.note(name, "resumed")
                process.resume()

        return resume

    def _flap(self, name: str) -> Callable[[], None]:
        """Crash and restart repeatedly."""
        fleet, timers = self._fleet, list[asyncio.TimerHandle]()

        def turn() -> None:
            if fleet.processes[name].running:
                fleet.crash(name)
            else:
                self._restart(name)
            wait_s = _FLAP_S * (0.5 + self._rng.random())
            timers[:] = [fleet.loop.at(fleet.loop.now_s + wait_s, turn)]

        def heal() -> None:
            timers[0].cancel()
            self._restart(name)

        turn()
        return heal

    def _slow(self, name: str, factor: float) -> Callable[[], None]:
        self._fleet.trace.note(name, "slowed", f"{factor:.3f}")
        self._fleet.workers[name].slow(factor)

        def heal() -> None:
            if name in self._fleet.workers:
                self._fleet.workers[name].slow(1.0)

        return heal

    def _drain(self, name: str) -> Callable[[], None]:
        """Drain it as on SIGTERM. A process that drained ends, and another life of it begins."""
        fleet = self._fleet
        fleet.trace.note(name, "drained")
        node = fleet.gateways[name] if name in fleet.gateways else fleet.workers[name]
        process = fleet.processes[name]
        process.spawn("drain", node.drain(_DRAIN_S))

        def end() -> None:
            if fleet.processes[name] is process and process.alive:
                fleet.crash(name)
                fleet.restart(name)

        return end

    def _lose_pool(self) -> Callable[[], None]:
        """Every engine crashes, and again as soon as it is back, as under a version that kills them."""
        fleet, timers = self._fleet, list[asyncio.TimerHandle]()

        def turn() -> None:
            for name in self._all_running(fleet.workers):
                self._crash_engine(name)
            timers[:] = [fleet.loop.at(fleet.loop.now_s + _POOL_TURN_S, turn)]

        turn()
        return lambda: timers[0].cancel()

    def _lose_zone(self, pick: float) -> Callable[[], None] | None:
        fleet = self._fleet
        zone = _pick(sorted({fleet.workers[name].zone for name in self._all_running(fleet.workers)}), pick)
        lost = [name for name in self._all_running(fleet.workers) if fleet.workers[name].zone == zone]
        for name in lost:
            fleet.crash(name, silent=True)

        def heal() -> None:
            for name in lost:
                self._restart(name)

        return heal if lost else None

    def _lose_node(self, fault: InjectedFault) -> Callable[[], None] | None:
        name = _pick(list(self._fleet.provider.nodes), fault.pick)
        if name is None:
            return None
        if fault.kind is FaultKind.NODE_PREEMPTED:
            self._fleet.provider.preempt(name, fault.for_s)
        else:
            self._fleet.provider.lose(name)
        return lambda: None

    def _crash_engine(self, name: str) -> Callable[[], None]:
        self._fleet.trace.note(name, "engine crashed")
        self._fleet.processes[name].call_soon(self._fleet.workers[name].worker.engines.crash)
        return lambda: None

    def _hang_engine(self, name: str) -> Callable[[], None]:
        self._fleet.trace.note(name, "engine hung")
        process, engines = self._fleet.processes[name], self._fleet.workers[name].worker.engines
        process.call_soon(engines.hang)

        def unhang() -> None:
            if process.alive:
                process.call_soon(engines.unhang)

        return unhang

    def _cut_off(self, name: str) -> Callable[[], None]:
        """Cut a process off from the store alone."""
        network = self._fleet.network
        self._fleet.trace.note(name, "cut off from the store")
        network.cut(name, STORE)
        return lambda: network.heal(name, STORE)

    def _disturb(self, fault: InjectedFault, name: str) -> Callable[[], None]:
        """Disturb the network between a process and one that it talks with."""
        fleet, network = self._fleet, self._fleet.network
        peers = [STORE, *fleet.schedulers]
        peers += fleet.gateways if name not in fleet.gateways else [*fleet.workers, REDIS]
        peer = _pick([found for found in peers if found != name], fault.other)
        assert peer is not None
        fleet.trace.note(name, fault.kind.value, peer)
        match fault.kind:
            case FaultKind.NETWORK_CUT:
                network.cut(name, peer, both=fault.pick < 0.5)
                return lambda: network.heal(name, peer)
            case FaultKind.HALF_OPEN:
                network.half_open(name, peer)
                return lambda: None  # what is lost stays lost: each side has to find out by itself
            case _:
                link = fleet.spec.link
                slow = Latency(link.base_s * fault.amount, link.jitter_s * fault.amount)
                network.set_latency(name, peer, slow)
                return lambda: network.set_latency(name, peer, None)

    def _jump(self, name: str, seconds: float) -> Callable[[], None]:
        self._fleet.trace.note(name, "clock jumped", f"{seconds:g}")
        self._fleet.processes[name].jump_unix(seconds)
        return lambda: self._fleet.processes[name].jump_unix(-seconds)


def _pick(names: list[str], choice: float) -> str | None:
    return names[int(choice * len(names))] if names else None
