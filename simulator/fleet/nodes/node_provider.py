"""The provider of nodes as control planes reach it: nodes that start late, and the ways in which it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, Final, TypeVar

from services.core.errors import Unavailable
from services.ports.nodes import ProvidedNode
from simulator.fleet.spec import ScalingSpec
from simulator.kernel.loop import VirtualTimeLoop
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process

PROVIDER: Final = "provider"
_TIMEOUT_S: Final = 5.0
_SLOW_RATIO: Final = 6.0
T = TypeVar("T")


class NodeFault(StrEnum):
    REFUSES = "refuses"  # the call fails, and nothing is ordered
    FORGETS = "forgets"  # the call succeeds, and nothing is ordered
    LATE = "late"  # its worker registers long after the usual time
    LIES = "lies"  # it is listed, and no worker ever registers
    TWICE = "twice"  # two nodes start for one order
    BREAKS = "breaks"  # its worker ends soon after its start, and it is not listed any more


@dataclass(slots=True)
class _Machine:
    node: ProvidedNode
    runs: bool = False
    ends_s: float | None = None


class SimNodes:
    """What the provider has. ``launch`` and ``stop`` start and end the worker of a node.

    ``faults`` counts the failures by kind.
    """

    def __init__(
        self,
        spec: ScalingSpec,
        loop: VirtualTimeLoop,
        rng: Random,
        *,
        launch: Callable[[str], None],
        stop: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._loop = loop
        self._rng = rng
        self._launch = launch
        self._stop = stop
        self._context = Context()  # no process's: a node is started from outside of it
        self._machines: dict[str, _Machine] = {}
        self._numbers = 1000
        self.faults: Counter[NodeFault] = Counter()
        self.ordered: Counter[str] = Counter()  # calls, by order

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose workers run."""
        return tuple(name for name, one in self._machines.items() if one.runs)

    # --- the port, as ``RemoteNodes`` calls it ----------------------------------------------------------

    async def list(self) -> tuple[ProvidedNode, ...]:
        now_s = self._loop.now_s
        return tuple(
            one.node if one.ends_s is None else replace(one.node, ending_in_s=max(0.0, one.ends_s - now_s))
            for one in self._machines.values()
        )

    async def order(self, order_id: str) -> None:
        self.ordered[order_id] += 1
        if any(one.node.order_id == order_id for one in self._machines.values()):
            return
        fault = self._draw()
        match fault:
            case NodeFault.REFUSES:
                raise Unavailable("the provider has no such node now", retry_after_s=1.0)
            case NodeFault.FORGETS:
                return
        for _ in range(2 if fault is NodeFault.TWICE else 1):
            self._begin(order_id, fault)

    async def release(self, node: str) -> bool:
        self._later(0.0, self._end, node)
        return True

    # --- machines ------------------------------------------------------------------------------------

    def lose(self, node: str) -> None:
        """Take a node away at once; call it outside of every process."""
        self._end(node)

    def preempt(self, node: str, in_s: float) -> None:
        """Announce that a node is taken away, and do so."""
        self._machines[node].ends_s = self._loop.now_s + in_s
        self._later(in_s, self._end, node)

    def _draw(self) -> NodeFault | None:
        if self._rng.random() >= self._spec.faulty_ratio:
            return None
        fault = self._rng.choice(list(NodeFault))
        self.faults[fault] += 1
        return fault

    def _begin(self, order_id: str, fault: NodeFault | None) -> None:
        self._numbers += 1
        name = f"worker-{self._numbers}"
        self._machines[name] = _Machine(ProvidedNode(order_id, name))
        start_s = self._rng.uniform(*self._spec.start_s)
        if fault is NodeFault.LIES:
            return
        self._later(start_s * (_SLOW_RATIO if fault is NodeFault.LATE else 1.0), self._run, name)
        if fault is NodeFault.BREAKS:
            self._later(start_s * 2.0, self._end, name)

    def _run(self, name: str) -> None:
        machine = self._machines.get(name)
        if machine is not None:
            machine.runs = True
            self._launch(name)

    def _end(self, name: str) -> None:
        machine = self._machines.pop(name, None)
        if machine is not None and machine.runs:
            self._stop(name)

    def _later(self, delay_s: float, call: Callable[[str], None], name: str) -> None:
        self._loop.at(self._loop.now_s + delay_s, call, name, context=self._context)


def serve_nodes(process: Process, network: Network, nodes: SimNodes) -> None:
    """Answer control planes until the process crashes."""
    network.listen(process, PROVIDER, lambda connection: None, answers=nodes)


class RemoteNodes:
    """Implements ``ports.nodes.NodeProvider`` for one process."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def list(self) -> tuple[ProvidedNode, ...]:
        return await self._ask(lambda nodes: nodes.list())

    async def order(self, order_id: str, node_type: str, zone: str) -> None:
        await self._ask(lambda nodes: nodes.order(order_id))

    async def release(self, node: str) -> bool:
        return await self._ask(lambda nodes: nodes.release(node))

    async def _ask(self, question: Callable[[SimNodes], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._network.ask(self._process, PROVIDER, question, within_s=_TIMEOUT_S)
        except Unreachable as error:
            raise Unavailable("the provider did not answer in time", retry_after_s=1.0) from error
